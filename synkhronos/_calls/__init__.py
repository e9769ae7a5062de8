"""Building functions, and calling them on all ranks."""

from __future__ import annotations

from synkhronos._calls.building import function
from synkhronos._calls.functions import Function
from synkhronos._calls.parallel import parallelize

__all__ = [
    "Function",
    "function",
    "parallelize",
]
