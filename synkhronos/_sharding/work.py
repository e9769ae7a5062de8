"""Work of a sharded function, read from its compiled graph: products, passes over memory, exchange between ranks.

The backend has inferred the shape of each value as an expression of the inputs' shapes (`shape_feature`). These
expressions are evaluated for the inputs of a call, without computing any value of the function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._backends import Constant, ops, scalar
from synkhronos._costs import Exchange, Product, Work
from synkhronos._graph.ops import Collective, Counted
from synkhronos._utils.interrupts import let_interrupts_pass

_Shape = tuple[int, ...]

_MEASURED = ("float32", "float64")  # dtypes of products

#: Operations that compute next to nothing: they return views, lengths, or a few numbers.
_VIEWS = {
    "Assert", "CheckAndRaise", "Counted", "DimShuffle", "InplaceDimShuffle", "LocalShard", "MakeVector", "OutputGuard",
    "RankConstant", "Rebroadcast", "Reshape", "ScalarFromTensor", "Shape", "Shape_i", "SpecifyShape", "Subtensor",
    "TensorFromScalar", "ViewOp",
}  # fmt: skip
#: Operations that read their inputs and write their outputs once.
_PASSES = {
    "AdvancedIncSubtensor1", "AdvancedSubtensor", "AdvancedSubtensor1", "All", "Alloc", "AllocEmpty", "Any", "ARange",
    "Argmax", "CAReduce", "CAReduceDtype", "CrossentropyCategorical1Hot", "CrossentropyCategorical1HotGrad",
    "CrossentropySoftmax1HotWithBiasDx", "CrossentropySoftmaxArgmax1HotWithBias", "DeepCopyOp", "DownsampleFactorMax",
    "Elemwise", "FusedElemwise", "IncSubtensor", "Join", "LogSoftmax", "Max", "MaxAndArgmax", "MaxPoolGrad", "Min",
    "OnePass", "Pool", "Prod", "Softmax", "SoftmaxGrad", "SoftmaxWithBias", "Split", "Sum", "SumOfElementwise",
}  # fmt: skip
#: Scalar operations that take much longer than an addition.
_SPECIAL = {
    "Cos", "Erf", "Erfc", "Exp", "Exp2", "Expm1", "GammaLn", "Log", "Log10", "Log1p", "Log2", "Pow", "Psi",
    "ScalarSigmoid", "ScalarSoftplus", "Sigmoid", "Sin", "Softplus", "Tanh",
}  # fmt: skip
_SOFTMAX = {"CrossentropySoftmaxArgmax1HotWithBias", "LogSoftmax", "Softmax", "SoftmaxWithBias"}


class Unknown(Exception):
    """A shape depends on a value that is computed."""


class Needs(NamedTuple):
    """What a call needs.

    Attributes
    ----------
    work : Work
        Of one rank.
    exchange : Exchange
        Between the ranks, without inputs.
    n_bytes : float
        Bytes of all values that the call computes, on one rank.
    lengths : tuple of int or None
        Length of each output and new value along its first axis; ``None`` if it has none, or it is not known.
    """

    work: Work
    exchange: Exchange
    n_bytes: float
    lengths: tuple[int | None, ...] = ()


class WorkReader:
    """Reader of the work of one compiled function.

    Parameters
    ----------
    function : compiled function
    """

    def __init__(self, function: Any) -> None:
        self._fgraph = function.maker.fgraph
        self._nodes = self._fgraph.toposort()
        feature: Any = getattr(self._fgraph, "shape_feature", None)
        known = {} if feature is None else vars(feature).get("shape_of")  # PyTensor 3 has a method instead
        self._lengths_of: Callable[[Any], Any] = feature.shape_tuple if known is None else known.get

    def needs(self, shapes: Sequence[_Shape], values: Sequence[Any], n_ranks: int) -> Needs:
        """Return what a call needs on the rank with the most rows.

        Parameters
        ----------
        shapes : sequence of tuple of int
            Shape of each input of the compiled function, shared variables included.
        values : sequence
            Value of each input without dimensions; ``None`` for the others.
        n_ranks : int
            Number of ranks among which the graph divides rows that a call does not pass.
        """
        inputs = self._fgraph.inputs
        known = _Shapes(self._lengths_of, dict(zip(inputs, shapes)), dict(zip(inputs, values)), n_ranks)
        products: list[Product] = []
        passes: list[float] = []
        divided: list[float] = []
        unknown: dict[str, None] = {}
        special, n_meetings, reduced, gathered, n_bytes = 0.0, 0, 0.0, 0.0, 0.0
        for node in self._nodes:
            name = type(node.op).__name__
            try:
                made = [_n_bytes(one, known) for one in node.outputs]
                if isinstance(node.op, scalar.ScalarOp) or name.startswith("Scalar"):
                    pass  # PyTensor's operations on single numbers
                elif isinstance(node.op, Collective):
                    n_meetings += 1
                    for op, size in zip(node.op.ops, made):
                        if op in ("gather", "broadcast"):
                            gathered += size
                        else:
                            reduced += size
                elif name in _PRODUCTS and node.outputs[0].dtype in _MEASURED:
                    lengths = map(known.of, (*node.inputs, *node.outputs))
                    products.append(_PRODUCTS[name](*lengths)._replace(dtype=node.outputs[0].dtype))
                elif name in _PASSES:
                    read = [_n_bytes(one, known) for one in node.inputs]
                    largest = max((_size(known.of(one)) for one in (*node.inputs, *node.outputs)), default=0)
                    is_divided = largest >= getattr(node.op, "least_divided", math.inf)
                    (divided if is_divided else passes).append(sum(made) + sum(read))
                    special += _n_special(node) * largest
                elif name not in _VIEWS:
                    unknown[name] = None
                if name not in _VIEWS:
                    n_bytes += sum(made)
            except Unknown:
                unknown[name] = None
        work = Work(tuple(products), tuple(passes), tuple(divided), special, len(self._nodes), tuple(unknown))
        firsts = tuple([_length(one, known) for one in self._fgraph.outputs])
        return Needs(work, Exchange(0.0, n_meetings, reduced, gathered), n_bytes, firsts)


class _Shapes:
    """Shapes of the values of a graph, for given inputs."""

    def __init__(
        self, lengths_of: Callable[[Any], Any], shapes: Mapping[Any, _Shape], values: Mapping[Any, Any], n_ranks: int
    ) -> None:
        self._lengths_of, self._shapes, self._n_ranks = lengths_of, shapes, n_ranks
        self._at_work: set[Any] = set()
        self._values: dict[Any, Any] = {var: value for var, value in values.items() if value is not None}

    def of(self, var: Any) -> _Shape:
        """Return the shape of a variable; raise `Unknown` if it depends on a computed value."""
        if var in self._shapes:
            return self._shapes[var]
        if isinstance(var, Constant):
            return np.shape(var.data)
        lengths = self._lengths_of(var)
        if lengths is None:
            if getattr(var, "ndim", 0):
                raise Unknown
            return ()
        return tuple([int(self._value(one)) for one in lengths])

    def _value(self, var: Any) -> Any:
        if isinstance(var, Constant):
            return var.data
        if var not in self._values:
            self._values[var] = self._computed(var)
        return self._values[var]

    def _computed(self, var: Any) -> Any:
        node = var.owner
        if node is None:
            raise Unknown
        if type(node.op) is ops.Shape_i:
            of = node.inputs[0]
            if of in self._at_work:
                raise Unknown  # the expression for its length is this one
            self._at_work.add(of)
            shape = self.of(of)
            self._at_work.discard(of)
            if node.op.i >= len(shape):
                raise Unknown
            return shape[node.op.i]
        inputs = [self._value(one) for one in node.inputs]
        if type(node.op) is Counted and not node.op.given:
            n_rows = int(inputs[0])
            return (n_rows, 0, -(-n_rows // self._n_ranks))[node.outputs.index(var)]
        storage: list[list[Any]] = [[None] for _ in node.outputs]
        try:
            if type(node.op) is ops.Elemwise:
                node.op.prepare_node(node, None, None, "py")
                found = node.op.scalar_op.impl(*inputs)
                return found[node.outputs.index(var)] if isinstance(found, (list, tuple)) else found
            node.op.perform(node, inputs, storage)
        except Exception as error:  # it has no implementation in Python that needs no preparation
            let_interrupts_pass(error)
            raise Unknown from error
        return storage[node.outputs.index(var)][0]


def _size(shape: _Shape) -> int:
    return math.prod(shape)


def _n_bytes(var: Any, known: _Shapes) -> int:
    return _size(known.of(var)) * np.dtype(var.dtype).itemsize if hasattr(var, "dtype") else 0


def _length(var: Any, known: _Shapes) -> int | None:
    try:
        return (known.of(var) or (None,))[0]
    except Unknown:
        return None


def _n_special(node: Any) -> int:
    """Return the number of special functions that an Apply node computes for each element of its output."""
    if type(node.op).__name__ in _SOFTMAX:
        return 1
    if type(node.op).__name__ == "FusedElemwise":
        return sum(map(_n_special, node.op.fgraph.toposort()))
    steps = [op for op, _ in getattr(node.op, "steps", ())] or [getattr(node.op, "elementwise", node.op)]
    scalars = [getattr(op, "scalar_op", None) for op in steps]
    return sum(_n_in(one) for one in scalars if one is not None)


def _n_in(scalar_op: Any) -> int:
    inner = getattr(scalar_op, "fgraph", None)
    if inner is None:
        return type(scalar_op).__name__ in _SPECIAL
    return sum(_n_in(node.op) for node in inner.toposort())


# -- lengths of products, from the shapes of the inputs and outputs of an Apply node


def _dot(x: _Shape, y: _Shape, *_: _Shape) -> Product:
    m, k = (1, *x)[-2:]
    return Product(m, y[1] if len(y) > 1 else 1, k, "")


def _batched_dot(x: _Shape, y: _Shape, *_: _Shape) -> Product:
    return _dot(x[-2:], y[-2:])._replace(times=_size(x[:-2]))


def _ger(_a: _Shape, _alpha: _Shape, x: _Shape, y: _Shape, *_: _Shape) -> Product:
    return Product(x[0], y[0], 1, "")


def _convolution(images: _Shape, filters: _Shape, *others: _Shape) -> Product:
    out = others[-1]
    return Product(out[0] * _size(out[2:]), filters[0], _size(filters[1:]), "")


def _convolution_by_filters(_images: _Shape, above: _Shape, *others: _Shape) -> Product:
    filters = others[-1]
    return Product(filters[0], _size(filters[1:]), above[0] * _size(above[2:]), "")


def _convolution_by_images(filters: _Shape, above: _Shape, *_: _Shape) -> Product:
    return Product(above[0] * _size(above[2:]), _size(filters[1:]), filters[0], "")


def _gemm(_z: _Shape, _a: _Shape, x: _Shape, y: _Shape, *_: _Shape) -> Product:
    return _dot(x, y)


_PRODUCTS: dict[str, Callable[..., Product]] = {
    "BatchedDot": _batched_dot,
    "CGemv": _gemm,
    "CGer": _ger,
    "CorrMM": _convolution,
    "CorrMM_gradInputs": _convolution_by_images,
    "CorrMM_gradWeights": _convolution_by_filters,
    "Dot": _dot,
    "Dot22": _dot,
    "Dot22Scalar": _dot,
    "Gemm": _gemm,
    "Gemv": _gemm,
    "Ger": _ger,
}
