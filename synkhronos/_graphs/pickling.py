"""Compiled functions as bytes, so that every rank gets a replica.

What travels of a function is the engine's to say. A shared variable lives in three objects: the variable, its
container, and the container's storage list; each is replaced by a persistent id, so that functions that arrive one
after the other share what they shared in the master. A variable new to the ranks travels as type, name and value;
values go out of band, beside the pickle, uncopied. Graphs are deep, and pickling recurses: it runs in a thread with a
stack of its own. Classes and functions travel by name, or whole where the ranks do not have them under it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import cloudpickle
import numpy as np

from synkhronos._engine import (
    FromFunctionOp,
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
from synkhronos._graphs.definitions import Definitions, function_of
from synkhronos._graphs.random import has_common_stream
from synkhronos._graphs.shared import VariableTable, get_array, shared_variables_of
from synkhronos._graphs.stack import with_deep_stack

__all__ = ["Bundle", "dump", "load"]


class Bundle(NamedTuple):
    """Pickled functions: the pickle, and the arrays that it refers to, each as flat bytes."""

    pickled: bytes
    buffers: list[np.ndarray]
    new: dict[int, Any]  # the shared variables that the ranks do not have yet, by the keys that they will have


class _Pickler(cloudpickle.Pickler):
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
        how = reduced(obj, self._frames)
        if how is not NotImplemented or self._definitions is None or self._definitions.reach(obj):
            return how
        if isinstance(obj, FromFunctionOp):
            shapes = obj._FromFunctionOp__infer_shape
            return FromFunctionOp, (function_of(obj), obj.itypes, obj.otypes, shapes)
        return super().reducer_override(obj)


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
    file, buffers = io.BytesIO(), []

    def pickle_both() -> None:
        def keep(buffer: pickle.PickleBuffer) -> None:
            buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

        _Pickler(file, {}, keep, definitions).dump(list(sys.path))
        _Pickler(file, {}, keep, definitions).dump(described)
        _Pickler(file, ids, keep, definitions).dump(parts)

    with_deep_stack(pickle_both)
    return Bundle(file.getvalue(), buffers, new)


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
    sys.path += [folder for folder in path if folder not in sys.path]  # for modules that workers import now
    for key, (cls, type_, name, is_random, value) in _Unpickler(file, variables, buffers).load().items():
        if is_random and stream:
            value = other_stream(value, stream)
        variables.put(key, cls(name=name, type=type_, value=value, strict=None))
    parts = with_deep_stack(_Unpickler(file, variables, buffers).load)
    functions = {key: unpack(part) for key, part in parts.items()}
    for function in functions.values():
        precompile(function)
    return functions
