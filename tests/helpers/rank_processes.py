"""Ranks as bare processes without a backend, with synchronization, shared memory and collectives."""

import os
import signal
import traceback

import numpy as np
from deadline import wait_for

from synkhronos._collectives import SharedMemoryTransport, Workspace
from synkhronos._memory.heap import make_heap
from synkhronos._memory.segments import Segment
from synkhronos._native import native
from synkhronos._processes.sync import Barrier, RankSync
from synkhronos._processes.timeline import Timeline
from synkhronos.errors import CollectiveAborted


class Ranks:
    """Processes that run the same function of their `Rank`. The int64 array `board` is in memory that they share."""

    def __init__(self, n_ranks, spin=0.0, shared_heap=True):
        self.n_ranks = n_ranks
        self.sync = RankSync(_shared((native.Sync.bytes_for(n_ranks),), np.uint8), n_ranks, 0, spin)
        self.board = _shared((64,), np.int64)
        self.workspace = Workspace(n_ranks)
        self.heap = make_heap(n_ranks, 0) if shared_heap else native.Heap(-1, n_ranks, 0, 0, 0)

    def run(self, work, seconds=60.0):
        """Run ``work(rank)`` in a process for each rank; fail if one of them raises, or if they exceed the limit."""
        running = {self._fork(rank, work): rank for rank in range(self.n_ranks)}
        failed = []

        def have_ended():
            for pid, rank in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del running[pid]
                    failed.extend([rank] * (status != 0))
            return not running

        try:
            wait_for(have_ended, lambda: f"the end of ranks {sorted(running.values())}", seconds)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        assert not failed, f"ranks {failed} raised; their tracebacks are above"

    def _fork(self, rank, work):
        pid = self.heap.share(lambda nothing: os.fork(), None)
        if pid:
            return pid
        self.heap.take(rank)
        self.heap.allow(1 << 30)
        status = 1
        try:
            self.heap.call(work, Rank(self, rank))
            status = 0
        except BaseException:
            traceback.print_exc()
            self.sync.abort()
        finally:
            os._exit(status)


def _shared(shape, dtype):
    segment = Segment.create(np.prod(shape) * np.dtype(dtype).itemsize)
    segment.close_fd()
    return segment.array(shape, dtype)


class Rank:
    """One process of `Ranks`."""

    def __init__(self, ranks, rank):
        self.rank = rank
        self.n_ranks = ranks.n_ranks
        self.board = ranks.board
        self.sync = ranks.sync
        self.sync.rank = rank
        self.timeline = Timeline(np.zeros((2, self.n_ranks), np.int64), rank)
        self.barrier = Barrier(self.sync, self.timeline, self.check)
        shared = ranks.workspace, self.sync, ranks.heap
        self.transport = SharedMemoryTransport(*shared, self.barrier, self.timeline)
        self.begin(1)

    def check(self):
        if self.sync.aborted:
            raise CollectiveAborted("another rank failed")

    def begin(self, number):
        """Start the command ``number``: restart the barrier and the transport."""
        self.barrier.restart(number)
        self.transport.restart()
