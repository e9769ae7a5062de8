"""Rewrite that fuses sums with the elementwise operations before them, without an intermediate array.

Theano does not fuse reductions: to sum the squares of an array, it writes all squares and reads them again. This
rewrite makes one Op of both. The Op computes some results into a buffer that stays in the first-level cache, and sums
them with a more precise accumulator, as Theano does. Programs compiled without optimization, or without g++, keep
Theano's Ops. ``THEANO_FLAGS=synkhronos.fused_sum=False`` turns the rewrite off.
"""

from __future__ import annotations

from typing import Any

from .flags import is_on
from .summation import kept_axes

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
