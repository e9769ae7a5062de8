"""One contract for all transports: each collective, op and dtype on several ranks, compared with NumPy.

`run_collectives.py` executes all of them in a program of its own, because a process can take GPUs only once. The tests
compare each result.
"""

import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from gpu_devices import gpus
from mpi_jobs import needs_mpi
from namespace_hosts import MPIEXEC
from run_collectives import DTYPES, OPS, SHAPES, WEIGHTED, WEIGHTS, has, name_of, value
from scripts import ROOT, python_path

REDUCTIONS = {"avg": np.add, "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
TOLERANCE = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-12}


class Transport(NamedTuple):
    """Transport, devices and nodes of a run.

    Attributes
    ----------
    way : str
        The first argument of `run_collectives.py`.
    kind : str
        Kind of devices: ``"cpu"``, ``"opencl"`` or ``"cuda"``.
    nodes : tuple of int
        Number of ranks of each node.
    """

    way: str
    kind: str
    nodes: tuple

    @property
    def n_ranks(self):
        return sum(self.nodes)

    @property
    def root(self):
        """Rank of the controller: the last rank of the first node."""
        return self.nodes[0] - 1


def _over_mpi(way, *nodes):
    name = f"mpi-{way}-{'+'.join(map(str, nodes))}"
    return pytest.param(Transport(f"mpi {way}", "cpu", nodes), id=name, marks=needs_mpi)


def _on_gpus(kind, way, n):
    marks = [getattr(pytest.mark, kind), pytest.mark.slow]
    return pytest.param(Transport(way, kind, (n,)), id=f"{kind}-{way}-{n}", marks=marks)


TRANSPORTS = [
    *[pytest.param(Transport("shared memory", "cpu", (n,)), id=f"shared-memory-{n}") for n in (1, 2, 3, 5)],
    *[_over_mpi("votes", *nodes) for nodes in ((1, 1), (2, 1, 2))],
    *[_over_mpi("pieces", *nodes) for nodes in ((2, 1), (1, 1, 1))],
    *[_over_mpi("tickets", *nodes) for nodes in ((1, 1), (1, 2, 1))],
    *[_on_gpus("opencl", way, n) for way, n in (("host", 1), ("host", 3), ("stand-in", 2), ("stand-in", 5))],
    *[_on_gpus("cuda", way, n) for way in ("host", "nccl") for n in (1, 2, 4, 8)],
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return a function that returns the results of `run_collectives.py`, which runs once for each transport."""
    done = {}

    def outcome(transport):
        if transport not in done:
            available = ["cpu"] if transport.kind == "cpu" else gpus(transport.kind)
            if transport.way == "nccl" and transport.n_ranks > len(available):
                pytest.skip(f"{len(available)} GPUs")
            devices = ",".join((available * transport.n_ranks)[: transport.n_ranks])
            file = tmp_path_factory.mktemp("outcome") / "results.npz"
            launch = [MPIEXEC, "-n", str(len(transport.nodes))] if len(transport.nodes) > 1 else []
            nodes = ",".join(map(str, transport.nodes))
            command = [
                *launch,
                sys.executable,
                "tests/transports/run_collectives.py",
                transport.way,
                devices,
                nodes,
                file,
            ]
            options = {"cwd": ROOT, "timeout": 300, "env": {**os.environ, "PYTHONPATH": python_path()}}
            run = subprocess.run(command, capture_output=True, text=True, **options)
            assert run.returncode == 0, run.stderr
            with np.load(file) as results:
                done[transport] = dict(results)
        return done[transport]

    return outcome


def expected(op, dtype, shape, n_ranks, returned):
    """Return the reduction computed by NumPy, with the dtype that the documentation states."""
    values = [value(rank, dtype, shape) for rank in range(n_ranks)]
    kind = np.dtype(dtype).kind
    if op in ("avg", WEIGHTED):
        weights = WEIGHTS[:n_ranks] if op == WEIGHTED else (1,) * n_ranks
        wide = [one.astype(np.longdouble) for one in values]
        mean = sum(weight * one for weight, one in zip(weights, wide)) / sum(weights)
        if kind == "f":
            return mean.astype(dtype)
        return mean.astype(np.float64) if returned else np.rint(mean).astype(dtype)
    widened = np.add.reduce(np.zeros(1, dtype)).dtype if returned and op in ("sum", "prod") and kind in "iub" else dtype
    result = values[0].astype(widened)
    for one in values[1:]:
        result = REDUCTIONS[op](result, one, dtype=widened)
    return result


def check(got, wanted, dtype):
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=TOLERANCE.get(dtype, 0 if got.dtype.kind != "f" else 1e-12))


def check_equal(got, wanted):
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.timeout(330)
@pytest.mark.parametrize("transport", TRANSPORTS)
class TestContract:
    @pytest.mark.parametrize("op", [*OPS, WEIGHTED])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_reductions_are_those_of_numpy(self, outcomes, transport, op, dtype):
        if not has(op, dtype):
            pytest.skip("booleans are not added")
        found, n_ranks = outcomes(transport), transport.n_ranks
        for shape in SHAPES:
            kept = expected(op, dtype, shape, n_ranks, returned=False)
            first = found[name_of(f"all_reduce {op}/rank 0", dtype, shape)]
            for rank in range(n_ranks):
                got = found[name_of(f"all_reduce {op}/rank {rank}", dtype, shape)]
                check(got, kept, dtype)
                np.testing.assert_array_equal(got, first)  # bitwise equal
            if op == WEIGHTED:
                continue
            for rank in range(n_ranks):
                got = found[name_of(f"reduce in place {op}/rank {rank}", dtype, shape)]
                check(got, kept if rank == transport.root else value(rank, dtype, shape), dtype)
            returned = found[name_of(f"reduce {op}", dtype, shape)]
            check(returned, expected(op, dtype, shape, n_ranks, returned=True), dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_broadcast_and_gathers_copy_values(self, outcomes, transport, dtype):
        found, n_ranks = outcomes(transport), transport.n_ranks
        for shape in SHAPES:
            together = np.concatenate([value(rank, dtype, shape) for rank in range(n_ranks)])
            check_equal(found[name_of("gather", dtype, shape)], together)
            for rank in range(n_ranks):
                got = found[name_of(f"broadcast/rank {rank}", dtype, shape)]
                check_equal(got, value(transport.root, dtype, shape))
                if shape != "row":
                    got = found[name_of(f"all_gather/rank {rank}", dtype, shape)]
                    check_equal(got, together)

    def test_the_requested_transport_is_used(self, outcomes, transport):
        found = outcomes(transport)
        if transport.way == "stand-in":
            root = transport.root
            kinds = ["all_gather", "all_reduce", f"broadcast from {root}", f"reduce to {root}"]
            assert found["collectives of the stand-in"].tolist() == kinds
        else:
            assert "collectives of the stand-in" not in found
        ways = {"mpi tickets": ["pieces", "tickets"]}.get(transport.way, transport.way.split()[1:])
        of_mpi = transport.way.startswith("mpi")
        assert found["ways between nodes"].tolist() == (ways if of_mpi else [])
