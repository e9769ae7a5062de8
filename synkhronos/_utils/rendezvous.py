"""Rendezvous of the processes of an MPI job, before MPI connects them.

``MPI_Init`` returns when all processes of the job have called it. If one process never calls it, the others wait
forever. Therefore each process reports its state, and reads the reports of the others, before it calls ``MPI_Init``::

    import synkhronos     registers an exit hook
    fork()                reports WAITS; `wait_for_all` waits until all processes have reported it, or one has ended
    exit without fork()   the exit hook reports ENDED, and the exception if there is one
    MPI is connected      the process reports JOINED

Reports are sent through each available channel:

* the name service of Hydra, which is the launcher of MPICH and Intel MPI, by the protocol PMI 1;
* the connection to ``python -m synkhronos run --hosts``, which also reports processes that have ended without a report.

Without a channel (Open MPI's ``mpiexec``, ``srun``), `wait_for_all` returns at once. These launchers themselves end the
job if a process ends without ``MPI_Init`` after others have called it.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import enum
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from synkhronos.errors import NodeLost


class State(str, enum.Enum):
    """State that a process reports; the value is the word on the wire."""

    STARTED = "started"
    WAITS = "waits"
    JOINED = "joined"
    ENDED = "ended"


STARTED, WAITS, JOINED, ENDED = State

#: Environment variable that names the connection to the supervisor (``python -m synkhronos run``), by its descriptor,
#: its inode and the process id. A program that this process starts may inherit the variable and the descriptor; the
#: process id shows that they are not its own.
SUPERVISOR = "SYNKHRONOS_SUPERVISOR"

#: Advice in messages about lost nodes.
RESTART = "start the program again"

#: Environment variables in which launchers pass the number of processes, and the number of this process. Those of
#: ``srun`` come last, because they apply only if neither ``srun`` nor a launcher that it has started uses PMI.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")

_assumes_nodes = False

_MOST_BYTES = 600  # longest report, before it is encoded: a line of PMI has at most 1,024 characters
_ANSWER_SECONDS = 30.0  # even a launcher that was stopped answers in time: MPI would read a late answer as its own
_UCRED_BYTES = 12  # size of `struct ucred`, which begins with the process id
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25  # seconds between two reads of the reports
_DRAIN_SECONDS, _FORWARD_SECONDS = 1.0, 0.1  # time that the launcher has to read the output, and to forward it


class _StartLost(NodeLost, SystemExit):
    """`NodeLost` without a traceback: unless the program catches it, Python prints the message and exits with code 1.

    A traceback would lead to the call of `fork`, which is not the cause.
    """

    def __init__(self, message: str, machine: int) -> None:
        super().__init__(message, machine)
        self.code = f"synkhronos.fork: {message}"


class Report(NamedTuple):
    """Report of one process of the job.

    Attributes
    ----------
    state : State
    host : str
        Host name of the process.
    reason : str
        Exception that has ended the process; may be empty.
    """

    state: State
    host: str
    reason: str = ""

    def encode(self) -> str:
        """Return the report as one word, in base 64."""
        text = " ".join(self).encode()[:_MOST_BYTES]
        return base64.urlsafe_b64encode(text).decode().rstrip("=")

    @staticmethod
    def decode(word: str) -> Report | None:
        """Return the report that a word encodes; ``None`` if the word is not a report."""
        with contextlib.suppress(ValueError):
            text = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4)).decode(errors="ignore")
            state, host, reason = text.split(" ", 2)
            return Report(State(state), host, reason)
        return None


class _Lines:
    """Channel of requests and answers of one line each, on a socket.

    Other code uses the socket, too, so its flags are not changed. Subclasses have two methods: ``report(rank, word)``
    publishes a word as the report of a process, and ``look(rank)`` returns the last one; empty if there is none.

    Parameters
    ----------
    fd : int
        Descriptor of the socket. Nothing is sent if it is not a socket, or later becomes another one.
    """

    def __init__(self, fd: int) -> None:
        self.fd, self._identity = fd, _identity(fd)

    @property
    def is_open(self) -> bool:
        """Whether the channel can send lines."""
        return self._identity is not None and _identity(self.fd) == self._identity

    def send(self, line: str) -> None:
        """Send a line."""
        if self.is_open:
            with contextlib.suppress(OSError):
                os.write(self.fd, f"{line}\n".encode())

    def ask(self, line: str) -> str:
        """Send a line, and return the answer; empty if there is none in time."""
        from synkhronos._utils.interrupts import deferred_interrupts  # imported late, because it loads the C core

        with deferred_interrupts():  # the next request would read an answer that an interrupt leaves unread
            self.send(line)
            return self._receive()

    def _receive(self) -> str:
        """Receive one line; close the channel if it does not arrive in time."""
        import select

        ready, answer, end = select.poll(), b"", time.monotonic() + _ANSWER_SECONDS
        ready.register(self.fd, select.POLLIN)
        while self.is_open and not answer.endswith(b"\n"):
            part = b""
            if ready.poll(1000 * max(0.0, end - time.monotonic())):
                with contextlib.suppress(OSError):
                    part = os.read(self.fd, 4096)
            if not part:
                self._identity = None
                return ""
            answer += part
        return answer.decode(errors="replace").rstrip("\n")

    def close(self) -> None:
        """Close the descriptor if it still belongs to the same socket."""
        if self.is_open:
            os.close(self.fd)
        self._identity = None


class _Launcher(_Lines):
    """Channel through the name service of Hydra, the launcher of MPICH and Intel MPI.

    After a process has sent anything, it must send ``finalize`` or call ``MPI_Finalize``. Otherwise Hydra ends the
    other processes when this one ends.

    Attributes
    ----------
    is_parent : bool
        Whether the launcher itself has started this process. If it has started a shell script, all programs of the
        script inherit one connection. A program that ends without `fork` must then send nothing, because a later
        program of the script may call `fork`.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.is_parent = _peer(fd) == os.getppid()

    def report(self, rank: int, word: str) -> None:
        self.command(f"publish_name service={self._name(rank)} port={word}")

    def look(self, rank: int) -> str:
        return self.command(f"lookup_name service={self._name(rank)}").get("port", "")

    def _name(self, rank: int) -> str:
        """Return the name under which a process publishes its report."""
        if not hasattr(self, "_job"):  # name of the job, because other jobs may use the same service
            self._job = self.command("get_my_kvsname").get("kvsname", "")
        return f"synkhronos-{self._job}-{rank}"

    def command(self, command: str) -> dict[str, str]:
        """Send a PMI command, and return the fields of the answer."""
        return dict(word.split("=", 1) for word in self.ask(f"cmd={command}").split() if "=" in word)


