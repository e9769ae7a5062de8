"""Contests: programs that are measured in turns, in one run on one machine.

Each contestant is a process, or several, that lives through the whole contest and waits without using
the processor while others have their turn: A B C A B C. All start, and have a round that does not
count, before the first round that does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.peers import missing
from benchmarks.processes import Contestant, ContestantFailed, Running
from benchmarks.samples import Sample

CORES = 2  # what the targets are for
AVAILABLE = sorted(os.sched_getaffinity(0))
START_SECONDS = 900.0  # Theano may have to compile, or DeepSpeed its kernels
ROUND_SECONDS = 300.0

Turns = dict[str, tuple[Contestant, dict[str, Any]]]


def use_cores(n: int | None) -> None:
    """Keep this process, and those that it will start, to `n` of the cores that it was started with, or to all."""
    os.sched_setaffinity(0, AVAILABLE[:n])


class Contest:
    """Starts contestants, lets them run in turns, and ends them; use it in a ``with`` statement.

    Parameters
    ----------
    contestants : list of Contestant
    aside : list of Contestant
        Started, too, for turns of their own: `alike` leaves them out.

    Attributes
    ----------
    gaps : dict of str
        For each peer that cannot take part, by name: why.
    facts : dict of dict
        For each of the others: what it says about itself.
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
        """Give turns with the same parameters for every contestant."""
        return {contestant.name: (contestant, parameters) for contestant in self.contestants}

    def run(self, rounds: int, turns: Turns, warm_up: int = 1) -> dict[str, Sample]:
        """Let contestants run in turns.

        Parameters
        ----------
        rounds : int
            How many rounds count.
        turns : dict of (Contestant, dict)
            The turns of each round, in order: a label, whose turn it is, and the parameters of its ``run``. Those of
            contestants that cannot take part are left out.
        warm_up : int
            Rounds before these that do not count.

        Returns
        -------
        dict of Sample
            What was measured, by label.

        Raises
        ------
        ContestantFailed
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
                    # Of several processes, the slowest one counts.
                    measured.append([max(numbers) for numbers in zip(*answers)])
        return {label: Sample(measured) for label, measured in samples.items()}
