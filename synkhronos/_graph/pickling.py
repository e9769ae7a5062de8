"""Pickle compiled functions, so that every rank gets a replica, and values that are not dense arrays.

**Functions.** The backend decides which parts of a function are pickled. A shared variable consists of three objects:
the variable, its container, and the container's storage list. Each is replaced by a persistent id. Functions that are
sent at different times therefore share the same variables as on the controller. A variable that is new to the ranks is
sent as type, name and value. Buffers are sent out of band, without a copy. Pickling recurses deeply, so it runs in a
thread with a large stack. Classes and functions are sent by name, or by value if the ranks cannot find them by name.
The state that they read (globals, class attributes, defaults, closures) is sent with them if it has changed: see
`Definitions`.

**Ops.** Ops store objects that they create when they first run: ufuncs, compiled inner functions, handles of libraries.
Attributes that the backend itself is known to create are never sent. If a function cannot be pickled, it is pickled
again, with other values for those attributes of its Ops that cannot be pickled. An attribute that was missing, ``None``
or an empty container when the Op was first pickled gets that value again. For an Op without such a record, another Op
is constructed from its ``__props__``, and the attribute's value is taken from that.

**Random states.** Each rank gets its own random stream, so that replicated dropout draws different masks, unless
`claim_stream` has made the stream common to all ranks.

**Values.** An input that is not a dense array, such as a sparse matrix, is passed to a function as bytes, which
`Unpacked` unpickles on each rank.
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

from synkhronos import _backends
from synkhronos._backends import T
from synkhronos._graph.definitions import Definitions, pickled_by_value
from synkhronos._graph.fast_call import with_deep_stack
from synkhronos._graph.namespaces import Slot, assign
from synkhronos._graph.shared_variables import VariableTable, get_array, shared_variables_of
from synkhronos._memory import Place
from synkhronos._utils.interrupts import FinalizerQueue, let_interrupts_pass

# -- random states

#: For the container of each random state: whether all ranks draw the same numbers from it.
_is_common: Any = weakref.WeakKeyDictionary()


def claim_stream(var: Any, common: bool) -> None:
    """Record whether a function requires that all ranks draw the same numbers from a random state.

    Parameters
    ----------
    var : shared variable
        The random state.
    common : bool
        Whether the stream is the same on all ranks, instead of different on each rank.

    Raises
    ------
    ValueError
        If a function that was built earlier requires the other kind of stream.
    """
    if _is_common.setdefault(var.container, common) != common:
        raise ValueError(
            f"the random state {var} is used by exact functions, which draw the same on all ranks, and by others (or "
            'with random="own"), for which each rank has a stream of its own: make a RandomStreams for each kind'
        )


# -- Ops

_BLANK = (type(None), dict, list, set)
_MISSING, _OTHER = object(), object()

#: By the id of an Op: a weak reference to the Op, and its attributes when it was first pickled. For each attribute, the
#: class of its value if that was ``None`` or an empty container, otherwise `_OTHER`.
_first: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
_ended: FinalizerQueue[int] = FinalizerQueue()


def note_ops(ops: Iterable[Any]) -> None:
    """Record the attributes of Ops when they are pickled for the first time."""
    for key in _ended.take():
        _first.pop(key, None)
    for op in ops:
        if id(op) not in _first:
            kinds = {name: type(one) if type(one) in _BLANK and not one else _OTHER for name, one in vars(op).items()}
            _first[id(op)] = weakref.ref(op), kinds
            _ended.watch(op, id(op))


def reduced_op(op: Any, as_built: bool) -> Any:
    """Return the reduction that pickles an Op.

    Parameters
    ----------
    op : Op
    as_built : bool
        For attributes that cannot be pickled, use their values when the Op was built, if these are known.
    """
    how = op.__reduce_ex__(5)
    if not (isinstance(how, tuple) and len(how) > 2 and isinstance(how[2], dict)):
        return how
    state = dict(how[2])
    for kind, name, is_none in _backends.MADE_AT_RUN_TIME:
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
    """Return an attribute's value when the Op was built: `_MISSING` if it did not exist, `_OTHER` if it is unknown."""
    reference, kinds = _first.get(id(op), (None, {}))
    if reference is not None and reference() is op:
        kind = kinds.get(name, _MISSING)
        return kind() if isinstance(kind, type) else kind
    try:
        again = type(op)(**{prop: getattr(op, prop) for prop in op.__props__})
        if again != op:
            return _OTHER
    except Exception as error:  # its constructor takes other arguments
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


# -- values that are not dense arrays


def pack_values(values: Sequence[Any]) -> np.ndarray:
    """Pickle values into a vector of uint8."""
    return np.frombuffer(cloudpickle.dumps(list(values), protocol=5), np.uint8)


def bytes_variable(name: str | None = None) -> Any:
    """Return a graph variable for results of `pack_values`: a vector of uint8."""
    return T.vector(name, dtype="uint8")


