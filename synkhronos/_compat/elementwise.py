"""Elementwise operations as vector code: Theano's loop over contiguous arrays, and others where some are broadcast.

Theano's loop stands behind a condition of many parts, each of which gcc guesses to hold every other time. With five
arrays, as in Adam's update, it thinks the loop too rare to be worth vector code: 2.9 ms for 1.28 million float32 in
place of 0.36. So it is told not to guess. Where arrays are broadcast along some axes, as in batch normalisation, Theano
has steps computed at run time, of which gcc makes no vector code; here the loop goes over runs of neighbours. Results
are the same but for rounding: gcc fuses a product and a sum in other places.
``THEANO_FLAGS=synkhronos.vector_elementwise=False`` turns it off.
"""

from __future__ import annotations

from typing import Any

from .marks import is_mend, mend
from .runs import Operand, elements, first_axis, given, length, loops
from .switches import read_support_code, switch

__all__ = ["vectorize_elementwise"]

_FLAG = "-fno-guess-branch-probability"
_SUPPORT, _ = read_support_code("runs.h")
_, _VERSION = read_support_code("runs.h", "runs.py", "elementwise.py")
_LEAST = 4  # elements of a run, to be worth a loop of its own

_CODE = """
{{
    const npy_intp *sizes = PyArray_DIMS({out});
    const npy_intp run = {run};
    if (run >= {least} && {side_by_side}) {{
        {loops}
    }} else {{
        {theanos_own}
    }}
}}
"""


def vectorize_elementwise(module: Any) -> None:
    """Give the op its loops and the compiler's flag, both part of the keys of Theano's cache.

    Calling it again does nothing.

    Parameters
    ----------
    module : module
        ``theano.tensor.elemwise``, executed.
    """
    op_class, is_on = module.Elemwise, switch("vector_elementwise")
    c_compile_args, all_code = op_class.c_compile_args, op_class._c_all
    support, version = op_class.c_support_code_apply, op_class.c_code_cache_version_apply
    if is_mend(c_compile_args):
        return

    @mend
    def with_flag(self: Any) -> list[str]:
        """Give Theano's arguments, and the flag."""
        return [*c_compile_args(self), *([_FLAG] if is_on() else [])]

    def with_runs(self: Any, node: Any, name: str, inputs: Any, outputs: Any, sub: Any) -> tuple[str, ...]:
        """Give Theano's code, with a loop over runs in the place of its own where the arrays allow that."""
        *before, theanos_own = all_code(self, node, name, inputs, outputs, sub)
        if is_on() and _has_runs(self, node):
            theanos_own = _code(self, node, name, inputs, outputs, sub, theanos_own)
        return (*before, theanos_own)

    def c_support_code_apply(self: Any, node: Any, name: str) -> str:
        """Give what the loops ask of arrays."""
        if is_on() and _has_runs(self, node):
            return _SUPPORT + given(support, self, node, name)
        theanos_own: str = support(self, node, name)
        return theanos_own

    def c_code_cache_version_apply(self: Any, node: Any) -> tuple[Any, ...]:
        """Give the version of the code."""
        theanos_own: tuple[Any, ...] = version(self, node)
        return (_VERSION, *theanos_own) if theanos_own and is_on() and _has_runs(self, node) else theanos_own

    op_class.c_compile_args, op_class._c_all = with_flag, with_runs
    op_class.c_support_code_apply, op_class.c_code_cache_version_apply = (
        c_support_code_apply,
        c_code_cache_version_apply,
    )


def _has_runs(op: Any, node: Any) -> bool:
    """Whether arrays are broadcast along some axes, and not all along the same ones: else Theano's loop is as good."""
    patterns = [one.broadcastable for one in node.inputs]
    return not op.openmp and bool(patterns) and first_axis(patterns) > 0


def _code(op: Any, node: Any, name: str, inputs: Any, outputs: Any, sub: Any, theanos_own: str) -> str:
    arrays = dict(zip([*inputs, *outputs], [*node.inputs, *node.outputs]))
    overwritten = {outputs[place]: inputs[of] for place, of in op.inplace_pattern.items()}
    operands = [
        Operand(array, array, variable.type.dtype_specs()[1], variable.broadcastable)
        for array, variable in arrays.items()
        if array not in overwritten
    ]
    first = first_axis([one.broadcastable for one in operands])
    results = [f"{overwritten.get(output, output)}_i" for output in outputs]
    task = op.scalar_op.c_code(node.tag.fake_node, f"{name}_scalar_", [f"{one}_i" for one in inputs], results, sub)
    return _CODE.format(
        out=outputs[0],
        run=length("sizes", range(first, node.outputs[0].ndim)),
        least=_LEAST,
        side_by_side=" && ".join(f"synkhronos::side_by_side({one.array}, {first})" for one in operands),
        loops=loops(operands, first, "sizes", elements(operands, first, "run", f"{{{task}}}")),
        theanos_own=theanos_own,
    )
