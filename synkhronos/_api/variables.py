"""Helpers of the collectives on shared variables: find the variables, match and check values, and set variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._api.data_arrays import Data, condition
from synkhronos._backends import TITLE, is_device_array
from synkhronos._collectives import OPS
from synkhronos._rank import Put, Source
from synkhronos._session import Origin, Session, current, origin_of
from synkhronos._utils.rows import Rows, Selection, select, shares, take


def start(function: str, shared_vars: Any, to_set: bool = False) -> tuple[Session, list[Any]]:
    """Return the session and a list of the variables, after distributing them to the ranks if necessary.

    With ``to_set``, variables that no function uses are distributed, too; otherwise they raise `ValueError`.
    """
    session = current(function)
    variables = list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]
    if not variables:
        raise ValueError(f"{function}: shared_vars is empty; expected at least one shared variable")
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
        raise ValueError(f"{function}: shared_vars has a variable twice: {variables}; name it once")
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
