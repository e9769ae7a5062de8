"""Replicas of shared variables: those that are the controller's memory, those that are stale, and those that differ."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence, Set
from itertools import chain
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos import _graph
from synkhronos._backends import is_random_state
from synkhronos._graph import SentValue
from synkhronos._memory import Place, copy_to_heap, look_at_free_memory, place_of
from synkhronos._native import native
from synkhronos._rank import Broadcast, Command, Digest, Get, Replica, Share, Unshare
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

    An exact function that the controller computes alone leaves its updates here. The other ranks get the values
    before the next command that may use them.

    Large values exist once on a node: the workers view the controller's array, in its part of the shared heap, instead
    of a copy. The controller may then change the array in place only if all ranks are to have the new value. Before a
    command that changes the variable on each rank by itself, the workers copy it.

    Parameters
    ----------
    replica : Replica
        The controller's replica.
    sizes : tuple of int
        Number of ranks on each node, the controller's first. The leader of each other node has a copy, which its
        workers view. A node with one rank has no memory for that, so nothing is shared then.

    Attributes
    ----------
    keys : set of int
        Keys of the variables.
    shared : set of int
        Keys of variables that the workers view. `SentValue.viewed` is the array.
    lead : float or None
        See `_costs.choose`.
    shares : bool
        Whether the workers can view values.
    """

    def __init__(self, replica: Replica, sizes: tuple[int, ...]) -> None:
        self.keys: set[int] = set()
        self.shared: set[int] = set()
        self.lead: float | None = None
        self._table, self._heap, self._n_ranks = replica.variables, replica.heap, sizes[0]
        self._placed: dict[int, np.ndarray] = {}  # by the id of a container, while variables are loaded
        self._is_on_one_node = len(sizes) == 1
        self.shares = min(sizes) > 1 and replica.heap.base is not None

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

    def note_sent(self, variables: Sequence[Any]) -> Callable[[bool], None]:
        """Record that the other ranks have the controller's present values.

        Returns
        -------
        callable
            ``undo(is_sent)`` undoes this for the variables whose values have not changed since. ``is_sent``: the ranks
            may have got the values.
        """
        records = [(self._table.key(var), _graph.sync_of(var.container)) for var in variables]
        stale = [sync.stale for _, sync in records]
        _graph.note_sent(variables)
        sent = [sync.sent for _, sync in records]

        def undo(is_sent: bool) -> None:
            for (key, sync), old, noted in zip(records, stale, sent):
                if sync.sent is not None and sync.sent is not noted:
                    continue
                sync.sent = None
                if old is not None and key is not None and sync.stale is None and not is_sent:
                    sync.stale = old
                    self.keys.add(key)

        return undo

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
        """Give the other ranks the values, by ``issue(command)``.

        A variable of which another thread changes the value meanwhile stays stale.
        """
        variables, wanted = self._known(self.keys), set(self.keys)
        syncs = {key: _graph.sync_of(var.container) for key, var in variables.items()}
        blocks: dict[int, np.ndarray] = {}
        copied = []
        viewed = self._viewed(but=self.keys)
        for key, var in variables.items():
            value = _graph.value_for_others(var)
            if value is None or syncs[key].viewed is not value:
                block = self._block(var, value, lambda: (*viewed, *blocks.values()))
                if block is None:
                    copied.append(key)
                else:
                    syncs[key].stale = blocks[key] = block
        if blocks:
            with deferred_interrupts():  # some workers may view either array until all have answered
                for key in blocks:
                    syncs[key].viewed = None
                self.shared.update(blocks)
            places = [place for place in map(self._place, blocks.values()) if place is not None]
            if not all(issue(Share(tuple(blocks), tuple(places)))):  # another node lacks memory
                self.shares = False
                copied += blocks
                blocks = {}
        if copied:
            shared = self.shared.intersection(copied)
            if shared:  # whose arrays the broadcast must not overwrite
                issue(Unshare(tuple(shared)))
                self._note(dict.fromkeys(shared), variables)
            pairs = [(var, _graph.value_for_others(var)) for var in map(variables.__getitem__, copied)]
            shapes = [_graph.host_array(var, value=value).shape for var, value in pairs]
            issue(Broadcast(tuple(copied), tuple(shapes)))
        with deferred_interrupts():
            changed = {key for key, block in blocks.items() if syncs[key].stale is not block}
            self._note({key: block for key, block in blocks.items() if key not in changed}, variables)
            self._end_stale(wanted - changed)

    def clear(self) -> None:
        """Forget all variables, because the other ranks have ended."""
        with deferred_interrupts():
            self._end_stale(self.keys)
            self._note(dict.fromkeys(self.shared), self._known(self.shared))

    # -- values that exist once

    def copied(self, variables: Sequence[Any]) -> list[Any]:
        """Return those of some variables of which each rank has a copy, even if nothing changes them on the ranks."""
        return [var for var in variables if not self._is_shareable(var, _graph.get_array(var))]

    def place(self, var: Any) -> Place | None:
        """Return the place of the array that workers without a variable are to view; ``None``: they get a copy."""
        key = self._table.key(var)
        if not self._is_on_one_node:
            array = None
        elif key is None:
            value = _graph.get_array(var)
            array = self._block(var, value, lambda: (*self._viewed(), *self._placed.values()))
            if array is not None:
                self._placed[id(var.container)] = array
        else:
            array = _graph.sync_of(var.container).viewed if key in self.shared else None
        return None if array is None else self._place(array)

    def begin_loading(self) -> None:
        """Begin to ask for the places of variables that the workers do not have yet."""
        self._placed.clear()

    def note_loaded(self, variables: Mapping[int, Any]) -> None:
        """Record that the workers have loaded these variables, and view the arrays whose `place` they got."""
        self._note({key: self._placed.get(id(var.container)) for key, var in variables.items()}, variables)
        self._placed.clear()
        self.shared.intersection_update(self._table.items())

    def view(self, keys: Sequence[int], issue: Callable[[Command], Any]) -> bool:
        """Have the workers view the values of some variables, by ``issue(command)``; return whether they do."""
        missing = self.not_viewed(keys)
        if missing and self.shares:
            self.add([self._table[key] for key in missing])
            self.send(issue)
        return not self.not_viewed(missing)

    def not_viewed(self, keys: Sequence[int]) -> list[int]:
        """Return the keys of the variables of which workers do not view the controller's present value."""
        return [key for key in keys if not self._is_viewed(key)]

    def _is_viewed(self, key: int) -> bool:
        if key not in self.shared or key in self.keys:
            return False
        value = _graph.get_array(self._table[key])
        return _graph.sync_of(self._table[key].container).viewed is value

    def give_again(self, keys: Set[int]) -> dict[int, Any]:
        """Record that workers may not view the present values of some variables any more; return the stale values."""
        variables = self._known(keys & self.shared)
        stale: dict[int, Any] = {}
        with deferred_interrupts():
            self.keys.update(variables)
            for key, var in variables.items():
                sync = _graph.sync_of(var.container)
                if sync.viewed is not None:  # else it is stale already
                    sync.stale, sync.viewed = sync.viewed, None
                stale[key] = sync.stale
        return stale

    def unshare(self, keys: Set[int], issue: Callable[[Command], Any]) -> None:
        """Have the workers copy the values of some variables that they view, by ``issue(command)``."""
        variables = self._known(keys)
        syncs = {key: _graph.sync_of(var.container) for key, var in variables.items()}
        stale = self.give_again(keys)  # if a worker fails, some have copies, and all get the values again
        if variables:
            issue(Unshare(tuple(variables)))
        with deferred_interrupts():
            self._note(dict.fromkeys(keys), variables)
            self._end_stale({key for key, sync in syncs.items() if sync.stale is stale[key]})

    def _is_shareable(self, var: Any, value: Any) -> bool:
        return self.shares and _graph.is_large(var, value)

    def _place(self, array: np.ndarray) -> Place | None:
        return place_of(self._heap, array)

    def _viewed(self, but: Set[int] = frozenset()) -> list[Any]:
        """Return the arrays that the workers view, except for those of some variables."""
        return [_graph.sync_of(var.container).viewed for var in self._known(self.shared - but).values()]

    def _block(self, var: Any, value: Any, others: Callable[[], Sequence[Any]]) -> np.ndarray | None:
        """Return a value in the heap, where it is moved if needed; ``None`` if the other ranks must have copies.

        Parameters
        ----------
        var : shared variable
        value : object
        others : callable
            ``others()`` returns the arrays that the workers view, or are about to view, as other variables.
        """
        if not self._is_shareable(var, value):
            return None
        # if the program has set two variables to one array, a change of one must not change the other
        if self._place(value) is not None and not any(value is one for one in others()):
            return value
        if self._heap.short:
            look_at_free_memory(self._heap, self._n_ranks)
        block: np.ndarray = self._heap.call(copy_to_heap, value)
        if self._place(block) is None:
            return None
        if _graph.get_array(var) is value:
            _graph.set_array(var, block)
        return block

    def _note(self, viewed: Mapping[int, Any], variables: Mapping[int, Any]) -> None:
        """Record the arrays that the workers view now; ``None``: they have copies."""
        with deferred_interrupts():
            for key, array in viewed.items():
                if key in variables:
                    _graph.sync_of(variables[key].container).viewed = array
                (self.shared.discard if array is None else self.shared.add)(key)

    def _end_stale(self, keys: Set[int]) -> None:
        """Record that the other ranks have the values of some variables, or need them no more."""
        with deferred_interrupts():
            variables = self._known(keys).values()
            native.set_stale(tuple([_graph.sync_of(var.container) for var in variables]), None)
            self.keys.difference_update(keys)

    def _known(self, keys: Collection[int]) -> dict[int, Any]:
        """Return the variables that the program has not dropped, by key."""
        known = self._table.items() if keys else {}
        return {key: known[key] for key in sorted(keys) if key in known}


