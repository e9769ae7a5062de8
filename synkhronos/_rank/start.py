"""Start of the ranks of one node: fork the workers, give each its replica, and serve commands."""

from __future__ import annotations

import gc
from typing import Any, Callable

from synkhronos import _backends, _graph
from synkhronos._collectives import Workspace
from synkhronos._memory import SegmentTable, make_heap
from synkhronos._processes import ProcessGroup
from synkhronos._rank.environment import seed_rank
from synkhronos._rank.messages import Decoder, Encoder, Envelope, Failure
from synkhronos._rank.replica import Replica
from synkhronos._utils.interrupts import FinalizerQueue, deferred_interrupts


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
