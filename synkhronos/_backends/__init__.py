"""The graph backend of this process: Theano 1.0.5, or its successor PyTensor.

Each backend is a package that defines the names in `INTERFACE`: `T` (functions that make expressions), variables, Apply
nodes and graph traversal, compiled functions, and `ops` (classes of operations, and functions that read their Apply
nodes). These names can be imported from here, as can the functions of `generic`, which are the same for all backends.
Code in other folders imports no backend, and does not test which one is in use.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__all__ = ["ENGINES", "TITLE", "choose", "engine"]


ENGINES = {"theano": "Theano", "pytensor": "PyTensor"}
_VARIABLE = "SYNKHRONOS_ENGINE"


def choose() -> str:
    """Choose ``"theano"`` or ``"pytensor"``.

    The environment variable ``SYNKHRONOS_ENGINE`` decides; without it, the imported backend is chosen, or else an
    installed one. If both are installed, Theano is chosen.

    Raises
    ------
    RuntimeError
        If both are imported and the environment variable is not set, or if it has another value.
    ImportError
        If neither is installed, or the one that the environment variable names is not.
    """
    asked = os.environ.get(_VARIABLE, "")
    if asked:
        if asked not in ENGINES:
            raise RuntimeError(f"{_VARIABLE}={asked!r}: expected {' or '.join(map(repr, ENGINES))}")
        if not _is_there(asked):
            raise ImportError(f"{_VARIABLE}={asked!r}, and {ENGINES[asked]} is not installed")
        return asked
    imported = [name for name in ENGINES if sys.modules.get(name) is not None and _is_there(name)]
    if len(imported) > 1:
        raise RuntimeError(f"both Theano and PyTensor are imported: name one of them in {_VARIABLE}")
    for name in imported or filter(_is_there, ENGINES):
        return name
    raise ImportError("neither Theano nor PyTensor is installed: installing synkhronos by pip brings one")


def _is_there(name: str) -> bool:
    """Return whether a package is installed. A mere folder of that name, which Python would import too, is not."""
    try:
        spec = find_spec(name)
    except ValueError:  # `sys.modules` has a module without a spec
        return False
    return spec is not None and spec.origin is not None


#: ``"theano"`` or ``"pytensor"``.
engine = choose()
#: The backend's name in messages.
TITLE = ENGINES[engine]

#: The names that each backend must define, by module of its package. In `ops`, an operation that a backend does not
#: have is `common.Absent`.
INTERFACE = {
    "graph": (
        "AFTER_MERGES", "BEFORE_ELEMENTWISE", "FOR_EXACT", "FOR_SLICES", "KEYWORDS", "NO_TENSORS", "TAKES_SUBSETS",
        "Apply", "Constant", "Container", "DenseType", "DisconnectedType", "Function", "In", "InconsistencyError",
        "MissingInputError", "Mode", "NotScalarConstantError", "Op", "Out", "ReplaceValidate", "Rewriter",
        "SharedVariable", "T", "TensorConstant", "TensorType", "UnusedInputError", "Variable", "ancestors",
        "as_type_of", "clone", "compile_function", "config", "copied", "copy_stack_trace", "equal_computations",
        "execution", "get_mode", "get_scalar_constant_value", "grad", "input_like", "io_toposort", "known_lengths",
        "leaves_of", "machine", "plain_function", "printing", "raise_at", "rebuild_collect_shared", "redirect",
        "register", "reshaped_like", "retyped", "scalar", "scan", "shared", "shared_like", "substituted",
        "updated_storage", "with_broadcastable",
    ),
    "ops": (
        "DRAWS", "EXPRESSED", "INLINED_LATE", "ARange", "AbstractConv2d", "AbstractConv2d_gradInputs",
        "AbstractConv2d_gradWeights", "AbstractConv3d", "AbstractConv3d_gradInputs", "AbstractConv3d_gradWeights",
        "AdvancedIncSubtensor", "AdvancedIncSubtensor1", "AdvancedSubtensor", "AdvancedSubtensor1", "All", "Alloc",
        "AllocEmpty", "AnyOp", "ArgSortOp", "Argmax", "Assert", "AveragePoolGrad", "BatchedDot", "Blockwise",
        "CAReduce", "CAReduceDtype", "CheckAndRaise", "ConsiderConstant", "CpuContiguous",
        "CrossentropyCategorical1Hot", "CrossentropyCategorical1HotGrad", "CrossentropySoftmax1HotWithBiasDx",
        "CrossentropySoftmaxArgmax1HotWithBias", "CumOp", "DeepCopyOp", "DimShuffle", "DisconnectedGrad", "Dot",
        "DownsampleFactorMaxGradGrad", "Elemwise", "ExtractDiag", "FromFunctionOp", "GradClip", "GradScale", "IfElse",
        "IncSubtensor", "Join", "LogSoftmax", "MakeVector", "Max", "MaxAndArgmax", "MaxPoolGrad", "MaxPoolRop", "Min",
        "OpFromGraph", "OutputGuard", "Pool", "Prod", "ProdWithoutZeros", "Rebroadcast", "RepeatOp", "Reshape",
        "ScalarFromTensor", "Scan", "Shape", "Shape_i", "Softmax", "SoftmaxGrad", "SoftmaxWithBias", "SolveBase",
        "SortOp", "SparseDot", "SpecifyShape", "Split", "StructuredDot", "StructuredDotGradCSC",
        "StructuredDotGradCSR", "Subtensor", "Sum", "TensorFromScalar", "UndefinedGrad", "ViewOp", "ZeroGrad", "adds",
        "advanced_index", "around", "axis_of", "basic_index", "draws_each", "inlined", "inner_outputs", "parts_of",
        "read_loop", "softmax_axes",
    ),
    "pickling": (
        "MADE_AT_RUN_TIME", "OF_NODES", "OF_TAGS", "OF_VARIABLES", "RESET", "FromFunctionOp", "NanGuardMode", "PureOp",
        "PureType", "Scratchpad", "is_random_state", "other_stream", "pack", "reduced_otherwise", "unpack",
    ),
    "process": (
        "as_asked", "bind", "blas_flags", "bound", "find_compiled", "is_device_array", "is_device_type",
        "limit_threads", "precompile", "prepare_fork", "print_profiles", "read", "stay_on_device", "to_device",
        "to_host", "unbind", "usual_flags", "write",
    ),
}  # fmt: skip

if TYPE_CHECKING:

    def __getattr__(attribute: str) -> Any: ...

else:
    for _part, _wanted in INTERFACE.items():
        _module = import_module(f"synkhronos._backends.{engine}.{_part}")
        _found = {_one: getattr(_module, _one) for _one in _wanted}  # a missing name is an error here
        globals().update({"ops": _module} if _part == "ops" else _found)

    from synkhronos._backends.generic import *  # noqa: F403 (by the names above)
