"""Contestant's side of a contest: a socket, with one line of JSON for each message.

This module imports only the standard library, because the processes of every peer import it.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, Callable

Run = Callable[..., Sequence[float]]

PAUSE = 0.15  # seconds before a turn: idle threads of another contestant's OpenBLAS spin for 0.1
_SECONDS, _LEAST, _MOST = 0.15, 3, 200  # untimed part of a turn, and its calls; at most so many are timed


def rank() -> int:
    """Return the index of this process among its contestant's processes."""
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    """Return the number of the contestant's processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def timed(step: Callable[[], Any], steps: int, untimed: int = 1, before: Callable[[], Any] = int) -> list[float]:
    """Return the seconds of each of `steps` calls, after `untimed` calls; `before` precedes each call, untimed."""
    seconds = []
    for _ in range(untimed + steps):
        before()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds[untimed:]


def timed_turn(step: Callable[[], Any]) -> list[float]:
    """Pause, make calls without timing them, then return the seconds of each of as many calls, or fewer.

    After a pause, the host of a virtual machine may take some time until it has the cores where communication between
    them is fast, as it is in a program that does not pause.
    """
    time.sleep(PAUSE)
    start, n_calls = time.perf_counter(), 0
    while n_calls < _LEAST or time.perf_counter() - start < _SECONDS:
        step()
        n_calls += 1
    return timed(step, min(n_calls, _MOST), untimed=0)


def compete(make: Callable[..., tuple[Run, dict[str, Any]]]) -> None:
    """Prepare, connect to the harness, and run on each request until the harness disconnects.

    Parameters
    ----------
    make : callable
        Called with the contestant's arguments. Returns ``run``, and facts about the contestant for the record. ``run``
        is called with the parameters of a round, and returns the measured numbers. On the leaders of other nodes,
        ``make`` does not return, so they do not connect to the harness.
    """
    address, arguments = sys.argv[1:]
    try:
        run, facts = make(**json.loads(arguments))
    except Exception as error:
        _say(_connect(address), error=_describe(error))
        raise
    stream = _connect(address)
    _say(stream, facts=facts)
    for line in stream:
        try:
            numbers = [float(number) for number in run(**json.loads(line))]
        except Exception as error:
            _say(stream, error=_describe(error))
            raise
        _say(stream, numbers=numbers)


def _connect(address: str) -> Any:
    with socket.socket(socket.AF_UNIX) as connection:  # the file keeps it open
        connection.connect(address)
        return connection.makefile("rw")


def _say(stream: Any, **message: Any) -> None:
    print(json.dumps(message), file=stream, flush=True)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
