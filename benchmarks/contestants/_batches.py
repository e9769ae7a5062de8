"""Minibatches for training steps: the same data and the same choice of rows for every contestant."""

from collections.abc import Iterator
from typing import Any, Union

import numpy as np

Batch = Union[slice, np.ndarray]
SHAPES = {"cnn": (1, 28, 28), "mlp": (1, 28, 28), "resnet": (3, 64, 64)}
CLASSES = 10
LEARNING_RATE, MOMENTUM = 0.01, 0.9  # of Nesterov momentum, for all contestants


def make_data(model: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `n` random images, float32, in the shape that a network takes, and random labels, int32."""
    rng = np.random.RandomState(0)
    x = rng.standard_normal((n, *SHAPES[model])).astype("float32")
    return x, rng.randint(0, CLASSES, n).astype("int32")


class Batches:
    """Endless minibatches of `n` rows: epoch after epoch, in a new random order or in the order of the data."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._rows: dict[Any, Iterator[Batch]] = {}

    def next(self, batch: int, shuffle: bool) -> Batch:
        """Return the next minibatch: an index array if shuffled, else a slice."""
        key = batch, shuffle
        if key not in self._rows:
            self._rows[key] = self._draw(batch, shuffle)
        return next(self._rows[key])

    def _draw(self, batch: int, shuffle: bool) -> Iterator[Batch]:
        if batch > self._n:
            raise ValueError(f"got a minibatch of {batch} rows, expected at most {self._n}")
        rng = np.random.RandomState(1)
        while True:
            order = rng.permutation(self._n)
            for start in range(0, self._n - batch + 1, batch):
                rows = slice(start, start + batch)
                yield order[rows] if shuffle else rows
