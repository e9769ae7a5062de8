"""What a user is told when a command failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._rank import Failure
from synkhronos.errors import WorkerError

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
    command: str, rank: int, device: str, results: Sequence[Any], own_error: Exception | None
) -> WorkerError:
    """The error for the failure of ``rank`` in a command; ``own_error`` is the exception itself on the master."""
    failure = results[rank]
    message = f"rank {rank} ({device}) failed in {command}: {failure.summary}"
    if not all(isinstance(result, Failure) and result.summary == failure.summary for result in results):
        message += (
            "\nOther ranks may have gone on, so that replicas may differ now; "
            "synkhronos.broadcast(shared_vars) gives all ranks the master's values."
        )
    return WorkerError(message, rank, device, failure.traceback, own_error)
