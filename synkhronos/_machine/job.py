"""A program on several nodes, from its start to its end, and the node that ended it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

from synkhronos._machine.launcher import interpreter_options
from synkhronos._machine.mpiexec import check_names, command, find_mpi, parse_hosts
from synkhronos._machine.supervisor import Supervisor

__all__ = ["run_on"]

_PR_SET_PDEATHSIG = 1
_SI_USER = 0
_LOOK_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_on(hosts: str, arguments: Sequence[str], command_line: Sequence[str], verbose: bool) -> tuple[int, str]:
    """Execute a program on several nodes, with the same Python on each; returns its exit code, and which node ended it.

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
        Which node was lost, and how; empty if none.

    Raises
    ------
    ValueError
        If ``hosts`` makes no sense, or a name in it does not resolve.
    FileNotFoundError
        If there is no MPI, or no launcher of it.
    """
    places = parse_hosts(hosts)
    mpi = find_mpi(os.environ)
    check_names([host for host, _ in places])
    supervisor, python = Supervisor(), [sys.executable, *interpreter_options(command_line)]
    program = supervisor.command(sys.executable, [*python, "-m", "synkhronos", "run", *arguments])
    words = command(mpi, places, program, list(os.environ))
    if verbose:
        sys.stderr.write(f"{mpi.version}: {shlex.join(words)}\n")
        sys.stderr.flush()
    return _execute(words, supervisor)


def _execute(words: Sequence[str], supervisor: Supervisor) -> tuple[int, str]:
    """Execute a command, and hand on signals that are sent to this process; those of the terminal reach both."""
    import ctypes  # where a program runs on this machine alone, it is not needed

    library, before = ctypes.CDLL(None), signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    was_told = False
    with subprocess.Popen(words, preexec_fn=prepare) as process:
        supervisor.start()
        while process.poll() is None:
            sent = signal.sigtimedwait(_SIGNALS, _LOOK_SECONDS)
            was_told = was_told or sent is not None
            if sent is not None and sent.si_code <= _SI_USER:
                process.send_signal(sent.si_signo)
        supervisor.close()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return code, "" if was_told or not code else supervisor.loss()
