"""Fixtures of tests of sessions: functions and variables that several modules use."""

import pytest
from collective_values import variable
from summing_function import sum_of


@pytest.fixture
def two(synchronize):
    """A session of two ranks."""
    return synchronize(2)


@pytest.fixture
def three(synchronize):
    """A session of three ranks."""
    return synchronize(3)


@pytest.fixture
def summing(two):
    """A function that sums what it is given on the ranks, rank by rank."""
    return sum_of("float64", 1)


@pytest.fixture
def var_of(session):
    """A function that gives a replicated variable of a dtype and number of dimensions."""
    return variable
