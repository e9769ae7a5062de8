"""Fixtures for tests of sessions: sessions of two and three ranks, a function, replicated variables."""

import pytest
from collective_values import variable
from summing_function import sum_of


@pytest.fixture
def two(synchronize):
    """Make or reuse a session of two ranks, and return their number."""
    return synchronize(2)


@pytest.fixture
def three(synchronize):
    """Make or reuse a session of three ranks, and return their number."""
    return synchronize(3)


@pytest.fixture
def summing(two):
    """Return a function that sums a vector of float64 over all ranks."""
    return sum_of("float64", 1)


@pytest.fixture
def var_of(session):
    """Return a function of a dtype and a number of dimensions that returns a replicated variable."""
    return variable
