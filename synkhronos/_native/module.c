/* The module `synkhronos._native.native`: each part adds its own functions and types. */
#define SYNKHRONOS_MODULE_MAIN
#include "module.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "synkhronos._native.native", "The compiled core of synkhronos.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native(void)
{
    import_array();
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (synkhronos_add_heap(module) || synkhronos_add_sync(module) || synkhronos_add_reductions(module)
        || synkhronos_add_collectives(module) || synkhronos_add_runner(module)
        || synkhronos_add_handlers(module) || synkhronos_add_halves(module) || synkhronos_add_digests(module)
        || synkhronos_add_descriptors(module) || synkhronos_add_lifeline(module) || synkhronos_add_recursion(module)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
