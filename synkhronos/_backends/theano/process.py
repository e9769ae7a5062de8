"""Prepare a process for Theano: checks before the fork, binding to a GPU, and copies of arrays to and from the GPU.

A process binds to one GPU, once, under the context name ``None``. A graph that one rank has compiled therefore uses, on
each rank that loads it, that rank's own GPU. pygpu is imported only if a GPU is requested.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import theano
from theano.compile import profiling
from theano.compile.sharedvalue import shared
from theano.configparser import change_flags
from theano.gof import compilelock

from synkhronos._backends.common import find_new_modules, skip
from synkhronos.errors import DeviceError

precompile = skip  # not needed: Theano compiles functions when they are made
limit_threads = skip  # not needed: Theano has no threads other than those of BLAS and OpenMP
print_profiles = profiling._atexit_print_fn


def prepare_fork() -> None:
    """Make Theano perform the checks that every process would otherwise perform in its first compilation.

    Theano detects the compiler's flags for this processor, and whether the BLAS library's gemv needs initialized
    memory; it runs the compiler for both. It also reads the contents of its cache of compiled modules. Forked workers
    inherit the results.

    In addition, Theano's compile lock is changed. A rank that waits for it tries again every 10 to 50 ms, instead of
    every five to ten seconds. Several ranks may want the lock at once, each for a short time.
    """
    if not isinstance(compilelock.lock, functools.partial):
        compilelock.lock = functools.partial(compilelock.lock, min_wait=0.01, max_wait=0.05)
    if theano.config.cxx:
        theano.gof.cmodule.GCC_compiler.compile_args()
        theano.tensor.blas_c.check_force_gemv_init()
        theano.gof.cc.get_module_cache()


def find_compiled() -> None:
    """Make Theano load the index of the modules that the controller has compiled since the last call.

    Otherwise Theano would find them one by one, and take the compile lock for each.
    """
    if theano.config.cxx:
        find_new_modules(theano.gof.cc.get_module_cache())


def usual_flags() -> Any:
    """Return a context without flags of the program that would refuse functions of the library's own."""
    return change_flags(compute_test_value="off", warn_float64="ignore")


def blas_flags() -> str:
    """Return the compiler's flags for BLAS."""
    return str(theano.config.blas.ldflags)


# -- GPUs

_OPTIMIZERS = (("gpuarray_opt", ("fast_run", "fast_compile")), ("gpua_scanOp_make_inplace", ("fast_run",)))


def bound() -> str | None:
    """Return the name of the GPU to which this process is bound, or ``None``; nothing is imported."""
    gpuarray = sys.modules.get("theano.gpuarray")
    devices = gpuarray.init_dev.devmap if gpuarray is not None else {}
    return next(iter(devices), None)


def bind(device: str, rank: int, quiet: bool) -> Any:
    """Bind this process to a GPU: new shared variables are stored there, and new functions compute there.

    Parameters
    ----------
    device : str
        ``"cuda0"``, ``"opencl0:0"``, …
    rank : int
    quiet : bool
        Suppress Theano's report on the device.

    Returns
    -------
    pygpu.gpuarray.GpuContext

    Raises
    ------
    DeviceError
        If the device cannot be used; the message names the device and the cause.
    """
    try:
        import theano.gpuarray as gpuarray

        if gpuarray.pygpu is None:
            import pygpu.gpuarray  # noqa: F401  (its exception says why it cannot be imported)

            raise ImportError("pygpu could not be imported when Theano was imported")
        if device.startswith("opencl"):
            _zero_new_memory()
            _separate_pocl_cache(rank)
        os.environ.pop("THEANO_GPU_IS_ALREADY_ACTIVE", None)  # inherited from another process, which holds a GPU
        with contextlib.ExitStack() as stack:
            if quiet:
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            gpuarray.use(device, force=True)
        if not gpuarray.pygpu_activated:
            raise RuntimeError("Theano did not activate pygpu")
        context = gpuarray.type.get_context(None)
        # Apply nodes of reductions refer to their context, which does not support pickle
        copyreg.pickle(gpuarray.pygpu.gpuarray.GpuContext, _reduce_context)
        # an allocation proves that the device works
        gpuarray.pygpu.zeros((1,), dtype="float32", context=context).sync()
    except Exception as error:
        raise DeviceError(
            f"{device} cannot be used: {_cause(error)}; `python -m synkhronos info --gpu` shows what is available, and "
            "`python -m synkhronos run` starts a script so that the CUDA libraries are found"
        ) from error
    return context


