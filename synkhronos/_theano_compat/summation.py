"""Vector code for sums of floating-point numbers over the first axes of an array, its last axes, or both.

Theano's C code sums the columns of a matrix one after the other, and each addition waits for the one before. The
gradient of every bias is such a sum. Here sums over rows are bitwise the same, because each column is summed in the
same order. Other sums add several interleaved partial sums, in an accumulator of the same dtype.
``THEANO_FLAGS=synkhronos.vector_sum=False`` turns this off.
"""

from __future__ import annotations

from typing import Any, Callable

from .flags import is_on, read_support_code, with_version, wrap_methods

_SUPPORT, _VERSION = read_support_code("summation.h")
_DTYPES = ("float32", "float64")

_CODE = """
if (PyArray_NDIM({x}) == {ndim} && PyArray_TYPE({x}) == NPY_{TYPE} && PyArray_ISCARRAY_RO({x}) &&
    PyArray_SIZE({x}) > 0) {{
    synkhronos::Sums<{type}, {sum}> synkhronos_sums(PyArray_DIMS({x}), {ndim}, {first}, {n_kept});
    if (!synkhronos_sums.make(&{out}, NPY_{OUT_TYPE})) {{
        {fail}
    }}
    synkhronos_sums.add(({type} *)PyArray_DATA({x}), PyArray_SIZE({x}));
    synkhronos_sums.put(({out_type} *)PyArray_DATA({out}));
}} else {{
    {theanos_own}
}}
"""


def vectorize_sums(module: Any) -> None:
    """Replace the C code of the Op. Calling this again does nothing.

    Parameters
    ----------
    module : module
        ``theano.tensor.elemwise``, executed.
    """
    wrap_methods(
        module.Sum,
        c_code=_c_code,
        c_support_code=lambda theanos, op: _SUPPORT if is_on("vector_sum") else "",
        c_headers=lambda theanos, op: ["<cstdlib>", *theanos(op)],
        c_code_cache_version_apply=with_version(_VERSION, lambda op, node: is_on("vector_sum")),
    )


def _c_code(theanos: Callable[..., str], op: Any, node: Any, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
    """Return vector code, with Theano's code as fallback."""
    fallback = theanos(op, node, name, inputs, outputs, sub)
    kept = kept_axes(op, node) if is_on("vector_sum") else None
    if kept is None:
        return fallback
    dtype, out_dtype = node.inputs[0].dtype, node.outputs[0].dtype
    return _CODE.format(
        x=inputs[0],
        out=outputs[0],
        ndim=node.inputs[0].ndim,
        type=f"npy_{dtype}",
        TYPE=dtype.upper(),
        sum=f"npy_{op.acc_dtype}",
        out_type=f"npy_{out_dtype}",
        OUT_TYPE=out_dtype.upper(),
        first=kept.start,
        n_kept=len(kept),
        fail=sub["fail"],
        theanos_own=fallback,
    )


def kept_axes(op: Any, node: Any) -> range | None:
    """Return the axes that are not summed, if they are adjacent and there is vector code for the dtypes.

    Otherwise return ``None``.
    """
    x, out = node.inputs[0], node.outputs[0]
    summed = set(range(x.ndim) if op.axis is None else op.axis)
    kept = [axis for axis in range(x.ndim) if axis not in summed]
    neighbours = range(kept[0], kept[-1] + 1) if kept else range(0)
    suits = x.dtype in _DTYPES and out.dtype in _DTYPES and op.acc_dtype in _DTYPES
    return neighbours if suits and summed and list(neighbours) == kept else None