class Unpacked(_backends.Op):
    """Operation that unpickles the values of `pack_values`.

    Parameters
    ----------
    types : tuple of Type
        Types of the values.
    """

    __props__ = ("types",)

    def __init__(self, types: tuple[Any, ...]) -> None:
        self.types = types

    def __str__(self) -> str:
        return "Unpacked"

    def make_node(self, packed: Any) -> Any:
        """Apply the operation to bytes."""
        return _backends.Apply(self, [packed], [type_() for type_ in self.types])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Unpickle the values."""
        for storage, value in zip(output_storage, pickle.loads(inputs[0].tobytes())):
            storage[0] = value


# -- functions


class Bundle(NamedTuple):
    """Pickled functions, with the variables and the state that the ranks do not have."""

    pickled: bytes
    buffers: list[np.ndarray]  # out-of-band buffers of the pickle, as flat arrays of bytes
    new: dict[int, Any]  # shared variables that the ranks do not have yet, by the keys that they get
    slots: dict[Slot, bytes]  # digests of the state that loading sets in modules and classes


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
        self.ops: list[Any] = []  # the pickled Ops

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        return self._ids.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        how = _backends.reduced(obj, self._frames)
        if (
            how is NotImplemented
            and isinstance(obj, _backends.PureOp)
            and not isinstance(obj, _backends.FromFunctionOp)
        ):
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
    place: Callable[[Any], Any] = lambda _: None,
) -> Bundle:
    """Pickle compiled functions, with the shared variables that are not yet in ``variables``.

    ``variables`` does not change. Add `Bundle.new` to it after the ranks have loaded the bundle.

    Parameters
    ----------
    functions : dict
        Compiled functions by key.
    variables : VariableTable
        The variables that the ranks have.
    also : sequence of shared variables
        Further variables to send.
    everything : bool
        Send all variables, for a new rank that has none.
    definitions : Definitions, optional
        The functions and classes that the ranks have. Default: assume that they have all.
    refresh : bool
        Also send changed state that functions already on the ranks read.
    place : callable
        ``place(var)`` returns the `Place` of a variable's value in shared memory, which the ranks are to view instead
        of a copy, or ``None``. Default: copy all values.

    Returns
    -------
    Bundle

    Raises
    ------
    pickle.PicklingError, TypeError, AttributeError
        If something cannot be pickled.
    """
    used = [*also, *(var for function in functions.values() for var in shared_variables_of(function))]
    new: dict[int, Any] = {}
    new_keys: dict[int, int] = {}  # keys by the ids of containers
    for var in used:
        if variables.key(var) is None and id(var.container) not in new_keys:
            new_keys[id(var.container)] = key = variables.new_key()
            new[key] = var
    known = {**variables.items(), **new}  # keeps the objects alive, so that their ids stay valid
    ids: dict[int, tuple[str, int]] = {}
    for var in used:  # includes aliases: variables with the same container are one variable on the ranks
        known_key = variables.key(var)
        ids[id(var)] = ("variable", new_keys[id(var.container)] if known_key is None else known_key)
    for key, var in known.items():
        ids[id(var)] = ("variable", key)
        ids[id(var.container)] = ("container", key)
        ids[id(var.container.storage)] = ("storage", key)
    described = {
        key: (type(var), var.type, var.name, has_own_stream(var), place(var) or _portable(get_array(var)))
        for key, var in (known if everything else new).items()
    }
    parts = {key: _backends.pack(function) for key, function in functions.items()}

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
        while more:  # repeat, because values to be set may contain functions that read further slots
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
                    if change.is_same or everything:  # the ranks have inherited the value
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
    """One pickle of a bundle, with its buffers."""

    def __init__(self, definitions: Definitions | None) -> None:
        self.file = io.BytesIO()
        self.buffers: list[np.ndarray] = []
        self._definitions = definitions

    def dump(self, obj: Any, ids: dict[int, tuple[str, int]], as_built: bool = False) -> list[Any]:
        """Pickle an object, and return the Ops in it."""

        def keep(buffer: pickle.PickleBuffer) -> None:
            self.buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

        pickler = _Pickler(self.file, ids, keep, self._definitions, as_built)
        pickler.dump(obj)
        return pickler.ops


def has_own_stream(var: Any) -> bool:
    """Return whether a variable is a random state that differs between ranks."""
    return _backends.is_random_state(var) and not _is_common.get(var.container)


def _portable(value: Any) -> Any:
    return _backends.to_host(value) if _backends.is_device_array(value) else value


def load(
    bundle: Bundle, variables: VariableTable, stream: int, view: Callable[[Place], Any] | None = None
) -> dict[int, Any]:
    """Unpickle functions on another rank, and add their new shared variables to ``variables``.

    Parameters
    ----------
    bundle : Bundle
        The pickled functions; arrays in them are copied.
    variables : VariableTable
        The rank's variables.
    stream : int
        Number of the rank's own random stream. Random states that are not common to all ranks are moved to it; 0 leaves
        them unchanged.
    view : callable
        ``view(place)`` returns the array at a place. Default: no values were placed.

    Returns
    -------
    dict
        Compiled functions by key.
    """
    _backends.find_compiled()
    file = io.BytesIO(bundle.pickled)
    # copies to NumPy arrays, because these are aligned and in huge pages, unlike a bytearray
    buffers = iter([np.array(buffer) for buffer in bundle.buffers])
    path = _Unpickler(file, variables, buffers).load()
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]  # so that imports find new folders
    seen: set[int] = set()
    for key, (cls, type_, name, is_random, value) in _Unpickler(file, variables, buffers).load().items():
        if is_random and stream:
            value = _backends.other_stream(value, stream)
        elif isinstance(value, Place):
            assert view is not None
            value = view(value)
        elif id(value) in seen and isinstance(value, np.ndarray):
            value = value.copy()  # variables of the program that share an array have their own on the controller, too
        seen.add(id(value))
        variables.put(key, cls(name=name, type=type_, value=value, strict=None))
    for _ in range(_Unpickler(file, variables, buffers).load()):
        assign(*with_deep_stack(_Unpickler(file, variables, buffers).load))
    parts = with_deep_stack(_Unpickler(file, variables, buffers).load)
    functions = {key: _backends.unpack(part) for key, part in parts.items()}
    for function in functions.values():
        _backends.precompile(function)
    return functions
