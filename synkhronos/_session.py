"""The session: the single owner of mutable state between `fork` and `close`; public functions delegate to it.

`Session.run` is the one way in which anything happens on the ranks: the workers are told, the master does the same on
its own replica, and the results of all ranks come back in rank order. Results of other ranks are views of shared
memory, good until the next command, so callers combine them while they hold `Session.lock`.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import _devices, _graphs
from synkhronos._arena import Arena
from synkhronos._collectives import LANE_BYTES, SharedMemoryTransport
from synkhronos._ledger import Ledger
from synkhronos._protocol import Arrays, Command, Failure, Load, Settle
from synkhronos._replica import Replica
from synkhronos._segments import ArrayRef, FileRef, Segment, SegmentTable, aligned
from synkhronos._team import Team
from synkhronos._worker import serve
from synkhronos.errors import CollectiveAborted, RemoteError, SessionError, WorkerDied, WorkerError

__all__ = ["Session", "segments"]

_logger = logging.getLogger("synkhronos")

#: Segments of this process; they outlive a session, so that `Data` made in one can be used in the next.
segments = SegmentTable()

_SPIN_SECONDS = 50e-6
_INTERRUPT_SECONDS = 0.7  # how long a rank may take to answer after the master was interrupted
_MAX_PENDING_SEGMENTS = 64


class Session:
    """Ranks, what they hold, and the commands that go to them.

    Parameters
    ----------
    devices : list of str
        The device of each rank.
    master_rank : int
    profile_workers : bool
        Print Theano's profiles of the workers when they stop.
    replicate_rng : bool
        Leave all ranks the same random streams.
    """

    def __init__(self, devices: list[str], master_rank: int, profile_workers: bool, replicate_rng: bool) -> None:
        self.n_ranks = len(devices)
        self.master_rank = master_rank
        self.devices = devices
        self.lock = threading.RLock()
        self.broken: BaseException | None = None
        self.pid = os.getpid()
        self._replicate_rng = replicate_rng
        self._functions: dict[int, Any] = {}  # compiled, not yet distributed
        self._next_function = 0
        self._ledger = Ledger(segments)
        spin = _SPIN_SECONDS if self.n_ranks <= _devices.count_cores() else 0.0
        self._team = Team(devices, master_rank, spin)
        shared = Segment.create(2 * self.n_ranks * LANE_BYTES + 8 * self.n_ranks)
        shared.close_fd()
        lanes = shared.array((2, self.n_ranks, LANE_BYTES), np.uint8)
        signatures = shared.array((self.n_ranks,), np.int64, offset=lanes.nbytes)

        def make_replica(rank: int) -> Replica:
            table = _graphs.VariableTable(self._ledger.variables.append if rank == master_rank else None)
            stream = (rank - master_rank) % self.n_ranks
            transport = SharedMemoryTransport(lanes, signatures, rank, self._team.barrier)
            return Replica(rank, self.n_ranks, stream, segments, table, transport)

        def work(rank: int) -> None:
            finish = _graphs.start_worker(profile_workers)
            replica = make_replica(rank)
            replica.limit_threads()
            serve(self._team, replica)
            finish()

        _graphs.prepare_fork()
        self._team.start(work)
        self.replica = make_replica(master_rank)
        self.replica.limit_threads()

    # -- commands

    def run(self, command: Command) -> list[Any]:
        """Have every rank execute a command; returns their results in rank order, arrays as arrays.

        Raises
        ------
        WorkerError
            If a rank raised; the session stays usable.
        WorkerDied
            If a worker is dead; the session is broken from then on.
        """
        with self.lock:
            results = self.publish(command)
            return [
                [None if ref is None else segments.view(ref) for ref in one.refs] if isinstance(one, Arrays) else one
                for one in results
            ]

    def publish(self, command: Command) -> list[Any]:
        """The same, but with the workers' arrays as `Arrays`, which other ranks can be told of."""
        with self.lock:
            self.check_usable()
            own_error: Exception | None = None
            own_time = 0.0
            result: Any = None
            try:
                envelope = self._ledger.envelope(command)
                self._team.send(pickle.dumps(envelope, protocol=pickle.HIGHEST_PROTOCOL))
                self.replica.forget(*envelope.release)
                try:
                    result = self.replica.execute(command)
                except WorkerDied:
                    raise
                except Exception as error:
                    own_error, own_time = error, time.monotonic()
                    self._team.signals.abort()
                replies = self._team.collect()
            except BaseException as error:
                self._interrupted(error)
                raise
            results = [None if reply is None else pickle.loads(reply) for reply in replies]
            self._ledger.delivered()
            self._raise_first_failure(command, results, own_error, own_time)
            results[self.master_rank] = result
            self._ledger.see_outboxes(results, self._team.workers)
            return results

    def _raise_first_failure(
        self, command: Command, results: Sequence[Any], own_error: Exception | None, own_time: float
    ) -> None:
        failures = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
        if own_error is not None:
            summary = f"{type(own_error).__name__}: {own_error}"
            aborted = isinstance(own_error, CollectiveAborted)
            failures[self.master_rank] = Failure(own_time, summary, "", aborted)
        if not failures:
            return
        self._team.signals.reset()
        rank = min(failures, key=lambda rank: (failures[rank].aborted, failures[rank].when))
        failure = failures[rank]
        message = f"rank {rank} ({self.devices[rank]}) failed in {type(command).__name__}: {failure.summary}"
        if len(failures) < self.n_ranks:
            message += (
                "\nThe other ranks may have gone on, so that replicas may differ now; "
                "synkhronos.broadcast(shared_vars) gives all ranks the master's values."
            )
        cause = own_error if rank == self.master_rank else RemoteError(failure.traceback)
        raise WorkerError(message, rank, self.devices[rank]) from cause

    def _interrupted(self, error: BaseException) -> None:
        """The master left a command early: a worker died, or the user pressed Ctrl-C."""
        self._team.signals.abort()
        if not isinstance(error, WorkerDied):
            try:
                self._team.collect(time.monotonic() + _INTERRUPT_SECONDS)
                self._team.signals.reset()
                self._ledger.delivered()
                _logger.warning("interrupted; the session is usable, but replicas may differ now")
                return
            except BaseException as second:
                error = error if isinstance(second, TimeoutError) else second
        self.broken = error
        _logger.error("the session is broken: %s", str(error) or type(error).__name__)
        self._team.stop(grace=0.0)

    def check_usable(self) -> None:
        """Raise `SessionError` if this session cannot carry out commands any more."""
        if self.broken is not None:
            raise SessionError(
                f"the session is broken ({type(self.broken).__name__}: {self.broken}); "
                "call synkhronos.close(), then synkhronos.fork() again"
            )
        if os.getpid() != self.pid:
            raise SessionError("this process was forked from the master later; only the master can command the ranks")

    # -- shared memory

    def stage(self, arrays: Sequence[np.ndarray]) -> list[ArrayRef]:
        """Copy arrays to where every rank can read them, until the next call of `stage` or `reserve`."""
        arena = self.reserve(sum(aligned(array.nbytes) for array in arrays))
        return [arena.place(array) for array in arrays]

    def reserve(self, n_bytes: int) -> Arena:
        """The staging arena, emptied and with room for ``n_bytes``."""
        return self._ledger.reserve(n_bytes)

    def share(self, made: Segment | FileRef) -> None:
        """Make a segment or file known here at once, and to every worker before its next command."""
        if self._ledger.add(made) >= _MAX_PENDING_SEGMENTS:
            self.run(Settle())

    def drop_segment(self, key: str) -> None:
        """Have every rank forget a segment, with the next command."""
        self._ledger.segments.append(key)

    # -- functions

    def add_function(self, function: Any) -> int:
        """Take in a compiled function, to be distributed; returns its key."""
        key = self._next_function
        self._next_function += 1
        self.replica.functions[key] = function
        self._functions[key] = function
        return key

    def drop_function(self, key: int) -> None:
        """Have every rank forget a function, with the next command."""
        self._functions.pop(key, None)
        self._ledger.functions.append(key)

    def distribute(self) -> None:
        """Replicate all functions that are not yet on every rank."""
        with self.lock:
            self.check_usable()
            if not self._functions:
                return
            functions = dict(self._functions)
            bundle = _graphs.dump(functions, self.replica.variables)
            refs = self.stage([np.frombuffer(bundle.pickled, dtype=np.uint8), *bundle.buffers])
            self.run(Load(refs[0], tuple(refs[1:]), self._replicate_rng))
            for key in functions:
                self._functions.pop(key, None)

    # -- the end

    def stop(self) -> None:
        """Stop and join the workers, and free the memory that only the session needed."""
        if os.getpid() != self.pid:
            return
        if self.broken is None:
            self._team.send(pickle.dumps(self._ledger.envelope(None)))
            self._team.stop()
        self.replica.restore_threads()
        self.replica.outbox.free()
        self._ledger.close()
