"""Compiled functions as bytes, so that every rank gets a replica.

What travels of a function is its maker (the optimised graph; nothing is optimised again) and which storage cell feeds
which input. A shared variable lives in three objects: the variable, its container, and the container's storage list;
each is replaced by a persistent id, so that functions that arrive one after the other share what they shared in the
master. A variable new to the ranks travels as type, name and value; values go out of band, beside the pickle,
uncopied. Graphs are deep, and pickling recurses: it runs in a thread with a stack of its own.

Of the variables of a graph, and of their tags, only what Theano itself puts there travels: other libraries hang whole
layers on them (Keras its ``_keras_history``, Blocks its annotations), which the ranks may be unable to load.
"""

from __future__ import annotations

import copyreg
import inspect
import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
from theano import Apply, Variable
from theano.compile.nanguardmode import NanGuardMode
from theano.gof.utils import scratchpad

from synkhronos._graphs.definitions import Definitions
from synkhronos._graphs.gpu import is_device_array, to_host
from synkhronos._graphs.random import has_common_stream, other_stream
from synkhronos._graphs.shared import VariableTable, find_compiled, get_array, is_random_state, shared_variables_of
from synkhronos._graphs.stack import with_deep_stack

__all__ = ["Bundle", "dump", "load"]


#: What Theano puts on the variables, the nodes and the tags of a compiled graph, as far as other processes need it.
_OF_VARIABLES = frozenset(
    ["auto_name", "clients", "container", "data", "fgraph", "index", "name", "owner", "tag", "type"]
)
_OF_NODES = frozenset(["deps", "fgraph", "inputs", "op", "outputs", "tag"])
_OF_TAGS = frozenset(
    [
        "context_name",
        "indestructible",
        "is_rng",
        "nan_guard_mode_check",
        "target",
        "trace",
        "unique_value",
        "values_eq_approx",
    ]
)


class Bundle(NamedTuple):
    """Pickled functions: the pickle, and the arrays that it refers to, each as flat bytes."""

    pickled: bytes
    buffers: list[np.ndarray]
    new: dict[int, Any]  # the shared variables that the ranks do not have yet, by the keys that they will have


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        file: Any,
        ids: dict[int, tuple[str, int]],
        buffer_callback: Callable[[Any], Any],
        definitions: Definitions | None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._ids = ids
        self._definitions = definitions
        self._frames: dict[Any, Any] = {}

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        return self._ids.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (Variable, Apply)):
            # a class of the user's own may need all that it has
            if type(obj).__module__.startswith("theano."):
                known = _OF_NODES if isinstance(obj, Apply) else _OF_VARIABLES
                return _new(type(obj), {name: value for name, value in obj.__dict__.items() if name in known})
        elif isinstance(obj, scratchpad):
            tags = {name: value for name, value in obj.__dict__.items() if name in _OF_TAGS}
            if "trace" in tags:
                tags["trace"] = self._once(tags["trace"])
            return _new(scratchpad, tags)
        elif inspect.isfunction(obj) and obj.__qualname__ in _GUARDS:
            return _guard, (_GUARDS[obj.__qualname__], _errors_of(obj))
        elif self._definitions is not None:
            self._definitions.check(obj)
        return NotImplemented

    def _once(self, trace: Any) -> Any:
        """The same trace, of frames that are the same objects wherever they come again: pickled once each."""
        if isinstance(trace, list):
            return [self._once(part) for part in trace]
        return self._frames.setdefault(trace, trace)


#: The functions that are the parts of NanGuardMode, closures that do not pickle, by the attributes of its linker.
_GUARDS = {
    "NanGuardMode.__init__.<locals>.nan_check": "callback",
    "NanGuardMode.__init__.<locals>.nan_check_input": "callback_input",
}


def _errors_of(guard: Any) -> tuple[bool, ...]:
    """What a function of NanGuardMode takes for an error: NaN, infinity, large values."""
    check = inspect.getclosurevars(guard).nonlocals["do_check_on"]
    found = inspect.getclosurevars(check).nonlocals
    return tuple(bool(found[f"{kind}_is_error"]) for kind in ("nan", "inf", "big"))


def _guard(attribute: str, errors: tuple[bool, ...]) -> Any:
    return getattr(NanGuardMode(*errors).linker, attribute)


