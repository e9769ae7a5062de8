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
    """Tell which of its contestant's processes this one is."""
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    """Tell how many processes the contestant has."""
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
    """Connect to the harness, get ready, and run whenever told to, until the harness hangs up.

    Parameters
    ----------
    make : callable
        Called with the contestant's arguments. Gives ``run``, and facts about itself for the
        record. ``run`` is called with the parameters of a round, and gives the numbers measured.
    """
    address, arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw")

        def answer(call: Callable[[], Any]) -> Any:
            try:
                result = call()
            except Exception as error:
                text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
                print(json.dumps({"error": text}), file=stream, flush=True)
                raise
            return result

        run, facts = answer(lambda: make(**json.loads(arguments)))
        print(json.dumps({"facts": facts}), file=stream, flush=True)
        for line in stream:
            parameters = json.loads(line)
            numbers = answer(lambda parameters=parameters: [float(number) for number in run(**parameters)])
            print(json.dumps({"numbers": numbers}), file=stream, flush=True)
