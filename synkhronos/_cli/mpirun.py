"""Run a program on several nodes with the launcher of mpi4py's MPI, and report which node ended it.

Each process connects to a supervisor before it executes the program, and keeps the connection until it ends. Then the
kernel closes the connection, whatever the cause, such as a missing script or package. Through the connection, processes
send reports and read the reports of others (`synkhronos._utils.rendezvous`).

Invariant: this process does not load an MPI library.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from synkhronos._cli.launcher import interpreter_options
from synkhronos._cli.probes import ask, python
from synkhronos._utils.rendezvous import ENDED, JOINED, STARTED, SUPERVISOR, Report

_PR_SET_PDEATHSIG = 1
_SI_USER = 0
_LOOK_SECONDS = 0.05
_SECONDS = 60.0  # time limit for importing mpi4py, and for the version of a launcher, on a busy machine
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_on(hosts: str, arguments: Sequence[str], command_line: Sequence[str], verbose: bool) -> tuple[int, str]:
    """Run a program on several nodes, with the same Python on each.

    Parameters
    ----------
    hosts : str
        See `parse_hosts`.
    arguments : sequence of str
        Arguments of Python: a script, or ``-m`` and a module, and their arguments.
    command_line : sequence of str
        Command line of this process, without ``arguments`` and this package's own arguments.
    verbose : bool
        Print the executed command to standard error.

    Returns
    -------
    code : int
        The launcher's exit code.
    loss : str
        A message that says which node was lost, and how; empty if none was.

    Raises
    ------
    ValueError
        If ``hosts`` is malformed, or a name in it does not resolve.
    FileNotFoundError
        If MPI is not installed, or does not have a launcher.
    """
    places = parse_hosts(hosts)
    mpi = find_mpi(os.environ)
    check_names([host for host, _ in places])
    supervisor, interpreter = Supervisor(), [sys.executable, *interpreter_options(command_line)]
    program = supervisor.command(sys.executable, [*interpreter, "-m", "synkhronos", "run", *arguments])
    words = command(mpi, places, program, list(os.environ))
    if verbose:
        sys.stderr.write(f"{mpi.version}: {shlex.join(words)}\n")
        sys.stderr.flush()
    return _execute(words, supervisor)


def _execute(words: Sequence[str], supervisor: Supervisor) -> tuple[int, str]:
    """Execute a command, and forward to it the signals that are sent to this process.

    Signals from the terminal are not forwarded, because they reach both processes.
    """
    import ctypes  # imported here, because a program on a single node does not need it

    library, before = ctypes.CDLL(None), signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    was_forwarded = False
    with subprocess.Popen(words, preexec_fn=prepare) as process:
        supervisor.start()
        while process.poll() is None:
            sent = signal.sigtimedwait(_SIGNALS, _LOOK_SECONDS)
            was_forwarded = was_forwarded or sent is not None
            if sent is not None and sent.si_code <= _SI_USER:
                process.send_signal(sent.si_signo)
        supervisor.close()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return code, "" if was_forwarded or not code else supervisor.loss


# -- the launcher and its arguments

_INSTALL = "pip install mpi4py mpich"

#: Program that prints, as JSON, the vendor and version of mpi4py's MPI, and the file of its library.
_ASK = """
import json
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
files = [line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/libmpi" in line]
print(json.dumps([MPI.get_vendor()[0], MPI.Get_library_version().splitlines()[0].strip("\\0 "), *files[:1]]))
"""

#: By mpi4py's name for an MPI: names of launchers, the most specific first, and a text in the output of ``--version``.
_HYDRA = (("mpiexec.mpich", "mpiexec.hydra", "mpiexec", "mpirun"), "HYDRA")
_LAUNCHERS = {
    "MPICH": _HYDRA,
    "MVAPICH": _HYDRA,
    "MVAPICH2": _HYDRA,
    "Intel MPI": (("mpiexec.hydra", "mpiexec", "mpirun"), "Intel(R) MPI"),
    "Open MPI": (("mpiexec.openmpi", "mpiexec", "mpirun"), "Open"),
}

#: Names of environment variables that affect what programs compute or find. Open MPI passes only those that are named.
_TAKEN_ALONG = re.compile(
    "(CUDA|MKL|MPI4PY|NCCL|OMP|OPENBLAS|PYTENSOR|SYNKHRONOS|THEANO)_.*|PYTHON.*|PATH|LD_LIBRARY_PATH"
)


class Mpi(NamedTuple):
    """An installed MPI.

    Attributes
    ----------
    vendor : str
        mpi4py's name for it.
    version : str
    launcher : str
        Path of its mpiexec.
    """

    vendor: str
    version: str
    launcher: str


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Parse host names with optional numbers of processes, such as ``a,b:2``.

    Raises
    ------
    ValueError
        If the text is malformed.

    >>> parse_hosts("a,b:2")
    [('a', 1), ('b', 2)]
    """
    hosts = []
    for part in text.split(","):
        host, colon, number = part.strip().partition(":")
        if not host or host.startswith("-") or set(host) & set(" /;@") or (colon and not number.isdigit()):
            raise ValueError(f"--hosts is {text}; expected names with commas between them, as in a,b or a,b:2")
        if colon and not int(number):
            raise ValueError(f"--hosts is {text}; expected at least one process on {host}")
        hosts.append((host, int(number) if colon else 1))
    names = [host for host, _ in hosts]
    for host in names:
        if names.count(host) > 1:
            raise ValueError(f"--hosts {text} names {host} twice; use {host}:2 for two processes there")
    return hosts


def check_names(hosts: Sequence[str]) -> None:
    """Check that host names resolve.

    Raises
    ------
    ValueError
        If a name does not resolve; the message lists all such names.
    """

    def resolves(host: str) -> bool:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(32) as pool:
        unknown = [host for host, known in zip(hosts, pool.map(resolves, hosts)) if not known]
    if unknown:
        raise ValueError(f"--hosts: no address found for {', '.join(unknown)}; check the spelling, DNS and /etc/hosts")


def find_mpi(environment: Mapping[str, str]) -> Mpi:
    """Find the MPI that mpi4py uses in this Python, and its launcher.

    Raises
    ------
    FileNotFoundError
        If there is none, or its mpiexec is missing; the message says what to install.
    """
    answer = ask({0: python(_ASK)}, environment, _SECONDS)[0]
    if answer.error or not answer.values:
        raise FileNotFoundError(f"mpi4py cannot be imported ({answer.error or 'no answer'}): {_INSTALL}")
    vendor, version, *library = answer.values[-1]
    names, said = _LAUNCHERS.get(vendor, (("mpiexec", "mpirun"), ""))
    for path in _candidates(names, library, environment):
        if said in _version(path):
            return Mpi(vendor, version, path)
    raise FileNotFoundError(
        f"there is no mpiexec of {vendor}, whose library mpi4py uses ({', '.join(library) or version}): install the "
        f"package that it is in (on Debian: mpich, or openmpi-bin), or another MPI: {_INSTALL}"
    )


def _candidates(names: Sequence[str], library: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield paths of launchers: in folders above the MPI library, then next to Python, then on the search path."""
    folders = [folder / "bin" for file in library for folder in Path(file).parents[:4]]
    folders += [Path(sys.executable).parent, *map(Path, environment.get("PATH", os.defpath).split(os.pathsep))]
    for folder in folders:
        for name in names:
            if os.access(folder / name, os.X_OK) and (folder / name).is_file():
                yield str(folder / name)


def _version(path: str) -> str:
    return ask({0: [path, "--version"]}, os.environ, _SECONDS)[0].output


def command(mpi: Mpi, hosts: Sequence[tuple[str, int]], program: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the command line that starts processes on hosts.

    Parameters
    ----------
    mpi : Mpi
    hosts : sequence of (str, int)
        See `parse_hosts`.
    program : sequence of str
        Command that each process executes.
    names : sequence of str
        Names of the environment variables of this process.
    """
    total = str(sum(n for _, n in hosts))
    listed = ",".join(f"{host}:{n}" for host, n in hosts)
    if mpi.vendor == "Open MPI":
        taken = [part for name in sorted(names) if _TAKEN_ALONG.fullmatch(name) for part in ("-x", name)]
        return [mpi.launcher, "--host", listed, "-n", total, "--bind-to", "none", *taken, *program]
    if mpi.vendor == "Intel MPI":  # with a list of hosts, it would start all processes on the first one
        parts = [["-n", str(n), "-host", host, *program] for host, n in hosts]
        return [mpi.launcher, *parts[0], *(word for part in parts[1:] for word in (":", *part))]
    return [mpi.launcher, "-hosts", listed, "-n", total, *program]


#: Program that Python executes on each host: it connects, if possible, to the address in its first argument, and
#: executes the command in the other arguments.
_CONNECT = f"""
import os, socket, sys
try:
    host, port, secret = sys.argv[1].split(":")
    connection = socket.create_connection((host, int(port)), 2)
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    connection.sendall(f"{{secret}} {{rank}} {{socket.gethostname()}}\\n".encode())
    connection.setblocking(True)
    connection.set_inheritable(True)
    inode = os.fstat(connection.fileno()).st_ino
    os.environ["{SUPERVISOR}"] = f"{{connection.fileno()}}:{{inode}}:{{os.getpid()}}"
except (OSError, ValueError):
    pass
os.execv(sys.argv[2], sys.argv[2:])
"""

_MOST_BYTES = 10_000  # longest line that a process may send


class _Process:
    """State of the connection to one process of the job."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None  # None until the process has sent its first line
        self.unread = b""


class Supervisor:
    """Thread that receives the reports of the processes of a job, and answers their requests.

    Attributes
    ----------
    loss : str
        A message that says which node was lost first, and how; empty if no node was lost before the program ended.
    """

    def __init__(self) -> None:
        self._listening = socket.create_server(("", 0), backlog=1024)
        self._secret = secrets.token_hex(8)
        self._address = f"{socket.gethostname()}:{self._listening.getsockname()[1]}:{self._secret}"
        self._reports: dict[int, Report] = {}
        self.loss = ""
        self._is_over = False
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def command(self, python: str, program: list[str]) -> list[str]:
        """Return the command that executes a program, given by its absolute path, under this supervisor."""
        return [python, "-c", f"exec({_CONNECT!r})", self._address, *program]  # on one line, because --verbose shows it

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        with contextlib.suppress(OSError):  # the thread has already ended if this process has too many open files
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _listen(self) -> None:
        processes: dict[int, _Process] = {}
        with self._listening, select.epoll() as ready:  # epoll returns events in the order in which they occurred
            ready.register(self._listening, select.EPOLLIN)
            while self._serve(ready, processes):
                pass
        for process in processes.values():
            process.connection.close()

    def _serve(self, ready: select.epoll, processes: dict[int, _Process]) -> bool:
        """Wait for the next events and handle them; return whether more may follow."""
        for fd, _ in ready.poll():
            if fd == self._listening.fileno():
                try:
                    connection, _ = self._listening.accept()
                except OSError:  # `close`
                    return False
                processes[connection.fileno()] = _Process(connection)
                ready.register(connection, select.EPOLLIN)
            elif not self._hear(processes[fd]):
                ready.unregister(fd)
                processes.pop(fd).connection.close()
        return True

    def _hear(self, process: _Process) -> bool:
        """Receive and handle lines of a process; return whether more may follow."""
        try:
            part = process.connection.recv(4096)
        except OSError:  # the connection to its host is lost
            part = b""
        *lines, process.unread = (process.unread + part).split(b"\n")
        makes_sense = all(self._take(process, *line.decode(errors="replace").split(" ")) for line in lines)
        goes_on = bool(part) and makes_sense and len(process.unread) < _MOST_BYTES
        if not goes_on and process.rank is not None:
            self._ended(process.rank)
        return goes_on

    def _take(self, process: _Process, what: str, *words: str) -> bool:
        """Handle a line; return whether it is well-formed."""
        if process.rank is None:
            if not secrets.compare_digest(what.encode(), self._secret.encode()) or len(words) != 2:
                return False
            process.rank = int(words[0]) if words[0].isdigit() else -1
            self._reports[process.rank] = Report(STARTED, words[1])
        elif what == "report" and len(words) == 1:
            report = Report.decode(words[0])
            if report is None:
                return False
            self._reports[process.rank] = report
            if report.state is ENDED:
                text = f"node {process.rank} ({report.host}) ended without calling fork()"
                self._lose(f"{text}: {report.reason}" if report.reason else text)
        elif what == "look" and len(words) == 1:
            found = self._reports.get(int(words[0])) if words[0].isdigit() else None
            try:
                process.connection.sendall(f"{found.encode() if found is not None else ''}\n".encode())
            except OSError:
                return False
        elif what == "farewell":
            self._is_over = True
        else:
            return False
        return True

    def _ended(self, rank: int) -> None:
        """Record that a process has ended."""
        report = self._reports[rank]
        if report.state is JOINED:
            self._lose(f"the process on node {rank} ({report.host}) died, or was killed, and the job ended with it")
        elif report.state is not ENDED:
            self._reports[rank] = Report(ENDED, report.host)
            self._lose(f"node {rank} ({report.host}) ended without calling fork()")

    def _lose(self, text: str) -> None:
        if not self._is_over:  # later losses are consequences of the first
            self.loss, self._is_over = text, True
