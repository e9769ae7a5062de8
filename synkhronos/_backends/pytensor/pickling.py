"""Pickle compiled functions and graphs of PyTensor for other processes, and derive random streams for ranks.

A pickled function consists of the optimized graph, its linker, and the assignment of storage cells to inputs. The graph
is not optimized again. Its Apply nodes are pickled first, each after the nodes whose results it uses, so that pickling
does not recurse deeply: since Python 3.12, no setting raises the limit of recursion in C.

Every process executes the nodes in this order, and constants keep their strides, because the keys of numba's cache on
disk depend on both. Of the features that rewrites attach to a graph, only the one for in-place operations and the
record of DebugMode are pickled. Variables and tags are pickled with only those attributes that PyTensor itself sets.
Other libraries attach models, which ranks may be unable to load.

Random streams are NumPy generators. Rank ``k`` uses NumPy's `jumped(k)` of the generator. One jump of PCG64, the
default, is the golden ratio's fraction of its period 2^128, so the streams of different ranks do not overlap. One jump
of MT19937 is 2^128 steps of a period of 2^19937 - 1; one of Philox is 2^128 steps of 2^256.
"""

# ruff: noqa: F401 (the imported names are used through this module)

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from pytensor.compile.debug.debugmode import _VariableEquivalenceTracker as Tracker
from pytensor.compile.debug.nanguardmode import NanGuardMode
from pytensor.compile.inner_function import HasInnerFunction
from pytensor.compile.io import SymbolicOutput
from pytensor.compile.ops import FromFunctionOp
from pytensor.graph.destroyhandler import DestroyHandler
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op as PureOp
from pytensor.graph.type import Type as PureType
from pytensor.graph.utils import Scratchpad
from pytensor.link.numba.linker import NumbaLinker
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.optimize import ScipyWrapperOp
from pytensor.tensor.random.type import RandomType

from synkhronos._backends.pytensor.custom_op import register_with_numba

#: Attributes that PyTensor sets on variables, Apply nodes and tags of a compiled graph and that other processes need.
OF_VARIABLES = frozenset(["auto_name", "container", "data", "index", "name", "owner", "tag", "type"])
#: Attributes of shared variables that other processes do not need, and the values that they get there.
RESET: dict[str, Any] = {"_default_update": None}
#: Attributes that Ops create when they are linked or first run, and create again if these are missing: the class, the
#: attribute's name, and whether ``None`` means that it is missing.
MADE_AT_RUN_TIME = ((HasInnerFunction, "_fn", True), (ScipyWrapperOp, "_fn_wrapped", True), (CAReduce, "_ufunc", False))
OF_NODES = frozenset(["inputs", "op", "outputs", "tag"])
OF_TAGS = frozenset(["nan_guard_mode_check", "trace", "unique_value", "values_eq_approx"])


def reduced_otherwise(obj: Any) -> Any:
    """Return the pickle reduction of graphs and some arrays; ``NotImplemented`` for other objects."""
    if type(obj) is FunctionGraph:
        in_place = any(isinstance(feature, DestroyHandler) for feature in obj._features)
        seen = [feature.all_variables_ever for feature in obj._features if isinstance(feature, Tracker)]
        return _graph, (list(obj.inputs), list(obj.outputs), obj.update_mapping, obj.name, in_place, seen)
    if type(obj) is np.ndarray and _has_own_strides(obj):
        return np.ndarray, (obj.shape, obj.dtype, bytearray(obj.tobytes()), 0, obj.strides)
    return NotImplemented


def _has_own_strides(array: np.ndarray) -> bool:
    """Return whether NumPy's pickles lose the array's strides: if it has no elements, or an axis of stride 0."""
    return array.flags.c_contiguous and (0 in array.shape or 0 in array.strides) and not array.dtype.hasobject


def _graph(
    inputs: list[Any], outputs: list[Any], update_mapping: Any, name: Any, in_place: bool, seen: list[Any]
) -> FunctionGraph:
    graph = FunctionGraph(inputs, outputs, clone=False, update_mapping=update_mapping)
    graph.name = name
    if in_place:
        graph.attach_feature(DestroyHandler())
    for variables in seen:  # DebugMode also computes variables that rewrites have replaced
        graph.equivalence_tracker = tracker = Tracker()
        graph.attach_feature(tracker)
        tracker.all_variables_ever = variables
        tracker.reasons = {var: [] for var in variables}  # only the controller compares them with their replacements
        graph.clients.update({var: [] for var in variables if var not in graph.clients})
    return graph


def pack(function: Any) -> Any:
    """Return the picklable parts of a compiled function."""
    maker = copy.copy(function.maker)
    graph = maker.fgraph
    maker.inputs = [copy.copy(spec) for spec in maker.inputs]
    maker.expanded_inputs = maker.inputs
    for output, position in graph.update_mapping.items():  # `update` is a variable of the unoptimized graph otherwise
        maker.inputs[position].update = graph.outputs[output]
    maker.outputs = [SymbolicOutput(var, spec.borrow) for var, spec in zip(graph.outputs, maker.outputs)]
    for spec in maker.inputs:
        spec.value = None  # a container, which is pickled with the cells
    # a container means "use this storage"
    cells = [
        container if spec.shared or spec.implicit else None
        for spec, container in zip(maker.inputs, function.input_storage)
    ]
    return graph.toposort(), maker, cells, function.trust_input


def unpack(packed: Any) -> Any:
    """Make a compiled function from the parts that `pack` returned."""
    order, maker, cells, trust_input = packed
    maker.fgraph.toposort = lambda: list(order)  # use the controller's order, because several are valid
    for spec, cell in zip(maker.inputs, cells):
        spec.value = cell
    if isinstance(maker.linker, NumbaLinker):
        register_with_numba()  # the rewrite that calls it does not run for a graph that is optimized already
    function = maker.create(cells)
    function.trust_input = trust_input
    return function


def is_random_state(var: Any) -> bool:
    """Return whether a shared variable is the state of a random stream."""
    return isinstance(var.type, RandomType)


def other_stream(state: Any, stream: int) -> Any:
    """Return a random state moved ahead by ``stream`` (> 0) streams.

    Parameters
    ----------
    state : numpy.random.Generator
    stream : int

    Raises
    ------
    TypeError
        If its bit generator can neither jump nor be seeded again.
    """
    bits = state.bit_generator
    if hasattr(bits, "jumped"):
        return np.random.Generator(bits.jumped(stream))
    seeds = getattr(bits, "seed_seq", None)
    if not isinstance(seeds, np.random.SeedSequence):
        raise TypeError(
            f"{type(bits).__name__} cannot give each rank a stream of its own: use PCG64, the default, or fork with "
            "replicate_rng=True"
        )
    return np.random.Generator(type(bits)(np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, stream))))
