"""Sums of floating-point numbers: vector code for Theano's sums, and sums of elementwise operations in one pass.

`vectorize_sums`: sums over the first axes of an array, its last axes, or both. Theano's C code sums the columns of a
matrix one after the other, and each addition waits for the one before. The gradient of every bias is such a sum. Here
sums over rows are bitwise the same, because each column is summed in the same order. Other sums add several interleaved
partial sums, in an accumulator of the same dtype. ``THEANO_FLAGS=synkhronos.vector_sum=False`` turns this off.

`fuse_sums`: Theano does not fuse reductions. To sum the squares of an array, it writes all squares and reads them
again. A rewrite makes one Op of both. The Op computes some results into a buffer that stays in the first-level cache,
and sums them with a more precise accumulator, as Theano does. Programs compiled without optimization, or without g++,
keep Theano's Ops. ``THEANO_FLAGS=synkhronos.fused_sum=False`` turns the rewrite off.
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


# -- sums of elementwise operations

_NAME = "synkhronos_fused_sum"
_BEHIND_FUSION = 49.1  # position in optdb: just after Theano's fusion, and before the in-place rewrites at 75
_REAL = ("bool", "float32", "float64", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))


def fuse_sums() -> None:
    """Register the rewrite with Theano, which must have been imported. Calling this again does nothing."""
    from theano.compile import optdb
    from theano.gof import Optimizer
    from theano.gof.toolbox import ReplaceValidate
    from theano.tensor import elemwise

    if hasattr(elemwise, "SumOfElementwise"):
        return
    from .fused_sum import SumOfElementwise

    # store the class in Theano's module, so that all copies of this package share it, and pickles find it by its name
    SumOfElementwise.__module__ = elemwise.__name__
    elemwise.SumOfElementwise = SumOfElementwise

    class FuseSums(Optimizer):
        """Rewrite that fuses a sum with an elementwise operation whose result only this sum uses."""

        def add_requirements(self, fgraph: Any) -> None:
            """Attach the feature that replaces variables."""
            fgraph.attach_feature(ReplaceValidate())

        def apply(self, fgraph: Any) -> None:
            """Replace all suitable sums."""
            for node in fgraph.toposort() if is_on("fused_sum") else ():
                if type(node.op) is elemwise.Sum and type(node.inputs[0].owner and node.inputs[0].owner.op) is (
                    elemwise.Elemwise
                ):
                    fused = _fused(node)
                    if fused is not None:
                        fgraph.replace_validate(node.outputs[0], fused, reason=_NAME)

    optdb.register(_NAME, FuseSums(), _BEHIND_FUSION, "fast_run", "fusion")


def _fused(node: Any) -> Any:
    """Return the output of the fused Op for a sum's Apply node; ``None`` if they cannot be fused."""
    from theano import config
    from theano.gof.opt import copy_stack_trace
    from theano.gof.utils import MethodNotDefined
    from theano.tensor.elemwise import SumOfElementwise

    (between,) = node.inputs
    elementwise = between.owner
    suits = (
        config.cxx
        and len(between.clients) == len(elementwise.outputs) == 1
        and not elementwise.op.inplace_pattern
        and not elementwise.op.openmp
        and not all(between.broadcastable)
        and all(one.dtype in _REAL for one in elementwise.inputs)
        and kept_axes(node.op, node) is not None
    )
    if not suits:
        return None
    result = SumOfElementwise(elementwise.op, node.op)(*elementwise.inputs)
    try:
        names = [f"x{i}" for i in range(len(elementwise.inputs))]
        result.owner.op.c_code(result.owner, "test", names, ["out"], {"fail": ""})
    except (MethodNotDefined, NotImplementedError):  # the elementwise operation has no C code
        return None
    if getattr(elementwise.op.scalar_op, "inner_float16", False):  # `c_code` has set it
        return None
    copy_stack_trace(node.outputs[0], result)
    return result
