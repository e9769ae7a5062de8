"""A worker ends with its controller, even if it computes and cannot look, and however the controller ended.

A thread of the worker, in C, waits for that (``pidfd_open``; where the kernel or a sandbox does not offer it, the
thread looks every tenth of a second). The controller holds no descriptor for this, so nothing that a program closes
ends its workers. A worker that the main thread has forked is killed with that thread, too (``PR_SET_PDEATHSIG``), which
works for a stopped process; other threads may end before the controller does.
"""

from __future__ import annotations

from synkhronos._core import native

__all__ = ["end_with"]


def end_with(pid: int, by_main_thread: bool = False) -> None:
    """Have the kernel kill this process when another one ends.

    Parameters
    ----------
    pid : int
        The other process.
    by_main_thread : bool
        Whether that is the parent, and its main thread has forked this process.
    """
    native.end_with(pid, by_main_thread)
