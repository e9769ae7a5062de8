"""Compiled functions as bytes, so that every rank gets a replica.

What travels of a function is its maker (the optimised graph; nothing is optimised again) and which storage cell feeds
which input. A shared variable lives in three objects: the variable, its container, and the container's storage list;
each is replaced by a persistent id, so that functions that arrive one after the other share what they shared in the
master. A variable new to the ranks travels as type, name and value; values go out of band, beside the pickle,
uncopied. Graphs are deep, and pickling recurses: it runs in a thread with a stack of its own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._graphs.gpu import is_device_array, to_host
from synkhronos._graphs.random import other_stream
from synkhronos._graphs.shared import VariableTable, find_compiled, get_array, is_random_state, shared_variables_of
from synkhronos._graphs.stack import with_deep_stack

__all__ = ["Bundle", "dump", "load"]


class Bundle(NamedTuple):
    """Pickled functions: the pickle, and the arrays that it refers to, each as flat bytes."""

    pickled: bytes
    buffers: list[np.ndarray]
    new: dict[int, Any]  # the shared variables that the ranks do not have yet, by the keys that they will have


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, ids: dict[int, tuple[str, int]], buffer_callback: Callable[[Any], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._ids = ids

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        return self._ids.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, variables: VariableTable, buffers: Iterator[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._variables = variables

    def persistent_load(self, pid: Any) -> Any:
        kind, key = pid
        var = self._variables[key]
        return {"variable": var, "container": var.container, "storage": var.container.storage}[kind]


def dump(functions: dict[int, Any], variables: VariableTable, everything: bool = False) -> Bundle:
    """Pickle compiled functions, by key; shared variables not yet in ``variables`` travel along.

    With ``everything`` all variables travel, for a rank that has none. ``variables`` is left as it is: once the ranks
    have loaded the bundle, add what is `Bundle.new`.
    """
    used = [var for function in functions.values() for var in shared_variables_of(function)]
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
        key: (type(var), var.type, var.name, is_random_state(var), _portable(get_array(var)))
        for key, var in (known if everything else new).items()
    }
    parts = {key: (function.maker, _cells(function), function.trust_input) for key, function in functions.items()}
    file, buffers = io.BytesIO(), []

    def pickle_both() -> None:
        def keep(buffer: pickle.PickleBuffer) -> None:
            buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

        _Pickler(file, {}, keep).dump(described)
        _Pickler(file, ids, keep).dump(parts)

    with_deep_stack(pickle_both)
    return Bundle(file.getvalue(), buffers, new)


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
