"""Which random states are the ranks' own, so that replicated dropout draws different masks, and which are common.

Ops as they were built: what they gather at run time and cannot be pickled does not travel.

Ops keep things that they make when they first run: ufuncs, compiled inner functions, handles of libraries. What the
engine itself is known to make never travels. If a function cannot be pickled, it is pickled once more, and each
attribute of its Ops that cannot be pickled travels as it was when the Op was first pickled, provided that it was
missing, ``None`` or an empty container then. For an Op that ran before it was first pickled, another Op is built from
its ``__props__``, and the attribute is taken from that.

Values that are no dense arrays, as bytes: how they reach other ranks, which get arrays alone.

A sparse matrix that is an input, say, enters a function as bytes, of which `Unpacked` makes it on each rank.

Compiled functions as bytes, so that every rank gets a replica.

What travels of a function is the engine's to say. A shared variable lives in three objects: the variable, its
container, and the container's storage list; each is replaced by a persistent id, so that functions that arrive one
after the other share what they shared in the master. A variable new to the ranks travels as type, name and value;
values go out of band, beside the pickle, uncopied. Graphs are deep, and pickling recurses: it runs in a thread with a
stack of its own. Classes and functions travel by name, or by value where the ranks do not have them under it. What they
read (globals, class attributes, defaults, closures) travels with them where it has changed: see `Definitions`.
"""

from __future__ import annotations

import io
import pickle
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, NamedTuple

import cloudpickle
import numpy as np

from synkhronos._backends import (
    MADE_AT_RUN_TIME,
    Apply,
    FromFunctionOp,
    Op,
    PureOp,
    T,
    find_compiled,
    is_device_array,
    is_random_state,
    other_stream,
    pack,
    precompile,
    reduced,
    to_host,
    unpack,
)
from synkhronos._graph.definitions import Definitions, pickled_by_value
from synkhronos._graph.fast_call import with_deep_stack
from synkhronos._graph.namespaces import Slot, assign
from synkhronos._graph.shared_variables import VariableTable, get_array, shared_variables_of
from synkhronos._utils.interrupts import Endings, let_interrupts_pass

__all__ = [
    "Bundle",
    "Unpacked",
    "bytes_variable",
    "claim_stream",
    "dump",
    "has_common_stream",
    "load",
    "note_ops",
    "pack_values",
    "reduced_op",
]


#: For containers of states whether all ranks draw the same of them.
_is_common: Any = weakref.WeakKeyDictionary()


def claim_stream(var: Any, common: bool) -> None:
    """A function draws of this random state: of a common stream, or of streams that differ between ranks.

    Raises
    ------
    ValueError
        If another function was built that does otherwise.
    """
    if _is_common.setdefault(var.container, common) != common:
        raise ValueError(
            f"the random state {var} is used by exact functions, which draw the same on all ranks, and by others (or "
            'with random="own"), for which each rank has a stream of its own: make a RandomStreams for each kind'
        )


def has_common_stream(var: Any) -> bool:
    """Whether all ranks are to draw the same of a random state."""
    return bool(_is_common.get(var.container))


_BLANK = (type(None), dict, list, set)
_MISSING, _OTHER = object(), object()

#: By the id of an Op: a reference to it, and for each attribute the class of its value, if that was blank, or `_OTHER`.
_first: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
_ended: Endings[int] = Endings()


def note_ops(ops: Iterable[Any]) -> None:
    """Note the attributes of Ops that were pickled as they are, the first time."""
    for key in _ended.take():
        _first.pop(key, None)
    for op in ops:
        if id(op) not in _first:
            kinds = {name: type(one) if type(one) in _BLANK and not one else _OTHER for name, one in vars(op).items()}
            _first[id(op)] = weakref.ref(op), kinds
            _ended.watch(op, id(op))


def reduced_op(op: Any, as_built: bool) -> Any:
    """How to make an Op, for pickle.

    Parameters
    ----------
    op : Op
    as_built : bool
        Replace attributes that cannot be pickled by what they were when the Op was built, as far as that is known.
    """
    how = op.__reduce_ex__(5)
    if not (isinstance(how, tuple) and len(how) > 2 and isinstance(how[2], dict)):
        return how
    state = dict(how[2])
    for kind, name, is_none in MADE_AT_RUN_TIME:
        if isinstance(op, kind) and name in state:
            del state[name]
            state.update({name: None} if is_none else {})
    if as_built:
        for name in [name for name, value in state.items() if not _can_be_pickled(value)]:
            value = _value_when_built(op, name)
            if value is _MISSING:
                del state[name]
            elif value is not _OTHER:
                state[name] = value
    return (*how[:2], state, *how[3:])


def _value_when_built(op: Any, name: str) -> Any:
    """What an attribute of an Op was; `_MISSING` if it was not there, `_OTHER` if that is not known."""
    reference, kinds = _first.get(id(op), (None, {}))
    if reference is not None and reference() is op:
        kind = kinds.get(name, _MISSING)
        return kind() if isinstance(kind, type) else kind
    try:
        again = type(op)(**{prop: getattr(op, prop) for prop in op.__props__})
        if again != op:
            return _OTHER
    except Exception as error:  # its constructor takes something else
        let_interrupts_pass(error)
        return _OTHER
    return vars(again).get(name, _MISSING)


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value, 5, buffer_callback=lambda buffer: None)
    except Exception as error:
        let_interrupts_pass(error)
        return False
    return True


