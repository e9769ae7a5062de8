/* The module `synkhronos._native.native`. Each *_module.c file adds its own functions and types. */
#define SYNKHRONOS_MODULE_MAIN
#include "module.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "synkhronos._native.native",
    .m_doc = "The compiled core of synkhronos.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit_native(void)
{
    import_array();
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (synkhronos_add_heap(module) || synkhronos_add_sync(module) || synkhronos_add_reductions(module)
        || synkhronos_add_collectives(module) || synkhronos_add_fast_call(module) || synkhronos_add_process(module)
        || synkhronos_add_float16(module) || synkhronos_add_block_hash(module)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
