"""What it takes to call a compiled function without its own `__call__`."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

__all__ = ["Running"]


class Running(NamedTuple):
    """What calls a compiled function without its own `__call__`."""

    function: Callable[[], Any]  # computes from the cells of the inputs; returns the outputs, then maybe others
    inputs: list[tuple[Any, list[Any]]]  # type and cell of each
    n_outputs: int
    emptied: list[list[Any]]  # the cells that are to be emptied afterwards
    explain: Callable[[], None]  # raises what is being raised, with the engine's own words
