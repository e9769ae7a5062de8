"""What the user asked of a session, beside its ranks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Options"]


class Options(NamedTuple):
    """Arguments of `fork`, checked.

    Attributes
    ----------
    profile_workers : bool
        Print the engine's profiles of the workers when they stop.
    replicate_rng : bool
        Leave all ranks the same random streams.
    timeout : float or None
        Seconds that a rank may take for a command.
    restart_workers : bool
        Replace workers that die.
    check_replicas : int
        Compare replicas at every so many-th call; 0: never.
    """

    profile_workers: bool
    replicate_rng: bool
    timeout: float | None
    restart_workers: bool
    check_replicas: int
