"""Messages about nodes with different versions."""

import numpy as np
from backend import theano

from synkhronos._multinode.leader_comm import describe, describe_differences


def test_versions_of_this_node():
    found = describe()
    assert found["NumPy"] == np.__version__
    assert found["floatX"] == theano.config.floatX
    assert "of unknown version" not in found.values()
    assert describe_differences([found, found, dict(found)], ["a", "b", "c"]) == ""


def test_each_difference_is_reported_with_both_nodes():
    found = describe()
    others = {**found, "NumPy": "0.9"}
    del others["floatX"]
    assert describe_differences([found, found, others], ["a", "b", "c"]) == (
        f"NumPy is 0.9 on node 2 (c) and {np.__version__} on node 0 (a); "
        f"floatX is missing on node 2 (c) and {found['floatX']} on node 0 (a)"
    )
