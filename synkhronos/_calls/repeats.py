"""Calls that differ from the last one in nothing but the contents of arrays: what these ask of the ranks is known.

What is staged is overwritten by whatever any thread stages next. So a call is remembered only if all that it reads
lies in `Data`, or is staged anew each time: no index lists.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._data import Data
from synkhronos._memory import ArrayRef
from synkhronos._rank import Call
from synkhronos._session import Session

__all__ = ["LastCall", "signature_of"]


def signature_of(values: Sequence[Any], batch: Any, *options: Any) -> tuple[Any, ...] | None:
    """All that a call depends on beside the contents of its inputs; ``None`` if there is more to look into.

    Parameters
    ----------
    values : sequence
        The inputs.
    batch : Any
        As given by the user.
    *options : hashable
        What else was asked for.
    """
    if isinstance(batch, slice):
        try:  # numbers of their own: a bound may be an array of 0 dimensions, which changes in place
            batch = tuple([bound if bound is None else operator.index(bound) for bound in _bounds(batch)])
        except TypeError:
            return None
    elif type(batch) not in (type(None), int):
        return None
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Data):
            parts += value.ref, value.minibatch
        elif type(value) is np.ndarray and batch is None:
            parts += value.shape, value.dtype
        else:
            return None
    return (*parts, batch, *options)


def _bounds(batch: slice) -> tuple[Any, Any, Any]:
    return batch.start, batch.stop, batch.step


class LastCall:
    """The last call of a function, to be given again."""

    def __init__(self) -> None:
        self._signature: tuple[Any, ...] | None = None
        self._call: Call | None = None

    def keep(self, signature: tuple[Any, ...] | None, call: Call) -> None:
        """Remember a call, if it has a signature and reads no index list."""
        lists = any(isinstance(source.rows, ArrayRef) for source in call.inputs) or bool(call.rows)
        self._signature, self._call = None if lists else signature, call

    def find(self, session: Session, signature: tuple[Any, ...] | None, values: Sequence[Any]) -> Call | None:
        """The last call if it had this signature, with NumPy inputs staged anew, and in the same places."""
        if signature is None or self._call is None or signature != self._signature:
            return None
        staged = [
            (source.array, value) for value, source in zip(values, self._call.inputs) if not isinstance(value, Data)
        ]
        return self._call if not staged or session.restage(*zip(*staged)) else None
