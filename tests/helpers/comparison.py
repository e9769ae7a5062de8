"""Comparison of arrays and random states, and the expected division of rows."""

import numpy as np


def shares(n, n_ranks):
    """Each rank's rows, by another way than the library's."""
    return [
        (int(part[0]), int(part[-1]) + 1) if len(part) else (0, 0) for part in np.array_split(np.arange(n), n_ranks)
    ]


def assert_close(actual, expected, rtol=2e-5, atol=1e-6):
    """Arrays equal within tolerance, and of equal shape."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def same_state(one, other):
    """Whether two states of random streams are the same: arrays, or NumPy's generators."""
    one, other = (getattr(state, "bit_generator", None) or state for state in (one, other))
    return one.state == other.state if hasattr(one, "state") else np.array_equal(one, other)
