"""Cache of prepared values, each valid for one key."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

__all__ = ["KeyedCache"]

Value = TypeVar("Value")


class KeyedCache(Generic[Value]):
    """Cache that holds, for each slot, the value for the latest key.

    A value is returned only for a key that equals the one it was computed for. The key must hold all that the value
    depends on; a version number stands for state that can change. No event has to invalidate an entry, then.

    Keys and values must not be changed.

    Parameters
    ----------
    most_slots : int, optional
        Limit of the number of slots. The oldest one is dropped when there would be more.
    """

    __slots__ = ("_entries", "_most_slots")

    def __init__(self, most_slots: int | None = None) -> None:
        self._entries: dict[Hashable, tuple[Any, Value]] = {}
        self._most_slots = most_slots

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, slot: Hashable, key: Any) -> Value | None:
        """Return the value of a slot; ``None`` if there is none for this key."""
        entry = self._entries.get(slot)
        if entry is not None and (entry[0] is key or entry[0] == key):
            return entry[1]
        return None

    def put(self, slot: Hashable, key: Any, value: Value) -> Value:
        """Store a slot's value for a key, in place of the one for the previous key; return the value."""
        if len(self._entries) == self._most_slots and slot not in self._entries:
            del self._entries[next(iter(self._entries))]
        self._entries[slot] = key, value
        return value

    def clear(self) -> None:
        """Drop all entries, so that they keep no memory alive."""
        self._entries.clear()
