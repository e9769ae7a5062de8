"""Batches of a training loop, which record the times at which the ranks of this node request them.

Contestants import this module, instead of containing it, because a rank that unpickles the batches must find this
process's memory.
"""

import itertools
import mmap
import time

import numpy as np

from benchmarks.contestants._batches import make_data

RANKS, MOST = 8, 1 << 12  # the numbers of ranks and of batches of a rank that are recorded
#: Times in seconds by rank and batch; all ranks of a node map this memory. A rank requests batch k before step k - 1.
TIMES = np.frombuffer(mmap.mmap(-1, 8 * RANKS * MOST)).reshape(RANKS, MOST)


class TimedBatches:
    """Batches for `synkhronos.loop`, of as many random images as ``sizes`` has for each rank."""

    def __init__(self, model: str, sizes: list[int]) -> None:
        self._model, self._sizes = model, sizes

    def __call__(self, rank, n_ranks, epoch, rng):
        images, labels = make_data(self._model, self._sizes[rank])
        for number in itertools.count():
            TIMES[rank, number] = time.monotonic()
            yield images, labels
