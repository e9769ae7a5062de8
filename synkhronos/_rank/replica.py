"""Replica of one rank: its functions, shared variables and data, and the execution of commands on them.

The same code runs on every rank, the controller included. The controller differs in two ways: its functions are
compiled instead of unpickled, and its results are used in place instead of being published.

`start_ranks` forks the workers of a node. Each gets its replica, and serves commands.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any, Callable

from synkhronos import _backends, _graph
from synkhronos._collectives import ShapesDiffer, Workspace, connect
from synkhronos._memory import (
    FdChannel,
    SegmentRef,
    SegmentTable,
    array_at,
    look_at_free_memory,
    make_heap,
    release_freed_memory,
)
from synkhronos._native import native
from synkhronos._processes import COLLECTIVES, CONTROL, TRANSFERS, Notes, ProcessGroup
from synkhronos._rank.call import Caller
from synkhronos._rank.collective_handlers import CollectiveHandlers
from synkhronos._rank.commands import (
    SYNCHRONIZES,
    Bind,
    Call,
    Command,
    Connect,
    EndLoop,
    Flush,
    Get,
    InOrder,
    Load,
    Loop,
    Record,
    RestoreLoop,
    SaveLoop,
    Shapes,
    TimeFunction,
    join_reductions,
)
from synkhronos._rank.environment import ThreadLimits, seed_rank
from synkhronos._rank.loop import Loops
from synkhronos._rank.messages import Decoder, Encoder, Envelope, Failure
from synkhronos._rank.results import ResultPublisher, RowViews
from synkhronos._rank.steps import Steps
from synkhronos._utils.interrupts import FinalizerQueue, deferred_interrupts


class Replica:
    """One rank's functions, shared variables and data.

    Parameters
    ----------
    group : ProcessGroup
        This rank's view of it.
    workspace : Workspace
        Memory for the collectives of the ranks.
    segments : SegmentTable
    variables : VariableTable
    heap : Heap
        The shared heap, of which this rank has a part.

    Attributes
    ----------
    on_node : range
        The ranks of this node.
    wire_dtype : str or None
        Type of float32 arrays on their way between nodes, if it is another one.
    completed : int
        Number of completed parts of the last command, if it is an `InOrder`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        workspace: Workspace,
        segments: SegmentTable,
        variables: _graph.VariableTable,
        heap: native.Heap,
    ) -> None:
        world = group.world
        self.rank = world.first + group.rank
        self.n_ranks = world.n_ranks
        self.on_node = range(world.first, world.first + group.n_ranks)
        self.wire_dtype = world.wire_dtype
        self.is_controller = self.rank == world.master_rank
        self.completed = 0
        self.segments = segments
        self.variables = variables
        self.heap = heap
        self.functions: dict[int, Any] = {}
        self.thread_limits = ThreadLimits(group.n_ranks, quiet=not self.is_controller)
        self.context: Any = None  # of the rank's GPU, once it is bound
        self._group = group
        self._timeline = group.timeline
        self._row_views = RowViews(segments)
        self._exchange = CollectiveHandlers(group, workspace, variables, self._row_views, heap=heap)
        self._caller = Caller(
            group,
            self.functions,
            segments,
            self._row_views,
            exchange=self._exchange,
            workspace=workspace,
            heap=heap,
        )
        self._loops = Loops(
            group,
            variables,
            segments,
            self._row_views,
            transport=self._exchange.transport,
            runner=self._caller.stepper,
        )
        self.restore = self._exchange.restore
        self._n_failures = 0
        self._publisher = ResultPublisher(workspace, heap, group.rank, by_message=world.node > 0)
        self.read = self._publisher.read
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Flush: self._flush,
            Record: self._record,
            Bind: self._bind,
            Connect: self._connect,
            Load: self._load,
            Call: self._caller.call,
            Loop: self._loops.run,
            EndLoop: self._loops.end,
            TimeFunction: self._caller.time_function,
            SaveLoop: self._loops.save,
            RestoreLoop: self._loops.restore,
            InOrder: self._in_order,
            **self._exchange.handlers,
        }

    def describe(self, command: Command) -> str:
        """Describe a command in a word or two: its kind, and the name of the function that it calls."""
        if isinstance(command, InOrder):
            return f"Sequence ({', '.join(map(self.describe, command.parts))})"
        function = self.functions[command.function].name if isinstance(command, (Call, Loop, TimeFunction)) else None
        return f"{type(command).__name__} {function or ''}".rstrip()

    def changes_variables(self, command: Command) -> bool:
        """Return whether a command may change shared variables; calls of functions without updates do not."""
        if isinstance(command, InOrder):
            return any(map(self.changes_variables, command.parts))
        if not isinstance(command, Call):
            return not isinstance(command, SaveLoop)
        functions = [command.function, *([command.follow.function] if command.follow else [])]
        of_functions = any(_graph.updated_variables(self.functions[function]) for function in functions)
        return bool(command.step or command.updated or of_functions)

    def execute(self, command: Command) -> Any:
        """Execute one command; allocate its arrays in this rank's part of the shared heap.

        Parameters
        ----------
        command : Command

        Returns
        -------
        object
            For `Call`, `Get` and `SaveLoop`: a list of arrays on the controller, and their places (`Arrays`) on a
            worker; ``None`` on a rank that returns nothing. For `InOrder`: the list of the parts' results. For other
            commands: arrays on the controller only, metadata, or ``None``.
        """
        self.completed = 0
        if self.thread_limits.is_wide:
            self.thread_limits.narrow()
        if self.heap.short:
            look_at_free_memory(self.heap, self._group.n_ranks)
        return self.heap.call(self._execute, command)

    def heed(self, n_failures: int) -> None:
        """Forget what this rank knows from earlier calls if a command has failed since: other ranks may not know it."""
        if n_failures != self._n_failures:
            self._n_failures = n_failures
            self._caller.forget_calls()

    def _execute(self, command: Command) -> Any:
        """Drop the state of the previous command, and execute this one; runs inside `native.Heap.call`."""
        self._exchange.restart()
        self._caller.steps.forget()
        self._publisher.forget()
        return self._carry_out(command)

    def _carry_out(self, command: Command) -> Any:
        """Call the handler of a command, or of one part of an `InOrder`; publish a worker's result."""
        kind, timeline = type(command), self._timeline
        if timeline.tracing:
            timeline.name(self.describe(command))
        if timeline.on:
            timeline.switch(COLLECTIVES if kind in self._exchange.handlers and kind is not Shapes else CONTROL)
        try:
            result = self._handlers[kind](command)
            if self.is_controller or result is None or kind not in (Call, Get, SaveLoop):
                return result
            timeline.switch(TRANSFERS)
            return self._publisher.publish(result)
        finally:
            if timeline.on:
                timeline.switch(CONTROL)

    def _in_order(self, command: InOrder) -> list[Any]:
        results: list[Any] = []
        for joined, parts in join_reductions(command.parts):
            if self.completed and type(joined) not in SYNCHRONIZES:
                self._exchange.transport.barrier()
            if len(parts) > 1:
                try:
                    with self._timeline.call(type(joined).__name__):
                        self._carry_out(joined)
                    results += [None] * len(parts)
                    self.completed += len(parts)
                    continue
                except ShapesDiffer:  # nothing has changed; one by one, so that the error is that of a part
                    pass
            for part in parts:
                with self._timeline.call(type(part).__name__):
                    results.append(self._carry_out(part))
                self.completed += 1
        return results

    def compute(self, function: Callable[[list[Any]], list[Any]], arrays: list[Any]) -> list[Any]:
        """Call a function outside of commands; allocate its arrays in this rank's part of the shared heap.

        BLAS uses the cores of all ranks of this node from here to the next command.
        """
        if self.heap.short:
            look_at_free_memory(self.heap, self._group.n_ranks)
        self.thread_limits.widen()
        return self.heap.call(function, arrays)

    @property
    def steps(self) -> Steps:
        """Updates of a call that are made completely or not at all."""
        return self._caller.steps

    def finish_step(self) -> bool:
        """Complete the updates of a call that ended early; see `Steps.finish`."""
        return self.heap.call(lambda _: self._caller.steps.finish(), None)

    def _flush(self, command: Flush) -> None:
        if command.trim:
            self.heap.trim()
            release_freed_memory()

    def _record(self, command: Record) -> Notes | None:
        if not command.on:
            return self._timeline.stop()
        self._timeline.start(command.room)
        return None

    def attach(self, refs: Sequence[SegmentRef], channel: FdChannel) -> None:
        """Map memory that the controller has created.

        All that can be mapped is mapped, before an exception is raised for the rest.
        """
        failed: Exception | None = None
        for ref in refs:
            try:
                if ref.key not in self.segments:  # a forked worker may have inherited it
                    self.segments.add(ref.key, channel.map(ref))
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def forget(self, segments: Sequence[str], functions: Sequence[int], variables: Sequence[int]) -> None:
        """Drop the objects that the controller has dropped."""
        for segment in segments:
            self.segments.release(segment)
        for function in functions:
            self.functions.pop(function, None)
            self._row_views.forget(function)
            self._caller.forget(function)
        for variable in variables:
            self.variables.drop(variable)
        if (functions or variables) and not self.is_controller:
            gc.collect()  # compiled functions are reference cycles, and may hold much memory

    # -- GPU

    def _bind(self, command: Bind) -> None:
        self.context = _backends.bind(command.devices[self.rank], self.rank, quiet=not self.is_controller)

    def _connect(self, command: Connect) -> None:
        self._exchange.use_nccl(connect(self.context, command.clique, self.n_ranks, self.rank))

    # -- functions

    def move_to_heap(self, variables: Sequence[Any]) -> None:
        """Move values of shared variables into this rank's part of the shared heap, where other ranks can read them."""
        self.heap.call(self._exchange.move_to_heap, variables)

    def _load(self, command: Load) -> None:
        if not self.is_controller and (command.ranks is None or self.rank in command.ranks):
            bundle = _graph.Bundle(
                self.segments.view(command.pickled).tobytes(),
                [self.segments.view(ref) for ref in command.buffers],
                {},
                {},
            )
            # stream 0 is the controller's, as the user created it
            stream = 0 if command.replicate_rng else (self.rank - self._group.world.master_rank) % self.n_ranks
            view = functools.partial(array_at, self.heap)
            self.functions.update(_graph.load(bundle, self.variables, stream, view))
        self.thread_limits.apply()  # the functions may have loaded a BLAS library


