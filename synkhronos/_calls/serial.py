"""Looking at the results of a call beside what Theano gives in one piece: an op that does not suit its output shows."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _graphs
from synkhronos._calls.results import Results
from synkhronos._data import Data
from synkhronos._partition import Selection, pieces
from synkhronos._rank import Call, Get
from synkhronos._session import Session, distances

__all__ = ["Serial", "is_asked"]

_ENVIRONMENT = "SYNKHRONOS_CHECK"


def is_asked(argument: Any, graph: _graphs.Graph) -> bool:
    """Whether a call is to be compared with Theano: as its argument says, else the environment, where that can be."""
    if argument is None:
        return os.environ.get(_ENVIRONMENT, "0") not in ("", "0") and not graph.is_random
    if not isinstance(argument, bool):
        raise TypeError(f"check_against_theano must be True, False or None; got {argument!r}")
    return argument


class Serial:
    """The outputs of a function, computed by the master alone and without updates; compiled when first needed.

    Parameters
    ----------
    graph : Graph
    results : Results
    named : list of bool
        Of which outputs the user named the op.
    """

    def __init__(self, graph: _graphs.Graph, results: Results, named: Sequence[bool]) -> None:
        self._graph = graph
        self._results = results
        self._function: Any = None
        has_data = graph.n_scattered or graph.sliceable_shareds
        self._judged: set[tuple[Any, ...]] = set()
        self._unnamed = {i for i, name in enumerate(named) if has_data and not name and self._may_have_rows(i)}

    def _may_have_rows(self, i: int) -> bool:
        variable = getattr(self._graph.outputs[i], "variable", self._graph.outputs[i])
        return variable.ndim > 0 and not variable.broadcastable[0]

    def _compute(self, inputs: Sequence[Any], sliceable: Sequence[Any], wanted: Sequence[int]) -> list[np.ndarray]:
        if self._function is None:
            self._function = self._graph.compile_serial()
        values = self._function(*inputs, *sliceable, output_subset=list(wanted))
        return [np.asarray(_graphs.to_host(value)) for value in values]

    # -- the whole call

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
                picked = values if rows is None else [_rows_of(value, some) for value, some in zip(values, rows)]
                sliceable.append(np.concatenate(picked))
        try:
            return self._compute(inputs, sliceable, wanted)
        except Exception as error:
            raise ValueError(f"check_against_theano: Theano fails on all rows in one piece: {error}") from error

    def compare(self, outputs: Sequence[Any], expected: Sequence[np.ndarray], wanted: Sequence[int]) -> None:
        """Raise `ValueError` for the output that differs most from what Theano gives, if any does.

        Outputs with the op ``None``, and scalars that are gathered, are what no serial call gives: they are left out.
        """
        worst = None
        for i, output, right in zip(wanted, outputs, expected):
            op = self._results.modes[i]
            if op is None or (op == "gather" and right.ndim == 0):
                continue
            got = np.asarray(_graphs.to_host(output))
            if got.shape != right.shape:
                raise ValueError(
                    f"{self._results.names[i]}, op {op!r}: shape {got.shape}, but Theano gives {right.shape} for the "
                    "same rows in one piece"
                )
            difference, tolerance = _largest_difference(got, right)
            if difference > tolerance and (worst is None or difference / tolerance > worst[0]):
                worst = difference / tolerance, i, op, difference, got, right
        if worst is not None:
            _, i, op, difference, got, right = worst
            place = np.unravel_index(np.argmax(distances(got, right)), got.shape)
            raise ValueError(
                f"{self._results.names[i]}, op {op!r}, differs from what Theano gives for the same rows in one piece "
                f"by up to {difference:.6g}: {got[place]:.9g}, expected {right[place]:.9g}. The op must make the value "
                "of the whole of the values of its parts (or the replicas differ: synkhronos.check_replicas)"
            )

    # -- rows that are averaged

    def judge(
        self, results: Sequence[Any], call: Call, inputs: Sequence[Any], wanted: Sequence[int], rows: Any = None
    ) -> None:
        """Refuse to average an output that has a row for each data point, if the user did not name the op.

        Suspicious is one that is as long as each piece of the data. Whether it follows the data, computations on one
        row more and on the same rows in reverse tell; if they cannot, there is a warning. What is no such output is not
        judged again.

        Parameters
        ----------
        results : list
            Of each rank, its values; ``None`` for a rank without data points.
        call : Call
        inputs : list of array or Data
            As the user gave them.
        wanted : list of int
            The outputs that the values are of.
        rows : list of selections, or None
            Those of the sliceable shared variables on each rank.

        Raises
        ------
        ValueError
            For an output with a row for each data point.
        """
        if not self._unnamed:
            return
        parts = [len(part) for count in call.counts if count for part in pieces(count, call.num_slices)]
        if len(parts) < 2:
            return
        shareds = self._graph.sliceable_shareds
        lengths = {"inputs": parts[0] if len(set(parts)) == 1 else None, "sliceable": None}
        if not self._graph.n_scattered or (shareds and call.num_slices > 1):
            lengths["sliceable"] = lengths["inputs"]
        elif shareds:
            own = _graphs.get_array(shareds[0]).shape[0] if rows is None else len(rows[call.master])
            lengths["sliceable"] = own
        for place, i in enumerate(wanted):
            if i not in self._unnamed:
                continue
            found = {values[place].shape[0] for values in results if values is not None and values[place] is not None}
            growing = [kind for kind, length in lengths.items() if found == {length}]
            if not growing or (i, *growing) in self._judged:
                continue
            [length] = found
            sliceable = [self._sliceable(var, rows, call.master) for var in shareds]
            follows = self._follows_the_rows(i, length, growing, inputs, sliceable, parts[0])
            if follows:
                raise ValueError(
                    f"{self._results.names[i]} has a row for each data point (axis 0 has length {length}, and so have "
                    "the parts of the data), and no op was named: an average would mix unrelated rows. Name the op: "
                    '"gather" for all rows, or "avg" if their average over ranks is meant'
                )
            self._judged.add((i, *growing))
            if follows is None:
                warnings.warn(
                    f"{self._results.names[i]} is averaged over ranks, and axis 0 is as long as the parts of the data "
                    f"({length}): if it has a row for each data point, the result is wrong, and the op should be "
                    '"gather"; if not, name the op "avg"',
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _sliceable(self, var: Any, rows: Any, rank: int) -> np.ndarray:
        """The rows that a call uses of the master's part of a sliceable shared variable."""
        value: np.ndarray = _graphs.to_host(_graphs.get_array(var))
        return value if rows is None else _rows_of(value, rows[rank])

    def _follows_the_rows(
        self,
        i: int,
        length: int,
        growing: Sequence[str],
        inputs: Sequence[Any],
        sliceable: Sequence[np.ndarray],
        part: int,
    ) -> bool | None:
        """Whether an output has a row for each of ``length`` data points; ``None`` where that cannot be told.

        These are points of the inputs, of the sliceable shared variables, or of both, as `growing` says.
        """
        n = self._graph.n_scattered
        arrays = [
            value.data if isinstance(value, Data) else self._graph.filter_input(position, value)
            for position, value in enumerate(inputs)
        ]

        def compute(picked: np.ndarray) -> np.ndarray:
            of_inputs = picked if "inputs" in growing else np.arange(part)
            some = [array[of_inputs % len(array)] for array in arrays[:n]]
            others = [value[picked % len(value)] if "sliceable" in growing else value for value in sliceable]
            return self._compute([*some, *arrays[n:], *others], [], [i])[0]

        in_order = np.arange(length)
        one_more: int | None = None
        with contextlib.suppress(Exception):  # sizes may be fixed in the graph
            one_more = len(compute(np.arange(length + 1)))
        if one_more == length + 1:
            return True
        with contextlib.suppress(Exception):
            there, back = compute(in_order), compute(in_order[::-1])
            if np.allclose(back, there[::-1]) and not np.allclose(there, there[::-1]):
                return True
        return None if one_more is None else False


def _rows_of(value: Any, rows: Selection) -> Any:
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
