"""Synthetic images: noise, as in the paper's experiments, with a faint pattern for each class.

Nothing here needs Theano or ranks. Arrays are filled where they lie, so that they may lie in shared memory.
"""

from __future__ import annotations

import numpy as np

CELLS = 4  # a pattern has so many rows and columns of cells, each of one colour
STRENGTH = 0.5  # standard deviation of the patterns; that of the noise is 1
BLOCK = 64  # images made at a time
TRAINING, VALIDATION, PATTERNS = range(3)  # each has random numbers of its own


def fill(images: np.ndarray, labels: np.ndarray, classes: int, seed: int, which: int = TRAINING) -> None:
    """Draw labels, and an image for each: the pattern of its class, and noise.

    Parameters
    ----------
    images : numpy.ndarray, shape ``(n, 3, size, size)``, float32 or float64, C-contiguous
    labels : numpy.ndarray, shape ``(n,)``, of integers
        Both are written to.
    classes : int
        Labels are from 0 to ``classes - 1``.
    seed : int
        Decides the patterns, and with `which` all else.
    which : int
        `TRAINING` or `VALIDATION`: other images of the same classes.
    """
    patterns = np.random.default_rng([seed, PATTERNS]).normal(0, STRENGTH, (classes, 3, CELLS, CELLS))
    patterns = patterns.astype(images.dtype)
    cells = np.arange(images.shape[-1]) * CELLS // images.shape[-1]  # the cell of each row, and of each column
    rng = np.random.default_rng([seed, which])
    labels[:] = rng.integers(classes, size=len(labels))
    for start in range(0, len(images), BLOCK):
        block = images[start : start + BLOCK]
        rng.standard_normal(out=block, dtype=block.dtype)
        block += patterns[labels[start : start + BLOCK]][:, :, cells[:, None], cells]
