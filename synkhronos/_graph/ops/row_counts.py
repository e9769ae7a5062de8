"""Operations for numbers that depend on the rank: its number and weight, and its range of the rows of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._backends import Apply, Op, T
from synkhronos._graph.ops.rank_context import current
from synkhronos._utils.rows import Rows, shares


class RankConstant(Op):
    """A scalar that may have a different value on each rank.

    Parameters
    ----------
    what : str
        The value: ``"rank"`` or ``"n_ranks"`` (int64), or ``"inverse_weight"`` (float64). The latter is the total
        weight of all ranks divided by this rank's weight, and 0 on a rank with weight 0. Outside a call, the three
        values are 0, 1 and 1.
    """

    __props__: tuple[str, ...] = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def make_node(self) -> Any:
        """Apply the operation, which has no inputs."""
        return Apply(self, [], [T.dscalar() if self.what == "inverse_weight" else T.lscalar()])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Read the number from the current rank context."""
        context = current()
        if self.what == "inverse_weight":
            own = 1 if context is None else context.own
            total = 1 if context is None else sum(context.weights)
            output_storage[0][0] = np.asarray(total / own if own else 0.0)
        elif context is None:
            output_storage[0][0] = np.asarray(int(self.what == "n_ranks"))
        else:
            output_storage[0][0] = np.asarray(getattr(context, self.what))

    def do_constant_folding(self, *_: Any) -> bool:
        """Return false, because the value differs between ranks."""
        return False

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """Return the shape of a scalar."""
        return [()]


class Counted(RankConstant):
    """Three int64 scalars: number of rows of a call, index of this rank's first row, and number of this rank's rows.

    If the call passes these three numbers, they are the first inputs; otherwise the operation divides the rows among
    the ranks. The other inputs are lengths, which must all be equal to the number of rows. If the operation divides
    fewer rows than there are ranks, each rank gets all rows, and only rank 0 has a weight in collectives.

    Parameters
    ----------
    names : tuple of str
        Names of the variables to which the lengths belong, for messages.
    given : str
        Names of the variables whose rows the call passes, for messages; empty if the call passes no numbers.
    """

    __props__ = ("names", "given")

    def __init__(self, names: tuple[str, ...], given: str) -> None:
        self.names, self.given = names, given

    def make_node(self, *numbers: Any) -> Any:
        """Apply the operation to the three numbers (if the call passes them) and the lengths."""
        return Apply(self, list(map(T.as_tensor_variable, numbers)), [T.lscalar() for _ in range(3)])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Compute the three numbers; raise `ValueError` on all ranks if the lengths differ."""
        numbers = list(map(int, inputs))
        names = [self.given, *self.names] if self.given else self.names
        lengths = [numbers[0], *numbers[3:]] if self.given else numbers
        if len(set(lengths)) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in zip(names, lengths))
            raise ValueError(
                f"sharded inputs and variables have different numbers of rows: {found}; expected equal ones"
            )
        rows, first, here = numbers[:3] if self.given else _divided(lengths[0])
        for storage, number in zip(output_storage, (rows, first, here)):
            storage[0] = np.asarray(number)

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """Return the shapes of three scalars."""
        return [(), (), ()]


def _divided(n_rows: int) -> tuple[int, int, int]:
    context = current()
    if context is None:
        return n_rows, 0, n_rows
    if n_rows >= context.n_ranks:
        split = shares(n_rows, context.n_ranks)
        context.weigh(tuple(map(len, split)))
    else:
        split = [Rows(0, n_rows)] * context.n_ranks
        context.weigh(tuple(int(rank == 0) for rank in range(context.n_ranks)))
    share = split[context.rank]
    return n_rows, share.start, len(share)
