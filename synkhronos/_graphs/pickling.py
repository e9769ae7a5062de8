"""Compiled functions as bytes, so that every rank gets a replica.

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
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import cloudpickle
import numpy as np

from synkhronos._backends import (
    FromFunctionOp,
    PureOp,
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
from synkhronos._graphs.built import note_ops, reduced_op
from synkhronos._graphs.definitions import Definitions, pickled_by_value
from synkhronos._graphs.namespaces import Slot, assign
from synkhronos._graphs.random import has_common_stream
from synkhronos._graphs.shared import VariableTable, get_array, shared_variables_of
from synkhronos._graphs.stack import with_deep_stack
from synkhronos._utils.interrupts import let_interrupts_pass

__all__ = ["Bundle", "dump", "load"]


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
