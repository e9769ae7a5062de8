"""Prepare a process for PyTensor: BLAS, checks before the fork, compilation by numba, refusal of GPUs.

If the user names no BLAS library, PyTensor's C code is linked to the library that `find_blas` finds. PyTensor itself
finds only the libraries of conda, and warns without these; installed by pip, it would multiply matrices through NumPy.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Callable

import numpy as np
from pytensor import config
from pytensor.compile.debug import profiling
from pytensor.compile.mode import get_default_mode
from pytensor.link.c.basic import get_module_cache
from pytensor.link.c.cmodule import GCC_compiler
from pytensor.link.numba.linker import NumbaLinker

from synkhronos._backends.common import find_new_modules, skip
from synkhronos._theano_compat import find_blas
from synkhronos.errors import DeviceError

print_profiles = profiling._atexit_print_fn


def prepare_fork() -> None:
    """Make PyTensor perform the checks that every process would otherwise perform in its first compilation.

    PyTensor detects the compiler's flags for this processor, and reads the contents of its cache of compiled modules.
    Forked workers inherit the results.
    """
    if config.cxx and not isinstance(get_default_mode().linker, NumbaLinker):
        GCC_compiler.compile_args()
        get_module_cache()


def precompile(function: Any) -> None:
    """Make numba compile a function for arguments of the types that ranks pass, and cache the code on disk.

    Otherwise numba would compile it in the first call, on all ranks at the same time.
    """
    code: Any = getattr(function.vm, "jit_fn", None)
    if not hasattr(code, "signatures"):
        return
    import numba
    from pytensor.link.numba.dispatch.basic import get_numba_type

    types = [
        get_numba_type(spec.variable.type, "C") if cell.storage[0] is None else numba.typeof(cell.storage[0])
        for spec, cell in zip(function.maker.inputs, function.input_storage)
    ]
    if types and code.py_func.__code__.co_flags & inspect.CO_VARARGS:  # functions that numba caches on disk take *args
        types = [numba.types.BaseTuple.from_types(types)]
    code.compile(tuple(types))


def find_compiled() -> None:
    """Make PyTensor load the index of the modules that the controller has compiled since the last call.

    Otherwise PyTensor would find them one by one, and take the compile lock for each.
    """
    if config.cxx and not isinstance(get_default_mode().linker, NumbaLinker):
        find_new_modules(get_module_cache())


def limit_threads(most: int) -> Callable[[], None] | None:
    """Limit the number of numba's threads, which ``prange`` uses; return a callable that restores it.

    Return ``None`` if numba's parallel module is not imported.
    """
    parallel: Any = sys.modules.get("numba.np.ufunc.parallel")
    if parallel is None:
        return None
    if parallel._is_initialized:  # the threads run already
        n_before = parallel.get_num_threads()
        parallel.set_num_threads(min(n_before, most))
        return lambda: parallel.set_num_threads(n_before)
    n_started, parallel.NUM_THREADS = parallel.NUM_THREADS, min(parallel.NUM_THREADS, most)  # started on first use

    def restore() -> None:
        parallel.NUM_THREADS = n_started

    return restore


def _offer_blas() -> None:
    """Set the default of ``pytensor.config.blas__ldflags`` to `find_blas`, or PyTensor's own default if that fails."""
    parameter = config._config_var_dict["blas__ldflags"]
    pytensors_own = parameter.default
    parameter._default = lambda: find_blas(config.cxx) or pytensors_own()
    if parameter.is_default and getattr(parameter, "val", None) == "":  # PyTensor has searched already, and found none
        config.blas__ldflags = find_blas(config.cxx)


_offer_blas()


def usual_flags() -> Any:
    """Return a context without flags of the program that would refuse functions of the library's own."""
    return config.change_flags(warn_float64="ignore")


def blas_flags() -> str:
    """Return the compiler's flags for BLAS; empty if numba compiles functions, which call SciPy's BLAS."""
    return str(config.blas__ldflags) if config.linker.startswith("c") else ""


# -- GPUs: not supported, so no array is on one


def bind(device: str, rank: int, quiet: bool) -> Any:
    """Raise `DeviceError`, because PyTensor does not support GPUs."""
    raise DeviceError(f"{device} cannot be used: PyTensor computes on CPU cores; GPUs need Theano")


def bound() -> str | None:
    """Return ``None``, because no process is bound to a GPU."""
    return None


def is_device_array(value: Any) -> bool:
    """Return false: no value is an array on a GPU, and no type is that of such an array."""
    return False


def as_asked(value: Any, output: Any) -> Any:
    """Return the value of an output unchanged, because it is always in host memory."""
    return value


def refuse(*_: Any) -> Any:
    """Raise `DeviceError`. Stand-in for functions on GPU arrays; never called, because no session has GPUs."""
    raise DeviceError("PyTensor computes on CPU cores; GPUs need Theano")


is_device_type = is_device_array
to_host = np.asarray
read = write = to_device = stay_on_device = refuse
unbind = skip
