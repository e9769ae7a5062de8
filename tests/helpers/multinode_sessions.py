"""Run the tests of sessions on several nodes: `synk.fork` divides the requested ranks among the nodes.

For ``make test-machines``: each process becomes a node leader at the first fork, and the tests continue in the first
process. Two ranks are one on each node, and three ranks are two and one. ``SYNKHRONOS_TEST_SHARES`` sets how four
ranks are divided: ``2,2`` or ``3,1``.
"""

import os

import backend_flags  # sets the backend's flags, so it comes first
import pytest

import synkhronos._session.lifecycle as lifecycle
from synkhronos._multinode.launch import StartLimit, find_comm

assert backend_flags

#: Number of nodes.
N = int(os.environ.get("PMI_SIZE", 1))
_NODE = int(os.environ.get("PMI_RANK", 0))
_SHARES = [int(share) for share in os.environ.get("SYNKHRONOS_TEST_SHARES", ",".join("1" * N)).split(",")]
#: Numbers of ranks of tests that are parametrized by them.
RANKS = (1, 2, 3, 5) if N == 1 else tuple(n for n in (2, 3, 4, 5) if n >= N)

_find_devices = lifecycle.find_free_devices


def _find_own_devices(n_parallel, *others):
    """Return the devices of this node's part of ``n_parallel`` ranks."""
    if n_parallel is not None and n_parallel >= N:
        of_others = [max(1, n_parallel * share // sum(_SHARES)) for share in _SHARES[1:]]
        n_parallel = of_others[_NODE - 1] if _NODE else n_parallel - sum(of_others)
    return _find_devices(n_parallel, *others)


def one_machine(reason):
    """Mark tests of behaviour that differs, or does not exist, on several nodes."""
    return pytest.mark.skipif(N > 1, reason=f"on several nodes: {reason}")


if N > 1:
    find_comm(StartLimit(60))  # MPI opens its files before the first test records them
    lifecycle.find_free_devices = _find_own_devices
