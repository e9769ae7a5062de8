"""Shared variables: access to their arrays, keys that identify them on all ranks, and tracking of changed values.

A program can set a variable on the controller alone: by `set_value` or another setter of its container, by
``f[var] = value``, or by writing to the container's storage. A plain function of the backend can also update it, even
in place. `SentValue` detects all of these. Functions and collectives instead change a variable on all ranks; `follow`
records these values.

Not detected are changes of an array in place (``get_value(borrow=True)``), and direct calls of a function's virtual
machine (``f.fn()``, ``f.vm()``) that update in place.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pickle
import re
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
    is_random_state,
    label_prints,
    print_profiles,
    to_device,
    to_host,
    updated_storage,
    write,
)
from synkhronos._native import native
from synkhronos._native.native import SentValue, first_set  # noqa: F401 - for other folders
from synkhronos._utils.interrupts import FinalizerQueue

#: Size in bytes from which on a value exists once on a node.
LEAST_BYTES = native.SMALLEST_BLOCK

_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def is_shared_variable(obj: Any) -> bool:
    """Return whether ``obj`` is a shared variable."""
    return isinstance(obj, SharedVariable)


def is_host_variable(obj: Any) -> bool:
    """Return whether ``obj`` is a variable whose values are NumPy arrays."""
    return isinstance(getattr(obj, "type", None), DenseType)


def is_tensor_variable(obj: Any) -> bool:
    """Return whether ``obj`` is a variable whose values are dense arrays, in host memory or on a GPU."""
    return is_host_variable(obj) or is_device_type(getattr(obj, "type", None))


def is_large(var: Any, value: Any) -> bool:
    """Return whether a value of a shared variable is an array that exists once on a node."""
    is_array = isinstance(value, np.ndarray) and is_host_variable(var) and not is_random_state(var)
    return is_array and value.nbytes >= LEAST_BYTES


def shared_variables_of(function: Any) -> list[Any]:
    """Return the shared variables that a compiled function reads or updates."""
    return [spec.variable for spec in function.maker.inputs if spec.implicit or spec.shared]


def updated_variables(function: Any) -> list[Any]:
    """Return the shared variables that a compiled function updates, states of random streams included."""
    return [spec.variable for spec in function.maker.inputs if spec.shared and spec.update is not None]


def uses(function: Any, var: Any) -> bool:
    """Return whether a compiled function reads or updates a shared variable, or another variable with its container."""
    return any(other.container is var.container for other in shared_variables_of(function))


def describe(function: Any) -> str:
    """Describe a compiled function, for messages."""
    inputs = ", ".join(str(spec.variable) for spec in function.maker.inputs if not (spec.implicit or spec.shared))
    name = function.name or ""
    if name.startswith(os.path.join(_PACKAGE, "")):  # the backend's default: the line that compiles it
        name = ""
    return f"the function of {name} ({inputs})" if re.search(":[0-9]+$", name) else f"the function {name}({inputs})"


def get_array(var: Any) -> Any:
    """Return a shared variable's NumPy or device array, not a copy: writing to it changes the variable."""
    return var.container.storage[0]


def host_array(var: Any, any_order: bool = False, value: Any = None) -> np.ndarray:
    """Return the value of a shared variable as a C-contiguous, writable NumPy array.

    The variable's own array is returned if possible, otherwise a copy. A value that is not a dense array (a
    `RandomState`, a sparse matrix, any object) is pickled.

    Parameters
    ----------
    var : shared variable
    any_order : bool
        Also accept an array that is contiguous in another order than C's (see `memory_order`), instead of copying it.
    value : object, optional
        A value to convert in place of the variable's present one.

    Returns
    -------
    ndarray
        The value. For a pickled value, a read-only vector of uint8.
    """
    value = get_array(var) if value is None else value
    if not is_tensor_variable(var):
        return np.frombuffer(pickle.dumps(value), np.uint8)
    value = to_host(value)
    is_contiguous = value.flags.c_contiguous or (any_order and memory_order(value) != ())
    return value if is_contiguous and value.flags.writeable else np.array(value, order="C")


