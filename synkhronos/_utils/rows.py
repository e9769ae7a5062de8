"""Index arithmetic: which rows of a data set each rank computes on.

These are pure functions of integers and arrays, independent of the backend and of processes. They define the meaning of
`batch`, `batch_s` and `num_slices`, and how data is scattered. They run in the controller, which sends the result to
all ranks.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Union

import numpy as np


class Rows(NamedTuple):
    """Range of rows ``start, start + 1, …, stop - 1`` of an array.

    Iteration is an error. Otherwise ``tuple(rows)`` would allocate memory for ``len(rows)`` elements, because Python
    takes the length as a hint.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        raise TypeError("got iteration over Rows, which is not supported; use its attribute bounds")

    def __reduce__(self) -> tuple[type[Rows], tuple[int, int]]:
        return Rows, (self.start, self.stop)

    @property
    def bounds(self) -> tuple[int, int]:
        """Tuple of ``start`` and ``stop``."""
        return self.start, self.stop


#: Rows of a data set: a contiguous range, or a 1-d int64 array of non-negative row indices.
Selection = Union[Rows, np.ndarray]


def shares(n: int, n_ranks: int) -> list[Rows]:
    """Split ``n`` data points into ``n_ranks`` shards, as evenly as possible.

    The first ``n % n_ranks`` shards have one more data point than the others.
    """
    quotient, rest = divmod(n, n_ranks)
    bounds = [rank * quotient + min(rank, rest) for rank in range(n_ranks + 1)]
    return [Rows(bounds[rank], bounds[rank + 1]) for rank in range(n_ranks)]


def pieces(n: int, num_slices: int) -> list[Rows]:
    """Split ``n`` data points into at most ``num_slices`` slices, none of them empty unless ``n`` is 0."""
    return shares(n, max(1, min(n, num_slices)))


def select(batch: Any, length: int, name: str = "batch") -> Selection:
    """Return the rows of a data set that a user's ``batch`` selects.

    Parameters
    ----------
    batch : None, int, slice, or list / 1-d array of integers or booleans
        ``None`` selects all rows, an int ``n`` the first ``n`` rows, and a boolean mask the rows where it is true.
    length : int
        Number of rows of the data set.
    name : str
        Name of the argument in error messages.

    Returns
    -------
    Rows, or int64 array of shape (n,)

    Raises
    ------
    TypeError
        If ``batch`` has another type or dtype.
    ValueError
        If ``batch`` has another shape, or is an int out of range.
    IndexError
        If a bound, an index or the length of a mask is out of range.
    """
    if batch is None:
        return Rows(0, length)
    if isinstance(batch, slice):
        return _select_slice(batch, length, name)
    if isinstance(batch, (bool, np.bool_)):
        raise TypeError(f"{name} is the bool {batch}; expected an int, a slice, or a list or 1-d array of indices")
    if not isinstance(batch, (np.ndarray, list, tuple, range)):
        try:
            count = operator.index(batch)
        except TypeError:
            batch = np.asarray(batch)
        else:
            if not 0 <= count <= length:
                raise ValueError(f"{name} is {count}; expected a number of data points between 0 and {length}")
            return Rows(0, count)
    return _select_indices(batch, length, name)


def _select_slice(batch: slice, length: int, name: str) -> Selection:
    """Return `select` for a slice."""
    start, stop, step = batch.start, batch.stop, batch.step
    if step is None and type(start) is int and type(stop) is int and 0 <= start <= stop <= length:
        return Rows(start, stop)  # fast path for the most frequent case
    try:
        start, stop, step = batch.indices(length)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {batch}: {error}") from None
    for bound in (batch.start, batch.stop):
        if bound is not None and not -length <= operator.index(bound) <= length:
            raise IndexError(f"{name}: {batch} is out of range for {length} data points")
    if step == 1:
        return Rows(start, max(start, stop))
    return np.arange(start, stop, step, dtype=np.int64)