# -- start of the ranks of one node


def serve(group: ProcessGroup, replica: Replica) -> None:
    """Execute the controller's commands, and answer each with its result or a `Failure`, until a stop arrives."""
    decoder, encoder = Decoder(), Encoder()
    while True:
        envelope: Envelope = decoder.loads(group.receive())
        if envelope.command is None:
            return
        reply: Any = None
        if envelope.attach or any(envelope.release):
            try:
                replica.forget(*envelope.release)
                replica.attach(envelope.attach, group.channel)
                if envelope.attach or envelope.release.segments:
                    group.channel.clear()  # discard segments that were sent, but dropped before they were mapped
            except Exception as error:
                reply = Failure.of(error, unprepared=True)
        if reply is None:
            replica.heed(envelope.n_failures)
            try:
                reply = replica.execute(envelope.command)
            except Exception as error:
                reply = Failure.of(error, completed=replica.completed)
        try:
            _answer(group, encoder, reply)
        except MemoryError:  # no memory for the reply: free what the heap keeps, then send less
            replica.heap.trim()
            try:
                _answer(group, encoder, reply)
            except MemoryError as error:  # all parts of a sequence may be complete: the last one has no result
                _answer(group, encoder, Failure.of(error, completed=max(0, replica.completed - 1)))


def _answer(group: ProcessGroup, encoder: Encoder, reply: Any) -> None:
    """Reply to the controller; after a failure of this rank, abort the other ranks' waits first."""
    if isinstance(reply, Failure) and not reply.aborted:
        group.sync.abort()
    group.answer(encoder.dumps(reply))


