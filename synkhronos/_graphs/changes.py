"""Track which values of shared variables the other ranks have.

A program changes the controller's value of a variable by `set_value` or another setter of its container, by
``f[var] = value``, by writing to the container's storage, or by a plain function of the engine that updates it, also in
place. The ranks change it together, by functions and collectives: `follow` records these values.
An array that is changed in place (``get_value(borrow=True)``) and the call of a function's machine (``f.fn()``,
``f.vm()``) that updates in place are not detected.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from synkhronos._backends import Container, Function, updated_storage

__all__ = ["Sync", "call_on_rank", "follow", "note_sent", "sync_of", "syncs_of", "watch"]


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
