"""Sums of the results of elementwise operations, without an array of them. Import this module only after Theano.

Theano does not fuse reductions: to sum the squares of an array, it writes all squares and reads them again. A rewrite
makes one Op of both. The Op computes some results into a buffer that stays in the first-level cache, and sums them with
a more precise accumulator, as Theano does. Programs compiled without optimization, or without g++, keep Theano's Ops.
``THEANO_FLAGS=synkhronos.fused_sum=False`` turns the rewrite off.
"""

from __future__ import annotations

from typing import Any

from theano import config
from theano.compile import optdb
from theano.gof import Apply, Op, Optimizer
from theano.gof.opt import copy_stack_trace
from theano.gof.toolbox import ReplaceValidate
from theano.gof.utils import MethodNotDefined
from theano.tensor import elemwise

from .elementwise import Operand, elements, first_axis, given, kept_axes, length, loops, read_inputs
from .flags import is_on, read_support_code

_SUPPORT, _ = read_support_code("loops.h")
_, _VERSION = read_support_code("loops.h", "elementwise.py", "fused_sum.py")

_NAME = "synkhronos_fused_sum"
_BEHIND_FUSION = 49.1  # position in optdb: just after Theano's fusion, and before the in-place rewrites at 75
_REAL = ("bool", "float32", "float64", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))

_CODE = """
{checks}
{{
    npy_intp sizes[] = {{{sizes}}};
    const npy_intp run = {run};
    {whole}
    synkhronos::Sums<{type}, npy_{sum}> sums(sizes, {ndim}, {start}, {n_kept});
    if (!sums.make(&{out}, NPY_{OUT_TYPE})) {{
        {fail}
    }}
    {loops}
    sums.put((npy_{out_type} *)PyArray_DATA({out}));
}}
"""
_BLOCK = """
for (npy_intp done = 0, n; done < run; done += n) {{
    {type} buffer[1024] __attribute__((aligned(64)));
    {type} *{out}_run = buffer;
    n = run - done < 1024 ? run - done : 1024;
    {{
        {elements}
    }}
    sums.add(buffer, n);
    {steps}
}}
"""


