"""Collectives on Theano shared variables: moving and combining the replicas of a variable across ranks.

Every function here takes one shared variable or a list of them, and, where it takes or returns values, one value or a list
to match. A variable must be used by a function of the session; a function that is not yet distributed is distributed first.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from synkhronos import _graphs
from synkhronos._collectives import OPS, ShapesDiffer, as_stored, combine
from synkhronos._data import Data, condition
from synkhronos._lifecycle import current
from synkhronos._partition import Rows, Selection, select, shares
from synkhronos._protocol import AllGather, AllReduce, Get, Put, Shapes, Source
from synkhronos._segments import aligned
from synkhronos._session import Session
from synkhronos.errors import WorkerError

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "get_lengths",
    "get_shapes",
    "get_value",
    "reduce",
    "scatter",
    "set_value",
]


def broadcast(shared_vars: Any, values: Any = None, nccl: bool = True) -> None:
    """Give every rank the master's value of each variable, or ``values``.

    Parameters
    ----------
    shared_vars : shared variable or list
    values : array_like or Data, or list, optional
        New values, cast as Theano would.
    nccl : bool
        Use NCCL where the variable lives on a CUDA GPU; on CPU cores it changes nothing.
    """
    session, variables = _start("broadcast", shared_vars)
    with session.lock:
        if values is None:
            values = [_graphs.get_array(var) for var in variables]
            ranks: Any = tuple(rank for rank in range(session.n_ranks) if rank != session.master_rank)
        else:
            values, ranks = _match(shared_vars, variables, values), None
        _put(session, variables, values, ranks=ranks)


def scatter(shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Split each value along axis 0, as evenly as possible, and give each rank its share as the variable's value.

    Parameters
    ----------
    shared_vars : shared variable or list
    values : array_like or Data, or list
        Shape ``(n, ...)``.
    batch : int, slice, list or array, optional
        Which rows of the values to use, as in a function call.
    """
    session, variables = _start("scatter", shared_vars)
    with session.lock:
        values = _match(shared_vars, variables, values)
        for var in variables:
            if var.ndim == 0:
                raise ValueError(f"scatter: {var} is 0-dimensional")
        _put(session, variables, values, batch=batch, split=True)


def set_value(rank: int, shared_vars: Any, values: Any, batch: Any = None) -> None:
    """Set one rank's copy of each variable.

    Parameters
    ----------
    rank : int
    shared_vars : shared variable or list
    values : array_like or Data, or list
    batch : int, slice, list or array, optional
        Which rows of the values to use.
    """
    session, variables = _start("set_value", shared_vars)
    with session.lock:
        values = _match(shared_vars, variables, values)
        _put(session, variables, values, ranks=(_check_rank(session, rank),), batch=batch)


def get_value(rank: int, shared_vars: Any) -> Any:
    """One rank's value of each variable, copied."""
    session, variables = _start("get_value", shared_vars)
    rank = _check_rank(session, rank)
    with session.lock:
        values = session.run(Get(_keys(session, variables), ranks=(rank,)))[rank]
        return _like(shared_vars, [np.array(value) for value in values])


def gather(shared_vars: Any, nd_up: int = 1, nccl: bool = True) -> Any:
    """All ranks' values of each variable, in rank order; nothing changes on any rank.

    Parameters
    ----------
    shared_vars : shared variable or list
    nd_up : int
        1: stacked on a new first axis, which needs equal shapes. 0: concatenated on axis 0; lengths may differ.
    nccl : bool
        On CPU cores it changes nothing.

    Raises
    ------
    ValueError
        If the shapes do not allow it.
    """
    session, variables = _start("gather", shared_vars)
    if isinstance(nd_up, bool) or nd_up not in (0, 1):
        raise ValueError(f"nd_up must be 1 (stack) or 0 (concatenate); got {nd_up!r}")
    with session.lock:
        results = session.run(Get(_keys(session, variables)))
        gathered = []
        for var, values in zip(variables, zip(*results)):
            _check_shapes("gather", var, [value.shape for value in values], concatenate=nd_up == 0)
            gathered.append(np.concatenate(values) if nd_up == 0 else np.stack(values))
    return _like(shared_vars, gathered)


def all_gather(shared_vars: Any, nccl: bool = True) -> None:
    """Make every rank's variable the concatenation, on axis 0 in rank order, of all ranks' values.

    Raises
    ------
    ValueError
        If the shapes differ beyond axis 0, or a variable is 0-dimensional; then nothing changes.
    """
    session, variables = _start("all_gather", shared_vars)
    with session.lock:
        for var, shapes in zip(variables, zip(*shapes_on_ranks(session, variables))):
            _check_shapes("all_gather", var, shapes, concatenate=True)
        keys = _keys(session, variables)
        published = session.publish(Get(keys, publish=True))
        segments = tuple(one.segment for one in published if one.segment is not None)
        session.run(AllGather(keys, segments, tuple(zip(*(one.refs for one in published)))))


