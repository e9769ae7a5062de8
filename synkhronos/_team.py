"""The processes of a session: starting, signalling, watching and stopping them. Knows nothing of Theano or of commands.

                     mailbox (one, shared memory)
      master ──post start[rank]──> worker  : read the mailbox, work, fill the own answer box
      master <────post done─────── worker  : one token a worker
      master and workers meet in `Signals.barrier` inside collectives

Invariants
----------
* One message is outstanding at a time, and every worker answers it once.
* Every wait wakes `POLL` seconds after it parked, at the latest: the master to see whether a worker has died, a worker
  to see whether the master has. A worker is also killed by the kernel when the master's main thread ends.
* Workers ignore SIGINT: Ctrl-C is the master's to handle.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any, Callable

import numpy as np

from synkhronos._segments import Segment, SegmentRef
from synkhronos._signals import Signals, wait
from synkhronos.errors import WorkerDied

__all__ = ["MasterDied", "Team"]

_logger = logging.getLogger("synkhronos")

_MAILBOX_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


class MasterDied(BaseException):
    """Raised in a worker whose master is gone."""


class _Box:
    """A message of any length in shared memory: short ones inline, long ones in a segment of their own."""

    def __init__(self) -> None:
        segment = Segment.create(_MAILBOX_BYTES)
        segment.close_fd()
        self._bytes = segment.buffer
        self._lengths = segment.array((2,), np.int64)
        self._overflow: Segment | None = None

    def put(self, message: bytes) -> None:
        if self._overflow is not None:
            self._overflow.close_fd()
            self._overflow = None
        inline = len(message) <= _MAILBOX_BYTES - 16
        if not inline:
            self._overflow = Segment.create(len(message))
            self._overflow.buffer[: len(message)] = message
            message = pickle.dumps((self._overflow.ref, len(message)))
        self._bytes[16 : 16 + len(message)] = message
        self._lengths[:] = (len(message), inline)

    def get(self) -> bytes:
        length, inline = self._lengths.tolist()
        message = self._bytes[16 : 16 + length]
        if not inline:
            ref, length = pickle.loads(message)
            assert isinstance(ref, SegmentRef)
            message = Segment.attach(ref).buffer[:length]
        return message


class Team:
    """The workers of one session, one for each rank but the master's.

    Parameters
    ----------
    devices : list of str
        The device of each rank.
    master_rank : int
    spin : float
        Seconds that a wait spins before it parks.
    """

    def __init__(self, devices: list[str], master_rank: int, spin: float) -> None:
        self.devices = devices
        self.n_ranks = len(devices)
        self.master_rank = master_rank
        self.rank = master_rank
        self.workers = [rank for rank in range(self.n_ranks) if rank != master_rank]
        self._master_pid = os.getpid()
        self._flags_segment = Segment.create(8)
        self._flags_segment.close_fd()
        self.signals = Signals(self.n_ranks, spin, self._flags_segment.array((1,), np.int64))
        self._mailbox = _Box()
        self._answers = [_Box() for _ in range(self.n_ranks)]
        self._processes: list[Any] = [None] * self.n_ranks
        self._unanswered = 0

    # -- the master's side

    def start(self, work: Callable[[int], None]) -> None:
        """Fork the workers; worker ``rank`` runs ``work(rank)`` and exits when that returns."""
        context = multiprocessing.get_context("fork")
        by_main_thread = threading.current_thread() is threading.main_thread()
        for rank in self.workers:
            process = context.Process(
                target=self._run, args=(rank, work, by_main_thread), name=f"synkhronos-rank-{rank}", daemon=True
            )
            process.start()
            self._processes[rank] = process

    def send(self, message: bytes) -> None:
        """Hand every worker the same message."""
        self._mailbox.put(message)
        self.signals.restart()
        self._unanswered = len(self.workers)
        for rank in self.workers:
            self.signals.start[rank].release()

    def collect(self, deadline: float | None = None) -> list[bytes | None]:
        """Wait for the answers of all workers, by rank; ``None`` at the master's. May be called again if interrupted.

        Raises
        ------
        WorkerDied
            If a worker is dead.
        TimeoutError
            If ``deadline`` (by `time.monotonic`) passes first.
        """

        def check() -> None:
            self.check_workers()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("workers did not answer in time")

        while self._unanswered:
            wait(self.signals.done, self.signals.spin, check)
            self._unanswered -= 1
        return [self._answers[rank].get() if rank in self.workers else None for rank in range(self.n_ranks)]

    def check_workers(self) -> None:
        """Raise `WorkerDied` if any worker is dead."""
        for rank in self.workers:
            process = self._processes[rank]
            if process is not None and process.exitcode is not None:
                raise WorkerDied(
                    f"the worker of rank {rank} ({self.devices[rank]}, pid {process.pid}) "
                    f"{describe_exit(process.exitcode)}; the session is broken: call synkhronos.close(), "
                    "then synkhronos.fork() again",
                    rank=rank,
                    pid=process.pid,
                    exitcode=process.exitcode,
                )

    def stop(self, grace: float = 5.0) -> None:
        """Join the workers, which have been told to stop; whoever has not ended after ``grace`` seconds is killed."""
        deadline = time.monotonic() + grace
        for rank in self.workers:
            process = self._processes[rank]
            if process is None:
                continue
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                if grace > 0:
                    _logger.warning("the worker of rank %d (pid %d) did not stop and is killed", rank, process.pid)
                process.kill()
                process.join()
            process.close()
            self._processes[rank] = None
        self.signals.close()

    # -- a worker's side

    def _run(self, rank: int, work: Callable[[int], None], by_main_thread: bool) -> None:
        self.rank = rank
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if by_main_thread:
            # the kernel looks at the forking thread, so only the main thread's end means the master's end
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            self.check_master()
            work(rank)
        except MasterDied:
            os._exit(1)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def check_master(self) -> None:
        """Raise `MasterDied` if this process has lost its master."""
        if os.getppid() != self._master_pid:
            raise MasterDied

    def receive(self) -> bytes:
        """Wait for the master's next message."""
        wait(self.signals.start[self.rank], self.signals.spin, self.check_master)
        self.signals.restart()
        return self._mailbox.get()

    def answer(self, message: bytes) -> None:
        """Answer the message."""
        self._answers[self.rank].put(message)
        self.signals.done.release()

    # -- both

    def barrier(self) -> None:
        """Meet all ranks; raises `CollectiveAborted`, `WorkerDied` or `MasterDied` if that cannot happen any more."""
        check = self.check_workers if self.rank == self.master_rank else self.check_master
        self.signals.barrier(self.rank, check)


def describe_exit(exitcode: int) -> str:
    """What an exit code says: "was killed by SIGKILL …", "exited with code 3"."""
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = {
        "SIGKILL": " (out of memory?)",
        "SIGSEGV": " (a crash in compiled code)",
        "SIGBUS": " (out of shared memory?)",
    }
    return f"was killed by {name}{hint.get(name, '')}"
