"""Contest of programs that are measured in turns, in one run on one machine.

A contestant is one or several processes, which exist during the full contest. They run in turns (A B C A B C) and wait
without using the processor while others run. All contestants start and run a warm-up round before the first measured
round.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.peers import missing
from benchmarks.processes import Contestant, ContestantFailed, Running
from benchmarks.samples import Sample

CORES = 2  # number of cores that the targets assume
AVAILABLE = sorted(os.sched_getaffinity(0))
START_SECONDS = 900.0  # Theano or DeepSpeed may have to compile
ROUND_SECONDS = 300.0

Turns = dict[str, tuple[Contestant, dict[str, Any]]]


def use_cores(n: int | None) -> None:
    """Restrict this process and its later children to `n` of the cores that it started with, or to all if None."""
    os.sched_setaffinity(0, AVAILABLE[:n])


class Contest:
    """Context manager that starts contestants, runs them in turns, and ends them.

    Parameters
    ----------
    contestants : list of Contestant
    aside : list of Contestant
        More contestants, which `alike` leaves out.

    Attributes
    ----------
    gaps : dict of str
        Reasons for which peers cannot take part, by the peers' names.
    facts : dict of dict
        Facts that the other contestants report about themselves, by their names.
    """

    def __init__(self, contestants: Sequence[Contestant], aside: Sequence[Contestant] = ()) -> None:
        self.contestants, self._aside = list(contestants), list(aside)
        self.gaps: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self._running: dict[str, Running] = {}

    def __enter__(self) -> Contest:
        try:
            for contestant in [*self.contestants, *self._aside]:
                self._start(contestant)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for running in self._running.values():
            running.stop()

    def _start(self, contestant: Contestant) -> None:
        try:
            reason = missing(contestant.needs)
            if reason:
                raise ContestantFailed(reason)
            running = Running(contestant, START_SECONDS)
        except ContestantFailed as error:
            if not contestant.peer:
                raise
            self.gaps[contestant.name] = str(error).splitlines()[0]
        else:
            self._running[contestant.name] = running
            self.facts[contestant.name] = running.facts

    def alike(self, **parameters: Any) -> Turns:
        """Return turns with the same parameters for every contestant."""
        return {contestant.name: (contestant, parameters) for contestant in self.contestants}

    def run(self, rounds: int, turns: Turns, warm_up: int = 1) -> dict[str, Sample]:
        """Run contestants in turns.

        Parameters
        ----------
        rounds : int
            Number of measured rounds.
        turns : dict of (Contestant, dict)
            The turns of each round, in order: for each label, the contestant and the parameters of its ``run``. Turns
            of contestants that cannot take part are left out.
        warm_up : int
            Number of earlier rounds, which are not measured.

        Returns
        -------
        dict of Sample
            The measurements, by label.

        Raises
        ------
        ContestantFailed
            If a contestant raises an exception, ends, or takes too long.
        """
        samples: dict[str, list[list[float]]] = {
            label: [] for label, (contestant, _) in turns.items() if contestant.name in self._running
        }
        for number in range(-warm_up, rounds):
            for label, measured in samples.items():
                contestant, parameters = turns[label]
                running = self._running[contestant.name]
                running.send(parameters)
                answers = running.wait("numbers", ROUND_SECONDS)
                if number >= 0:
                    # a contestant is as slow as its slowest process
                    measured.append([max(numbers) for numbers in zip(*answers)])
        return {label: Sample(measured) for label, measured in samples.items()}