class ReplicaCheck:
    """Tracks which shared variables should be equal on all ranks, and compares them.

    Variables that differ on purpose are left out: random states, sliceable shared variables, variables that were
    scattered, and those that a training loop changes on each rank.

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
        self._in_loops: Any = weakref.WeakSet()
        self._warned: Any = weakref.WeakSet()

    def note_data(self, variables: Sequence[Any]) -> None:
        """Record that variables hold data, of which each rank has its own rows."""
        for var in variables:
            self._has_noted = True
            self._data.add(var.container)

    def note_loop(self, variables: Sequence[Any], begins: bool) -> None:
        """Record that a training loop begins or ends, in which variables differ between ranks."""
        for var in variables:
            (self._in_loops.add if begins else self._in_loops.discard)(var.container)

    def is_in_loop(self, var: Any) -> bool:
        """Return whether a training loop changes a variable on each rank at the moment."""
        return var.container in self._in_loops

    def is_data(self, var: Any) -> bool:
        """Return whether a variable holds data, of which each rank may have its own rows."""
        return var.container in self._data

    def differs(self, variables: Sequence[Any]) -> bool:
        """Return whether any of the variables was scattered, or holds data, since it was equal on all ranks."""
        return self._has_noted and any(var.container in kind for kind in (self._parts, self._data) for var in variables)

    def note_parts(self, variables: Sequence[Any], are_parts: bool = True) -> Callable[[bool], None]:
        """Record that variables were scattered, or (if not ``are_parts``) made equal on all ranks.

        Returns
        -------
        callable
            ``undo(is_sent)`` undoes this. ``is_sent``: ranks may have got their rows, so variables stay scattered.
        """
        self._has_noted = self._has_noted or are_parts
        changed: list[tuple[Any, Any]] = []
        for var in variables if self._has_noted else ():
            self.n_changes += are_parts or var.container in self._parts
            for kind in (self._parts,) if are_parts else (self._parts, self._data):
                if (var.container in kind) != are_parts:
                    changed.append((kind, var.container))
                    (kind.add if are_parts else kind.discard)(var.container)

        def undo(is_sent: bool) -> None:
            for kind, container in () if are_parts and is_sent else changed:
                self.n_changes += 1
                (kind.discard if are_parts else kind.add)(container)

        return undo

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
            and var.container not in self._in_loops
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
        self.warn_of_differences(list(dict.fromkeys(chain(*variables))))

    def warn_of_differences(self, variables: Sequence[Any]) -> None:
        """Compare variables, and warn once of each that differs between ranks."""
        for var, most in self.compare(self._equal(variables)).items():
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
