/* NumPy's way to allocate in a region (NEP 49). */
#include "heap_module.h"

/* Every array keeps the capsule of the handler that gave its memory: what the capsule has lives as long as any array. */
struct memory {
    PyDataMem_Handler handler;
    struct regions *all;
};

static void *memory_malloc(void *all, size_t n_bytes)
{
    return regions_malloc(all, n_bytes);
}

static void *memory_calloc(void *all, size_t n, size_t n_bytes)
{
    return regions_calloc(all, n, n_bytes);
}

static void *memory_realloc(void *all, void *block, size_t n_bytes)
{
    return regions_realloc(all, block, n_bytes);
}

static void memory_free(void *all, void *block, size_t n_bytes)
{
    regions_free(all, block);
}

static void memory_end(PyObject *capsule)
{
    struct memory *memory = PyCapsule_GetPointer(capsule, "mem_handler");
    regions_destroy(memory->all);
    PyMem_RawFree(memory);
}

PyObject *regions_handler(struct regions *all)
{
    struct memory *memory = PyMem_RawCalloc(1, sizeof *memory);
    if (memory == NULL)
        return PyErr_NoMemory();
    memory->all = all;
    memory->handler = (PyDataMem_Handler){
        .name = "synkhronos",
        .version = 1,
        .allocator = {all, memory_malloc, memory_calloc, memory_realloc, memory_free},
    };
    PyObject *capsule = PyCapsule_New(memory, "mem_handler", memory_end);
    if (capsule == NULL)
        PyMem_RawFree(memory);
    return capsule;
}
