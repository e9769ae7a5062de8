"""Supervisor of the processes that ``python -m synkhronos run --hosts`` starts.

Each process connects to the supervisor before it executes the program, and keeps the connection until it ends. Then the
kernel closes the connection, whatever the cause, such as a missing script or package. Through the connection, processes
send reports and read the reports of others (`synkhronos._utils.rendezvous`).
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading

from synkhronos._utils.rendezvous import ENDED, JOINED, STARTED, SUPERVISOR, Report

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
