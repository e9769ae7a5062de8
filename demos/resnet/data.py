"""Synthetic images: noise, as in the paper's experiments, plus a faint pattern for each class.

This module needs neither Theano nor ranks. It fills arrays in place, so they may be in shared memory.
"""

from __future__ import annotations

import numpy as np

CELLS = 4  # rows and columns of cells in a pattern; each cell has one colour
STRENGTH = 0.5  # standard deviation of the patterns; the noise has 1
BLOCK = 64  # images generated at a time
TRAINING, VALIDATION, PATTERNS = range(3)  # each has its own random numbers


def fill(images: np.ndarray, labels: np.ndarray, classes: int, seed: int, which: int = TRAINING) -> None:
    """Fill arrays with random labels, and with an image for each label: the pattern of its class plus noise.

    Parameters
    ----------
    images : numpy.ndarray, shape ``(n, 3, size, size)``, float32 or float64, C-contiguous
    labels : numpy.ndarray, shape ``(n,)``, of integers
        Both arrays are overwritten.
    classes : int
        Labels are from 0 to ``classes - 1``.
    seed : int
        Seed of the patterns and, with `which`, of labels and noise.
    which : int
        `TRAINING` or `VALIDATION`: different images of the same classes.
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
