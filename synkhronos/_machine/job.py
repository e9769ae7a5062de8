"""A program on several machines, from its start to its end, and the machine that ended it."""

from __future__ import annotations

import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from synkhronos._machine.launcher import interpreter_options
from synkhronos._machine.mpiexec import command, find_mpi, parse_hosts

__all__ = ["run_on"]

_PR_SET_PDEATHSIG = 1
_SI_USER = 0
_LOOK_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_on(hosts: str, arguments: Sequence[str], command_line: Sequence[str], verbose: bool) -> tuple[int, str]:
    """Execute a program on several machines, with the same Python on each; returns its exit code, and who ended it.

    Parameters
    ----------
    hosts : str
        See `parse_hosts`.
    arguments : sequence of str
        What Python gets: a script, or ``-m`` and a module, and their arguments.
    command_line : sequence of str
        The command line of this process, without ``arguments`` and what else this package was given.
    verbose : bool
        Say on standard error what is executed.

    Returns
    -------
    int
        That of the launcher.
    str
        Which machine's process died, and all others with it; empty if none has.

    Raises
    ------
    ValueError
        If ``hosts`` makes no sense.
    FileNotFoundError
        If there is no MPI, or no launcher of it.
    """
    places = parse_hosts(hosts)
    mpi = find_mpi(os.environ)
    watch = Watch()
    program = ["env", f"SYNKHRONOS_WITNESS={watch.address}", sys.executable, *interpreter_options(command_line)]
    words = command(mpi, places, [*program, "-m", "synkhronos", "run", *arguments], list(os.environ))
    if verbose:
        sys.stderr.write(f"{mpi.version}: {shlex.join(words)}\n")
        sys.stderr.flush()
    return _execute(words, watch)


def _execute(words: Sequence[str], watch: Watch) -> tuple[int, str]:
    """Execute a command, and hand on signals that are sent to this process; those of the terminal reach both."""
    import ctypes  # where a program runs on this machine alone, it is not needed

    library, before = ctypes.CDLL(None), signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    was_told = False
    with subprocess.Popen(words, preexec_fn=prepare) as process:
        watch.start()
        while process.poll() is None:
            sent = signal.sigtimedwait(_SIGNALS, _LOOK_SECONDS)
            was_told = was_told or sent is not None
            if sent is not None and sent.si_code <= _SI_USER:
                process.send_signal(sent.si_signo)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return code, "" if was_told or not code else watch.first_death


class Watch:
    """Hears which process of the job is the first to end, and whether in peace.

    Attributes
    ----------
    address : str
        Where: host, port, and a secret.
    first_death : str
        The machine of that process; empty if all is well, or was at the first end.
    """

    def __init__(self) -> None:
        self._listening = socket.create_server(("", 0), backlog=1024)
        self._secret = secrets.token_hex(8)
        self.address = f"{socket.gethostname()}:{self._listening.getsockname()[1]}:{self._secret}"
        self.first_death = ""
        self._is_over = False

    def start(self) -> None:
        """Listen, in a thread."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        ready = select.epoll()  # it tells what happened in the order in which it did
        ready.register(self._listening, select.EPOLLIN)
        callers: dict[int, tuple[socket.socket, bytearray]] = {}
        while True:
            for fd, _ in ready.poll():
                if fd == self._listening.fileno():
                    caller, _ = self._listening.accept()
                    callers[caller.fileno()] = caller, bytearray()
                    ready.register(caller, select.EPOLLIN)
                elif not self._hears(*callers[fd]):
                    ready.unregister(fd)
                    callers.pop(fd)[0].close()
                    if self._is_over:
                        return

    def _hears(self, caller: socket.socket, said: bytearray) -> bool:
        """Take in what a caller says; returns whether it may say more."""
        try:
            part = caller.recv(4096)
        except OSError:  # its machine is gone
            part = b""
        said += part
        greeting, *rest = bytes(said).split(b"\n")
        secret, _, name = greeting.decode(errors="replace").partition(" ")
        if secret != self._secret:
            return bool(part) and len(said) < 1000
        if not part:
            machine, _, host = name.partition(" ")
            self.first_death = f"machine {machine} ({host})"
        self._is_over = not part or b"farewell" in rest
        return not self._is_over
