"""What of compiled functions travels to other processes, and what is defined by name.

What travels of a function is the optimised graph, how it is to be linked (nothing is optimised again), and which
storage cell feeds which input. Its nodes come first, each after those whose results it takes, so that pickling never
goes deep: since Python 3.12 recursion in C has a limit that no setting raises. They are computed in this order
everywhere, and constants keep their strides, for by these numba finds the code that another process has kept on disk.
Of what rewrites have noted about a graph, only that it works in place travels. Of the variables of a graph, and of
their tags, only what PyTensor itself puts there does: other libraries hang models on them, which the ranks may be
unable to load.

States of PyTensor's random streams: NumPy's generators.

A generator jumps as many of its period's parts ahead as NumPy says: PCG64, the default, 2^127 steps of 2^128 times the
golden ratio's fraction, so that no two ranks meet; MT19937 2^128 of 2^19937 - 1; Philox 2^128 of 2^256.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
from pytensor.compile.debug.debugmode import _VariableEquivalenceTracker as Tracker
from pytensor.compile.debug.nanguardmode import NanGuardMode
from pytensor.compile.inner_function import HasInnerFunction
from pytensor.compile.io import SymbolicOutput
from pytensor.compile.ops import FromFunctionOp
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.destroyhandler import DestroyHandler
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op as PureOp
from pytensor.graph.type import Type as PureType
from pytensor.graph.utils import Scratchpad
from pytensor.link.numba.linker import NumbaLinker
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.optimize import ScipyWrapperOp
from pytensor.tensor.random.type import RandomType

from synkhronos._backends.common import GUARDS, errors_of, new, once
from synkhronos._backends.pytensor.custom_op import tell_numba

__all__ = [
    "MADE_AT_RUN_TIME",
    "FromFunctionOp",
    "PureOp",
    "PureType",
    "is_random_state",
    "other_stream",
    "pack",
    "reduced",
    "unpack",
]


#: What PyTensor puts on the variables, the nodes and the tags of a compiled graph, as far as other processes need it.
_OF_VARIABLES = frozenset(["auto_name", "container", "data", "index", "name", "owner", "tag", "type"])
#: What PyTensor's Ops make when they are linked or first run, and make again where it is missing: a class, the name of
#: the attribute, and whether ``None`` stands for a missing one.
MADE_AT_RUN_TIME = ((HasInnerFunction, "_fn", True), (ScipyWrapperOp, "_fn_wrapped", True), (CAReduce, "_ufunc", False))
_OF_NODES = frozenset(["inputs", "op", "outputs", "tag"])
_OF_TAGS = frozenset(["nan_guard_mode_check", "trace", "unique_value", "values_eq_approx"])


def reduced(obj: Any, frames: dict[Any, Any]) -> Any:
    """How to make an object of PyTensor's, for pickle; ``NotImplemented`` for others.

    ``frames`` are those of traces, which are the same objects wherever they come again: pickled once each.
    """
    if isinstance(obj, (Variable, Apply)):
        # a class of the user's own may need all that it has; what is in frozen graphs has its own way
        has_own_way = type(obj).__reduce__ is not object.__reduce__ or "__reduce_ex__" in obj.__dict__
        if type(obj).__module__.startswith("pytensor.") and not has_own_way:
            known = _OF_NODES if isinstance(obj, Apply) else _OF_VARIABLES
            state = {name: value for name, value in obj.__dict__.items() if name in known}
            if "container" in state:
                state["_default_update"] = None
            return new(type(obj), state)
    elif isinstance(obj, Scratchpad):
        tags = {name: value for name, value in obj.__dict__.items() if name in _OF_TAGS}
        if "trace" in tags:
            tags["trace"] = once(tags["trace"], frames)
        return new(type(obj), tags)
    elif type(obj) is FunctionGraph:
        in_place = any(isinstance(feature, DestroyHandler) for feature in obj._features)
        seen = [feature.all_variables_ever for feature in obj._features if isinstance(feature, Tracker)]
        return _graph, (list(obj.inputs), list(obj.outputs), obj.update_mapping, obj.name, in_place, seen)
    elif type(obj) is np.ndarray and _has_own_strides(obj):
        return np.ndarray, (obj.shape, obj.dtype, bytearray(obj.tobytes()), 0, obj.strides)
    elif inspect.isfunction(obj) and obj.__qualname__ in GUARDS:
        return _guard, (GUARDS[obj.__qualname__], errors_of(obj))
    return NotImplemented


def _has_own_strides(array: np.ndarray) -> bool:
    """Whether it has strides that NumPy's pickles do not keep: those of no elements, and of axes of length 1."""
    return array.flags.c_contiguous and (0 in array.shape or 0 in array.strides) and not array.dtype.hasobject


def _graph(
    inputs: list[Any], outputs: list[Any], update_mapping: Any, name: Any, in_place: bool, seen: list[Any]
) -> FunctionGraph:
    graph = FunctionGraph(inputs, outputs, clone=False, update_mapping=update_mapping)
    graph.name = name
    if in_place:
        graph.attach_feature(DestroyHandler())
    for variables in seen:  # of DebugMode, which computes those that are in the graph no more, too
        graph.equivalence_tracker = tracker = Tracker()
        graph.attach_feature(tracker)
        tracker.all_variables_ever = variables
        tracker.reasons = {var: [] for var in variables}  # the master looks whether what replaced them is equal
        graph.clients.update({var: [] for var in variables if var not in graph.clients})
    return graph


def _guard(attribute: str, errors: tuple[bool, ...]) -> Any:
    return getattr(NanGuardMode(*errors).linker, attribute)


def pack(function: Any) -> Any:
    """What travels of a compiled function."""
    maker = copy.copy(function.maker)
    graph = maker.fgraph
    maker.inputs = [copy.copy(spec) for spec in maker.inputs]
    maker.expanded_inputs = maker.inputs
    for output, position in graph.update_mapping.items():  # in place of what it was before it was optimised
        maker.inputs[position].update = graph.outputs[output]
    maker.outputs = [SymbolicOutput(var, spec.borrow) for var, spec in zip(graph.outputs, maker.outputs)]
    for spec in maker.inputs:
        spec.value = None  # a container, which is among the cells
    # a container stands for "use this storage"
    cells = [
        container if spec.shared or spec.implicit else None
        for spec, container in zip(maker.inputs, function.input_storage)
    ]
    return graph.toposort(), maker, cells, function.trust_input


def unpack(packed: Any) -> Any:
    """The compiled function of which this has travelled."""
    order, maker, cells, trust_input = packed
    maker.fgraph.toposort = lambda: list(order)  # one of several that are right
    for spec, cell in zip(maker.inputs, cells):
        spec.value = cell
    if isinstance(maker.linker, NumbaLinker):
        tell_numba()  # the graph is not optimised here again, which would tell it
    function = maker.create(cells)
    function.trust_input = trust_input
    return function


def is_random_state(var: Any) -> bool:
    """Whether a shared variable is the state of a random stream."""
    return isinstance(var.type, RandomType)


def other_stream(state: Any, stream: int) -> Any:
    """The random state ``stream`` (> 0) streams further on.

    Parameters
    ----------
    state : numpy.random.Generator
    stream : int

    Raises
    ------
    TypeError
        If its bit generator can neither jump nor be seeded anew.
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
