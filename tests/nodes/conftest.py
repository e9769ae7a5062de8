"""Fixtures and time limits for tests of several nodes."""

from pathlib import Path

import pytest
from mpi_jobs import hosts_or_skip, start_until_ready


def pytest_collection_modifyitems(items):
    """Raise the time limit of the tests in this folder, whose programs wait for each other on a busy computer.

    A limit on the command line, such as that of `make node-kills`, applies instead.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent and item.config.getoption("timeout") is None:
            item.add_marker(pytest.mark.timeout(320))


@pytest.fixture(scope="module")
def hosts():
    """Yield two hosts, which are shared by the tests of a module."""
    with hosts_or_skip(2) as made:
        yield made


@pytest.fixture
def start_slow(hosts, tmp_path):
    """Return a function that starts a program, which prints "ready" and waits for a file PATH, and limits its link."""
    path = tmp_path / "slow"

    def begin(rate, *sources):
        job = start_until_ready(hosts, *(source.replace("PATH", str(path)) for source in sources))
        hosts.limit(rate)
        path.touch()
        return job

    yield begin
    hosts.limit(None)
