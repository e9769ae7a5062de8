"""`Session`: owner of all mutable state between `fork` and `close`. Public functions delegate to it.

Code of other folders executes commands by `Session.submit`, which a sequence may record, or by `Session.run`, which
executes at once. Both call `Session.issue`: the workers receive the command, the controller executes it on its own
replica, and the results of all ranks are returned in rank order. Results of other ranks are views of shared memory,
which are valid until the next command. So callers combine them while they hold `Session.lock`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _backends, _graph
from synkhronos._memory import ArrayRef, Segment, SegmentTable
from synkhronos._multinode import MultiNodeGroup, Nodes, Options
from synkhronos._processes import TRANSFERS, ProcessGroup, kind_of
from synkhronos._rank import (
    IGNORES_VALUES,
    Call,
    Command,
    Encoder,
    Envelope,
    Flush,
    Load,
    Release,
    Step,
    keeps_equal,
    parts_of,
    start_ranks,
)
from synkhronos._session.devices import connect_gpus, take_gpus
from synkhronos._session.diagnostics import controller_error
from synkhronos._session.dispatch import Dispatcher, RankGroup, State
from synkhronos._session.function_registry import FunctionRegistry
from synkhronos._session.ledger import Ledger, Staged
from synkhronos._session.replicas import ReplicaCheck, StaleReplicas, Updates
from synkhronos._session.shards import ShapeCache, Shards
from synkhronos._session.submission import Sequencer
from synkhronos._utils.interrupts import collect_garbage, deferred_interrupts, let_interrupts_pass
from synkhronos.errors import SessionError

#: Segments of this process. They outlive a session, so that `Data` of one session can be used in the next one.
segments = SegmentTable()


_MOST_ATTEMPTS = 10  # to give the workers a value that does not change meanwhile


class Session:
    """All ranks of a session and their state, as the controller sees them.

    Parameters
    ----------
    devices : list of str
        The device of each rank of this node.
    master_rank : int
    options : Options
    nodes : Nodes, optional
        All nodes, if the session spans several.
    """

    def __init__(self, devices: list[str], master_rank: int, options: Options, nodes: Nodes | None = None) -> None:
        self.devices = devices if nodes is None else nodes.devices
        self.n_ranks = len(self.devices)
        self.master_rank = master_rank
        self.pid = os.getpid()
        self.is_on_one_node = nodes is None
        self.on_gpu = kind_of(devices[0]) != "cpu"
        self.nccl = False  # whether NCCL connects the ranks
        self.plan = options.plan
        self.costs: Any = None  # measured costs of this machine, once a function needs them to choose a plan
        self.profile: Any = None  # the profile that is being recorded
        self.sequencer = Sequencer(self)
        self.run, self.submit = self.sequencer.run, self.sequencer.submit
        self.shards: Shards | None = None
        self._replicate_rng = options.replicate_rng
        self._ledger = Ledger(segments, self.trim, len(devices) - 1)
        self.restage = self._ledger.restage
        group = ProcessGroup(devices, master_rank, options.timeout, None if nodes is None else nodes.world)
        self._group: RankGroup = group if nodes is None else MultiNodeGroup(group, nodes.devices, segments)
        self.timeline = group.timeline
        self.nodes = [group.world.ranks_of(node) for node in range(len(group.world.sizes))]  # the ranks of each

        def begin() -> None:
            if hasattr(self, "_dispatcher"):  # only in a worker that replaces a dead one
                self._ledger.abandon()

        self.loops, self.sizes = group.loops, group.world.sizes  # the number of ranks of each node
        definitions = _graph.Definitions() if nodes is None else nodes.definitions
        try:
            ended = self._ledger.ended_variables
            self.replica = start_ranks(group, segments, ended, options.profile_workers, begin, options.seed)
            self._shape_cache = ShapeCache(self.sequencer, self.replica, master_rank)
            self.shapes = self._shape_cache.of
            self.stale = StaleReplicas(self.replica, group.world.sizes)
            self.replica_check = ReplicaCheck(self.replica.variables, self.run, master_rank, options.check_replicas)
            self._functions = FunctionRegistry(self.replica, self._ledger, self._load, definitions, self.stale)
            restore = self._restore if options.restart_workers else None
            self._dispatcher = Dispatcher(self._group, self.replica, self._ledger, options.timeout, restore)
            self._send = self._dispatcher.issue
            if options.restart_workers:
                stage = functools.partial(self._stage, place=0)
                self.shards = Shards(self.replica, self.n_ranks, self._send, stage)
                self._send = self.shards.issue
            self.lock = self._dispatcher.lock
            self.check_usable = self._dispatcher.check_usable
            # `threading.Condition` uses this method of RLock, too. A count of this package's own would be wrong if a
            # signal handler raised an exception between taking the lock and counting.
            self.in_a_call: Callable[[], bool] = self.lock._is_owned
            self.flush()  # raises unless every worker has started
            if self.on_gpu:
                names = devices if nodes is None else nodes.names
                take_gpus(names, self.run)
                self.nccl = nodes is None and connect_gpus(names, self.replica.context, self.run)
        except BaseException:
            if self.on_gpu:
                _backends.unbind()
            with deferred_interrupts():
                self._group.stop(grace=0.0)
                self._group.await_end()
                if hasattr(self, "replica"):
                    self.replica.thread_limits.restore()
                    self.replica.heap.close()
            raise

    def __repr__(self) -> str:
        devices = ", ".join(sorted(set(self.devices)))
        state = ", broken" if self.broken else ""
        return f"<synkhronos session of {self.n_ranks} ranks on {devices}, master rank {self.master_rank}{state}>"

    # -- commands

    def issue(self, command: Command) -> list[Any]:
        """Have every rank execute a command; return the results in rank order, with arrays as views of shared memory.

        Raises
        ------
        WorkerError
            If a rank raised an exception; the session stays usable.
        WorkerDied
            If a worker died; the session is broken from then on.
        WorkerRestarted
            If a worker died and was replaced (``restart_workers``); the session stays usable.
        WorkerTimeout
            If a rank does not reply within the timeout; the session is broken from then on.
        """
        with self.lock:
            self._functions.forget_ended()
            if self.stale.keys and type(command) not in IGNORES_VALUES:
                self.update_replicas()
            if self.stale.shared:
                changed = self.stale.shared.intersection(self._shape_cache.changed_by(command))
                if changed:
                    self.stale.unshare(changed, self.issue)
            if self._shape_cache.is_used:
                self._shape_cache.see(command)
            if type(command) is Call and command.step is not None:
                return self._issue_step(command, command.step)
            try:
                return self._send(command)
            except BaseException:
                self._make_equal_again(command)
                raise

    def _issue_step(self, command: Call, step: Step) -> list[Any]:
        """Have every rank execute a call, of which only the controller sets some variables."""
        variables = self.replica.variables
        sliced = [key for one in step.sliced for key in one.variables]
        # another thread, or a signal handler, may set a variable while the workers get its value
        if not any(self.view(sliced) for _ in range(_MOST_ATTEMPTS)):
            raise SessionError(f"{variables[sliced[0]]} was changed while a call that updates it began; call it again")
        adopted = self.stale.updates_of([variables[key] for key in step.adopted])
        self.stale.begin(adopted)
        try:
            return self._send(command)
        except BaseException:
            self._dispatcher.complete_step()
            if not self.is_on_one_node:  # only the controller's node has completed the step, or has undone it
                self.stale.give_again(set(sliced))
            # some ranks may have set others, or drawn random numbers
            self.stale.add([variables[key] for key in (*step.others, *step.drawn)])
            raise
        finally:
            self.stale.end(adopted)

    def _make_equal_again(self, command: Command) -> None:
        """Record that ranks may differ in what exact calls were to change, so that they get the controller's values."""
        known, changed = self.replica.variables.items(), self._shape_cache.changed_by
        keys = {key for call in parts_of(command) if keeps_equal(call) for key in changed(call)}
        variables = [known[key] for key in keys if key in known and not _graph.has_own_stream(known[key])]
        apart = self.replica_check.scattered(variables)
        self.stale.add([var for var in variables if var not in apart])

    def update_replicas(self) -> None:
        """Give the other ranks the values of stale variables now, instead of before the next command."""
        with self.lock:
            self.check_usable()
            self.stale.send(self.issue)

    # -- shared variables

    def keys(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """Return the keys of shared variables, which must have been distributed."""
        return self.replica.variables.keys_of(variables)

    def view(self, keys: Sequence[int]) -> bool:
        """Have the workers view the controller's values of variables; return whether that is possible."""
        if self.replica_check.every:
            self.replica_check.warn_of_differences([self.replica.variables[key] for key in self.stale.not_viewed(keys)])
        return self.stale.view(keys, self.issue)

    def compute_alone(
        self, run: Callable[[list[Any]], list[Any]], arrays: list[Any], updates: Updates, name: str | None
    ) -> list[Any]:
        """Compute a call on the controller alone, and record which variables are stale on the other ranks.

        Parameters
        ----------
        run : callable
            Computes the outputs from the list of inputs.
        arrays : list
            The inputs.
        updates : Updates
        name : str or None
            Name of the function, for the message.

        Returns
        -------
        list
            The outputs.

        Raises
        ------
        WorkerError
            If it fails, as for a command.
        """
        has_updates = bool(updates.known or updates.unknown)
        try:
            if not has_updates:
                return self.private(self.replica.compute(run, arrays))
            try:
                self.stale.begin(updates)
                outputs = self.replica.compute(run, arrays)
            finally:
                self.stale.end(updates)
            return self.private(outputs)
        except Exception as error:
            let_interrupts_pass(error)
            raise controller_error(name, self.master_rank, error, None if has_updates else False) from None

    # -- memory

    def private(self, values: Sequence[Any]) -> list[Any]:
        """Return results of the controller, copied if they are in the shared heap: the program may keep them."""
        return self.replica.heap.private(values)

    def stage(self, items: Sequence[Staged]) -> list[ArrayRef]:
        """Copy arrays, or rows of arrays, to staging memory that every rank can read; return their references.

        The copies are valid until the next call; in a sequence, until the sequence was executed.
        """
        place = self.sequencer.place
        if place and self._ledger.is_full:
            self.flush()
        before = self.timeline.switch(TRANSFERS)
        refs = self._stage(items, place)
        self.timeline.switch(before)
        return refs

    def _stage(self, items: Sequence[Staged], place: int) -> list[ArrayRef]:
        try:
            return self._ledger.stage(items, place)
        except Exception as error:
            self._dispatcher.check_closed(error)
            raise

    def allocate(self, n_bytes: int) -> Segment:
        """Allocate shared memory; `share` registers it with the workers.

        Raises
        ------
        MemoryError
            If too little memory is free, even after all ranks have freed dropped memory.
        """
        with self.lock:
            return self._ledger.allocate(n_bytes)

    def share(self, segment: Segment, content: np.ndarray) -> None:
        """Register memory, here at once and with every worker before its next command.

        It stays registered as long as the array ``content`` exists.
        """
        with self.lock:
            self._ledger.share(segment, content)
            if self._ledger.is_full:
                self.flush()

    def report(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return, by rank, how far its clock is ahead of the controller's (ns), and its heap's `native.Heap.counts`."""
        with self.lock:
            self.check_usable()
            own = self.replica.heap.counts()
            ahead, counts = self._group.report()
            return ahead, own + counts[len(own) :]

    @property
    def n_shipped(self) -> int:
        """Bytes of the controller's memory that have been sent to other nodes."""
        return self._group.n_shipped

    def flush(self) -> None:
        """Send all entries of the ledger now: workers map new memory, and unmap dropped memory."""
        self.issue(Flush())

    def trim(self, collect: bool = True) -> None:
        """Have every rank free dropped memory, and the blocks that it keeps for later calls."""
        if collect:
            collect_garbage()
        self.issue(Flush(trim=True))

    # -- functions

    def add_function(self, function: Any, owner: Any, also: Sequence[Any] = ()) -> int:
        """Register a compiled function for distribution; return its key.

        All ranks drop the function after ``owner`` is garbage-collected. They also get the shared variables ``also``.
        """
        return self._functions.add(function, owner, also)

    def distribute(self, keys: Sequence[int] | None = None, variable: Any = None) -> None:
        """Replicate functions that are not yet on every rank: all, those with these keys, or those using a variable.

        Raises
        ------
        TypeError, WorkerError
            If a function cannot be pickled or loaded. The others are still replicated.
        """
        with self.lock:
            self.check_usable()
            self._functions.distribute(keys, variable)

    def distribute_variables(self, variables: Sequence[Any]) -> None:
        """Replicate shared variables that no distributed function uses yet."""
        with self.lock:
            self._functions.distribute_variables(variables)

    def _load(self, bundle: _graph.Bundle, ranks: tuple[int, ...] | None) -> None:
        refs = self._stage([np.frombuffer(bundle.pickled, dtype=np.uint8), *bundle.buffers], 0)
        self.issue(Load(refs[0], tuple(refs[1:]), self._replicate_rng, ranks))
        self._ledger.trim()

    def _restore(self, ranks: tuple[int, ...]) -> list[Any]:
        """Send functions, variables and data to new workers; return the variables that have lost rows."""
        assert self.shards is not None
        self._functions.restore(ranks)
        if not self.is_on_one_node:  # the new workers have copies
            self.stale.give_again(self.stale.shared)
        self.shards.restore(ranks)
        return self.shards.lost()

    # -- the end

    @property
    def broken(self) -> bool:
        """Whether the session can only be closed."""
        return self._dispatcher.state is not State.USABLE

    def stop(self) -> None:
        """Stop and join the workers, and free the session's memory."""
        if os.getpid() != self.pid:
            return
        within = self.in_a_call()  # whether a signal handler closes the session during a call
        with self.lock, deferred_interrupts(), contextlib.ExitStack() as end:
            end.callback(self._release, within)  # even if a node is lost
            end.callback(self._group.await_end)
            if within and not self.broken:
                self._dispatcher.state = State.CLOSED
                self._group.stop(grace=0.0)
            if not self.broken:
                grace = {"grace": 0.0}
                try:
                    self._group.send(Encoder().dumps(Envelope((), Release(), None)))
                    grace = {}  # the ranks end by themselves
                finally:
                    self._dispatcher.state = State.CLOSED
                    self._group.stop(**grace)

    def _release(self, within: bool) -> None:
        """Free the session's memory.

        Parameters
        ----------
        within : bool
            Whether a signal handler closes the session during a call. Then the shared heap is freed only when the call
            has ended, because the call still reads results of the ranks.
        """
        self._dispatcher.finish_step()
        self.replica.thread_limits.restore()
        self.stale.clear()
        if self._group.is_lost:
            pass  # MPI may still write to the shared heaps
        elif within:
            weakref.finalize(self, self.replica.heap.close).atexit = False
        else:
            self.replica.heap.close()
        self._ledger.close()
        if self.on_gpu:
            _backends.unbind()