def _as_array(batch: Any, name: str) -> np.ndarray:
    """Return a list or an array of indices as an array."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy before 1.24 only warns about ragged lists
            return np.asarray(batch)
    except (ValueError, Warning) as error:
        raise ValueError(f"{name} has lists of different lengths; expected one flat list of indices") from error


def _select_indices(batch: Any, length: int, name: str) -> np.ndarray:
    """Return `select` for a list or an array of indices, or for a boolean mask."""
    indices = _as_array(batch, name)
    if indices.ndim == 0 and indices.dtype.kind in "iu":
        raise TypeError(f"{name} is a 0-d array; expected a Python int, a slice, or a list or 1-d array of indices")
    if indices.ndim == 0:
        value = indices.item()
        meant = f". Did you mean {value:.0f}?" if isinstance(value, float) and value.is_integer() else ""
        raise TypeError(
            f"{name} is {value!r}; expected an int, a slice, or a list or 1-d array of indices or booleans{meant}"
        )
    if indices.ndim != 1:
        raise ValueError(f"{name} has shape {indices.shape}; expected 1 dimension")
    if indices.dtype.kind == "b":
        if len(indices) != length:
            raise IndexError(
                f"{name} is a boolean mask of length {len(indices)}; expected {length}, one for each data point"
            )
        return np.flatnonzero(indices).astype(np.int64, copy=False)
    if not len(indices):
        return np.zeros(0, dtype=np.int64)
    if indices.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {indices.dtype}; expected integers or booleans")
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < -length or highest >= length:
        wrong = lowest if lowest < -length else highest
        raise IndexError(f"{name}: index {wrong} is out of range for {length} data points")
    indices = indices.astype(np.int64, copy=False)
    return np.where(indices < 0, indices + length, indices) if lowest < 0 else indices


def shift(batch: Any, length: int, name: str = "batch") -> Selection:
    """Return the rows that a user's ``batch`` selects from data that is already the minibatch.

    For a slice, row 0 of the data is the lowest selected row. For a list of indices or a mask, row ``i`` of the data
    belongs to the ``i``-th selected index.

    Parameters
    ----------
    batch : int, slice, or list / 1-d array of integers or booleans
        Rows of the full data set, as for `select`. Bounds of a slice must not be negative.
    length : int
        Number of rows of the minibatch.
    name : str
        Name of the argument in error messages.

    Returns
    -------
    Rows, or int64 array of shape (n,)

    Raises
    ------
    TypeError, ValueError, IndexError
        As for `select`. Also, `IndexError` if the minibatch has fewer rows than a slice spans, or another number of
        rows than a list has indices.
    """
    if isinstance(batch, slice):
        start, stop, step = _minibatch_bounds(batch, name)
        span = len(range(start, stop, step)) * step - step + 1 if stop > start else 0
        _check_span(span, length, name)
        return Rows(0, span) if step == 1 else np.arange(0, span, step, dtype=np.int64)
    if isinstance(batch, (list, tuple, np.ndarray)):
        indices = _as_array(batch, name)
        batch = np.flatnonzero(indices) if indices.dtype.kind == "b" and indices.ndim == 1 else batch
    rows = select(batch, np.iinfo(np.int64).max, name)
    if isinstance(rows, np.ndarray) and len(rows) != length:
        raise IndexError(
            f"{name} has {len(rows)} indices, and the minibatch data {length} rows; expected equal numbers, because "
            "its row i belongs to the i-th index"
        )
    _check_span(len(rows), length, name)
    return Rows(0, len(rows))


def _minibatch_bounds(batch: slice, name: str) -> tuple[int, int, int]:
    """Return start, stop and step of a slice of a minibatch, which must be absolute."""
    start, stop, step = batch.start or 0, batch.stop, 1 if batch.step is None else batch.step
    if not all(isinstance(bound, (int, np.integer)) for bound in (start, stop, step)):
        raise TypeError(f"{name} is {batch}; expected integer bounds and a stop, which minibatch data needs")
    if start < 0 or stop < 0 or step < 1:
        raise ValueError(f"{name} is {batch}; expected bounds of at least 0 and a positive step, for minibatch data")
    return int(start), int(stop), int(step)


def _check_span(span: int, length: int, name: str) -> None:
    """Raise `IndexError` if a minibatch has fewer rows than the selection spans."""
    if length < span:
        raise IndexError(f"{name} spans {span} rows; the minibatch data has only {length}")


def select_per_rank(batch_s: Any, lengths: Sequence[int]) -> list[Selection]:
    """Return the rows that a user's ``batch_s`` selects on each rank.

    Parameters
    ----------
    batch_s : selection, or list of selections
        One selection for all ranks (``None``, slice, list of ints, index array or boolean mask), or a list with one
        selection for each rank.
    lengths : sequence of int
        Number of rows on each rank.

    Returns
    -------
    list of (Rows, or int64 array of shape (n,))

    Raises
    ------
    TypeError, ValueError, IndexError
        As for `select`. Also, `ValueError` if the list does not have one selection for each rank.
    """
    n_ranks, kinds = len(lengths), (slice, list, tuple, np.ndarray)
    if isinstance(batch_s, (list, tuple)) and any(isinstance(item, kinds) for item in batch_s):
        if len(batch_s) != n_ranks:
            raise ValueError(
                f"batch_s is a list of {len(batch_s)} selections; expected one for each of the {n_ranks} ranks"
            )
        each = list(batch_s)
    elif batch_s is None or isinstance(batch_s, slice) or np.ndim(batch_s) == 1:
        each = [batch_s] * n_ranks
    else:
        raise TypeError(
            f"batch_s is {batch_s!r}; expected a slice, a list of ints, an index array, or a list of these, one for "
            "each rank"
        )
    return [select(one, length, f"batch_s on rank {rank}") for rank, (one, length) in enumerate(zip(each, lengths))]


def take(selection: Selection, rows: Rows) -> Selection:
    """Return the part of a selection at the positions ``rows``."""
    if isinstance(selection, Rows):
        return Rows(selection.start + rows.start, selection.start + rows.stop)
    return selection[rows.start : rows.stop]
