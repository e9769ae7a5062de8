"""Which shared variables a program has given new values, by `set_value`, since the other ranks were told.

All ways in which programs set a variable go through the property ``value`` of its container; what ranks compute or
receive does not. An array that is changed in place (``get_value(borrow=True)``) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from theano.gof.link import Container

__all__ = ["changed", "note_told", "watch_values"]

#: Containers of the variables that exact functions use, and those of them that have been set.
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
changed: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_values(variables: Iterable[Any]) -> None:
    """Note from now on which of these are set; they enter `changed`."""
    _watched.update(var.container for var in variables)


def note_told(variables: Iterable[Any]) -> None:
    """The other ranks have the values of these variables."""
    changed.difference_update([var.container for var in variables])


_set: Any = Container.value.fset


def _set_and_note(self: Any, value: Any) -> None:
    _set(self, value)
    if self in _watched:
        changed.add(self)


Container.value = property(Container.value.fget, _set_and_note)
