"""A worker, seen from the master."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Callable

from synkhronos._memory import Passage
from synkhronos._team.lifeline import end_with
from synkhronos._team.process import Process

__all__ = ["Member"]


class Member:
    """A worker's process, and the way for memory to and from it.

    Parameters
    ----------
    live : callable
        ``live(passage)`` is the worker's life; it is given its end of that way.
    others : iterable of Member
        Those that were forked before.

    Attributes
    ----------
    process : Process
    passage : Passage
        The master's end.
    """

    def __init__(self, live: Callable[[Passage], None], others: Iterable[Member]) -> None:
        by_main_thread = threading.current_thread() is threading.main_thread()
        self.passage, its_own = Passage.pair()
        master = os.getpid()

        def begin() -> None:
            end_with(master, by_main_thread)
            for member in (*others, self):
                member.passage.close()
            live(its_own)

        try:
            self.process = Process(begin)
        except BaseException:  # there can be no process more
            self.let_go()
            raise
        finally:
            its_own.close()

    def let_go(self) -> None:
        """Its process has ended."""
        self.passage.close()
