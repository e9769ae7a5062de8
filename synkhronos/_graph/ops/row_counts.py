"""Numbers that a rank knows of itself, in a graph.

How many rows a call has, and which of them are this rank's: counted in the graph, and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._backends import Apply, Op, T
from synkhronos._graph.ops.rank_context import current
from synkhronos._utils.rows import Rows, shares

__all__ = ["Counted", "Known"]


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


class Counted(Known):
    """The number of rows of a call, the first one of this rank, and how many are here: three int64 scalars.

    Inputs: those three as the call gives them, where ``given`` says of what; then lengths, all of which must be the
    number of rows. Without ``given`` rows are divided here. If there are fewer of them than ranks, each rank has them
    all, and only one counts in collectives.

    Parameters
    ----------
    names : tuple of str
        What the lengths are of.
    given : str
        What the call's own rows are of; empty if it gives none.
    """

    __props__ = ("names", "given")

    def __init__(self, names: tuple[str, ...], given: str) -> None:
        self.names, self.given = names, given

    def make_node(self, *numbers: Any) -> Any:
        """Apply it to the three numbers, if they are given, and to the lengths."""
        return Apply(self, list(map(T.as_tensor_variable, numbers)), [T.lscalar() for _ in range(3)])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Refuse lengths that differ, on all ranks alike."""
        numbers = list(map(int, inputs))
        names = [self.given, *self.names] if self.given else self.names
        lengths = [numbers[0], *numbers[3:]] if self.given else numbers
        if len(set(lengths)) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in zip(names, lengths))
            raise ValueError(f"what is sharded must have one number of rows; got {found}")
        rows, first, here = numbers[:3] if self.given else _divided(lengths[0])
        for storage, number in zip(output_storage, (rows, first, here)):
            storage[0] = np.asarray(number)

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """No dimensions."""
        return [(), (), ()]


def _divided(n_rows: int) -> tuple[int, int, int]:
    standing = current()
    if standing is None:
        return n_rows, 0, n_rows
    if n_rows >= standing.n_ranks:
        split = shares(n_rows, standing.n_ranks)
        standing.weigh(tuple(map(len, split)))
    else:
        split = [Rows(0, n_rows)] * standing.n_ranks
        standing.weigh(tuple(int(rank == 0) for rank in range(standing.n_ranks)))
    share = split[standing.rank]
    return n_rows, share.start, len(share)
