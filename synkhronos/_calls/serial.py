"""What Theano gives in one piece, and the results of a call beside it: an op that does not suit its output shows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graph
from synkhronos._backends import TITLE, to_host
from synkhronos._calls.results import Results
from synkhronos._rank import Get
from synkhronos._session import Session, distances
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.rows import Selection

__all__ = ["Serial", "environment_asks", "is_asked", "rows_of"]

_ENVIRONMENT = "SYNKHRONOS_CHECK"


def environment_asks() -> bool:
    """Whether calls are to be compared with Theano where they do not say; asked when a function is built."""
    return os.environ.get(_ENVIRONMENT, "0") not in ("", "0")


def is_asked(argument: Any, default: bool, place: int) -> bool:
    """Whether a call is to be compared with Theano: as its argument says, else by default, where that can be.

    It cannot be after the first ``place`` in a sequence: parts that are not carried out yet may change variables.
    """
    if argument is None:
        return default and place < 2
    if not isinstance(argument, bool):
        raise TypeError(f"check_against_theano must be True, False or None; got {argument!r}")
    if argument and place > 1:
        raise ValueError("check_against_theano=True in a sequence is for the first in the block, or stand outside")
    return argument


class Serial:
    """What a function computes, in the master alone and without storing updates; compiled when first needed.

    Parameters
    ----------
    graph : Graph
    results : Results
    """

    def __init__(self, graph: _graph.Graph, results: Results) -> None:
        self._graph = graph
        self._results = results
        self._functions: dict[Any, Any] = {}

    def compute(
        self, inputs: Sequence[Any], variables: Sequence[Any], wanted: Sequence[int], others: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        """Some outputs, and new values of updated variables, which are counted after the outputs.

        Parameters
        ----------
        inputs, variables : list of array
            Values of all inputs, and of the sliceable shared variables, then of the others.
        wanted : list of int
        others : list of shared variables
            Those that are given values beside the sliceable ones.
        """
        values = self._function(wanted, others, False)(*inputs, *variables)
        return [np.asarray(to_host(value)) for value in values]

    def shapes(
        self, inputs: Sequence[Any], variables: Sequence[Any], wanted: Sequence[int], others: Sequence[Any]
    ) -> list[tuple[int, ...]]:
        """The shapes of what `compute` gives, computing no more than they need."""
        return [tuple(shape.tolist()) for shape in self._function(wanted, others, True)(*inputs, *variables)]

    def _function(self, wanted: Sequence[int], others: Sequence[Any], shapes: bool) -> Any:
        key = (tuple(wanted), tuple(others), shapes)
        if key not in self._functions:
            self._functions[key] = self._graph.compile_serial(wanted, others, shapes)
        return self._functions[key]

    def expected(
        self, session: Session, inputs: Sequence[Any], rows: list[Selection] | None, wanted: Sequence[int]
    ) -> list[np.ndarray]:
        """What Theano gives for the rows of all ranks in one piece; to be asked before the call and its updates.

        Parameters
        ----------
        session : Session
        inputs : list of array
            All rows that are chosen.
        rows : list of selections, or None
            Those of the sliceable shared variables on each rank.
        wanted : list of int
            The outputs.

        Raises
        ------
        ValueError
            If the function draws random numbers, or Theano cannot compute these rows in one piece.
        """
        if self._graph.is_random:
            raise ValueError("check_against_theano: the function draws random numbers, which differ between ranks")
        variables = self._graph.sliceable_shareds
        sliceable = []
        if variables:
            on_ranks = session.run(Get(session.keys(variables)))
            for values in zip(*on_ranks):
                picked = values if rows is None else [rows_of(value, some) for value, some in zip(values, rows)]
                sliceable.append(np.concatenate(picked))
        try:
            return self.compute(inputs, sliceable, wanted)
        except Exception as error:
            let_interrupts_pass(error)
            raise ValueError(f"check_against_theano: {TITLE} fails on all rows in one piece: {error}") from error

    def compare(self, outputs: Sequence[Any], expected: Sequence[np.ndarray], wanted: Sequence[int]) -> None:
        """Raise `ValueError` for the output that differs most from what Theano gives, if any does.

        Outputs with the op ``None``, and scalars that are gathered, are what no serial call gives: they are left out.
        """
        worst = None
        for i, output, right in zip(wanted, outputs, expected):
            op = self._results.modes[i]
            if op is None or (op == "gather" and right.ndim == 0):
                continue
            got = np.asarray(to_host(output))
            if got.shape != right.shape:
                raise ValueError(
                    f"{self._results.names[i]}, op {op!r}: shape {got.shape}, but {TITLE} gives {right.shape} for the "
                    "same rows in one piece"
                )
            difference, tolerance = _largest_difference(got, right)
            if difference > tolerance and (worst is None or difference / tolerance > worst[0]):
                worst = difference / tolerance, i, op, difference, got, right
        if worst is not None:
            _, i, op, difference, got, right = worst
            place = np.unravel_index(np.argmax(distances(got, right)), got.shape)
            raise ValueError(
                f"{self._results.names[i]}, op {op!r}, differs from what {TITLE} gives for the same rows in one piece "
                f"by up to {difference:.6g}: {got[place]:.9g}, expected {right[place]:.9g}. The op must make the value "
                "of the whole of the values of its parts (or the replicas differ: synkhronos.check_replicas)"
            )


def rows_of(value: Any, rows: Selection) -> Any:
    """The rows that are chosen of an array."""
    return value[slice(*rows.bounds)] if isinstance(rows, tuple) else value[rows]


def _largest_difference(got: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """The largest difference, and what rounding may make of it: half the digits of the dtype, of the largest value."""
    differences = distances(got, right)
    if not differences.size:
        return 0.0, 1.0
    floats = [one.dtype for one in (got, right) if one.dtype.kind in "fc"]
    eps = max([float(np.finfo(dtype).eps) for dtype in floats], default=float(np.finfo(np.float64).eps))
    finite = np.abs(right[np.isfinite(right)].astype(np.complex128))
    return float(differences.max()), eps**0.5 * float(finite.max(initial=0)) + eps
