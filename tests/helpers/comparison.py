"""Comparison of arrays, and the expected division of rows."""

import numpy as np


def shares(n, n_ranks):
    """Return the rows of each rank as ``(start, stop)``, computed independently of the library."""
    parts = np.array_split(np.arange(n), n_ranks)
    return [(int(part[0]), int(part[-1]) + 1) if len(part) else (0, 0) for part in parts]


def assert_close(actual, expected, rtol=2e-5, atol=1e-6):
    """Assert that arrays are equal within tolerance, and have equal shapes."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def close(actual, expected, rtol=1e-9, atol=1e-11):
    """Assert that arrays, shared variables or equally long lists of them are equal up to rounding of float64."""
    if isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            close(one, other, rtol, atol)
    else:
        actual, expected = (getattr(one, "get_value", lambda one=one: one)() for one in (actual, expected))
        assert_close(actual, expected, rtol, atol)