def _zero_new_memory() -> None:
    """Make Theano fill new memory on the GPU with zeros.

    CLBlast's gemv multiplies the old contents by 0 instead of overwriting them, so a NaN there would remain.
    """
    from theano.gpuarray.basic_ops import GpuAllocEmpty

    make_code, version = GpuAllocEmpty.c_code, GpuAllocEmpty.c_code_cache_version

    def c_code(self: Any, node: Any, name: str, inp: Any, out: Any, sub: Any) -> str:
        return f"{make_code(self, node, name, inp, out, sub)}\nGpuArray_memset(&{out[0]}->ga, 0);\n"

    GpuAllocEmpty.c_code = c_code
    GpuAllocEmpty.c_code_cache_version = lambda self: (*version(self), "zeroed")


def _separate_pocl_cache(rank: int) -> None:
    """Set a separate folder for the kernels that PoCL compiles on this rank, initialized with rank 0's kernels.

    All ranks need the same new kernel at the same time. With a shared folder, this sometimes failed with
    "clBuildProgram: Unknown error".
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pocl"
    folders = Path(os.environ.get("POCL_CACHE_DIR") or default)
    own, first = folders / f"rank-{rank}", folders / "rank-0"
    with contextlib.suppress(OSError, shutil.Error):  # a kernel that cannot be copied is compiled again
        if first.exists() and not own.exists():
            shutil.copytree(first, own)
        own.mkdir(parents=True, exist_ok=True)
    os.environ["POCL_CACHE_DIR"] = str(own)


def _cause(error: Exception) -> str:
    parts = [part.decode(errors="replace") if isinstance(part, bytes) else str(part) for part in error.args]
    first, *_ = error.args or ("",)
    if isinstance(first, tuple):  # pygpu: ((message, code),)
        parts = [part.decode(errors="replace") if isinstance(part, bytes) else str(part) for part in first]
    return f"{type(error).__name__}: {', '.join(parts)}"


def _reduce_context(context: Any) -> tuple[Any, tuple[Any, ...]]:
    from theano.gpuarray.type import _name_for_ctx, get_context

    return get_context, (_name_for_ctx(context),)


def unbind() -> None:
    """Make Theano create shared variables and functions on the CPU again; existing GPU arrays stay valid."""
    from theano.gpuarray import gpuarray_shared_constructor

    if gpuarray_shared_constructor in shared.constructors:
        theano.compile.shared_constructor(gpuarray_shared_constructor, remove=True)
        for name, tags in _OPTIMIZERS:
            theano.compile.optdb.remove_tags(name, *tags)


def is_device_array(value: Any) -> bool:
    """Return whether a value is an array on a GPU."""
    gpuarray = sys.modules.get("pygpu.gpuarray")
    return gpuarray is not None and isinstance(value, gpuarray.GpuArray)


def is_device_type(type_: Any) -> bool:
    """Return whether a Theano type is that of arrays on a GPU."""
    module = sys.modules.get("theano.gpuarray.type")
    return module is not None and isinstance(type_, module.GpuArrayType)


def stay_on_device(var: Any) -> Any:
    """Return an expression, or `theano.Out`, whose value stays on the GPU, if the GPU supports its dtype."""
    from theano.gpuarray.type import gpu_supported

    if isinstance(var, theano.Out):
        return theano.Out(stay_on_device(var.variable), var.borrow)
    is_on_host = isinstance(getattr(var, "type", None), theano.tensor.TensorType)
    return var.transfer(None) if is_on_host and gpu_supported(var) else var


def to_host(value: Any) -> np.ndarray:
    """Return a value as a NumPy array: a copy of a GPU array, or a NumPy array itself."""
    return np.asarray(value)


def to_device(value: Any) -> Any:
    """Copy a NumPy array to this process's GPU; return a device array unchanged."""
    if is_device_array(value):
        return value
    import pygpu
    from theano.gpuarray.type import get_context

    return pygpu.array(value, context=get_context(None))


def as_asked(value: Any, output: Any) -> Any:
    """Return an output's value as a NumPy array, or as a GPU array if the output's type is that of GPU arrays."""
    if is_device_type(getattr(getattr(output, "variable", output), "type", None)):
        return None if value is None else to_device(value)
    return to_host(value) if is_device_array(value) else value


def read(array: Any, out: np.ndarray) -> None:
    """Copy a device array to ``out``, a C-contiguous NumPy array of the same shape and dtype."""
    if array.size and array.flags["C_CONTIGUOUS"]:
        array.read(out)
    else:
        np.copyto(out, np.asarray(array))


def write(array: Any, value: np.ndarray) -> None:
    """Copy a NumPy array to a C-contiguous device array of the same shape and dtype."""
    if array.size:
        array.write(np.ascontiguousarray(value))
