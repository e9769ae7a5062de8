"""What users hand over: arrays in shared memory, and values cast as Theano would cast them."""

from __future__ import annotations

from synkhronos._data.array import Data
from synkhronos._data.conversion import condition
from synkhronos._data.making import data

__all__ = [
    "Data",
    "condition",
    "data",
]
