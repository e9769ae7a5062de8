"""Monitor for the ranks of this user's sessions (``python -m synkhronos top``), which runs outside of them."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from synkhronos._processes import SessionStatus

_PAUSE = 0.01  # seconds between two samples; the share of waiting time is computed from the samples
_HEAD = ("session", "rank", "pid", "doing", "waiting", "memory", "program")
_MEMORY = ("/memfd:synkhronos", "/dev/shm/synkhronos-")
_OTHERS = "the same command on other nodes shows their ranks"
_NONE = "no session of this user is running on this machine"


class Found(NamedTuple):
    """A session: the process id of its controller or node leader, and its status."""

    pid: int
    status: SessionStatus


def find_sessions() -> list[Found]:
    """Return the sessions of this user on this machine, ordered by process id."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                found += [Found(int(name), status) for status in _statuses_of(int(name))]
    return sorted(found, key=lambda one: one.pid)


def _statuses_of(pid: int) -> Iterator[SessionStatus]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(path).startswith(_MEMORY):  # opening another kind of file might have side effects
                status = SessionStatus(path)
                if status.pids[status.master_rank] == pid:  # other processes may have inherited the descriptor
                    yield status
                    return


def measure(sessions: list[Found], seconds: float) -> list[tuple[str, ...]]:
    """Sample the state of sessions for some seconds; return the rows of the table, one for each rank."""
    waits = [[0] * one.status.n_ranks for one in sessions]
    n_looks, end = 0, time.monotonic() + seconds
    while not n_looks or time.monotonic() < end:
        time.sleep(_PAUSE)
        n_looks += 1
        doing = [one.status.look() for one in sessions]
        for counts, now in zip(waits, doing):
            for rank, what in enumerate(now):
                counts[rank] += what.startswith("waits")
    lines: list[tuple[str, ...]] = []
    for one, counts, now in zip(sessions, waits, doing):
        program = program_of(_command(one.pid))
        for rank, pid in enumerate(one.status.pids):
            role = "" if rank != one.status.master_rank else " leader" if one.status.first else " controller"
            what, n_bytes = _process(pid)
            share = "-" if what == "ended" else f"{100 * counts[rank] / n_looks:.0f} %"
            cells = (str(one.pid), f"{one.status.first + rank}{role}", str(pid), what or now[rank])
            lines.append((*cells, share, f"{n_bytes / 1e6:,.0f} MB", program))
    return lines


def program_of(command: Sequence[str]) -> str:
    """Return the name of a program from its command line: Python's script or module, or the command.

    >>> program_of(["python3.11", "-X", "dev", "-m", "ipykernel_launcher", "-f", "kernel.json"])
    'ipykernel_launcher'
    """
    is_python = bool(command) and os.path.basename(command[0]).startswith("python")
    words = iter(command[is_python:])
    for word in words:
        if re.fullmatch("-[A-Za-z]*[mWX]", word):
            value = next(words, "")
            if word.endswith("m"):
                return value
        elif re.fullmatch("-[A-Za-z]*c", word):
            return "-c"
        elif not word.startswith("-"):
            return os.path.basename(word)
    return ""


def _command(pid: int) -> list[str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    return []


def has_others(sessions: list[Found]) -> bool:
    """Return whether any of these sessions has ranks on other nodes."""
    return any(one.status.n_all > one.status.n_ranks for one in sessions)


def _process(pid: int) -> tuple[str, int]:
    """Return the state of a process, and its resident memory in bytes.

    The state is ``"stopped"``, ``"ended"``, or empty if the process runs.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return "ended", 0
    return {"T": "stopped", "t": "stopped", "Z": "ended"}.get(state, ""), pages * os.sysconf("SC_PAGE_SIZE")


def top(once: bool, seconds: float = 1.0) -> int:
    """Show the table once, or repeatedly until Ctrl-C.

    Parameters
    ----------
    once : bool
    seconds : float
        Time between two updates, in which the ranks are sampled.

    Returns
    -------
    int
        The exit code; 1 if there is no session, and 3 if the live view cannot be shown because rich is missing.
    """
    sessions = find_sessions()
    if not sessions:
        sys.stderr.write(f"synkhronos top: {_NONE}\n")
        return 1
    if once:
        lines = [_HEAD, *measure(sessions, seconds)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        sys.stdout.writelines("  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in lines)
        sys.stdout.write(f"{_OTHERS}\n" if has_others(sessions) else "")
        return 0
    try:
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        sys.stderr.write("synkhronos top: the live view needs rich (pip install rich); or give --once\n")
        return 3
    with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while sessions:
            table = Table(
                caption=_OTHERS if has_others(sessions) else None, box=None, pad_edge=False, padding=(0, 2, 0, 0)
            )
            for head in _HEAD:
                table.add_column(head, no_wrap=head != _HEAD[-1])  # a terminal of 80 columns shortens the program alone
            for line in measure(sessions, seconds):
                table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in line))  # no markup in names
            live.update(table, refresh=True)
            sessions = find_sessions()
    return 0
