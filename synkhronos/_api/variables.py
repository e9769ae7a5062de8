"""Variables on all ranks: read, write and compare their values; and helpers of the collectives on them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._api.data_arrays import Data, condition
from synkhronos._backends import TITLE, is_device_array
from synkhronos._collectives import OPS
from synkhronos._processes import TRANSFERS
from synkhronos._rank import Get, KeepValues, Put, Source
from synkhronos._session import Origin, Session, current, origin_of
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import Rows, Selection, select, shares, take
from synkhronos.errors import SynkhronosError, WorkerRestarted
from synkhronos.typing import Variables


def start(function: str, shared_vars: Any, to_set: bool = False) -> tuple[Session, list[Any]]:
    """Return the session and a list of the variables, after distributing them to the ranks if necessary.

    With ``to_set``, variables that no function uses are distributed, too; otherwise they raise `ValueError`.
    """
    session = current(function)
    variables = list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]
    if not variables:
        raise ValueError(f"{function}: got no variables; expected at least one shared variable")
    key_of = session.replica.variables.key
    for var in variables:
        if not _graph.is_shared_variable(var) or not _graph.is_tensor_variable(var):
            raise TypeError(f"{function}: got {var!r}; expected {TITLE} shared variables that hold arrays")
        if key_of(var) is None:
            session.distribute(variable=var)
            if key_of(var) is None and not to_set:
                raise ValueError(
                    f"{function}: no function of this session uses the shared variable {var}; build one with "
                    "synkhronos.function first, so that the variable exists on every rank"
                )
    if len(set(variables)) < len(variables):
        raise ValueError(f"{function}: got a variable twice: {variables}; name it once")
    unknown = [var for var in variables if key_of(var) is None] if to_set else []
    if unknown:
        session.distribute_variables(unknown)
    return session, variables


def over_nccl(session: Session, variables: Sequence[Any], nccl: bool, allowed: Callable[[Any], bool]) -> list[Any]:
    """Return the variables to move by NCCL: those on GPUs with an allowed dtype.

    Return none if the user does not want NCCL, or the ranks are not connected by it.
    """
    if not (nccl and session.nccl):
        return []
    return [var for var in variables if is_device_array(_graph.get_array(var)) and allowed(np.dtype(var.dtype))]


def like(shared_vars: Any, results: list[Any]) -> Any:
    return results if isinstance(shared_vars, (list, tuple)) else results[0]


def as_list(shared_vars: Any, values: Any) -> list[Any]:
    """Return values as a list, with one value for each variable."""
    return list(values) if isinstance(shared_vars, (list, tuple)) else [values]


def match(shared_vars: Any, variables: Sequence[Any], values: Any) -> list[Any]:
    """Return a list with one value for each variable: `Data`, or an array cast to the variable's dtype."""
    if not isinstance(shared_vars, (list, tuple)):
        values = [values]
    elif not isinstance(values, (list, tuple)) or len(values) != len(variables):
        got = f"{len(values)}" if isinstance(values, (list, tuple)) else repr(values)
        raise ValueError(f"got {got}; expected a list of {len(variables)} values, one for each variable")
    matched = []
    for var, value in zip(variables, values):
        if isinstance(value, Data) and (value.dtype != np.dtype(var.dtype) or value.ndim != var.ndim):
            raise TypeError(f"{var}: got {value!r}; expected {var.dtype} data of {var.ndim} dimensions")
        try:
            matched.append(value if isinstance(value, Data) else condition(value, np.dtype(var.dtype), var.ndim, False))
        except TypeError as error:
            raise TypeError(f"{var}: {error}") from None
    return matched


