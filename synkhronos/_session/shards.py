"""Shapes of shared variables on the ranks, and the origins of scattered rows.

`ShapeCache` caches shapes. `Shards` is used by sessions with ``restart_workers``. It records where each rank's rows of
a scattered variable came from, so that a new worker can get them again. To this end it holds a weak reference to the
scattered array, and a digest of each rank's rows. Rows are restored if the array still exists and the rows are bitwise
the same. Otherwise, or if an update has changed the rows, only the dead worker had them, and they are lost. Then each
use of the variable raises an error until the rows are set again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos import _graph, _rank
from synkhronos._session.submission import Sequencer
from synkhronos._utils import KeyedCache
from synkhronos._utils.rows import Rows, Selection
from synkhronos.errors import SessionError

#: Limits of what a `ShapeCache` holds, because programs may make and drop any number of functions and variables.
_MOST_SLOTS, _MOST_COUNTS = 16, 1024


class ShapeCache:
    """Cache of the shapes of shared variables on all ranks, and of the variables that calls change.

    Commands that may change shapes are counted, and an entry is valid for the counts and the controller's own shapes at
    that time. When a worker replaces a dead one, it loads functions, which is such a command.

    Parameters
    ----------
    sequencer : Sequencer
    replica : Replica
        The controller's replica.
    master_rank : int
    """

    def __init__(self, sequencer: Sequencer, replica: _rank.Replica, master_rank: int) -> None:
        self._sequencer, self._replica, self._master_rank = sequencer, replica, master_rank
        self._shapes: KeyedCache[list[list[tuple[int, ...]]]] = KeyedCache(_MOST_SLOTS)  # by the keys of the variables
        self.is_used = False  # whether shapes were ever asked for; else `see` need not be called
        self._n_changes = 0  # of all variables
        self._changes: Counter[int] = Counter()  # by a variable's key: calls that may have changed its shape
        self._updated: KeyedCache[set[Any]] = KeyedCache(_MOST_SLOTS)  # keys of variables, by function and call

    def of(self, variables: Sequence[Any]) -> list[list[tuple[int, ...]]]:
        """Return, for each rank, the list of the variables' shapes on that rank."""
        self._sequencer.check_first(_rank.Shapes.__name__)
        keys = self._replica.variables.keys_of(variables)
        own = [_graph.get_array(variable).shape for variable in variables]
        version = self._n_changes, [self._changes[key] for key in keys], own
        self.is_used = True
        shapes = self._shapes.get(keys, version)
        return self._shapes.put(keys, version, self._sequencer.run(_rank.Shapes(keys))) if shapes is None else shapes

    def see(self, command: _rank.Command) -> None:
        """Record which shapes a command may change."""
        for part in _rank.parts_of(command):
            if isinstance(part, _rank.Call):
                self._changes.update(self.changed_by(part))
                if len(self._changes) > _MOST_COUNTS:
                    self._changes.clear()
                    self._n_changes += 1
            elif type(part) not in _rank.KEEPS_SHAPES:
                self._n_changes += 1

    def changed_by(self, command: _rank.Command) -> Collection[Any]:
        """Return the keys of variables that a command changes on each rank by itself."""
        if isinstance(command, _rank.Call):
            slot, updated = command.function, self._updated.get(command.function, command)
            return self._updated.put(slot, command, self._updated_by(command)) if updated is None else updated
        if isinstance(command, _rank.Loop):
            variables = _graph.updated_variables(self._replica.functions[command.function])
            own = command.exchange.variables + command.exchange.others + tuple([key for key, _ in command.shared])
            return {*own, *map(self._replica.variables.key, variables)}
        if isinstance(command, _rank.InOrder):
            return [key for part in command.parts for key in self.changed_by(part)]
        if isinstance(command, _rank.EndLoop):
            return () if command.keep or command.discard else command.variables
        if isinstance(command, _rank.TimeFunction):
            variables = _graph.updated_variables(self._replica.functions[command.function])
            return {*map(self._replica.variables.key, variables)}
        if isinstance(command, (_rank.Put, _rank.AllReduce, _rank.Reduce, _rank.AllGather, _rank.KeepValues)):
            return command.variables
        return ()

    def _updated_by(self, call: _rank.Call) -> set[Any]:
        keys = (call.function, *(() if call.follow is None else (call.follow.function,)))
        functions = [self._replica.functions[key] for key in keys]
        updated = [var for function in functions for var in _graph.updated_variables(function)]
        set_by_ranks = () if call.step is None else [key for key in call.step.others if key not in call.step.adopted]
        return {*call.updated, *set_by_ranks, *map(self._replica.variables.key, updated)}