def start_ranks(
    group: ProcessGroup,
    segments: SegmentTable,
    ended: FinalizerQueue[int] | None,
    profile_workers: bool,
    begin: Callable[[], None],
    seed: bytes | None,
) -> Replica:
    """Fork the workers of a process group, which serve until they receive a stop; return the replica of this process.

    Parameters
    ----------
    group : ProcessGroup
    segments : SegmentTable
    ended : FinalizerQueue, or None
        Receives the keys of variables that the program has dropped.
    profile_workers : bool
        Print Theano's profiles of the workers when they stop.
    begin : callable
        Called in each worker as it starts.
    seed : bytes, optional
        Seed of each worker's global random generators; see `seed_rank`.

    Returns
    -------
    Replica
    """
    workspace = Workspace(group.n_ranks)
    heap = make_heap(group.n_ranks, group.master_rank)

    def work(rank: int) -> None:
        begin()
        if seed is not None:
            seed_rank(seed, group.world.first + rank, group.number)
        gc.freeze()  # inherited objects are never collected here: this is faster, and their pages stay shared
        group.timeline.reset(rank)
        heap.take(rank)
        finish = _graph.start_worker(profile_workers, group.world.first + rank)
        replica = Replica(group, workspace, segments, _graph.VariableTable(None), heap)
        replica.thread_limits.apply()
        serve(group, replica)
        finish()

    try:
        _backends.prepare_fork()
        inherited = segments.lent()  # this frame stays alive in the workers, and so do these arrays
        heap.share(group.start, work)
        del inherited
        replica = Replica(group, workspace, segments, _graph.VariableTable(ended), heap)
        replica.thread_limits.apply()
    except BaseException:
        with deferred_interrupts():
            group.stop(grace=0.0)
            heap.close()
        raise
    return replica
