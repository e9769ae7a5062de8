"""Minibatches for training steps: the same data and the same choice of rows for every contestant."""

from collections.abc import Iterator
from typing import Any, Union

import numpy as np

Batch = Union[slice, np.ndarray]
SHAPES = {"cnn": (1, 28, 28), "mlp": (1, 28, 28), "resnet": (3, 64, 64)}
CLASSES = 10
LEARNING_RATE, MOMENTUM = 0.01, 0.9  # Nesterov's momentum, for all


def make_data(model: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Give `n` random images, float32, and random labels, int32, as a network takes them."""
    rng = np.random.RandomState(0)
    x = rng.standard_normal((n, *SHAPES[model])).astype("float32")
    return x, rng.randint(0, CLASSES, n).astype("int32")


class Batches:
    """Rows of minibatches without end: epoch after epoch, in a new order each time or in the order of the data."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._rows: dict[Any, Iterator[Batch]] = {}

    def next(self, batch: int, shuffle: bool) -> Batch:
        """Give the next minibatch: an index array if it is shuffled, else a slice."""
        key = batch, shuffle
        if key not in self._rows:
            self._rows[key] = self._draw(batch, shuffle)
        return next(self._rows[key])

    def _draw(self, batch: int, shuffle: bool) -> Iterator[Batch]:
        if batch > self._n:
            raise ValueError(f"a minibatch of {batch} rows from {self._n}")
        rng = np.random.RandomState(1)
        while True:
            order = rng.permutation(self._n)
            for start in range(0, self._n - batch + 1, batch):
                rows = slice(start, start + batch)
                yield order[rows] if shuffle else rows