class Origin(NamedTuple):
    """Source of one rank's rows of a variable.

    Parameters
    ----------
    array : callable
        Returns the program's array, or ``None`` if it does not exist any more.
    rows : Rows, array or None
        The rows of the array; ``None``: all.
    digest : bytes
        Digest of the rows that the rank received.
    """

    array: Callable[[], Any]
    rows: Selection | None
    digest: bytes

    def read(self, dtype: Any) -> np.ndarray | None:
        """Return the rows; ``None`` if the array does not exist any more, or the rows have changed."""
        array = self.array()
        if array is None:
            return None
        if isinstance(self.rows, Rows):
            array = array[slice(*self.rows.bounds)]
        elif self.rows is not None:
            if len(self.rows) and self.rows.max() >= len(array):
                return None
            array = array[self.rows]
        value = np.array(array, dtype, order="C")
        return value if _rank.digest_of(value) == self.digest else None


def origin_of(given: Any, value: Any) -> Callable[[], Any]:
    """Return a callable that returns one of the program's arrays, but does not keep it alive.

    Parameters
    ----------
    given : object
        The value that the program passed.
    value : numpy.ndarray or Data
        The converted value; the same object as ``given`` if no conversion was needed.

    Returns
    -------
    callable
        ``read()`` returns the array, or ``None`` if it does not exist any more.
    """
    if not isinstance(value, np.ndarray) and given is value:  # Data
        data: Callable[[], Any] = weakref.ref(value)
        return lambda: getattr(data(), "data", None)
    array = given if isinstance(given, np.ndarray) else value
    owner = array
    while isinstance(owner.base, np.ndarray):  # refer to X, because a view such as X[:100] may be deleted before it
        owner = owner.base
    found, n_bytes = weakref.ref(owner), owner.nbytes
    offset = _address(array) - _address(owner)
    shape, strides, dtype = array.shape, array.strides, array.dtype.str

    def read() -> Any:
        owner = found()
        if owner is None or owner.nbytes != n_bytes:
            return None
        return np.asarray(_View(owner, (_address(owner) + offset, True), shape, strides, dtype))

    return read


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class _View:
    """View of an array's memory, by NumPy's array interface."""

    def __init__(self, owner: Any, data: tuple[int, bool], shape: Any, strides: Any, dtype: str) -> None:
        self._owner = owner
        self.__array_interface__ = {"version": 3, "data": data, "shape": shape, "strides": strides, "typestr": dtype}