class SumOfElementwise(Op):
    """Op that sums the result of an elementwise operation over some axes.

    Parameters
    ----------
    elementwise : Elemwise
        Must have one output, and not work in place.
    sum : Sum
        Must be a sum for which `kept_axes` returns axes.
    """

    __props__ = ("elementwise", "sum")

    def __init__(self, elementwise: Any, sum: Any) -> None:
        self.elementwise, self.sum = elementwise, sum

    def _nodes(self, inputs: Any) -> tuple[Any, Any]:
        node = self.elementwise.make_node(*inputs)
        return node, self.sum.make_node(*node.outputs)

    def make_node(self, *inputs: Any) -> Any:
        """Apply the Op to the inputs of the elementwise operation."""
        return Apply(self, list(inputs), [self._nodes(inputs)[1].outputs[0].type()])

    def infer_shape(self, node: Any, shapes: Any) -> Any:
        """Return the symbolic lengths of the axes that are not summed."""
        elementwise, sum_ = self._nodes(node.inputs)
        return self.sum.infer_shape(sum_, self.elementwise.infer_shape(elementwise, shapes))

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """Compute both operations one after the other, for modes without C code."""
        between: list[Any] = [[None]]
        elementwise, sum_ = self._nodes(node.inputs)
        self.elementwise.prepare_node(elementwise, None, None, "py")
        self.elementwise.perform(elementwise, inputs, between)
        self.sum.perform(sum_, between[0], outputs)

    def __str__(self) -> str:
        return f"{self.sum} of {self.elementwise}"

    # -- C++ code

    def c_code(self, node: Any, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        """Return the loops, after Theano's own checks of the lengths."""
        elementwise, sum_ = self._nodes(node.inputs)
        self.elementwise.prepare_node(elementwise, None, None, "c")
        (out,), (between,) = outputs, elementwise.outputs
        arrays = dict(zip(inputs, node.inputs))
        first = first_axis([one.broadcastable for one in arrays.values()])
        operands, checks, whole = read_inputs(arrays, first, sub)
        results = Operand(out, "", between.type.dtype_specs()[1], between.broadcastable)
        task = self.elementwise.scalar_op.c_code(
            elementwise.tag.fake_node, f"{name}_scalar_", [f"{one}_i" for one in inputs], [f"{out}_i"], sub
        )
        block = _BLOCK.format(
            type=results.type,
            out=out,
            elements=elements([*operands, results], first, "n", f"{{{task}}}"),
            steps=" ".join(f"{one.name}_run += n;" for one in operands if not all(one.broadcastable[first:])),
        )
        kept = kept_axes(self.sum, sum_)
        assert kept is not None
        return _CODE.format(
            checks=checks,
            sizes=", ".join(_length(arrays, axis) for axis in range(between.ndim)),
            run=length("sizes", range(first, between.ndim)),
            whole=whole,
            type=results.type,
            sum=self.sum.acc_dtype,
            ndim=between.ndim,
            start=kept.start,
            n_kept=len(kept),
            out=out,
            OUT_TYPE=node.outputs[0].dtype.upper(),
            out_type=node.outputs[0].dtype,
            fail=sub["fail"],
            loops=loops(operands, first, "sizes", block),
        )

    def c_headers(self) -> list[str]:
        """Return the headers that the code includes."""
        return ["<cstdlib>", *self.elementwise.c_headers()]

    def c_compile_args(self) -> list[str]:
        """Return the compiler arguments of elementwise operations."""
        arguments: list[str] = self.elementwise.c_compile_args()
        return arguments

    def c_support_code(self) -> str:
        """Return the support code for sums, and that of the elementwise operation."""
        return _SUPPORT + given(self.elementwise.c_support_code)

    def c_support_code_apply(self, node: Any, name: str) -> str:
        """Return the support code of the elementwise operation's Apply node."""
        code: str = self.elementwise.scalar_op.c_support_code_apply(self._nodes(node.inputs)[0], f"{name}_scalar_")
        return code

    def c_code_cache_version_apply(self, node: Any) -> tuple[Any, ...]:
        """Return the version of the entire code; empty if it must not be cached."""
        version: tuple[Any, ...] = self.elementwise.c_code_cache_version_apply(self._nodes(node.inputs)[0])
        return (_VERSION, *version) if version else ()


def _length(arrays: dict[str, Any], axis: int) -> str:
    """Return the C++ variable, set by Theano's checks, that holds the length of the result along an axis."""
    return next((f"{array}_n{axis}" for array, one in arrays.items() if not one.broadcastable[axis]), "1")


# -- the rewrite


class Rewrite(Optimizer):
    """Rewrite that replaces variables of a graph if the result is valid."""

    def add_requirements(self, fgraph: Any) -> None:
        """Attach the feature that replaces variables."""
        fgraph.attach_feature(ReplaceValidate())


class _FuseSums(Rewrite):
    """Rewrite that fuses a sum with an elementwise operation whose result only this sum uses."""

    def apply(self, fgraph: Any) -> None:
        """Replace all suitable sums."""
        for node in fgraph.toposort() if is_on("fused_sum") else ():
            inner = node.inputs[0].owner if type(node.op) is elemwise.Sum else None
            if inner is not None and type(inner.op) is elemwise.Elemwise:
                fused = _fused(node)
                if fused is not None:
                    fgraph.replace_validate(node.outputs[0], fused, reason=_NAME)


def _fused(node: Any) -> Any:
    """Return the output of the fused Op for a sum's Apply node; ``None`` if they cannot be fused."""
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
    result = elemwise.SumOfElementwise(elementwise.op, node.op)(*elementwise.inputs)
    try:
        names = [f"x{i}" for i in range(len(elementwise.inputs))]
        result.owner.op.c_code(result.owner, "test", names, ["out"], {"fail": ""})
    except (MethodNotDefined, NotImplementedError):  # the elementwise operation has no C code
        return None
    if getattr(elementwise.op.scalar_op, "inner_float16", False):  # `c_code` has set it
        return None
    copy_stack_trace(node.outputs[0], result)
    return result


def publish(op: type) -> bool:
    """Store the class of an Op in Theano's module, unless another copy of this package has; return whether it is new.

    So all copies of this package share the class, and pickles find it by its name.
    """
    is_new = not hasattr(elemwise, op.__name__)
    if is_new:
        op.__module__ = elemwise.__name__
        setattr(elemwise, op.__name__, op)
    return is_new


def register() -> None:
    """Register the rewrite with Theano. Calling this again does nothing."""
    if publish(SumOfElementwise):
        optdb.register(_NAME, _FuseSums(), _BEHIND_FUSION, "fast_run", "fusion")
