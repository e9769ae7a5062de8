"""Variables, values and expected results of collectives."""

import functools

import numpy as np
from backend import theano
from comparison import assert_close

import synkhronos as synk

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64")
UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
TOLERANCES = {"float16": (4e-3, 4e-3), "float32": (1e-6, 1e-6), "complex64": (1e-6, 1e-6)}


built = {}


def variable(dtype, ndim, name=""):
    """Return a shared variable that a distributed function uses; there is one for each dtype, ``ndim`` and name."""
    key = f"{dtype}_{ndim}{name}"
    if key not in built:
        var = theano.shared(np.zeros((1,) * ndim, dtype), key)
        built[key] = var, synk.function([], [(var, None)])
    synk.distribute()
    return built[key][0]


def draw_values(dtype, shape, n_ranks, seed=0):
    """Return a random array for each rank. No op overflows a floating dtype."""
    rng = np.random.RandomState(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return [rng.rand(*shape) > 0.4 for _ in range(n_ranks)]
    if dtype.kind in "iu":
        return [rng.randint(0 if dtype.kind == "u" else -20, 20, shape).astype(dtype) for _ in range(n_ranks)]
    values = [(0.5 + rng.rand(*shape)) * rng.choice([-1, 1], shape) for _ in range(n_ranks)]
    if dtype.kind == "c":
        values = [value + 1j * rng.rand(*shape) for value in values]
    return [np.asarray(value).astype(dtype) for value in values]


def put(var, values):
    for rank, value in enumerate(values):
        synk.set_value(rank, var, value)


def get(var, n_ranks):
    return [synk.get_value(rank, var) for rank in range(n_ranks)]


def expected_of(values, op, weights=None):
    """Return the expected reduction in the dtype of the values, computed independently of the library."""
    dtype = values[0].dtype
    if op != "avg":
        return functools.reduce(UFUNCS[op], values).astype(dtype)
    weights = [1.0] * len(values) if weights is None else weights
    present = [
        (value.astype("complex128" if dtype.kind == "c" else "float64"), w) for value, w in zip(values, weights) if w
    ]
    average = sum(value * weight for value, weight in present) / sum(weights)
    return np.asarray(np.rint(average) if dtype.kind in "iub" else average).astype(dtype)


def check_equal_on_all_ranks(var, expected, n_ranks):
    results = get(var, n_ranks)
    for result in results:
        assert result.dtype == expected.dtype
        close(result, expected)
        assert result.tobytes() == results[0].tobytes()


def close(result, expected):
    rtol, atol = TOLERANCES.get(str(expected.dtype), (1e-12, 1e-14))
    assert_close(result, expected, rtol=rtol, atol=atol)
