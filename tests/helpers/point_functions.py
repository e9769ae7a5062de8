"""Random data points, and functions of them."""

import functools

import numpy as np
from backend import T

import synkhronos as synk

WIDTH = 3


def draw_points(n, seed=0):
    """Draw the inputs and targets of ``n`` data points."""
    rng = np.random.RandomState(seed + n)
    return rng.randn(n, WIDTH).astype("float32"), rng.randn(n).astype("float32")


@functools.cache
def adding():
    x, y = T.dvector("x"), T.dvector("y")
    return synk.function([x, y], [(x + y, "gather")])
