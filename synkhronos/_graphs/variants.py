"""Which functions are compiled from what a user asked for."""

from __future__ import annotations

from typing import NamedTuple

from synkhronos._backends import TAKES_SUBSETS

__all__ = ["PLAIN", "Variant"]


class Variant(NamedTuple):
    """Which of the functions compiled from one graph."""

    accumulate: bool = False  # return the new values of updated variables instead of storing them
    rows: str = "all"  # of the sliceable shared variables: "all", "range" (start, stop), or "index" (a vector)
    device: bool = False  # leave the outputs on the GPU
    outputs: tuple[int, ...] | None = None  # these only

    def told(self, subset: tuple[int, ...] | None) -> tuple[Variant, tuple[int, ...] | None]:
        """The variant that computes some outputs, and of these which a call of it must ask for."""
        return (self, subset) if TAKES_SUBSETS else (self._replace(outputs=subset), None)


#: The function as the user asked for it.
PLAIN = Variant()