def put(
    session: Session,
    variables: Sequence[Any],
    values: Sequence[Any],
    ranks: tuple[int, ...] | None = None,
    batch: Any = None,
    split: bool = False,
    given: Sequence[Any] | None = None,
) -> None:
    """Set variables on some ranks to values or rows of values, now or in the recorded sequence.

    ``ranks`` are the ranks to set; ``None`` means all. With ``split``, each rank gets its shard of the rows. ``given``
    are the values as the program passed them. They are needed if ranks get different values, so that a restarted worker
    can get its value again; ``None`` means that all ranks get the same values.
    """
    if batch is not None and any(value.ndim == 0 for value in values):
        raise ValueError("got batch for a 0-dimensional value, which has no rows; leave batch out")
    rows: list[Selection | None] = [
        select(batch, len(value)) if split or batch is not None else None for value in values
    ]
    for var, value, chosen in zip(variables, values, rows):
        for axis, fixed in enumerate(var.broadcastable):
            if fixed and ((value.shape[axis] if axis or chosen is None else len(chosen)) != 1 or (split and not axis)):
                raise ValueError(f"{var}: axis {axis} is broadcastable; expected length 1 on every rank")
    arrays = [value for value in values if not isinstance(value, Data)]
    indices = [one for one in rows if isinstance(one, np.ndarray)]
    refs = iter(session.stage([*arrays, *indices]))
    places = [value.ref if isinstance(value, Data) else next(refs) for value in values]
    sources = [Source(place, next(refs) if isinstance(one, np.ndarray) else one) for place, one in zip(places, rows)]
    split_rows: tuple[tuple[Rows, ...], ...] | None = None
    if split:
        split_rows = tuple(tuple(shares(len(chosen), session.n_ranks)) for chosen in rows if chosen is not None)
    session.sequencer.keep([*variables, *(value.memory for value in values if isinstance(value, Data))])
    command = Put(session.keys(variables), tuple(sources), split_rows, ranks)
    shards = session.shards
    if shards is None:
        session.submit(command, no_value)
    elif given is None:
        session.submit(command, lambda results: shards.forget(variables))
    else:
        is_data = session.replica_check.is_data
        own = [i for i, var in enumerate(variables) if split or shards.tracks(var) or is_data(var)]
        arrays_again = [origin_of(given[i], values[i]) for i in own]
        digests = session.keys([variables[i] for i in own])

        def note(results: Sequence[Any]) -> None:
            for place, (i, array) in enumerate(zip(own, arrays_again)):
                for rank in range(session.n_ranks) if ranks is None else ranks:
                    chosen = rows[i]
                    if split_rows is not None and chosen is not None:
                        chosen = take(chosen, split_rows[i][rank])
                    shards.note(variables[i], rank, Origin(array, chosen, results[rank][place]))

        session.submit(dataclasses.replace(command, digests=digests), note)


def no_value(results: Sequence[Any]) -> None:
    """Return ``None``, as the result of a command without one."""


def check_rank(session: Session, rank: Any) -> int:
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise TypeError(f"rank is {rank!r}; expected an int")
    if not 0 <= rank < session.n_ranks:
        raise ValueError(f"rank is {rank}; expected 0 to {session.n_ranks - 1}")
    return int(rank)


def check_weights(session: Session, op: str, weights: Any) -> tuple[float, ...] | None:
    if weights is None:
        return None
    if not OPS[op].weighted:
        weighted = " or ".join(f'"{name}"' for name in OPS if OPS[name].weighted)
        raise ValueError(f"got weights for op {op!r}; they are for op {weighted} only")
    checked = np.asarray(weights, dtype=np.float64)
    if checked.shape != (session.n_ranks,):
        raise ValueError(f"weights has shape {checked.shape}; expected {session.n_ranks} numbers, one for each rank")
    if not np.isfinite(checked).all() or (checked < 0).any() or not checked.any():
        raise ValueError(f"weights is {weights!r}; expected finite numbers of at least 0, not all 0")
    return tuple(checked.tolist())


def check_shapes(function: str, var: Any, shapes: Sequence[tuple[int, ...]], concatenate: bool = False) -> None:
    if concatenate and any(len(shape) == 0 for shape in shapes):
        raise ValueError(f"{function}: {var} is 0-dimensional; expected at least one dimension")
    if len({shape[1:] if concatenate else shape for shape in shapes}) > 1:
        beyond = " beyond axis 0" if concatenate else ""
        raise ValueError(f"{function}: {var} has the shapes {list(shapes)} on the ranks; expected equal ones{beyond}")


