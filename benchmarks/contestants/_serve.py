"""The contestant's side of a contest: one socket, one line of JSON for each message.

This module imports nothing but the standard library, as every peer's process imports it.
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


def rank() -> int:
    """Return which of its contestant's processes this one is."""
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    """Return how many processes the contestant has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def timed(step: Callable[[], Any], steps: int, untimed: int = 1, before: Callable[[], Any] = int) -> list[float]:
    """Give the seconds that each of `steps` calls took, after some that do not count; `before` each is not timed."""
    seconds = []
    for _ in range(untimed + steps):
        before()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds[untimed:]


def compete(make: Callable[..., tuple[Run, dict[str, Any]]]) -> None:
    """Get ready, connect to the harness, and run on each request, until the harness hangs up.

    Parameters
    ----------
    make : callable
        Called with the contestant's arguments. Gives ``run``, and facts about itself for the
        record. ``run`` is called with the parameters of a round, and gives the numbers measured. In processes
        that lead another machine's ranks it never returns: the harness does not get to know these.
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
    with socket.socket(socket.AF_UNIX) as connection:  # which the file keeps open
        connection.connect(address)
        return connection.makefile("rw")


def _say(stream: Any, **message: Any) -> None:
    print(json.dumps(message), file=stream, flush=True)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
