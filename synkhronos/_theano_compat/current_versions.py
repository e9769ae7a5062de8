"""Fixes for current versions of NumPy and Python.

NumPy 1.23 and later: products of empty matrices, and ``theano.tensor.topk``.

Since NumPy 1.23, arrays without elements have strides of 0. Theano's C code for BLAS uses the strides unchanged: it
reports that "some matrix has no unit stride", or passes a leading dimension of 0, which BLAS rejects. With the patch,
such arrays have the strides of contiguous ones, through which nothing is read.

``theano.tensor.topk`` and related functions index with a list, which NumPy 1.23 does not treat as a tuple any more.

Python 3.11: Scan's loop as C code, where Theano without this patch runs it in Python.

Theano ships C code for the loop, which Cython 0.28 generated, and compiles it on first use. The code accesses internal
structures of the interpreter that Python 3.11 hides. This is not necessary: Cython's macros select between internal
shortcuts and the official interface. This module selects the official interface, and replaces the code in two places
for which Cython has no macro.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

from .flags import is_replacement, with_version, wrap_methods

_VERSION = "synkhronos 1"  # part of the keys of Theano's cache, because the code differs from Theano's own

_CONTIGUOUS = """
        npy_intp empty_{0}[{ndim}];
        if (PyArray_SIZE({array}) == 0) {{
            empty_{0}[{ndim} - 1] = type_size;
            empty_{0}[{ndim} - 2] = (N{0}[{ndim} - 1] ? N{0}[{ndim} - 1] : 1) * (npy_intp) type_size;
            if ({ndim} > 2) empty_{0}[0] = 0;
            S{0} = empty_{0};
        }}
"""


def patch_strides() -> None:
    """Fix products of empty matrices. Theano must have been imported; calling this again does nothing."""
    from theano.tensor.blas import BatchedDot, GemmRelated

    if is_replacement(GemmRelated.build_gemm_version):
        return
    arrays = {"x": "%(_x)s", "y": "%(_y)s", "z": "%(_zout)s"}
    strides = "".join(_CONTIGUOUS.format(name, ndim=2, array=array) for name, array in arrays.items())
    GemmRelated.check_strides = strides + GemmRelated.check_strides
    wrap_methods(GemmRelated, build_gemm_version=with_version(_VERSION))
    head = "npy_intp *Nz = PyArray_DIMS(zs), *Sz = PyArray_STRIDES(zs);\n"
    batched = "".join(_CONTIGUOUS.format(name, ndim=3, array=f"{name}s") for name in "xyz")
    wrap_methods(
        BatchedDot,
        c_support_code=lambda theanos, op: theanos(op).replace(head, head + batched),
        c_code_cache_version=with_version(_VERSION),
    )


def patch_topk() -> None:
    """Replace the implementation of `TopKOp`. Theano must have been imported; calling this again does nothing."""
    module: Any = importlib.import_module("theano.tensor.sort")  # theano.tensor's attribute of that name is a function
    module._topk_py_impl = top_k


def top_k(op: Any, x: Any, k: Any, axis: int, idx_dtype: Any) -> Any:
    """Return the ``k`` largest elements along an axis, or the smallest, in no particular order.

    Parameters
    ----------
    op : TopKOp
        Its ``return_values`` and ``return_indices`` select the results.
    x : numpy.ndarray
    k : int, or array of one int
        Number of elements; negative for the smallest ones.
    axis : int
    idx_dtype : dtype
        Dtype of the indices.

    Returns
    -------
    array, or tuple of two arrays
        The values, their indices, or both in this order. Each has the shape of ``x``, except for ``abs(k)`` elements
        along ``axis``.

    Raises
    ------
    ValueError
        If ``k`` is 0, or the axis has fewer than ``abs(k)`` elements.
    """
    import numpy as np

    k, length = int(k), x.shape[axis]
    if k == 0:
        raise ValueError("topk: kth cannot be zero")
    if abs(k) > length:
        raise ValueError(f"topk: kth cannot be larger than the size of the axis; got {k} for axis {axis} of {length}")
    # index of the partitioning element, and the slice of the elements to return
    kth, part = (length - k, slice(length - k, None)) if k > 0 else (-k - 1, slice(-k))
    index = tuple(part if i == axis % x.ndim else slice(None) for i in range(x.ndim))
    if not op.return_indices:
        return np.partition(x, kth, axis=axis)[index]
    if abs(k) == 1:
        indices = np.expand_dims((np.argmax if k > 0 else np.argmin)(x, axis=axis), axis)
    else:
        indices = np.argpartition(x, kth, axis=axis)[index]
    if not op.return_values:
        return indices.astype(idx_dtype)
    return np.take_along_axis(x, indices, axis), indices.astype(idx_dtype)


# -- Scan's loop

logger = logging.getLogger("synkhronos")

#: Cython's macros for internal shortcuts, which are set to 0.
_OFFICIAL_WAYS = ("CYTHON_FAST_THREAD_STATE", "CYTHON_FAST_PYCALL", "CYTHON_USE_PYLONG_INTERNALS")

#: Replacements of C code, all for tracebacks. A code object from `PyCode_NewEmpty` has only one line, so the line
#: number of its frame need not be set.
_REPLACED = {
    "(frame)->f_lineno = (lineno)": "((void) 0)",
    "PyCode_New(a, k, l, s, f, code, c, n, v, fv, cell, fn, name, fline, lnos)": (
        "PyCode_NewEmpty(PyUnicode_AsUTF8(fn), PyUnicode_AsUTF8(name), fline)"
    ),
}

_failed = False


@contextlib.contextmanager
def loop_in_c() -> Iterator[None]:
    """Patch the compiler while ``theano.scan_module.scan_perform_ext`` is executed, which compiles the loop if needed.

    Raises
    ------
    ImportError
        If the loop cannot be compiled. Theano then runs it in Python. The reason is logged once.
    """
    global _failed
    if sys.version_info < (3, 11):
        yield
        return
    if _failed:
        raise ImportError("the C code of Scan's loop could not be compiled")
    from theano.gof.cmodule import GCC_compiler

    theanos_own = GCC_compiler.compile_str

    def compile_str(module_name: str, src_code: str, **options: Any) -> Any:
        """Adapt C code to Python 3.11, and compile it."""
        options["preargs"] = [*options["preargs"], *(f"-D{name}=0" for name in _OFFICIAL_WAYS)]
        for old, new in _REPLACED.items():
            src_code = src_code.replace(f"{old}\n", f"{new}\n")
        with contextlib.redirect_stdout(io.StringIO()):  # Theano prints the path of the code if this fails
            return theanos_own(module_name, src_code, **options)

    GCC_compiler.compile_str = staticmethod(compile_str)
    try:
        yield
    except Exception as error:
        _failed = True
        logger.warning("Scan runs its loop in Python, which is slower: %.300s", error)
        raise ImportError(str(error)) from error
    finally:
        GCC_compiler.compile_str = staticmethod(theanos_own)
