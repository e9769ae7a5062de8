"""Sums of the results of elementwise operations, without the array of these results between.

Theano's fusion ends at reductions: the sum of squares of an array writes the squares, and reads them again. Here both
are one op, which computes some results into a buffer that stays in the first cache, and sums them, as Theano does with
an accumulator of more precision. Programs compiled without optimisation, or without g++, keep Theano's ops, as do all
with ``THEANO_FLAGS=synkhronos.fused_sum=False``.
"""

from __future__ import annotations

from typing import Any

from .flags import switch
from .summation import kept_axes

__all__ = ["fuse_sums"]

_NAME = "synkhronos_fused_sum"
_BEHIND_FUSION = 49.1  # places in Theano's order: what is fused by then stays out of place, which comes at 75
_REAL = ("bool", "float32", "float64", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))


def fuse_sums() -> None:
    """Add the rewrite to Theano's. Theano must have been imported; calling it again does nothing."""
    from theano.compile import optdb
    from theano.gof import Optimizer
    from theano.gof.toolbox import ReplaceValidate
    from theano.tensor import elemwise

    if hasattr(elemwise, "SumOfElementwise"):
        return
    from .fused_sum import SumOfElementwise

    # one class, whichever copy of this package is at work; pickles find it there
    SumOfElementwise.__module__ = elemwise.__name__
    elemwise.SumOfElementwise = SumOfElementwise
    is_on = switch("fused_sum")

    class FuseSums(Optimizer):
        """Makes one op of a sum and what it alone is the sum of."""

        def add_requirements(self, fgraph: Any) -> None:
            """Ask for replacements."""
            fgraph.attach_feature(ReplaceValidate())

        def apply(self, fgraph: Any) -> None:
            """Replace all sums that suit."""
            for node in fgraph.toposort() if is_on() else ():
                if type(node.op) is elemwise.Sum and type(node.inputs[0].owner and node.inputs[0].owner.op) is (
                    elemwise.Elemwise
                ):
                    fused = _fused(node)
                    if fused is not None:
                        fgraph.replace_validate(node.outputs[0], fused, reason=_NAME)

    optdb.register(_NAME, FuseSums(), _BEHIND_FUSION, "fast_run", "fusion")


def _fused(node: Any) -> Any:
    """The sum as one op; nothing where it does not suit."""
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
    except (MethodNotDefined, NotImplementedError):  # an elementwise operation in Python
        return None
    if getattr(elementwise.op.scalar_op, "inner_float16", False):  # known once there is code
        return None
    copy_stack_trace(node.outputs[0], result)
    return result