class _Supervisor(_Lines):
    """Channel to ``python -m synkhronos run --hosts``, over a connection that was opened before the program started."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=self.close)

    def report(self, rank: int, word: str) -> None:
        self.send(f"report {word}")

    def look(self, rank: int) -> str:
        return self.ask(f"look {rank}")

    def pass_on(self) -> str:
        """Keep the connection open when this process executes another program; return `SUPERVISOR` for that program."""
        os.set_inheritable(self.fd, True)
        return f"{self.fd}:{_identity(self.fd)}:{os.getpid()}"


class Rendezvous:
    """Rendezvous of this process with the other processes of the job.

    Parameters
    ----------
    environment : mapping
        Environment variables; `SUPERVISOR` is removed.

    Attributes
    ----------
    size, rank : int
        Number of processes in the job, and number of this process.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self.size = count_launched(environment)
        self.rank = next((int(environment[name]) for name in _RANKS if environment.get(name, "").isdigit()), 0)
        self._pid = os.getpid()
        self._state: State = STARTED
        self._launcher: _Launcher | None = None
        self._supervisor: _Supervisor | None = None
        self._seen: dict[int, Report] = {}
        if self.size > 1:
            if environment.get("PMI_FD", "").isdigit() and "MPI_LOCALRANKID" in environment:  # Hydra, not Slurm
                self._launcher = _Launcher(int(environment["PMI_FD"]))
            fd, inode, pid = map(int, environment.pop(SUPERVISOR, "-1:0:0").split(":"))
            if pid == self._pid and _identity(fd) == inode:
                self._supervisor = _Supervisor(fd)
            atexit.register(self._end)

    def wait_for_all(self, seconds: float | None) -> None:
        """Wait until all processes of the job have called `fork`.

        Parameters
        ----------
        seconds : float or None
            Longest wait, as passed by the user; ``None``: no limit.

        Raises
        ------
        NodeLost
            In the first process, if another process has ended or has not called `fork` in time. If the first process
            itself has not called `fork`, another process ends the job instead.
        """
        self._report(WAITS)
        began, pause = time.monotonic(), _SHORTEST_PAUSE
        missing = [rank for rank in range(self.size) if rank != self.rank]
        while self._channels():
            missing = [rank for rank in missing if not self._is_there(rank)]
            # the first process watches all others; these watch each other only until the first has called `fork`
            if not missing or (self.rank and 0 not in missing):
                return
            for rank in missing:
                report = self._seen.get(rank)
                if report is not None and report.state is ENDED:
                    text = f"{self.describe(rank)} ended without calling fork()"
                    self._give_up(rank, f"{text}: {report.reason}" if report.reason else text)
            if seconds is not None and time.monotonic() - began > seconds:
                names = " and ".join(map(self.describe, missing))
                self._give_up(missing[0], f"{names} did not call fork() within start_timeout={seconds:g} seconds")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def joined(self) -> None:
        """Report that MPI has connected this process with the others."""
        self._report(JOINED)

    def farewell(self) -> None:
        """Report that the job ends without an error."""
        if self._supervisor is not None:
            self._supervisor.send("farewell")

    def pass_on(self, environment: MutableMapping[str, str]) -> None:
        """Pass the connection to the supervisor on to the program that this process executes next."""
        if self._supervisor is not None:
            environment[SUPERVISOR] = self._supervisor.pass_on()

    def abort(self) -> None:
        """Have the launcher end all processes of the job, including this one.

        Without Hydra, do nothing: Open MPI's launcher ends the job when this process ends.
        """
        drain_output()
        if self._launcher is not None:
            self._launcher.send("cmd=abort exitcode=1")

    def descriptors(self) -> list[int]:
        """Return the descriptors that `abort` needs."""
        return [self._launcher.fd] if self._launcher is not None and self._launcher.is_open else []

    def describe(self, rank: int) -> str:
        """Return the name of a process's node, with its host if that is known."""
        return f"node {rank} ({self._seen[rank].host})" if rank in self._seen else f"node {rank} of {self.size}"

    def _channels(self) -> list[_Supervisor | _Launcher]:
        channels: tuple[_Supervisor | _Launcher | None, ...] = (self._supervisor, self._launcher)
        return [one for one in channels if one is not None and one.is_open]

    def _is_there(self, rank: int) -> bool:
        """Return whether another process has called `fork`."""
        return self._look(rank) in (WAITS, JOINED)

    def _look(self, rank: int) -> State | None:
        """Return the state of another process; ``None`` if it is unknown."""
        for channel in self._channels():
            report = Report.decode(channel.look(rank))
            if report is not None:
                self._seen[rank] = report
                if report.state is not STARTED:
                    break
        return self._seen[rank].state if rank in self._seen else None

    def _report(self, state: State, reason: str = "") -> None:
        """Publish the state of this process through all channels."""
        before, self._state = self._state, state
        word = Report(state, os.uname().nodename, reason).encode()
        for channel in self._channels():
            if channel is not self._launcher or before is STARTED:  # Hydra cannot change a published name
                channel.report(self.rank, word)

    def _give_up(self, rank: int, message: str) -> None:
        """End the job, unless a process with a lower number has called `fork` and will do that."""
        message = f"{message}; {RESTART}"
        if not self.rank:
            raise _StartLost(message, rank)
        if not any(self._is_there(other) for other in range(self.rank)):
            flush_output()  # so that buffered output precedes the message
            os.write(2, f"synkhronos.fork: {message}\n".encode())
            self.abort()
            os._exit(1)

    def _end(self) -> None:
        """Report at exit that this process ends without a session; end the job if others still wait for it."""
        if os.getpid() != self._pid or self._state is JOINED:
            return
        flush_output()
        mpi = _mpi_state()
        may_be_followed = self._state is STARTED and self._launcher is not None and not self._launcher.is_parent
        if mpi == "unknown" or may_be_followed:
            self._launcher = None
        has_failed = self._state is WAITS
        error = getattr(sys, "last_value", None)
        self._report(ENDED, "" if error is None else " ".join(f"{type(error).__name__}: {error}".split()))
        others = [rank for rank in range(self.size) if rank != self.rank]
        if has_failed and not all(self._look(rank) is ENDED for rank in others):
            if mpi == "initialized":
                drain_output()
                sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(1)
            self.abort()
        elif self._launcher is not None and not mpi:
            self._launcher.command("finalize")  # so that this process may end while others continue


