"""Shared variables: telling them apart, reading and writing their device arrays, naming them across ranks."""

from __future__ import annotations

import itertools
import os
import pickle
import weakref
from collections.abc import Iterable
from typing import Any, Callable

import numpy as np

from synkhronos._backends import (
    DenseType,
    SharedVariable,
    is_device_type,
    label_prints,
    print_profiles,
    to_device,
    to_host,
    write,
)
from synkhronos._graphs.changes import follow, watch
from synkhronos._utils.interrupts import Endings

__all__ = [
    "VariableTable",
    "copy_array",
    "describe",
    "get_array",
    "host_array",
    "is_host_variable",
    "is_shared_variable",
    "is_tensor_variable",
    "memory_order",
    "set_array",
    "shared_variables_of",
    "start_worker",
    "updated_variables",
    "uses",
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
