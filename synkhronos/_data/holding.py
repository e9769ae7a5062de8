"""The shared memory that `Data` hold: one of them, or several in which it was unpickled."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from synkhronos._memory import Segment
from synkhronos._session import current

__all__ = ["Holding"]


#: By key: the memory of this process, and what it inherited.
_known: Any = weakref.WeakValueDictionary()


class Holding:
    """Memory that is given back when the last `Data` lets go of it.

    Parameters
    ----------
    key : str
    content : uint8 array
        All of it.
    is_file : bool
        Whether it is a file of the user's.
    """

    def __init__(self, key: str, content: np.ndarray, is_file: bool) -> None:
        self.key = key
        self.bytes = content
        self.is_file = is_file
        _known[key] = self

    @classmethod
    def allocate(cls, n_bytes: int) -> Holding:
        """New memory, filled with zeros."""
        return cls.share(current("Data").allocate(n_bytes), n_bytes, is_file=False)

    @classmethod
    def share(cls, segment: Segment, n_bytes: int, is_file: bool) -> Holding:
        """Memory that is mapped already, made known to all ranks."""
        session = current("Data")
        made = cls(segment.ref.key, segment.bytes[:n_bytes], is_file)
        session.share(segment, made.bytes)
        return made

    @classmethod
    def find(cls, key: str) -> Holding | None:
        """The memory of this key, if this process has it."""
        found: Holding | None = _known.get(key)
        return found
