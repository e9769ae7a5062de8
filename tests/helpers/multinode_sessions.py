"""What lets the tests of sessions run on several machines: `synk.fork` divides the ranks that a test wants.

``make test-machines``: each process becomes the leader of a machine at the first fork, and the tests go on in the first
one. What two ranks do is then done by one on each machine; three are two and one. ``SYNKHRONOS_TEST_SHARES`` says how
many of four ranks each machine has: ``2,2`` or ``3,1``.
"""

import os

import backend_flags  # the engine's flags, before all
import pytest

import synkhronos._session.lifecycle as lifecycle
from synkhronos._multinode.launch import StartLimit, find_comm

assert backend_flags

#: How many machines there are.
N = int(os.environ.get("PMI_SIZE", 1))
_MACHINE = int(os.environ.get("PMI_RANK", 0))
_SHARES = [int(share) for share in os.environ.get("SYNKHRONOS_TEST_SHARES", ",".join("1" * N)).split(",")]
#: What tests take that go through numbers of ranks.
RANKS = (1, 2, 3, 5) if N == 1 else tuple(n for n in (2, 3, 4, 5) if n >= N)

_find_devices = lifecycle.find_free_devices


def _find_own_devices(n_parallel, *others):
    """Of so many ranks in all, those of this machine."""
    if n_parallel is not None and n_parallel >= N:
        of_others = [max(1, n_parallel * share // sum(_SHARES)) for share in _SHARES[1:]]
        n_parallel = of_others[_MACHINE - 1] if _MACHINE else n_parallel - sum(of_others)
    return _find_devices(n_parallel, *others)


def one_machine(reason):
    """Mark tests of what sessions on several machines do otherwise, or not."""
    return pytest.mark.skipif(N > 1, reason=f"on several machines: {reason}")


if N > 1:
    find_comm(StartLimit(60))  # so that what MPI opens is there before the first test
    lifecycle.find_free_devices = _find_own_devices
