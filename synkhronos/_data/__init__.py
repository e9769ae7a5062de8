"""What users hand over: arrays in shared memory, and values cast as Theano would cast them."""

from __future__ import annotations

from synkhronos._data.array import Data, data
from synkhronos._data.conversion import condition

__all__ = [
    "Data",
    "condition",
    "data",
]
