"""Replicas of shared variables: those that are stale on other ranks than the controller, and those that differ."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos import _graph
from synkhronos._backends import is_random_state
from synkhronos._graph import SentValue
from synkhronos._native import native
from synkhronos._rank import Broadcast, Command, Digest, Get
from synkhronos._session.diagnostics import warn
from synkhronos._utils.interrupts import deferred_interrupts


class Updates(NamedTuple):
    """Variables that a function updates on the controller alone.

    Attributes
    ----------
    known, unknown : tuple of SentValue
        Records of the variables that the other ranks have, and of those that they do not have yet.
    keys : frozenset of int
        Keys of the former.
    n_added : int
        Number of variables that the other ranks had been given by then.
    """

    known: tuple[SentValue, ...]
    unknown: tuple[SentValue, ...]
    keys: frozenset[int]
    n_added: int


class StaleReplicas:
    """Variables whose present values only the controller has, although they are valid for all ranks.

    An exact function that the controller computes alone leaves its updates here. The other ranks get the values, all in
    one message, before the next command that may use them.

    Parameters
    ----------
    table : VariableTable
        The replicated shared variables.

    Attributes
    ----------
    keys : set of int
        Keys of the variables.
    lead : float or None
        See `_costs.choose`.
    """

    def __init__(self, table: _graph.VariableTable) -> None:
        self.keys: set[int] = set()
        self.lead: float | None = None
        self._table = table

    def updates_of(self, variables: Sequence[Any]) -> Updates:
        """Return the records of variables, for `begin` and `end`."""
        keys = {_graph.sync_of(var.container): self._table.key(var) for var in variables}
        known = tuple([sync for sync, key in keys.items() if key is not None])
        unknown = tuple([sync for sync, key in keys.items() if key is None])
        return Updates(
            known, unknown, frozenset([key for key in keys.values() if key is not None]), self._table.n_added
        )

    def is_current(self, updates: Updates) -> bool:
        """Return whether `updates_of` would return the same for the same variables."""
        return not updates.unknown or updates.n_added == self._table.n_added

    def add(self, variables: Sequence[Any]) -> None:
        """Record that the controller's present values are valid for all ranks.

        Variables that the other ranks do not have yet are left out: they are sent with a function.
        """
        self.end(self.updates_of(variables))

    def begin(self, updates: Updates) -> None:
        """Record that the controller begins to compute new values of variables; `end` must follow."""
        self.keys |= updates.keys
        native.set_stale(updates.known, _graph.IN_WORK)

    def end(self, updates: Updates) -> None:
        """Record that the controller has computed new values, which are valid for all ranks."""
        self.keys |= updates.keys  # first: after an exception between these lines, the next call does this again
        native.note_values(updates.known, True)
        native.note_values(updates.unknown, False)

    def send(self, issue: Callable[[Command], Any]) -> None:
        """Give the other ranks the values, by ``issue(command)``."""
        variables = self._variables()
        if variables:
            values = [_graph.host_array(var, value=_graph.value_for_others(var)) for var in variables.values()]
            issue(Broadcast(tuple(variables), tuple([value.shape for value in values])))
        self.clear()

    def clear(self) -> None:
        """Forget the variables, because the other ranks have their values or have ended."""
        with deferred_interrupts():
            native.set_stale(tuple([_graph.sync_of(var.container) for var in self._variables().values()]), None)
            self.keys.clear()

    def _variables(self) -> dict[int, Any]:
        """Return the variables that the program has not dropped, by key."""
        known = self._table.items() if self.keys else {}
        return {key: known[key] for key in sorted(self.keys) if key in known}


class ReplicaCheck:
    """Tracks which shared variables should be equal on all ranks, and compares them.

    Variables that differ on purpose are left out: random states, sliceable shared variables, and variables that were
    scattered.

    Parameters
    ----------
    table : VariableTable
        The replicated shared variables.
    run : callable
        ``run(command)`` has every rank execute a command, and returns the results in rank order.
    master_rank : int
    every : int
        Compare a function's variables before every ``every``-th function call; 0: never.

    Attributes
    ----------
    n_changes : int
        Incremented whenever the result of `scattered` may change.
    """

    def __init__(
        self, table: _graph.VariableTable, run: Callable[[Command], list[Any]], master_rank: int, every: int
    ) -> None:
        self.every = every
        self.n_changes = 0
        self._table = table
        self._run = run
        self._master_rank = master_rank
        self._n_calls = 0
        self._has_noted = False  # whether a set below was ever filled; faster than asking if a `WeakSet` is empty
        self._data: Any = weakref.WeakSet()  # their containers
        self._parts: Any = weakref.WeakSet()
        self._warned: Any = weakref.WeakSet()

    def note_data(self, variables: Sequence[Any]) -> None:
        """Record that variables hold data, of which each rank has its own rows."""
        for var in variables:
            self._has_noted = True
            self._data.add(var.container)

    def is_data(self, var: Any) -> bool:
        """Return whether a variable holds data, of which each rank may have its own rows."""
        return var.container in self._data

    def note_parts(self, variables: Sequence[Any], are_parts: bool = True) -> None:
        """Record that variables were scattered, or (if not ``are_parts``) made equal on all ranks."""
        self._has_noted = self._has_noted or are_parts
        if not self._has_noted:
            return
        for var in variables:
            self.n_changes += are_parts or var.container in self._parts
            (self._parts.add if are_parts else self._parts.discard)(var.container)
            if not are_parts:
                self._data.discard(var.container)

    def scattered(self, variables: Sequence[Any]) -> list[Any]:
        """Filter variables: return the ones that were scattered and have not been made equal since."""
        return [var for var in variables if var.container in self._parts]

    def all(self) -> list[Any]:
        """Return all replicated variables that should be equal on all ranks."""
        return self._equal(list(self._table.items().values()))

    def _equal(self, variables: Sequence[Any]) -> list[Any]:
        return [
            var
            for var in variables
            if self._table.key(var) is not None
            and _graph.is_tensor_variable(var)
            and not is_random_state(var)
            and var.container not in self._parts
            and var.container not in self._data
        ]

    def compare(self, variables: Sequence[Any]) -> dict[Any, float]:
        """Return the variables that differ between ranks, each with its largest difference from the controller's value.

        See `synkhronos.check_replicas`.
        """
        if not variables:
            return {}
        keys = self._table.keys_of(variables)
        differ: dict[Any, float] = {}
        for var, key, digests in zip(variables, keys, zip(*self._run(Digest(keys)))):
            if len(set(digests)) == 1:
                continue
            values = [result[0] for result in self._run(Get((key,)))]
            own = values[self._master_rank]
            most = max(float(distances(own, value).max(initial=0)) for value in values)
            if most > 0:  # 0.0 and -0.0, and different NaNs, have different digests but count as equal
                differ[var] = most
        return differ

    def see_calls(self, variables: Sequence[list[Any]]) -> None:
        """Compare the functions' variables before a call if a comparison is due; warn once for each variable.

        Parameters
        ----------
        variables : sequence of list
            The shared variables of each function that is called.
        """
        n_before, self._n_calls = self._n_calls, self._n_calls + len(variables)
        if n_before // self.every == self._n_calls // self.every:
            return
        for var, most in self.compare(self._equal(list(dict.fromkeys(chain(*variables))))).items():
            if var.container not in self._warned:
                self._warned.add(var.container)
                warn(
                    f"the replicas of {var} differ between ranks, by up to {most:.6g}, before call {self._n_calls}: "
                    "updates are local, and set_value sets the controller's copy only. Make them equal by "
                    "synkhronos.broadcast, or average them by synkhronos.all_reduce"
                )


def distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return absolute differences element by element.

    Equal infinities, and two NaNs, have the difference 0. Where only one element is NaN the difference is infinite. If
    the shapes differ, return an infinite scalar.
    """
    if one.shape != other.shape:
        return np.array(np.inf)
    wide = np.complex128 if "c" in (one.dtype.kind, other.dtype.kind) else np.longdouble
    one, other = one.astype(wide), other.astype(wide)
    with np.errstate(invalid="ignore"):
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        return np.where(same, 0, np.nan_to_num(np.abs(one - other), nan=np.inf, posinf=np.inf))