def pack_values(values: Sequence[Any]) -> np.ndarray:
    """Pickle values: a vector of uint8."""
    return np.frombuffer(cloudpickle.dumps(list(values), protocol=5), np.uint8)


def bytes_variable(name: str | None = None) -> Any:
    """Return a variable for what `pack_values` makes."""
    return T.vector(name, dtype="uint8")


class Unpacked(Op):
    """The values that `pack_values` has packed.

    Parameters
    ----------
    types : tuple of Type
        Of the values.
    """

    __props__ = ("types",)

    def __init__(self, types: tuple[Any, ...]) -> None:
        self.types = types

    def __str__(self) -> str:
        return "Unpacked"

    def make_node(self, packed: Any) -> Any:
        """Apply it to bytes."""
        return Apply(self, [packed], [type_() for type_ in self.types])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Unpickle the values."""
        for storage, value in zip(output_storage, pickle.loads(inputs[0].tobytes())):
            storage[0] = value


class Bundle(NamedTuple):
    """Pickled functions: the pickle, and the arrays that it refers to, each as flat bytes."""

    pickled: bytes
    buffers: list[np.ndarray]
    new: dict[int, Any]  # the shared variables that the ranks do not have yet, by the keys that they will have
    slots: dict[Slot, bytes]  # the digests of what is set in the ranks' modules and classes


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self,
        file: Any,
        ids: dict[int, tuple[str, int]],
        buffer_callback: Callable[[Any], Any],
        definitions: Definitions | None,
        as_built: bool = False,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._ids = ids
        self._definitions = definitions
        self._frames: dict[Any, Any] = {}
        self._as_built = as_built
        self.ops: list[Any] = []  # that were met

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        return self._ids.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        how = reduced(obj, self._frames)
        if how is NotImplemented and isinstance(obj, PureOp) and not isinstance(obj, FromFunctionOp):
            self.ops.append(obj)
            return reduced_op(obj, self._as_built)
        if how is not NotImplemented or self._definitions is None or self._definitions.reach(obj):
            return how
        return pickled_by_value(obj, lambda: cloudpickle.Pickler.reducer_override(self, obj))


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
    refresh: bool = False,
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
    refresh : bool
        What functions of the ranks read travels again where it has changed.

    Raises
    ------
    pickle.PicklingError, TypeError, AttributeError
        If something cannot be pickled.
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
    parts = {key: pack(function) for key, function in functions.items()}

    def pickle_all(as_built: bool) -> Bundle:
        first, last = _Part(definitions), _Part(definitions)
        changes: list[_Part] = []
        slots: dict[Slot, bytes] = {}
        if definitions is not None:
            definitions.begin(refresh)
        first.dump(list(sys.path), {})
        first.dump(described, {})
        ops = last.dump(parts, ids, as_built)
        more = definitions is not None
        while more:  # what is to be set may contain functions that read more
            more = False
            assert definitions is not None
            for change in definitions.changes(slots):
                slots[change.slot] = change.digest
                more = True
                part = _Part(definitions)
                try:
                    part.dump((change.slot, change.value), ids)
                except Exception as error:
                    let_interrupts_pass(error)
                    if change.is_same or everything:  # as the ranks have inherited it
                        continue
                    raise pickle.PicklingError(
                        f"{change.slot}, which {change.reader} reads, was set after synkhronos.fork(), and cannot be "
                        f"pickled: {type(error).__name__}: {error}"
                    ) from error
                changes.append(part)
        if not as_built:
            note_ops(ops)
        first.dump(len(changes), {})
        everything_pickled = [first, *changes, last]
        pickled = b"".join(part.file.getvalue() for part in everything_pickled)
        return Bundle(pickled, [buffer for part in everything_pickled for buffer in part.buffers], new, slots)

    try:
        return with_deep_stack(lambda: pickle_all(as_built=False))
    except Exception as error:
        let_interrupts_pass(error)
    return with_deep_stack(lambda: pickle_all(as_built=True))


class _Part:
    """A part of a bundle."""

    def __init__(self, definitions: Definitions | None) -> None:
        self.file = io.BytesIO()
        self.buffers: list[np.ndarray] = []
        self._definitions = definitions

    def dump(self, obj: Any, ids: dict[int, tuple[str, int]], as_built: bool = False) -> list[Any]:
        """Pickle an object; returns the Ops in it."""

        def keep(buffer: pickle.PickleBuffer) -> None:
            self.buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

        pickler = _Pickler(self.file, ids, keep, self._definitions, as_built)
        pickler.dump(obj)
        return pickler.ops


def _has_own_stream(var: Any) -> bool:
    return is_random_state(var) and not has_common_stream(var)


def _portable(value: Any) -> Any:
    return to_host(value) if is_device_array(value) else value


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
    path = _Unpickler(file, variables, buffers).load()
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]  # for modules that workers import now
    for key, (cls, type_, name, is_random, value) in _Unpickler(file, variables, buffers).load().items():
        if is_random and stream:
            value = other_stream(value, stream)
        variables.put(key, cls(name=name, type=type_, value=value, strict=None))
    for _ in range(_Unpickler(file, variables, buffers).load()):
        assign(*with_deep_stack(_Unpickler(file, variables, buffers).load))
    parts = with_deep_stack(_Unpickler(file, variables, buffers).load)
    functions = {key: unpack(part) for key, part in parts.items()}
    for function in functions.values():
        precompile(function)
    return functions
