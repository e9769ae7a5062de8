"""Noting which objects have ended, in a way that no signal's handler can tear apart.

Objects may end at any moment, and at any moment a handler may raise. A finalizer in Python that this hits is printed
and lost, and with it the memory that it was to give back. So nothing of Python runs when an object ends: C code puts a
weak reference, which bears a key, into a queue, and whoever is to act on it looks there when it has time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

__all__ = ["Endings"]

_Key = TypeVar("_Key")


class _Ending(weakref.ref):
    __slots__ = ("key",)
    key: Any


class Endings(Generic[_Key]):
    """The keys of objects that have ended.

    Attributes
    ----------
    waiting : deque
        Empty, unless some have ended whose keys are to be taken.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Ending] = {}
        self.waiting: deque[_Ending] = deque()

    def watch(self, thing: Any, key: _Key) -> None:
        """Note the key when the thing ends."""
        ending = _Ending(thing, self.waiting.append)
        ending.key = key
        self._watched[id(ending)] = ending

    def take(self) -> Iterator[_Key]:
        """What has ended since the last time; a key comes again if whoever acts on it is interrupted."""
        while self.waiting:
            ending = self.waiting[0]
            yield ending.key
            self._watched.pop(id(ending), None)
            self.waiting.popleft()
