"""What tests of several machines share."""

import pytest
from namespace_hosts import Hosts, reason_to_skip


@pytest.fixture(scope="module")
def hosts():
    """Two hosts, for the tests of a module."""
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(2) as made:
        yield made
