"""Functions that sum their inputs over the ranks."""

import numpy as np
from backend import T, theano

import synkhronos as synk

built = {}


def sum_of(dtype, ndim):
    if (dtype, ndim) not in built:
        x = T.TensorType(dtype, (False,) * ndim)("x")
        built[dtype, ndim] = synk.function([x], (x.sum(), "sum"))
    return built[dtype, ndim]


def summing():
    if "f" not in built:
        x, w = T.dvector("x"), theano.shared(np.zeros(2), "w")
        built["w"] = w
        built["f"] = synk.function([x], (x.sum() + 0 * w.sum(), "sum"), updates=[(w, w + x.sum())])
    return built["f"]