def reduce(shared_vars: Any, op: str = "avg", in_place: bool = True, nccl: bool = True) -> Any:
    """Reduce all ranks' values of each variable to the master.

    Parameters
    ----------
    shared_vars : shared variable or list
    op : str
        ``"avg"``, ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
    in_place : bool
        ``True``: into the master's variable (integers keep their dtype: averages round to the nearest). ``False``:
        returned (in NumPy's dtype for such a reduction), and nothing changes.
    nccl : bool
        On CPU cores it changes nothing.
    """
    session, variables = _start("reduce", shared_vars)
    op = _check_op("reduce", op)
    with session.lock:
        results = session.run(Get(_keys(session, variables)))
        reduced = []
        for var, values in zip(variables, zip(*results)):
            _check_shapes("reduce", var, [value.shape for value in values])
            reduced.append(combine(values, op, (1,) * session.n_ranks, str(var)))
        if not in_place:
            return _like(shared_vars, reduced)
        for var, value in zip(variables, reduced):
            _graphs.set_array(var, as_stored(value, np.dtype(var.dtype)))
    return None


def all_reduce(shared_vars: Any, op: str = "avg", nccl: bool = True, weights: Optional[Sequence[float]] = None) -> None:
    """Reduce all ranks' values of each variable, into every rank's variable; the result is the same to the bit everywhere.

    Parameters
    ----------
    shared_vars : shared variable or list
    op : str
        ``"avg"``, ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``. Integers keep their dtype: averages round to the nearest.
    nccl : bool
        On CPU cores it changes nothing.
    weights : sequence of float, optional
        For ``"avg"``: one number for each rank; a weight of 0 leaves that rank's value out altogether. With
        ``f.counts`` the average over ranks of a mean over data points is the mean over all data points.

    Raises
    ------
    ValueError
        If a variable's shape is not the same on all ranks; then nothing changes.
    """
    session, variables = _start("all_reduce", shared_vars)
    op = _check_op("all_reduce", op)
    checked = _check_weights(session, op, weights)
    with session.lock:
        try:
            session.run(AllReduce(_keys(session, variables), op, checked))
        except WorkerError as error:
            if not isinstance(error.__cause__, ShapesDiffer):
                raise
            for var, shapes in zip(variables, zip(*shapes_on_ranks(session, variables))):
                _check_shapes("all_reduce", var, shapes)
            raise


def get_shapes(shared_vars: Any) -> List[Any]:
    """The shape of each variable on each rank: a list with one entry for each rank (for a list of variables, a list of these)."""
    session, variables = _start("get_shapes", shared_vars)
    return _like(shared_vars, [list(shapes) for shapes in zip(*shapes_on_ranks(session, variables))])


def get_lengths(shared_vars: Any) -> List[Any]:
    """The length of axis 0 of each variable on each rank, as in `get_shapes`; `ValueError` for a 0-dimensional one."""
    session, variables = _start("get_lengths", shared_vars)
    for var in variables:
        if var.ndim == 0:
            raise ValueError(f"get_lengths: {var} is 0-dimensional")
    return _like(shared_vars, [[shape[0] for shape in shapes] for shapes in zip(*shapes_on_ranks(session, variables))])


def shapes_on_ranks(session: Session, variables: Sequence[Any]) -> List[List[Tuple[int, ...]]]:
    """For each rank, the shapes of the variables there."""
    return session.run(Shapes(_keys(session, variables)))


def _start(function: str, shared_vars: Any) -> Tuple[Session, List[Any]]:
    """The session and the variables, checked to be replicated."""
    session = current(function)
    variables = list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]
    if not variables:
        raise ValueError(f"{function}: shared_vars is empty")
    session.distribute()
    for var in variables:
        if not _graphs.is_shared_variable(var) or not _graphs.is_tensor_variable(var):
            raise TypeError(f"{function}: expected Theano shared variables that hold arrays; got {var!r}")
        if session.replica.variables.key(var) is None:
            raise ValueError(
                f"{function}: no function of this session uses the shared variable {var}; build one with "
                "synkhronos.function first, so that the variable exists on every rank"
            )
    if len(set(variables)) < len(variables):
        raise ValueError(f"{function}: a variable is named twice in {variables}")
    return session, variables


def _keys(session: Session, variables: Sequence[Any]) -> Tuple[int, ...]:
    return tuple(session.replica.variables.key(var) for var in variables)


