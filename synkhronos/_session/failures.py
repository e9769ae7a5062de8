"""What a user is told when a command failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._rank import Call, Command, Failure
from synkhronos.errors import RemoteError, WorkerError

__all__ = ["BROKEN", "first_failure", "worker_error"]

#: What to do when a session cannot go on.
BROKEN = "the session is broken: call synkhronos.close(), then synkhronos.fork() again"


def first_failure(results: Sequence[Any], master_rank: int) -> int | None:
    """The rank that failed first, by the clock; one that only gave up because another had failed comes last.

    If all ranks failed alike it is the master, whose exception is at hand.
    """
    failures = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
    if not failures:
        return None
    if len(failures) == len(results) and len({failure.summary for failure in failures.values()}) == 1:
        return master_rank
    return min(failures, key=lambda rank: (failures[rank].aborted, failures[rank].when))


def worker_error(
    command: Command, rank: int, device: str, results: Sequence[Any], own_error: Exception | None
) -> WorkerError:
    """The error for the failure of ``rank``; ``own_error`` is the exception itself if that is the master."""
    failure = results[rank]
    message = f"rank {rank} ({device}) failed in {type(command).__name__}: {failure.summary}"
    if isinstance(command, Call) and command.everybody:
        message += (
            "\nThere are no data points in this call: every rank computed on arrays without rows, "
            "and what failed may only need rows. Call the function with one data point at least."
        )
    if not all(isinstance(result, Failure) and result.summary == failure.summary for result in results):
        message += (
            "\nOther ranks may have gone on, so that replicas may differ now; "
            "synkhronos.broadcast(shared_vars) gives all ranks the master's values."
        )
    error = WorkerError(message, rank, device)
    error.__cause__ = own_error if own_error is not None else RemoteError(failure.traceback)
    return error
