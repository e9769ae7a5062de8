"""A line that tells of work which takes long: on a terminal, or in a notebook; logs and pipes see nothing.

It appears after `PATIENCE` seconds and is taken back at the end, so that work of a moment shows nothing. A thread
writes it: what is waited for may be compiled code that never returns to Python. Work that forks has no thread beside
it, and tells of each part that is done.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from synkhronos._background import Background

__all__ = ["Progress", "counted", "progress"]

T = TypeVar("T")

PATIENCE = 2.0  # seconds
_STEP = 0.5  # seconds between two looks of the line

_working = threading.local()  # within some work, parts of it say nothing of their own


class Progress:
    """Work that is under way.

    Parameters
    ----------
    title : str
        What is done.
    total : int
        Of how many parts; 0: not known.
    """

    def __init__(self, title: str, total: int = 0) -> None:
        self.title = title
        self.done = 0  # parts; whoever does the work counts
        self._total = total
        self._began = time.perf_counter()
        self._due = self._began + PATIENCE  # of the next line, where no thread writes
        self._pid = os.getpid()
        self._over = threading.Lock()  # taken until the work is over
        self._over.acquire()
        self._width = 0

    def __str__(self) -> str:
        parts = f" {self.done} of {self._total}," if self._total > 1 else ""
        return f"synkhronos: {self.title}:{parts} {time.perf_counter() - self._began:.0f} s"

    def tell(self) -> None:
        """Write the line again and again until the work is over, and take it back."""
        wait = PATIENCE
        while not self._over.acquire(timeout=wait):
            self._write(str(self))
            wait = _STEP
        self.take_back()

    def count(self) -> None:
        """A part is done; write the line, at times."""
        self.done += 1
        if time.perf_counter() >= self._due:
            self._write(str(self))
            self._due = time.perf_counter() + _STEP

    def take_back(self) -> None:
        """Leave an empty line, if there is any."""
        if self._width:
            self._write("")

    def end(self) -> None:
        """The work is over."""
        self._over.release()

    def _write(self, line: str) -> None:
        if os.getpid() == self._pid:
            with contextlib.suppress(AttributeError, OSError, ValueError):  # a program may have closed it
                sys.stderr.write(f"\r{line.ljust(self._width)}" + "\r" * (not line))
                sys.stderr.flush()
                self._width = len(line)


@contextlib.contextmanager
def progress(title: str, total: int = 0) -> Iterator[Progress]:
    """Show a line while the block takes longer than `PATIENCE`; it may count parts in ``done``."""
    work = Progress(title, total)
    if getattr(_working, "is_told", False) or not _is_watched():
        yield work
        return
    _working.is_told = True
    writer = Background(work.tell, "synkhronos progress", daemon=True)
    writer.start()
    try:
        yield work
    finally:
        _working.is_told = False
        work.end()
        writer.wait()


@contextlib.contextmanager
def counted(title: str, parts: Sequence[T]) -> Iterator[Iterator[T]]:
    """Show a line, without a thread, while the block takes longer than `PATIENCE` to go through the parts."""
    work = Progress(title, len(parts))
    is_watched = _is_watched()

    def one_by_one() -> Iterator[T]:
        for part in parts:
            yield part
            if is_watched:
                work.count()

    try:
        yield one_by_one()
    finally:
        work.take_back()


def _is_watched() -> bool:
    """Whether a person sees what is written to standard error."""
    shell: Any = sys.modules.get("IPython")
    if shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell":  # a notebook
        return True
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