def _new(cls: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """How to make an object with these attributes, for pickle."""
    return copyreg.__newobj__, (cls,), state or None  # type: ignore[attr-defined]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, variables: VariableTable, buffers: Iterator[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._variables = variables

    def persistent_load(self, pid: Any) -> Any:
        kind, key = pid
        var = self._variables[key]
        return {"variable": var, "container": var.container, "storage": var.container.storage}[kind]


def dump(
    functions: dict[int, Any],
    variables: VariableTable,
    also: Sequence[Any] = (),
    everything: bool = False,
    definitions: Definitions | None = None,
) -> Bundle:
    """Pickle compiled functions; shared variables not yet in ``variables`` travel along.

    ``variables`` is left as it is: once the ranks have loaded the bundle, add what is `Bundle.new`.

    Parameters
    ----------
    functions : dict
        By key.
    variables : VariableTable
    also : sequence of shared variables
        Further ones that are to travel.
    everything : bool
        All variables travel, for a rank that has none.
    definitions : Definitions, optional
        What the ranks know; default: all that is there.

    Raises
    ------
    pickle.PicklingError, TypeError, AttributeError
        If something cannot be pickled, or is not among the definitions.
    """
    used = [*also, *(var for function in functions.values() for var in shared_variables_of(function))]
    new: dict[int, Any] = {}
    new_keys: dict[int, int] = {}  # by the ids of their containers
    for var in used:
        if variables.key(var) is None and id(var.container) not in new_keys:
            new_keys[id(var.container)] = key = variables.new_key()
            new[key] = var
    known = {**variables.items(), **new}  # held until the end: an id means something only while its object lives
    ids: dict[int, tuple[str, int]] = {}
    for var in used:  # aliases, too: variables over one container arrive as one
        known_key = variables.key(var)
        ids[id(var)] = ("variable", new_keys[id(var.container)] if known_key is None else known_key)
    for key, var in known.items():
        ids[id(var)] = ("variable", key)
        ids[id(var.container)] = ("container", key)
        ids[id(var.container.storage)] = ("storage", key)
    described = {
        key: (type(var), var.type, var.name, _has_own_stream(var), _portable(get_array(var)))
        for key, var in (known if everything else new).items()
    }
    parts = {key: (function.maker, _cells(function), function.trust_input) for key, function in functions.items()}
    file, buffers = io.BytesIO(), []

    def pickle_both() -> None:
        def keep(buffer: pickle.PickleBuffer) -> None:
            buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

        _Pickler(file, {}, keep, definitions).dump(described)
        _Pickler(file, ids, keep, definitions).dump(parts)

    with_deep_stack(pickle_both)
    return Bundle(file.getvalue(), buffers, new)


def _has_own_stream(var: Any) -> bool:
    return is_random_state(var) and not has_common_stream(var)


def _portable(value: Any) -> Any:
    return to_host(value) if is_device_array(value) else value


def _cells(function: Any) -> list[Any]:
    # a container stands for "use this storage"; other inputs start with their default value, or with nothing
    return [
        container if spec.shared or spec.implicit else default
        for spec, container, (_, _, default) in zip(function.maker.inputs, function.input_storage, function.defaults)
    ]


def load(bundle: Bundle, variables: VariableTable, stream: int) -> dict[int, Any]:
    """Unpickle functions on another rank; their new shared variables are added to ``variables``.

    Parameters
    ----------
    bundle : Bundle
        Its arrays are copied.
    variables : VariableTable
    stream : int
        Random states that arrive are moved to this stream of their own; 0 leaves them as they are.
    """
    find_compiled()
    file = io.BytesIO(bundle.pickled)
    buffers = iter([np.array(buffer) for buffer in bundle.buffers])  # aligned, and in huge pages, unlike a bytearray
    for key, (cls, type_, name, is_random, value) in _Unpickler(file, variables, buffers).load().items():
        if is_random and stream:
            value = other_stream(value, stream)
        variables.put(key, cls(name=name, type=type_, value=value, strict=None))
    functions = {}
    parts = with_deep_stack(_Unpickler(file, variables, buffers).load)
    for key, (maker, cells, trust_input) in parts.items():
        functions[key] = maker.create(cells, trustme=True)
        functions[key].trust_input = trust_input
    return functions
