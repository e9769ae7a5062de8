"""Fixtures and time limits for tests of several nodes."""

from pathlib import Path

import pytest
from mpi_jobs import hosts_or_skip


def pytest_collection_modifyitems(items):
    """Raise the time limit of the tests in this folder, whose programs wait for each other on a busy computer."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(320))


@pytest.fixture(scope="module")
def hosts():
    """Yield two hosts, which are shared by the tests of a module."""
    with hosts_or_skip(2) as made:
        yield made
