"""Warnings that point at the user's line of code, and error messages for failed commands."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

from synkhronos._rank import Call, Command, Failure, InOrder, Load, keeps_equal
from synkhronos._utils.resources import count_cores
from synkhronos.errors import WorkerError

#: Packages of notebooks and debuggers. Their threads hold no lock that a worker needs, so `check_threads` ignores them.
_HARMLESS = ("IPython", "ipykernel", "debugpy", "_pydevd_bundle", "pydevd")

#: Advice in messages about replicas that may differ.
MAKE_EQUAL = "synkhronos.broadcast(shared_vars) gives all ranks the controller's values"

#: Packages whose stack frames `warn` skips.
_OWN = ("synkhronos", "contextlib")


def check_cores(n_ranks: int) -> None:
    """Warn if there are more ranks than CPU cores."""
    n_cores = count_cores()
    if n_ranks > n_cores:
        warn(
            f"synkhronos.fork: {n_ranks} ranks share {n_cores} CPU core{'s' * (n_cores > 1)}, which is slower than one "
            "rank on each core; `python -m synkhronos info` shows what this machine has"
        )


def check_threads() -> None:
    """Warn if other threads are running, because a fork copies their locks but not the threads."""
    names = sorted(_names_of_other_threads())
    if names:
        warn(
            f"synkhronos.fork: other threads are running ({', '.join(names)}), and locks that they hold, in NumPy or "
            "Theano for example, stay locked in the workers, which may then hang; fork before starting threads"
        )


def _names_of_other_threads() -> Iterator[str]:
    for thread in threading.enumerate():
        work = getattr(thread, "_target", None)
        owners = [type(thread).__module__, getattr(work, "__module__", None) or ""]
        if thread is not threading.current_thread() and not any(one.split(".")[0] in _HARMLESS for one in owners):
            yield thread.name


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning that points at the line of the user's program that called this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OWN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


#: Message: how to continue after a session is broken.
BROKEN = "the session is broken: call synkhronos.close(), then synkhronos.fork() again"
#: The same if a node is lost: this process cannot start another session.
LOST = "the session is broken: a node does not answer; start the program again"


class Outcome(NamedTuple):
    """What became of the updates of a call that was not completed.

    Attributes
    ----------
    updated : bool or None
        Whether all or none of them were made; ``None`` if that is not known. ``False`` if the call has none.
    text : str
        The same for a message; empty if it is not known, or if the call has none.
    """

    updated: bool | None
    text: str


ALL_MADE = Outcome(True, "all updates of the call were made")
NONE_MADE = Outcome(False, "no update of the call was made")

#: Matches the first line of the backend's messages about shape mismatches.
_OF_SHAPES = re.compile("shape|dimension|size|align|broadcast|out of bounds|mis-?match", re.IGNORECASE)


def first_failure(results: Sequence[Any], master_rank: int, ahead: Sequence[int]) -> int | None:
    """Return the rank that failed first by the clock, or ``None`` if no rank failed.

    Ranks that only gave up because another rank had failed come last. If all ranks failed with the same message, return
    the controller, because its exception object is available.

    Parameters
    ----------
    results : sequence
        The result of each rank; a `Failure` if it failed.
    master_rank : int
    ahead : sequence of int
        How far each rank's clock is ahead of the controller's, in nanoseconds.
    """
    failures = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
    if not failures:
        return None
    if len(failures) == len(results) and len({failure.summary for failure in failures.values()}) == 1:
        return master_rank
    return min(failures, key=lambda rank: (failures[rank].aborted, failures[rank].when - ahead[rank] / 1e9))


def worker_error(
    command: Command,
    describe: Callable[[Command], str],
    rank: int,
    device: str,
    results: Sequence[Any],
    own_error: Exception | None,
    outcome: Outcome,
) -> WorkerError:
    """Return the error to raise for the failure of ``rank`` in a command.

    Parameters
    ----------
    command : Command
    describe : callable
        ``describe(command)`` returns text for the message.
    rank : int
    device : str
        The device of that rank.
    results : sequence
        The result of each rank; a `Failure` if it failed.
    own_error : Exception or None
        The exception object, if the rank is the controller.
    outcome : Outcome
    """
    failure = results[rank]
    parts: tuple[Command, ...] = ()
    if isinstance(command, InOrder):
        parts, command = command.parts, command.parts[failure.completed]
    message = f"rank {rank} ({device}) failed in {describe(command)}: {failure.summary}"
    if parts:
        n_complete = min(result.completed for result in results if isinstance(result, Failure))
        complete = ", ".join(map(describe, parts[:n_complete])) or "none"
        message += (
            f"\nThis was part {failure.completed + 1} of a sequence of {len(parts)}. Complete on all ranks: "
            f"{complete}; no rank has started a later part."
        )
    if isinstance(command, Call):
        message += _rows_of(command, rank, failure.summary)
    if outcome.text:
        message += f"\n{outcome.text[0].upper()}{outcome.text[1:]}."
    elif (
        outcome.updated is None
        and not isinstance(command, Load)
        and not all(isinstance(result, Failure) and result.summary == failure.summary for result in results)
    ):
        message += "\nOther ranks may have gone on"
        message += (
            ". The next call gives all ranks the controller's values."
            if all(map(keeps_equal, parts or (command,)))
            else f", so replicas may differ now; {MAKE_EQUAL}."
        )
    return WorkerError(
        message, rank, device, failure.traceback, own_error, part=failure.completed, updated=outcome.updated
    )


def controller_error(name: str | None, rank: int, error: Exception, updated: bool | None) -> WorkerError:
    """Return the error to raise for the failure of a call that the controller computes alone, on CPU cores."""
    failure = Failure.of(error)
    what = f"Call {name}" if name else "Call"
    message = f"rank {rank} (cpu) failed in {what}: {failure.summary}\nThe controller computed this call alone."
    return WorkerError(message, rank, "cpu", failure.traceback, error, updated=updated)


def _rows_of(command: Call, rank: int, summary: str) -> str:
    """Describe the rank's data points, because graphs with a built-in batch size fail on shards of another size."""
    n_points, n_all = command.counts[rank], sum(command.counts)
    if command.all_compute:
        return (
            "\nThere are no data points in this call, so every rank computed on arrays without rows; "
            "if the failed operation needs rows, call the function with at least one data point."
        )
    if not n_points or len(command.counts) == 1 == command.num_slices:
        return ""
    if command.shares is not None:
        start, stop = command.shares[rank].bounds
        had = f"rows {start} to {stop - 1} of {n_all}" if n_points > 1 else f"row {start} of {n_all}"
    elif command.rows:
        had = f"{n_points} rows of the sliceable shared variables"
    else:
        return ""
    if command.num_slices > 1:
        had += f", in {min(n_points, command.num_slices)} slices"
    is_of_shapes = _OF_SHAPES.search(summary.split("\n")[0])
    hint = "; a batch size that is built into the graph must be that of every shard" if is_of_shapes else ""
    return f"\nThis rank had {had}{hint}."
