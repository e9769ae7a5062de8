"""What tests of several machines share."""

from pathlib import Path

import pytest
from mpi_jobs import hosts_or_skip


def pytest_collection_modifyitems(items):
    """Let the programs of these tests wait for each other on a machine that is busy."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(320))


@pytest.fixture(scope="module")
def hosts():
    """Two hosts, for the tests of a module."""
    with hosts_or_skip(2) as made:
        yield made
