"""Numbers that a rank knows of itself, in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._backends import Apply, Op, T
from synkhronos._inside.standing import current

__all__ = ["Known"]


class Known(Op):
    """A number that a rank knows of itself, and that another rank may know otherwise.

    Parameters
    ----------
    what : str
        ``"rank"``, ``"n_ranks"`` (int64), or ``"whole"`` (float64): how many times its own weight all ranks have
        together, 0 on a rank that is left out. A single rank has 0, 1 and 1.
    """

    __props__: tuple[str, ...] = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def make_node(self) -> Any:
        """Takes nothing."""
        return Apply(self, [], [T.dscalar() if self.what == "whole" else T.lscalar()])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Ask where the rank stands."""
        standing = current()
        if self.what == "whole":
            own = 1 if standing is None else standing.own
            total = 1 if standing is None else sum(standing.weights)
            output_storage[0][0] = np.asarray(total / own if own else 0.0)
        elif standing is None:
            output_storage[0][0] = np.asarray(int(self.what == "n_ranks"))
        else:
            output_storage[0][0] = np.asarray(getattr(standing, self.what))

    def do_constant_folding(self, *_: Any) -> bool:
        """Never: it is another number on other ranks."""
        return False

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """No dimensions."""
        return [()]
