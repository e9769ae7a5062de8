"""A word to users whose function gives every rank the whole of the work.

A tutorial's ``theano.function([index], cost, givens={x: data[index * n : (index + 1) * n]})``, ported with ``index``
among the `bcast_inputs`, is right on all ranks, and no quicker than on one. The same call is meant where ``data`` was
scattered before; so the graph alone cannot tell. What tells is that all ranks come to the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos._collectives import OPS
from synkhronos._graph import Graph
from synkhronos._session import warn

__all__ = ["Doubt"]


class Doubt:
    """Whether a function gives every rank the whole, to be settled by the values of its first call.

    There is none about functions that have scattered inputs, sliceable shared variables, no inputs at all, or no
    outputs to be reduced; nor where the inputs are but numbers, such as a learning rate, that pick no rows.

    Parameters
    ----------
    graph : Graph
    modes : list of str or None
        The ops of its outputs.
    """

    def __init__(self, graph: Graph, modes: Sequence[str | None]) -> None:
        self._open = bool(
            graph.input_variables
            and not graph.n_scattered
            and not graph.sliceable_shareds
            and any(mode in OPS for mode in modes)
            and graph.picks_rows_of_shared()
        )

    def settle(self, name: str | None, results: Sequence[Any]) -> None:
        """Warn, once, if all ranks came to the same values.

        Parameters
        ----------
        name : str, optional
            Of the function.
        results : list
            For each rank, its outputs.
        """
        if not self._open or len(results) < 2:
            return
        self._open = False
        first, *others = results
        pairs = [pair for values in others for pair in zip(first, values)]
        known = [pair for pair in pairs if not any(value is None for value in pair)]  # others are of the master alone
        if known and all(_same(*pair) for pair in known):
            warn(
                f"{name or 'a function'}: no input is scattered, and all {len(results)} ranks came to the same values: "
                "every rank computes the whole. Pass the data as inputs, and pick rows by batch; or scatter the shared "
                "variables, name them in sliceable_shareds, and pick rows by batch_s"
            )


def _same(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and one.tobytes() == other.tobytes()
