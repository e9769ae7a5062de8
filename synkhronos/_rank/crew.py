"""The ranks of one machine: forked, and each with its replica."""

from __future__ import annotations

import gc
from typing import Any, Callable

from synkhronos import _backends, _graph
from synkhronos._collectives import Workspace
from synkhronos._memory import SegmentTable, make_regions
from synkhronos._processes import Team
from synkhronos._rank.replica import Replica
from synkhronos._rank.seeding import set_apart
from synkhronos._rank.worker import serve
from synkhronos._utils.interrupts import deferred_interrupts

__all__ = ["start_ranks"]


def start_ranks(
    team: Team,
    segments: SegmentTable,
    ended: Any,
    profile_workers: bool,
    begin: Callable[[], Any],
    seed: bytes | None,
) -> Replica:
    """Fork the workers of a team, which serve until they are told to stop; returns the replica of this process.

    Parameters
    ----------
    team : Team
    segments : SegmentTable
    ended : Endings, or None
        Takes the keys of variables that the program has dropped.
    profile_workers : bool
        Print Theano's profiles of the workers when they stop.
    begin : callable
        Called in each worker as it begins.
    seed : bytes, optional
        Of which the global random states of each worker are made; see `seeding`.
    """
    workspace = Workspace(team.n_ranks)
    regions = make_regions(team.n_ranks, team.master_rank)

    def work(rank: int) -> None:
        begin()
        if seed is not None:
            set_apart(seed, team.world.first + rank, team.signals.sent)
        gc.freeze()  # what was inherited is not this process's to collect: quicker, and its pages stay shared
        team.timeline.reset(rank)
        regions.take(rank)
        finish = _graph.start_worker(profile_workers, team.world.first + rank)
        replica = Replica(team, workspace, segments, _graph.VariableTable(None), regions)
        replica.thread_limits.apply()
        serve(team, replica)
        finish()

    try:
        _backends.prepare_fork()
        inherited = segments.lent()  # in this frame, which workers keep
        regions.share(team.start, work)
        del inherited
        replica = Replica(team, workspace, segments, _graph.VariableTable(ended), regions)
        replica.thread_limits.apply()
    except BaseException:
        with deferred_interrupts():
            team.stop(grace=0.0)
            regions.close()
        raise
    return replica