def without(variables: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the variables that are not among the others."""
    return [var for var in variables if not any(var is other for other in others)]


def check_replicas(shared_vars: Variables | None = None) -> dict[Any, float]:
    """Compare shared variables between ranks, and return those that differ; no variable changes.

    Each rank computes a digest of each value (BLAKE2b of 128 bits, RFC 7693). If the digests of a variable differ, its
    values are sent to the controller and compared there.

    Parameters
    ----------
    shared_vars : shared variable or list, optional
        Tensor variables that a function of the session uses. Default: all variables that should be equal on all ranks.
        These are the variables that functions use, except for states of random streams, ``sliceable_shareds``, and
        variables that were scattered and that no `broadcast`, `all_reduce` or `all_gather` has made equal again.
        Functions that are not yet distributed are distributed first.

    Returns
    -------
    dict
        For each variable that differs, a float: the largest absolute difference of an element from the controller's
        value. It is infinite if shapes differ, or if only one of the two elements is NaN. The dictionary is empty if
        all replicas are equal. 0.0 equals -0.0, and NaN equals NaN.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If the list is empty or has a variable twice, or if no function of the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(2), "s")
    >>> with synk.session(2):
    ...     synk.broadcast(s, [1, 2])
    ...     synk.set_value(1, s, [1, 5])
    ...     print(synk.check_replicas(s)[s])
    3.0
    """
    if shared_vars is None:
        session = current("check_replicas")
        session.distribute()
        variables = None
    else:
        session, variables = start("check_replicas", shared_vars)
    with session.lock, session.timeline.call("check_replicas"):
        return session.replica_check.compare(session.replica_check.all() if variables is None else variables)


def set_value(rank: int, shared_vars: Variables, values: Any, batch: Any = None) -> None:
    """Set each variable on one rank; the other ranks keep their values.

    A variable's own ``set_value`` sets it on the controller only; this function sets it on any rank. A NumPy value is
    copied into shared memory, and from there into the rank's variable. Variables that no function of the session uses
    yet are distributed to the ranks first.

    Parameters
    ----------
    rank : int
        From 0 to the number of ranks minus 1.
    shared_vars : shared variable or list
        Tensor variables of any dtype and shape.
    values : array_like or Data, or list
        One value for each variable, with the variable's number of dimensions; cast as by `broadcast`.
    batch : int, slice, or list / 1-d array of integers or booleans, optional
        The rows of each value to use: the first ``batch`` rows, a range, or an index list. Default: all.

    Raises
    ------
    SessionError
        Without a session.
    TypeError
        If ``rank`` is not an int, an item is not a shared variable that holds an array, a value does not have the
        variable's dtype or number of dimensions, or ``batch`` is of another type.
    ValueError
        If there is no such rank, the number of values differs from the number of variables, ``batch`` is given for a
        0-dimensional value, or a value does not have length 1 along a broadcastable axis.
    IndexError
        If ``batch`` is out of range.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.broadcast(s, [0])
    ...     synk.set_value(1, s, [5])
    ...     print(synk.gather(s, nd_up=0))
    [0. 5.]
    """
    session, variables = start("set_value", shared_vars, to_set=True)
    with session.lock, session.timeline.call("set_value"):
        matched, given = match(shared_vars, variables, values), as_list(shared_vars, values)
        put(session, variables, matched, ranks=(check_rank(session, rank),), batch=batch, given=given)


def get_value(rank: int, shared_vars: Variables) -> Any:
    """Return a copy of one rank's value of each variable; no variable changes.

    Parameters
    ----------
    rank : int
        From 0 to the number of ranks minus 1.
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses.

    Returns
    -------
    numpy.ndarray, or list of numpy.ndarray
        A new array in the controller's memory, with the variable's dtype and its shape on that rank.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If ``rank`` is not an int, or an item is not a shared variable that holds an array.
    ValueError
        If there is no such rank, or no function of the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     print(synk.get_value(1, s))
    [3.]
    """
    session, variables = start("get_value", shared_vars)
    rank = check_rank(session, rank)
    with session.lock, session.timeline.call("get_value"):
        values = session.run(Get(session.keys(variables), ranks=(rank,)))[rank]
        session.timeline.switch(TRANSFERS)
        return like(shared_vars, [np.array(value) for value in values])


def get_shapes(shared_vars: Variables) -> list[Any]:
    """Return the shape of each variable on each rank.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses.

    Returns
    -------
    list of tuple of int
        One shape for each rank, in rank order; for a list of variables, a list of such lists.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        If no function of the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     print(synk.get_shapes(s))
    [(2,), (1,)]
    """
    session, variables = start("get_shapes", shared_vars)
    return like(shared_vars, [list(shapes) for shapes in zip(*session.shapes(variables))])


def get_lengths(shared_vars: Variables) -> list[Any]:
    """Return the length of axis 0 of each variable on each rank.

    Parameters
    ----------
    shared_vars : shared variable or list
        Tensor variables that a function of the session uses, with at least one dimension.

    Returns
    -------
    list of int
        One length for each rank, in rank order; for a list of variables, a list of such lists.

    Raises
    ------
    SessionError
        Without a session, and in a `sequence` after its first part.
    TypeError
        If an item is not a shared variable that holds an array.
    ValueError
        For a 0-dimensional variable, or if no function of the session uses a variable.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     print(synk.get_lengths(s))
    [2, 1]
    """
    session, variables = start("get_lengths", shared_vars)
    for var in variables:
        if var.ndim == 0:
            raise ValueError(f"get_lengths: {var} is 0-dimensional; expected at least one dimension")
    return like(shared_vars, [[shape[0] for shape in shapes] for shapes in zip(*session.shapes(variables))])


@contextlib.contextmanager
def restored(session: Session, variables: Sequence[Any]) -> Iterator[None]:
    """Give variables on all ranks the values at the end of a block that they had at its beginning."""
    keys, lead = session.keys(variables), session.stale.lead
    session.run(KeepValues(keys))
    try:
        yield
    except WorkerRestarted:
        session.replica.restore()
        session.stale.add(variables)  # the new worker has copied none
        raise
    except BaseException:
        with contextlib.suppress(SynkhronosError):  # this exception says more
            _restore(session, keys, lead)
        raise
    else:
        _restore(session, keys, lead)


def _restore(session: Session, keys: tuple[int, ...], lead: Any) -> None:
    try:
        if not session.broken:
            session.run(KeepValues(keys, restore=True))
    finally:
        with deferred_interrupts():
            session.replica.restore()
            session.stale.lead = lead