def count_launched(environment: Mapping[str, str]) -> int:
    """Return the number of processes that were launched together, according to the environment of one of them."""
    return next((int(environment[name]) for name in _SIZES if environment.get(name, "").isdigit()), 1)


_WITH_OTHERS = count_launched(os.environ) > 1  # before `fork`, which may remove these variables


def is_spread() -> bool:
    """Return whether this process was launched with others, so that a session has several nodes, or this is assumed."""
    return _assumes_nodes or _WITH_OTHERS


@contextlib.contextmanager
def assuming_nodes() -> Iterator[None]:
    """Build graphs within the block as on several nodes."""
    global _assumes_nodes
    before, _assumes_nodes = _assumes_nodes, True
    try:
        yield
    finally:
        _assumes_nodes = before


def _identity(fd: int) -> int | None:
    """Return the inode of a socket; ``None`` if the descriptor is not a socket."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _peer(fd: int) -> int:
    """Return the id of the process that has created the other end of a socket; 0 if it is unknown."""
    import socket

    with contextlib.suppress(OSError), socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM) as end:
        return int.from_bytes(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED_BYTES)[:4], sys.byteorder)
    return 0


def _mpi_state() -> str:
    """Return the state of MPI in this process: "" (not initialized), "initialized", "finalized" or "unknown"."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        return "finalized" if mpi.Is_finalized() else "initialized" if mpi.Is_initialized() else ""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return "unknown" if "/libmpi" in file.read() else ""
    return "unknown"


def flush_output() -> None:
    """Flush stdout and stderr; ignore errors, because a program may have closed or replaced these streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def drain_output() -> None:
    """Wait until the launcher has read the output of this process, for at most `_DRAIN_SECONDS`.

    The launcher drops unread output when the job is aborted.
    """
    flush_output()
    end = time.monotonic() + _DRAIN_SECONDS
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # closed
            while _count_unread(fd) and time.monotonic() < end:
                time.sleep(_SHORTEST_PAUSE)
    time.sleep(_FORWARD_SECONDS)


def _count_unread(fd: int) -> int:
    """Return the number of unread bytes in a pipe; 0 for a file that is not a pipe."""
    import fcntl
    import termios

    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return 0
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


rendezvous = Rendezvous(os.environ)
