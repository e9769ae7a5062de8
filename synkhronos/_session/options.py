"""Options of a session: the checked arguments of `fork` that do not concern devices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from synkhronos._multinode import WARNING_SECONDS
from synkhronos._rank import digest_of_states


class Options(NamedTuple):
    """Checked arguments of `fork`.

    Attributes
    ----------
    profile_workers : bool
        Print the backend's profiles of the workers when they stop.
    replicate_rng : bool
        Give all ranks the same random streams.
    timeout : float or None
        Seconds that a rank may take for a command.
    restart_workers : bool
        Replace workers that die.
    check_replicas : int
        Compare replicas at every so many-th call; 0: never.
    wire_dtype : str or None
        The wire dtype of float32 arrays between nodes; ``None``: float32.
    seed : bytes or None
        The seed of each rank's global random states; ``None``: all ranks keep the states that they inherit.
    heartbeat : float
        Seconds of silence after which a node is lost.
    """

    profile_workers: bool
    replicate_rng: bool
    timeout: float | None
    restart_workers: bool
    check_replicas: int
    wire_dtype: str | None
    seed: bytes | None
    heartbeat: float


def make_options(
    profile_workers: Any,
    replicate_rng: Any,
    timeout: Any,
    restart_workers: Any,
    check_replicas: Any,
    wire_dtype: Any,
    heartbeat: Any,
) -> Options:
    """Check arguments of `fork`.

    Raises
    ------
    ValueError
        Naming the argument.
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise ValueError(f"timeout is {timeout!r}; expected a positive number of seconds, or None")
    if isinstance(check_replicas, bool) or not hasattr(check_replicas, "__index__") or check_replicas < 0:
        raise ValueError(f"check_replicas is {check_replicas!r}; expected a number of calls, or 0")
    if wire_dtype not in (None, "float16", "bfloat16"):
        raise ValueError(f'wire_dtype is {wire_dtype!r}; expected "float16", "bfloat16" or None')
    is_number = isinstance(heartbeat, (int, float)) and not isinstance(heartbeat, bool)
    if not (is_number and WARNING_SECONDS < heartbeat < math.inf):
        raise ValueError(
            f"heartbeat is {heartbeat!r}; expected a finite number of seconds above {WARNING_SECONDS:g}, after which a "
            "warning is printed"
        )
    return Options(
        bool(profile_workers),
        bool(replicate_rng),
        timeout,
        bool(restart_workers),
        int(check_replicas),
        wire_dtype,
        None if replicate_rng else digest_of_states(),
        float(heartbeat),
    )
