"""Asking questions in processes of their own: what crashes, hangs or opens a device there does no harm here.

`ask` starts all commands at once and waits for each. None outlives it, nor do its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Answer", "ask", "python"]


class Answer(NamedTuple):
    """What a command answered.

    Attributes
    ----------
    output : str
        What it printed on standard output, also if it failed later.
    error : str
        One line that says how it failed; empty if it did not.
    """

    output: str
    error: str

    @property
    def values(self) -> list[Any]:
        """The lines of the output that are JSON, decoded."""
        found = []
        for line in self.output.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    @property
    def record(self) -> dict[str, Any]:
        """All objects of the output, joined into one."""
        return {name: value for part in self.values if isinstance(part, dict) for name, value in part.items()}


def python(program: str, *arguments: str, isolated: bool = False) -> list[str]:
    """Return the command that executes a program, given as its source, by this interpreter.

    Parameters
    ----------
    program : str
    *arguments : str
        Its ``sys.argv[1:]``.
    isolated : bool
        Leave out the site's packages and Python's environment variables, which halves the time to start.
    """
    options = ["-I", "-S"] if isolated else []
    return [sys.executable, *options, "-c", program, *arguments]


def ask(
    commands: Mapping[Any, list[str]], environment: Mapping[str, str], timeout: float, given: str = ""
) -> dict[Any, Answer]:
    """Execute commands, all at once.

    Parameters
    ----------
    commands : mapping
        From whatever names a command to the command.
    environment : mapping
        The environment variables of each.
    timeout : float
        Seconds that they have together; what has not ended by then is killed.
    given : str
        The standard input of each; at most a few hundred characters.

    Returns
    -------
    dict
        An `Answer` for each command, under its name.
    """
    started: dict[Any, subprocess.Popen[str]] = {}
    answers = {}
    deadline = time.monotonic() + timeout
    try:
        for name, command in commands.items():
            try:
                started[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                answers[name] = Answer("", f"cannot be started: {error}")
        for name, process in started.items():
            answers[name] = _answer(process, given, deadline, timeout)
    finally:
        for process in started.values():
            if process.poll() is None:
                _kill(process)
                process.communicate()
    return {name: answers[name] for name in commands}


def _answer(process: subprocess.Popen[str], given: str, deadline: float, timeout: float) -> Answer:
    try:
        output, errors = process.communicate(given, timeout=max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        return Answer(output, f"no answer within {timeout:g} seconds")
    if process.returncode == 0:
        return Answer(output, "")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("compilation terminated", "collect2:"))]
    said = telling[-1] if telling else ""
    if process.returncode > 0:
        return Answer(output, said or f"exit code {process.returncode}")
    number = -process.returncode
    return Answer(output, f"ended by signal {number} ({signal.strsignal(number)})" + (f"; {said}" if said else ""))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started, which may be what still holds its standard output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