def memory_order(array: np.ndarray) -> tuple[int, ...]:
    """Return the axes, slowest first, of an array that is contiguous in another order than C's; else ``()``."""
    if array.flags.c_contiguous:
        return ()
    order = tuple(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
    return order if array.transpose(order).flags.c_contiguous else ()


def set_array(var: Any, value: Any) -> None:
    """Set a variable to an array, which becomes the variable's own. It is copied only to move it to a device."""
    if is_device_type(var.type):
        value = to_device(value)
    var.container.storage[0] = var.type.filter(value, strict=True)
    follow(var.container)


def adopt_array(var: Any, value: np.ndarray) -> None:
    """Set a variable to a `host_array`, which becomes the variable's own unless it was pickled."""
    if is_tensor_variable(var):
        set_array(var, value)
    else:
        var.container.storage[0] = pickle.loads(value.tobytes())
        follow(var.container)


def copy_array(var: Any, value: np.ndarray) -> None:
    """Set a variable to a copy of a `host_array`; the variable's existing array is overwritten if the shapes match."""
    old = get_array(var)
    if not is_tensor_variable(var):
        adopt_array(var, value)
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
    """Prepare the backend in a process that was just forked; return a function to call before the process exits."""
    label_prints(rank)

    def finish() -> None:
        if profiles:
            print_profiles()

    return finish


class VariableTable:
    """Shared variables by key: a key identifies the replicas of one variable on all ranks.

    Variables with the same container have one key: they are one variable on the other ranks.
    ``theano.clone(var, share_inputs=False)`` makes such an alias, which Lasagne's batch normalization uses.

    The controller's table holds weak references. When the program has dropped the last variable with a container, the
    key is added to ``ended``. Until then, values that the program sets are detected (`SentValue`). A worker's table
    keeps its variables until `drop` removes them.

    Parameters
    ----------
    ended : FinalizerQueue, optional
        Queue for the keys of variables that the program has dropped. Only the controller's table has one.

    Attributes
    ----------
    n_added : int
        Number of variables that were ever added.
    """

    def __init__(self, ended: FinalizerQueue[int] | None = None) -> None:
        self._by_key: Any = {} if ended is None else weakref.WeakValueDictionary()
        self._containers: Any = weakref.WeakValueDictionary()
        self._key_of: Any = weakref.WeakKeyDictionary()
        self._like: dict[int, tuple[Any, str | None]] = {}
        self._ended = ended
        self._counter = itertools.count()
        self.n_added = 0

    def new_key(self) -> int:
        """Return a key that was never used before."""
        return next(self._counter)

    def put(self, key: int, var: Any) -> None:
        """Add a variable under a key."""
        self.n_added += 1
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
        """Return the key of a variable, or ``None`` if it is not in the table."""
        return self._key_of.get(var.container)

    def keys_of(self, variables: Iterable[Any]) -> tuple[int, ...]:
        """Return the keys of variables; raise `KeyError` if one is not in the table."""
        return tuple(self._key_of[var.container] for var in variables)

    def __getitem__(self, key: int) -> Any:
        var = self._by_key.get(key)
        if var is None:  # the program has dropped the variable that was added, but not an alias with its container
            (cls, name), container = self._like[key], self._containers[key]
            var = cls(name=name, type=container.type, value=None, strict=None, container=container)
            self._by_key[key] = var
        return var

    def items(self) -> dict[int, Any]:
        containers = list(self._containers.items())  # kept alive: the garbage collector may end others meanwhile
        return {key: self[key] for key, _ in containers}


# -- tracking of the values that other ranks have


#: See `SentValue.stale`.
IN_WORK = object()


_by_container: weakref.WeakKeyDictionary[Any, SentValue] = weakref.WeakKeyDictionary()
_by_storage: Any = weakref.WeakValueDictionary()  # by id; functions have their own containers with the same storage
_references: dict[int, Any] = _by_storage.data  # a lookup in the weak dictionary itself takes 0.3 µs


def sync_of(container: Any) -> SentValue:
    """Return the record of the variable with this container; create it if there is none."""
    sync = _by_container.get(container)
    if sync is None:
        sync = _by_container[container] = _by_storage[id(container.storage)] = SentValue(container.storage)
    return sync


def syncs_of(function: Any) -> tuple[SentValue, ...]:
    """Return the records of the variables that a compiled function updates, as far as they exist."""
    found = [_by_storage.get(id(storage)) for storage in updated_storage(function)]
    return tuple([sync for sync in found if sync is not None])


def watch(container: Any) -> None:
    """Record that the other ranks have the present value of the variable with this container."""
    native.note_values((sync_of(container),), False)


def note_sent(variables: Iterable[Any]) -> None:
    """Record that the other ranks have the present values of these variables."""
    for var in variables:
        watch(var.container)


def value_for_others(var: Any) -> Any:
    """Return the value that the other ranks should have: the controller's, unless only the program has set that."""
    stale = sync_of(var.container).stale
    return get_array(var) if stale is None or stale is IN_WORK else stale


def follow(container: Any) -> None:
    """Record that all ranks have the variable's present value.

    Do nothing if the program has set the variable on the controller, and no call has sent that value yet.
    """
    sync = _by_storage.get(id(container.storage))
    if sync is not None:
        native.follow_values((sync,))


def _keep_value(storage: list[Any]) -> None:
    """Copy a value that the other ranks view, or have still to get, before the program may change it in place."""
    sync, value = _by_storage.get(id(storage)), storage[0]
    if sync is None or value is None:
        return
    if sync.viewed is value:
        storage[0] = copy.deepcopy(value)
    elif sync.stale is value:
        sync.stale = copy.deepcopy(value)


def _note_set(storage: list[Any]) -> None:
    sync = _by_storage.get(id(storage))
    if sync is not None:
        sync.sent = None


_set: Any = Container.value.fset
call_on_rank: Any = Function.__call__  # for calls that all ranks make: their updates are not the program's


def _set_and_note(self: Any, value: Any) -> None:
    _set(self, value)
    _note_set(self.storage)


def _set_data(self: Any, value: Any) -> None:
    _set(self, value)
    if self in _by_container:  # skips containers of functions: some linkers store updates through their property `data`
        _note_set(self.storage)


@functools.wraps(call_on_rank)
def _call_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
    updated = updated_storage(self)
    if not updated:
        return call_on_rank(self, *args, **kwargs)
    watched = [storage for storage in updated if id(storage) in _references]
    for storage in watched:
        _keep_value(storage)
    try:
        return call_on_rank(self, *args, **kwargs)
    finally:
        for storage in watched:
            _note_set(storage)


Container.value = property(Container.value.fget, _set_and_note)
Container.data = property(Container.data.fget, _set_data)
Function.__call__ = _call_and_note
