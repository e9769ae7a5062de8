"""Shared variables: telling them apart, reading and writing their device arrays, naming them across ranks.

Track which values of shared variables the other ranks have.

A program changes the controller's value of a variable by `set_value` or another setter of its container, by
``f[var] = value``, by writing to the container's storage, or by a plain function of the engine that updates it, also in
place. The ranks change it together, by functions and collectives: `follow` records these values.
An array that is changed in place (``get_value(borrow=True)``) and the call of a function's machine (``f.fn()``,
``f.vm()``) that updates in place are not detected.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import weakref
from collections.abc import Iterable
from typing import Any, Callable

import numpy as np

from synkhronos._backends import (
    Container,
    DenseType,
    Function,
    SharedVariable,
    is_device_type,
    label_prints,
    print_profiles,
    to_device,
    to_host,
    updated_storage,
    write,
)
from synkhronos._utils.interrupts import Endings

__all__ = [
    "Sync",
    "VariableTable",
    "call_on_rank",
    "copy_array",
    "describe",
    "follow",
    "get_array",
    "host_array",
    "is_host_variable",
    "is_shared_variable",
    "is_tensor_variable",
    "memory_order",
    "note_sent",
    "set_array",
    "shared_variables_of",
    "start_worker",
    "sync_of",
    "syncs_of",
    "updated_variables",
    "uses",
    "watch",
]


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def is_shared_variable(obj: Any) -> bool:
    """Whether ``obj`` is a shared variable."""
    return isinstance(obj, SharedVariable)


def is_host_variable(obj: Any) -> bool:
    """Whether ``obj`` is a variable whose values are NumPy arrays."""
    return isinstance(getattr(obj, "type", None), DenseType)


def is_tensor_variable(obj: Any) -> bool:
    """Whether ``obj`` is a variable whose values are dense arrays, in host memory or on a GPU."""
    return is_host_variable(obj) or is_device_type(getattr(obj, "type", None))


def shared_variables_of(function: Any) -> list[Any]:
    """The shared variables that a compiled function reads or updates."""
    return [spec.variable for spec in function.maker.inputs if spec.implicit or spec.shared]


def updated_variables(function: Any) -> list[Any]:
    """The shared variables that a compiled function gives new values, states of random streams among them."""
    return [spec.variable for spec in function.maker.inputs if spec.shared and spec.update is not None]


def uses(function: Any, var: Any) -> bool:
    """Whether a compiled function reads or updates a shared variable, or another one over its container."""
    return any(other.container is var.container for other in shared_variables_of(function))


def describe(function: Any) -> str:
    """A compiled function, for messages."""
    inputs = ", ".join(str(spec.variable) for spec in function.maker.inputs if not (spec.implicit or spec.shared))
    named_by_engine = (function.name or "").startswith(_PACKAGE)  # by the line that compiles it
    return f"the function {'' if named_by_engine else function.name or ''}({inputs})"


def get_array(var: Any) -> Any:
    """The value of a shared variable (NumPy or device array), without a copy: writing to it writes to the variable."""
    return var.container.storage[0]


def host_array(var: Any, any_order: bool = False) -> np.ndarray:
    """The value of a shared variable as a C-contiguous, writable NumPy array: its own where it is one, else a copy.

    With ``any_order`` it may be contiguous in another order, its `memory_order`. What is no dense array (a
    `RandomState`, a sparse matrix, any object) is pickled.
    """
    if not is_tensor_variable(var):
        return np.frombuffer(pickle.dumps(get_array(var)), np.uint8)
    value = to_host(get_array(var))
    is_contiguous = value.flags.c_contiguous or (any_order and memory_order(value) != ())
    return value if is_contiguous and value.flags.writeable else np.array(value, order="C")


def memory_order(array: np.ndarray) -> tuple[int, ...]:
    """The axes in the order of memory if the array is contiguous in another order than C's, else ``()``."""
    if array.flags.c_contiguous:
        return ()
    order = tuple(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
    return order if array.transpose(order).flags.c_contiguous else ()


def set_array(var: Any, value: Any) -> None:
    """Make ``value``, which nobody else may own, the variable's value, without a copy where it is on its device."""
    if is_device_type(var.type):
        value = to_device(value)
    var.container.storage[0] = var.type.filter(value, strict=True)
    follow(var.container)


def copy_array(var: Any, value: np.ndarray) -> None:
    """Copy a `host_array` into a shared variable, into its existing array where that fits."""
    old = get_array(var)
    if not is_tensor_variable(var):
        var.container.storage[0] = pickle.loads(value.tobytes())
        follow(var.container)
    elif is_device_type(var.type):
        if old.shape == value.shape and old.flags["C_CONTIGUOUS"]:
            write(old, value)
        else:
            set_array(var, value)
    elif old.shape == value.shape and old.flags.writeable:
        np.copyto(old, value)
    else:
        set_array(var, np.array(value, order="C"))


def start_worker(profiles: bool, rank: int) -> Callable[[], None]:
    """Prepare the engine in a process that was just forked; returns what to call before the process exits."""
    label_prints(rank)

    def finish() -> None:
        if profiles:
            print_profiles()

    return finish


class VariableTable:
    """Shared variables by key: the same key names the replicas of one variable on every rank.

    Variables over one container (``theano.clone(var, share_inputs=False)`` makes such an alias, and Lasagne's batch
    normalisation uses it) have one key: they are one variable on the other ranks.

    The master's table holds containers weakly: when the program has dropped the last variable over one, its key is
    noted in ``ended``; until then it is noted when the program gives it a value. A worker's table holds its variables
    until told to `drop` them.
    """

    def __init__(self, ended: Endings[int] | None = None) -> None:
        self._by_key: Any = {} if ended is None else weakref.WeakValueDictionary()
        self._containers: Any = weakref.WeakValueDictionary()
        self._key_of: Any = weakref.WeakKeyDictionary()
        self._like: dict[int, tuple[Any, str | None]] = {}
        self._ended = ended
        self._counter = itertools.count()

    def new_key(self) -> int:
        """A key that was never given before."""
        return next(self._counter)

    def put(self, key: int, var: Any) -> None:
        """Take in a variable."""
        self._by_key[key] = var
        self._containers[key] = var.container
        self._like[key] = type(var), var.name
        self._key_of[var.container] = key
        if self._ended is not None:
            self._ended.watch(var.container, key)
            watch(var.container)

    def drop(self, key: int) -> None:
        var = self._by_key.pop(key, None)
        self._like.pop(key, None)
        self._containers.pop(key, None)
        if var is not None:
            self._key_of.pop(var.container, None)

    def key(self, var: Any) -> int | None:
        """The key of a variable, ``None`` if it is not in the table."""
        return self._key_of.get(var.container)

    def keys_of(self, variables: Iterable[Any]) -> tuple[int, ...]:
        """The keys of variables; `KeyError` if one is not in the table."""
        return tuple(self._key_of[var.container] for var in variables)

    def __getitem__(self, key: int) -> Any:
        var = self._by_key.get(key)
        if var is None:  # the one that was taken in is gone, an alias is not
            (cls, name), container = self._like[key], self._containers[key]
            var = cls(name=name, type=container.type, value=None, strict=None, container=container)
            self._by_key[key] = var
        return var

    def items(self) -> dict[int, Any]:
        return {key: self[key] for key in list(self._containers)}


class Sync:
    """What the other ranks have of one shared variable.

    Attributes
    ----------
    storage : list
        That of its container: one item, the controller's value.
    sent : object
        The value that the other ranks have; ``None`` if the program has changed it since. The program has set the
        variable unless this is the object in ``storage``.
    """

    __slots__ = ("__weakref__", "sent", "storage")

    def __init__(self, storage: list[Any]) -> None:
        self.storage = storage
        self.sent: Any = None


_by_container: weakref.WeakKeyDictionary[Any, Sync] = weakref.WeakKeyDictionary()
_by_storage: Any = weakref.WeakValueDictionary()  # functions have other containers
_references: dict[int, Any] = _by_storage.data  # to look in the weak dictionary itself takes 0.3 µs


def sync_of(container: Any) -> Sync:
    """The record of the variable with this container; it is made if there is none."""
    sync = _by_container.get(container)
    if sync is None:
        sync = _by_container[container] = _by_storage[id(container.storage)] = Sync(container.storage)
    return sync


def syncs_of(function: Any) -> list[Sync]:
    """The records of the variables that a compiled function updates, as far as there are any."""
    found = [_by_storage.get(id(storage)) for storage in updated_storage(function)]
    return [sync for sync in found if sync is not None]


def watch(container: Any) -> None:
    """Record that the other ranks have the value of the variable with this container."""
    sync_of(container).sent = container.storage[0]


def note_sent(variables: Iterable[Any]) -> None:
    """Record that the other ranks have the values of these variables."""
    for var in variables:
        watch(var.container)


def follow(container: Any) -> None:
    """Record that a command of all ranks has set a variable, unless the program has set it before."""
    sync = _by_storage.get(id(container.storage))
    if sync is not None and sync.sent is not None:
        sync.sent = sync.storage[0]


def _note_set(storage: list[Any]) -> None:
    sync = _by_storage.get(id(storage))
    if sync is not None:
        sync.sent = None


_set: Any = Container.value.fset
call_on_rank: Any = Function.__call__  # for calls that all ranks make


def _set_and_note(self: Any, value: Any) -> None:
    _set(self, value)
    _note_set(self.storage)


def _set_data(self: Any, value: Any) -> None:
    _set(self, value)
    if self in _by_container:  # not a function's container: some linkers store updates by its property data
        _note_set(self.storage)


@functools.wraps(call_on_rank)
def _call_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call_on_rank(self, *args, **kwargs)
    finally:
        for storage in updated_storage(self):
            if id(storage) in _references:
                _note_set(storage)


Container.value = property(Container.value.fget, _set_and_note)
Container.data = property(Container.data.fget, _set_data)
Function.__call__ = _call_and_note