class Shards:
    """Record of the origins of each rank's rows of scattered variables, which restores them in new workers.

    Parameters
    ----------
    replica : Replica
        The controller's replica.
    n_ranks : int
    issue : callable
        ``issue(command)`` has every rank execute a command.
    stage : callable
        ``stage(arrays)`` copies arrays to staging memory, and returns their references.
    """

    def __init__(
        self,
        replica: _rank.Replica,
        n_ranks: int,
        issue: Callable[[_rank.Command], list[Any]],
        stage: Callable[[Sequence[np.ndarray]], Sequence[Any]],
    ) -> None:
        self._replica, self._n_ranks, self._issue, self._stage = replica, n_ranks, issue, stage
        self._all = frozenset(range(n_ranks))
        # by container: the origin of each rank's rows (None: only the rank has them), and the ranks whose rows are lost
        self._origins: Any = weakref.WeakKeyDictionary()
        self._lost: Any = weakref.WeakKeyDictionary()
        self._harmless: set[int] = set()  # keys of functions that update no variable with an origin
        self._waiting: set[int] = set()  # ranks whose new workers still wait for their rows

    def tracks(self, var: Any) -> bool:
        """Return whether each rank has its own rows of a variable."""
        return var.container in self._origins

    def note(self, var: Any, rank: int, origin: Origin) -> None:
        """Record the origin of a rank's rows."""
        self._origins[var.container][rank] = origin
        self._harmless.clear()

    def forget(self, variables: Sequence[Any]) -> None:
        """Record that variables have the same value on all ranks."""
        for var in variables:
            self._origins.pop(var.container, None)

    def issue(self, command: _rank.Command) -> list[Any]:
        """Have every rank execute a command.

        Raises
        ------
        SessionError
            If the command uses lost rows; nothing is sent then.
        """
        if not self._origins and not isinstance(command, (_rank.Put, _rank.InOrder)):
            return self._issue(command)
        lost = {container: set(ranks) for container, ranks in self._lost.items()}
        equal: list[Any] = []
        for part in _rank.parts_of(command):
            self._follow(part, lost, equal)
        results = self._issue(command)
        self.forget(equal)
        self._lost = weakref.WeakKeyDictionary({container: ranks for container, ranks in lost.items() if ranks})
        return results

    def _follow(self, command: _rank.Command, lost: dict[Any, set[int]], equal: list[Any]) -> None:
        """Check that a command uses no lost rows, and drop the origins of the variables that it may change.

        Rows that the command sets are removed from ``lost``. Variables that it makes equal on all ranks are appended to
        ``equal``.
        """
        if isinstance(command, _rank.Call):
            if lost:
                self._check(self._used(command, _graph.shared_variables_of), self._all, lost)
            if command.function not in self._harmless:
                for var in self._used(command, _graph.updated_variables):
                    self._change(var, self._all)
                self._harmless.add(command.function)
        elif isinstance(command, _rank.Loop):
            function = self._replica.functions[command.function]
            self._check(_graph.shared_variables_of(function), self._all, lost)
            keys = [*command.exchange.variables, *(key for key, _ in command.shared)]
            for var in [*_graph.updated_variables(function), *self._variables(keys)]:
                self._change(var, self._all)
        elif isinstance(command, _rank.EndLoop):
            if not (command.keep or command.discard):
                equal += self._variables(command.variables)
        elif isinstance(command, _rank.Put):
            ranks = self._all if command.ranks is None else frozenset(command.ranks)
            for key, var in zip(command.variables, self._variables(command.variables)):
                if key in command.digests and not self.tracks(var):
                    self._origins[var.container] = [None] * self._n_ranks
                self._change(var, ranks)
                lost.get(var.container, set()).difference_update(ranks)
        elif isinstance(command, (_rank.Broadcast, _rank.Share)):
            for var in self._variables(command.variables):
                lost.pop(var.container, None)
                equal.append(var)
        elif isinstance(
            command, (_rank.AllGather, _rank.AllReduce, _rank.Digest, _rank.Get, _rank.Reduce, _rank.Shapes)
        ):
            asked = command.ranks if isinstance(command, _rank.Get) else None
            variables = self._variables(command.variables)
            self._check(variables, self._all if asked is None else frozenset(asked), lost)
            if isinstance(command, (_rank.AllGather, _rank.AllReduce)):
                for var in variables:
                    self._change(var, self._all)
                equal += variables

    def _variables(self, keys: Sequence[int]) -> list[Any]:
        return [self._replica.variables[key] for key in keys]

    def _used(self, call: _rank.Call, variables_of: Callable[[Any], list[Any]]) -> list[Any]:
        """Return ``variables_of(function)`` for each function of a call, and the variables that the call updates."""
        keys = (call.function, *(() if call.follow is None else (call.follow.function,)))
        variables = [var for key in keys for var in variables_of(self._replica.functions[key])]
        return [*variables, *self._variables(call.updated)]

    def _change(self, var: Any, ranks: frozenset[int]) -> None:
        """Record that a variable's rows on these ranks may differ from the scattered ones."""
        if self.tracks(var):
            for rank in ranks:
                self._origins[var.container][rank] = None

    def _check(self, variables: Sequence[Any], ranks: frozenset[int], lost: dict[Any, set[int]]) -> None:
        for var in variables:
            gone = sorted(ranks & lost.get(var.container, set()))
            if gone:
                raise SessionError(
                    f'the rows of "{var}" on rank {gone[0]} are lost, because its worker died and the scattered array '
                    "is gone or has changed; scatter the variable again, or set the rows by "
                    f"synkhronos.set_value({gone[0]}, ...)"
                )

    def restore(self, ranks: Sequence[int]) -> None:
        """Send new workers their rows again; record the rows that cannot be restored as lost."""
        self._waiting.update(ranks)
        while self._waiting:  # if another worker dies meanwhile, a nested call restores the rows of all that wait
            rank = min(self._waiting)
            for key, var in self._replica.variables.items().items():
                if self.tracks(var):
                    origin = self._origins[var.container][rank]
                    value = None if origin is None else origin.read(var.dtype)
                    if value is None:
                        self._lost.setdefault(var.container, set()).add(rank)
                    else:
                        (ref,) = self._stage([value])
                        self._issue(_rank.Put((key,), (_rank.Source(ref, None),), None, (rank,)))
            self._waiting.discard(rank)

    def lost(self) -> list[Any]:
        """Return the variables that have lost rows."""
        return [var for var in self._replica.variables.items().values() if var.container in self._lost]
