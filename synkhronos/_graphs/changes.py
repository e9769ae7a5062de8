"""Which shared variables a program has given new values since the other ranks were told.

All ways in which programs set a variable go through the properties of a container over its storage: `set_value`, those
of its own container; ``f[var] = value``, those of a container of the function. What ranks compute or receive does not.
An array that is changed in place (``get_value(borrow=True)``) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from synkhronos._engine import Container

__all__ = ["changed", "note_told", "watch"]

#: Containers of the variables that other ranks have, by the ids of their storage, and those of them that have been set.
_watched: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
changed: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(container: Any) -> None:
    """Note from now on whether the variable with this container is set; then it enters `changed`."""
    _watched[id(container.storage)] = container


def note_told(variables: Iterable[Any]) -> None:
    """The other ranks have the values of these variables."""
    changed.difference_update([var.container for var in variables])


_set: Any = Container.value.fset


def _set_and_note(self: Any, value: Any) -> None:
    _set(self, value)
    container = _watched.get(id(self.storage))
    if container is not None:
        changed.add(container)


def _set_data(self: Any, value: Any) -> None:
    # through the property data of a function's container, functions of some linkers store their updates
    (_set_and_note if _watched.get(id(self.storage)) is self else _set)(self, value)


Container.value = property(Container.value.fget, _set_and_note)
Container.data = property(Container.data.fget, _set_data)
