"""A bar of tqdm's that tells of work which takes long: on a terminal, or in a notebook; logs and pipes see nothing.

It appears after `PATIENCE` seconds and is taken back at the end, so that work of a moment shows nothing. A thread
keeps it up to date: what is waited for may be compiled code that never returns to Python. Work that forks has no thread
beside it, and tells of each part that is done.

Invariant: only who has made a bar writes it. A process that was forked meanwhile leaves it alone, and tqdm's lock, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from synkhronos._utils.background import Background

__all__ = ["Progress", "counted", "progress"]

T = TypeVar("T")

PATIENCE = 2.0  # seconds
_STEP = 0.5  # seconds between two looks of the bar

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
        self.done = 0  # parts; whoever does the work counts
        self._title, self._total = title, total
        self._began = time.time()
        self._over = threading.Lock()  # taken until the work is over
        self._over.acquire()

    def tell(self) -> None:
        """Show a bar, if it comes to that, until the work is over, and take it back."""
        if self._over.acquire(timeout=PATIENCE):
            return
        with _bar(self._title, self._total, initial=self.done) as bar:
            bar.start_t = self._began
            bar.refresh()
            while not self._over.acquire(timeout=_STEP):
                bar.n = self.done
                bar.refresh()

    def end(self) -> None:
        """The work is over."""
        self._over.release()


@contextlib.contextmanager
def progress(title: str, total: int = 0) -> Iterator[Progress]:
    """Show a bar while the block takes longer than `PATIENCE`; it may count parts in ``done``."""
    work = Progress(title, total)
    if getattr(_working, "is_told", False) or not _is_watched():
        yield work
        return
    _working.is_told = True
    _kind_of_bar()  # imported here: a process that is forked in the middle of that could not do so any more
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
    """Show a bar, without a thread, while the block takes longer than `PATIENCE` to go through the parts."""
    if not _is_watched():
        yield iter(parts)
        return
    bar, maker = _bar(title, len(parts), delay=PATIENCE, mininterval=_STEP, miniters=1), os.getpid()

    def one_by_one() -> Iterator[T]:
        for part in parts:
            yield part
            bar.update()

    try:
        yield one_by_one()
    finally:
        if os.getpid() == maker:
            bar.close()


def _bar(title: str, total: int, **options: Any) -> Any:
    form = "{l_bar}{bar}| {n_fmt} of {total_fmt} [{elapsed}<{remaining}]" if total > 1 else "{desc}: {elapsed}"
    width = shutil.get_terminal_size().columns  # tqdm shows nothing on a terminal that does not tell
    return _kind_of_bar()(
        desc=f"synkhronos: {title}", total=total or None, leave=False, bar_format=form, ncols=width, **options
    )


@functools.cache
def _kind_of_bar() -> Any:
    from tqdm import tqdm  # for those who look on: it takes time, too

    class Bar(tqdm):
        monitor_interval = 0  # no thread, for processes may be forked
        _instances: ClassVar[WeakSet[Any]] = WeakSet()  # which tqdm changes under its lock

        def __del__(self) -> None:
            """Say nothing: whoever has made it closes it."""

    Bar.set_lock(threading.RLock())  # tqdm's own takes a semaphore of the system
    return Bar


def _is_watched() -> bool:
    """Whether a person sees what is written to standard error."""
    shell: Any = sys.modules.get("IPython")
    if shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell":  # a notebook
        return True
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
