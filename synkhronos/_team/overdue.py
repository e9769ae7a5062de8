"""Whom a leader names when other machines keep it waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from synkhronos.errors import WorkerTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from synkhronos._team.team import Team

__all__ = ["check_exchange", "check_machines", "check_order"]

#: Each leader names a rank of its own machine first; after so many seconds more it is the leader itself that is silent.
_MARGIN = 1.0


def check_order(team: Team) -> None:
    """Raise, in the leader of another machine, if the master has said meanwhile that the ranks are to end."""
    world = team.world
    if world.machine and not team.stopped and world.line.is_told_to_stop():
        raise WorkerTimeout("the first machine has said that the ranks are to end", team.rank, 0)


def check_machines(team: Team, silent: Sequence[int]) -> None:
    """Raise if the ranks of this machine cannot go on, or, in the master, if another one does not answer in time.

    Parameters
    ----------
    team : Team
        Of this machine, whose ranks keep nobody waiting.
    silent : sequence of int
        The machines that are waited for.
    """
    patience, world = team.patience, team.world
    check_order(team)
    is_over = patience.is_over(_MARGIN)
    if team.dead() or team.stopped:
        team.check_workers()  # which raises
    elif silent and is_over and not world.machine:
        rank = world.ranks_of(silent[0])[0]
        name = f"rank {rank}, which leads machine {silent[0]} ({world.line.hosts[silent[0]]})"
        raise WorkerTimeout(f"{name}, did not answer within {patience.seconds} seconds", rank, 0)


def check_exchange(team: Team) -> None:
    """Raise, in the master, if other leaders do not go on with an exchange of arrays in time."""
    patience, world = team.patience, team.world
    if world.machine or not patience.is_over(_MARGIN):
        return
    others = range(1, len(world.sizes))
    names = ", ".join(f"machine {machine} ({world.line.hosts[machine]})" for machine in others)
    who = f"the leader of {names}" if len(others) == 1 else f"a leader of {names}"
    text = f"{who}, did not go on with an exchange of arrays within {patience.seconds} seconds"
    raise WorkerTimeout(text, world.ranks_of(1)[0], 0)
