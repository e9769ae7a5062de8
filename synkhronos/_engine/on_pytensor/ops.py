"""The operations of PyTensor's graphs, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import DeepCopyOp, ViewOp
from pytensor.conditional.op import IfElse
from pytensor.gradient import DisconnectedGrad, GradClip, GradScale, UndefinedGrad, ZeroGrad
from pytensor.graph.op import HasMultipleInnerGraph
from pytensor.raise_op import Assert, CheckAndRaise
from pytensor.scan.op import Scan
from pytensor.sparse.math import Dot as SparseDot
from pytensor.sparse.math import StructuredDot, StructuredDotGradCSC, StructuredDotGradCSR
from pytensor.tensor import special
from pytensor.tensor.basic import (
    Alloc,
    AllocDiag,
    AllocEmpty,
    ARange,
    Eye,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.blas.batched import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.einsum import Einsum
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CpuContiguous, CumOp
from pytensor.tensor.extra_ops import Repeat as RepeatOp
from pytensor.tensor.linalg.products import KroneckerProduct
from pytensor.tensor.math import All, Argmax, Dot, Max, Min, Prod, ProdWithoutZeros, Sum
from pytensor.tensor.math import Any as AnyOp
from pytensor.tensor.pad import Pad
from pytensor.tensor.random import basic as random
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)

from synkhronos._engine.absent import absent

__all__ = [
    "DRAWS",
    "EXPRESSED",
    "INNER_GRAPHS",
    "ARange",
    "AbstractConv2d",
    "AbstractConv2d_gradInputs",
    "AbstractConv2d_gradWeights",
    "AbstractConv3d",
    "AbstractConv3d_gradInputs",
    "AbstractConv3d_gradWeights",
    "AdvancedIncSubtensor",
    "AdvancedIncSubtensor1",
    "AdvancedSubtensor",
    "AdvancedSubtensor1",
    "All",
    "Alloc",
    "AllocEmpty",
    "AnyOp",
    "ArgSortOp",
    "Argmax",
    "Assert",
    "AveragePoolGrad",
    "BatchedDot",
    "Blockwise",
    "CAReduce",
    "CAReduceDtype",
    "CheckAndRaise",
    "ConsiderConstant",
    "CpuContiguous",
    "CrossentropyCategorical1Hot",
    "CrossentropyCategorical1HotGrad",
    "CrossentropySoftmax1HotWithBiasDx",
    "CrossentropySoftmaxArgmax1HotWithBias",
    "CumOp",
    "DeepCopyOp",
    "DimShuffle",
    "DisconnectedGrad",
    "Dot",
    "DownsampleFactorMaxGradGrad",
    "Elemwise",
    "Eye",
    "GradClip",
    "GradScale",
    "IfElse",
    "IncSubtensor",
    "Join",
    "JoinDims",
    "LogSoftmax",
    "MakeVector",
    "Max",
    "MaxAndArgmax",
    "MaxPoolGrad",
    "MaxPoolRop",
    "Min",
    "OpFromGraph",
    "OutputGuard",
    "Pool",
    "Prod",
    "ProdWithoutZeros",
    "Rebroadcast",
    "RepeatOp",
    "Reshape",
    "ScalarFromTensor",
    "Scan",
    "Shape",
    "Shape_i",
    "Softmax",
    "SoftmaxGrad",
    "SoftmaxWithBias",
    "SortOp",
    "SparseDot",
    "SpecifyShape",
    "Split",
    "SplitDims",
    "StructuredDot",
    "StructuredDotGradCSC",
    "StructuredDotGradCSR",
    "Subtensor",
    "Sum",
    "TensorFromScalar",
    "UndefinedGrad",
    "ViewOp",
    "ZeroGrad",
    "basic_index",
    "inner_outputs",
    "scan_like",
]

AbstractConv2d = absent("AbstractConv2d")
AbstractConv2d_gradInputs = absent("AbstractConv2d_gradInputs")
AbstractConv2d_gradWeights = absent("AbstractConv2d_gradWeights")
AbstractConv3d = absent("AbstractConv3d")
AbstractConv3d_gradInputs = absent("AbstractConv3d_gradInputs")
AbstractConv3d_gradWeights = absent("AbstractConv3d_gradWeights")
AdvancedIncSubtensor1 = absent("AdvancedIncSubtensor1")
AdvancedSubtensor1 = absent("AdvancedSubtensor1")
AveragePoolGrad = absent("AveragePoolGrad")
CAReduceDtype = absent("CAReduceDtype")
ConsiderConstant = absent("ConsiderConstant")
CrossentropyCategorical1Hot = absent("CrossentropyCategorical1Hot")
CrossentropyCategorical1HotGrad = absent("CrossentropyCategorical1HotGrad")
CrossentropySoftmax1HotWithBiasDx = absent("CrossentropySoftmax1HotWithBiasDx")
CrossentropySoftmaxArgmax1HotWithBias = absent("CrossentropySoftmaxArgmax1HotWithBias")
DownsampleFactorMaxGradGrad = absent("DownsampleFactorMaxGradGrad")
MaxAndArgmax = absent("MaxAndArgmax")
MaxPoolGrad = absent("MaxPoolGrad")
MaxPoolRop = absent("MaxPoolRop")
OutputGuard = absent("OutputGuard")
Pool = absent("Pool")
Rebroadcast = absent("Rebroadcast")
SoftmaxGrad = absent("SoftmaxGrad")
SoftmaxWithBias = absent("SoftmaxWithBias")

#: By their types, operations that are made of others, and what makes of a node the expressions of its outputs.
EXPRESSED: dict[type, Callable[[Any], Any]] = {}

#: Operations with an inner graph that is all that they compute.
INNER_GRAPHS: tuple[type, ...] = (
    OpFromGraph,
    AllocDiag,
    Einsum,
    KroneckerProduct,
    Pad,
    *(getattr(special, name) for name in ("LogAddExp", "LogSumExp", "XLog1PY", "XLogY")),
)

#: Random draws: of a state, a size and arguments they make a new state, and what is drawn.
DRAWS: tuple[type, ...] = tuple(
    kind
    for kind in vars(random).values()
    if isinstance(kind, type) and issubclass(kind, RandomVariable) and kind is not RandomVariable
)


def basic_index(inputs: Sequence[Any], op: Any) -> list[Any]:
    """The slices and integers of basic indexing; ``inputs`` are what is indexed, and the numbers of the index."""
    return list(indices_from_subtensor(inputs[1:], op.idx_list))


def inner_outputs(op: Any) -> list[Any]:
    """The outputs of the inner graphs of an operation, if it has any."""
    graphs = op.inner_graphs.values() if isinstance(op, HasMultipleInnerGraph) else ()
    return [output for graph in graphs for output in graph.outputs]


def scan_like(op: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """A Scan with as many sequences, states and others as another one, and with other steps."""
    return Scan(
        list(inputs),
        list(outputs),
        op.info,
        mode=op.mode,
        truncate_gradient=op.truncate_gradient,
        name=op.name,
        profile=op.profile,
        allow_gc=op.allow_gc,
        strict=op.strict,
    )