def _like(shared_vars: Any, results: List[Any]) -> Any:
    return results if isinstance(shared_vars, (list, tuple)) else results[0]


def _match(shared_vars: Any, variables: Sequence[Any], values: Any) -> List[Any]:
    """One value for each variable, as Data or as an array of the variable's dtype."""
    if not isinstance(shared_vars, (list, tuple)):
        values = [values]
    elif not isinstance(values, (list, tuple)) or len(values) != len(variables):
        got = f"{len(values)}" if isinstance(values, (list, tuple)) else repr(values)
        raise ValueError(f"expected a list of {len(variables)} values, one for each variable; got {got}")
    matched = []
    for var, value in zip(variables, values):
        if isinstance(value, Data) and (value.dtype != np.dtype(var.dtype) or value.ndim != var.ndim):
            raise TypeError(f"{var} holds {var.dtype} arrays of {var.ndim} dimensions; got {value!r}")
        try:
            matched.append(value if isinstance(value, Data) else condition(value, np.dtype(var.dtype), var.ndim, False))
        except TypeError as error:
            raise TypeError(f"{var}: {error}") from None
    return matched


def _put(
    session: Session,
    variables: Sequence[Any],
    values: Sequence[Any],
    ranks: Optional[Tuple[int, ...]] = None,
    batch: Any = None,
    split: bool = False,
) -> None:
    """Set variables on some ranks to (rows of) values; ``split`` gives each rank its share of the rows."""
    if batch is not None and any(value.ndim == 0 for value in values):
        raise ValueError("batch picks rows, but a value is 0-dimensional")
    rows: List[Optional[Selection]] = [
        select(batch, len(value)) if split or batch is not None else None for value in values
    ]
    for var, value, chosen in zip(variables, values, rows):
        for axis, fixed in enumerate(var.broadcastable):
            if fixed and ((value.shape[axis] if axis or chosen is None else len(chosen)) != 1 or (split and not axis)):
                raise ValueError(f"{var}: axis {axis} is broadcastable and must have length 1 on every rank")
    staged = [value for value in values if not isinstance(value, Data)] + [one for one in rows if isinstance(one, np.ndarray)]
    arena = session.reserve(sum(aligned(array.nbytes) for array in staged))
    sources = []
    for value, chosen in zip(values, rows):
        ref = value.ref if isinstance(value, Data) else arena.place(value)
        sources.append(Source(ref, arena.place(chosen) if isinstance(chosen, np.ndarray) else chosen))
    split_rows: Optional[Tuple[Tuple[Rows, ...], ...]] = None
    if split:
        split_rows = tuple(tuple(shares(len(chosen), session.n_ranks)) for chosen in rows if chosen is not None)
    session.run(Put(_keys(session, variables), tuple(sources), split_rows, ranks))


def _check_rank(session: Session, rank: Any) -> int:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise TypeError(f"rank must be an int; got {rank!r}")
    if not 0 <= rank < session.n_ranks:
        raise ValueError(f"rank {rank} does not exist; ranks are 0 to {session.n_ranks - 1}")
    return int(rank)


def _check_op(function: str, op: Any) -> str:
    plain = op[2:] if isinstance(op, str) and op.startswith("c_") else op
    if plain not in OPS:
        raise ValueError(f"{function}: unknown op {op!r}; expected one of {', '.join(map(repr, OPS))}")
    return plain


def _check_weights(session: Session, op: str, weights: Any) -> Optional[Tuple[float, ...]]:
    if weights is None:
        return None
    if op != "avg":
        raise ValueError(f'weights are for op "avg"; got op {op!r}')
    checked = np.asarray(weights, dtype=np.float64)
    if checked.shape != (session.n_ranks,):
        raise ValueError(f"weights: expected {session.n_ranks} numbers, one for each rank; got shape {checked.shape}")
    if not np.isfinite(checked).all() or (checked < 0).any() or not checked.any():
        raise ValueError(f"weights must be finite, not negative, and not all 0; got {weights!r}")
    return tuple(checked.tolist())


def _check_shapes(function: str, var: Any, shapes: Sequence[Tuple[int, ...]], concatenate: bool = False) -> None:
    if concatenate and any(len(shape) == 0 for shape in shapes):
        raise ValueError(f"{function}: {var} is 0-dimensional and cannot be concatenated")
    if len({shape[1:] if concatenate else shape for shape in shapes}) > 1:
        beyond = " beyond axis 0" if concatenate else ""
        raise ValueError(f"{function}: the shapes of {var} differ between ranks{beyond}: {list(shapes)}")
