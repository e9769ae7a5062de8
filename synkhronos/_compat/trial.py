"""Trying a BLAS in a fork: one that crashes, or ends the process as MKL does where a part is missing, does so there.

And there are the libraries that are loaded in this process already, by which others may be found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import tempfile
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from . import routines
from .linking import link

__all__ = ["Linked", "try_blas", "try_routines"]

_SECONDS = 60  # for a BLAS to be loaded and called, on a machine that is busy


class Linked(NamedTuple):
    """What comes of linking to a BLAS, and of calling it.

    Attributes
    ----------
    trouble : str
        Why Theano's modules cannot be linked to it, or do not load, or die in it; empty if all is well.
    objection : str
        Why Theano must not compute with it.
    file : str
        The file whose products are called.
    """

    trouble: str = ""
    objection: str = ""
    file: str = ""


def try_blas(flags: str) -> Linked:
    """Link a module to a BLAS, load it and call its routines.

    Theano must have been imported, and have a compiler.

    Parameters
    ----------
    flags : str
        As in ``theano.config.blas.ldflags``.
    """
    from theano import config

    try:
        # Where Theano's own modules lie: elsewhere, executing files may be forbidden.
        with tempfile.TemporaryDirectory(prefix="synkhronos_", dir=config.base_compiledir) as folder:
            module = link(flags, folder)
            return try_routines(lambda: routines.load_table(module))
    except OSError as error:
        return Linked(trouble=str(error))


def try_routines(load: Callable[[], dict[str, int]]) -> Linked:
    """Load a BLAS, and call its routines, in a fork of this process.

    Parameters
    ----------
    load : callable
        Loads it, and returns the addresses of `routines.SYMBOLS` or raises an `OSError`.
    """
    reading, writing = os.pipe()
    child = 0
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no handler raises in the fork
        try:
            child = os.fork()
            if not child:
                _answer(load, writing)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(writing)
        output = _listen(reading)
    finally:
        os.close(reading)
        status = _end(child) if child else 0
    answer: dict[str, str] = {}
    words = []
    for line in filter(None, map(str.strip, output.splitlines())):
        if line.startswith("{"):
            answer.update(json.loads(line))
        else:
            words.append(line)
    if "objection" not in answer:
        number = f" by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
        answer["trouble"] = "; ".join(words[:3]) or f"it ends the process{number}"
    return Linked(**answer)


def _answer(load: Callable[[], dict[str, int]], writing: int) -> NoReturn:
    """Tell what comes of a BLAS, in a fork; line by line, each as soon as it is known."""

    def tell(**facts: str) -> None:
        os.write(writing, f"{json.dumps(facts)}\n".encode())

    try:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        addresses = load()
        tell(file=routines.file_of(addresses["dgemm_"]))
        tell(objection=routines.objection(addresses))
    except OSError as error:
        words = re.sub(r".*: undefined symbol: (\w+)", r"none of the libraries has the routine \1", str(error))
        tell(trouble=words, objection="")
    finally:
        os._exit(0)


def _listen(reading: int) -> str:
    """Return what a fork says until it ends, or for as long as it is waited for."""
    output = b""
    ready = select.poll()
    ready.register(reading)
    while ready.poll(1000 * _SECONDS):
        part = os.read(reading, 1 << 16)
        if not part:
            return output.decode(errors="replace")
        output += part
    return f"{output.decode(errors='replace')}\nit gives no answer within {_SECONDS} seconds"


def _end(child: int) -> int:
    """Return the status of a fork, which is killed if it has not ended, and remove what Intel's OpenMP leaves of it."""
    status = 0
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # where the program reaps its children itself
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    with contextlib.suppress(OSError):
        os.unlink(f"/dev/shm/__KMP_REGISTERED_LIB_{child}_{os.getuid()}")
    return status
