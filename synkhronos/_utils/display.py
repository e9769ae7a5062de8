"""Display for interactive users: errors for unknown arguments, tables as text and HTML, names for `dir`, progress bars.

Progress of long work is shown by tqdm, on a terminal or in a notebook; logs and pipes get no output. A bar appears
after `DELAY` seconds and is removed at the end, so short work shows nothing. `progress` updates the bar from a thread,
because the work may be compiled code that does not return to Python. `counted` is for work that forks: it has no
thread, and updates the bar after each part of the work.

Invariant: only the process that has created a bar writes it. A process that is forked meanwhile uses neither the bar
nor tqdm's lock.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, Callable, ClassVar, TypeVar, cast
from weakref import WeakSet

from synkhronos._utils.interrupts import Background, deferred_interrupts

F = TypeVar("F", bound=Callable[..., Any])


def unknown_keyword(function: str, name: str, known: Sequence[str]) -> TypeError:
    """Return the error for an unknown keyword argument; it suggests arguments with similar names.

    Parameters
    ----------
    function : str
        Name of the function that the user has called.
    name : str
        Name of the unknown argument.
    known : sequence of str
        Names of the function's arguments.
    """
    similar = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    meant = f"; did you mean {' or '.join(similar)}?" if similar else "."
    return TypeError(f"{function} has no argument {name!r}{meant} It takes {', '.join(known)}")


def check_keywords(function: Callable[..., Any], keywords: Iterable[str]) -> None:
    """Raise `TypeError` for a keyword argument that a public function does not have."""
    known = list(inspect.signature(function).parameters)
    for name in keywords:
        if name not in known:
            raise unknown_keyword(f"synkhronos.{function.__name__}", name, known)


def suggests_keywords(function: F) -> F:
    """Decorate a public function: its error for an unknown keyword argument suggests similar names."""

    @functools.wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        check_keywords(function, kwargs)
        return function(*args, **kwargs)

    return cast("F", check_and_call)


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a table as text. The first column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def html_table(lines: Iterable[Sequence[object]], title: str = "") -> str:
    """Format a table as HTML; the first line is the head. Columns are aligned as in `text_table`."""
    head, *body = (
        "".join(
            f'<{tag} style="text-align: {"right" if column else "left"}">{escape(str(cell))}</{tag}>'
            for column, cell in enumerate(line)
        )
        for tag, line in zip(itertools.chain(["th"], itertools.repeat("td")), lines)
    )
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    rows = "".join(f"<tr>{row}</tr>" for row in body)
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def public_names(one: object, *internal: str) -> list[str]:
    """Return the public attributes of an object: no leading underscore, and not among ``internal``."""
    return [name for name in object.__dir__(one) if not name.startswith("_") and name not in internal]


# -- progress bars

T = TypeVar("T")

DELAY = 2.0  # seconds
_STEP = 0.5  # seconds between two updates of the bar

_working = threading.local()  # `is_shown` is set while a bar is shown, so that nested work shows no other bar


class Progress:
    """Progress of some work.

    Parameters
    ----------
    title : str
        Name of the work.
    total : int
        Number of parts of the work; 0: unknown.
    look : callable, optional
        ``look()`` returns the number of finished parts, and a text to show; else the code that does the work updates
        `done`.

    Attributes
    ----------
    done : int
        Number of finished parts. The code that does the work updates it.
    """

    def __init__(self, title: str, total: int = 0, look: Callable[[], tuple[int, str]] | None = None) -> None:
        self.done = 0
        self._look = look
        self._title, self._total = title, total
        self._over = threading.Lock()  # locked until the work has ended
        self._over.acquire()

    def show(self) -> None:
        """Show a bar after `DELAY` seconds, update it, and remove it when the work has ended; runs in a thread."""
        with _bar(self._title, self._total, delay=DELAY, mininterval=_STEP, miniters=0) as bar:
            while not self._over.acquire(timeout=_STEP):
                if self._look is not None:
                    self.done, text = self._look()
                    bar.set_postfix_str(text, refresh=False)
                bar.update(self.done - bar.n)

    def end(self) -> None:
        """Report that the work has ended, which ends `show`."""
        self._over.release()


@contextlib.contextmanager
def progress(title: str, total: int = 0, look: Callable[[], tuple[int, str]] | None = None) -> Iterator[Progress]:
    """Show a bar while the block runs, if it takes longer than `DELAY`; the block may update `Progress.done`."""
    work = Progress(title, total, look)
    if getattr(_working, "is_shown", False) or not _is_watched():
        yield work
        return
    _kind_of_bar()  # import tqdm in this thread: a process that is forked during an import could not import it again
    writer = Background(work.show, "synkhronos progress", daemon=True)
    try:
        _working.is_shown = True
        writer.start()
        yield work
    finally:
        with deferred_interrupts():
            _working.is_shown = False
            work.end()
        writer.wait()


@contextlib.contextmanager
def counted(title: str, parts: Sequence[T]) -> Iterator[Iterator[T]]:
    """Show a bar, without a thread, while the block iterates over parts, if that takes longer than `DELAY`."""
    if not _is_watched():
        yield iter(parts)
        return
    bar, maker = _bar(title, len(parts), delay=DELAY, mininterval=_STEP, miniters=1), os.getpid()

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
    """Return a new progress bar."""
    form = "{l_bar}{bar}| {n_fmt} of {total_fmt} [{elapsed}<{remaining}{postfix}]" if total > 1 else "{desc}: {elapsed}"
    width = shutil.get_terminal_size().columns  # tqdm would show nothing where the terminal's width is unknown
    return _kind_of_bar()(
        desc=f"synkhronos: {title}", total=total or None, leave=False, bar_format=form, ncols=width, **options
    )


@functools.cache
def _kind_of_bar() -> Any:
    """Return the class of the bars: tqdm without its threads, and without locks that processes share."""
    from tqdm import tqdm  # imported only if a bar can be shown, because the import takes time

    class Bar(tqdm):
        monitor_interval = 0  # no monitor thread, because the process may fork
        _instances: ClassVar[WeakSet[Any]] = WeakSet()  # not those of tqdm's own class, which another lock protects

        def __del__(self) -> None:
            """Do nothing, because the code that has created the bar closes it."""

    Bar.set_lock(threading.RLock())  # tqdm's own lock includes a semaphore that forked processes would share
    return Bar


def _is_watched() -> bool:
    """Return whether standard error is shown on a terminal or in a notebook."""
    shell: Any = sys.modules.get("IPython")
    if shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell":  # a notebook
        return True
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # standard error is missing or closed
        return False
