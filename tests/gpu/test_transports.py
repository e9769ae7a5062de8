"""One contract for every transport: each collective, op and dtype on 1, 2, 3 and 5 ranks, against NumPy.

`transports.py` does them all in a process of its own, since a process can take GPUs only once; here each result is
looked at.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from gpu_devices import gpus
from scripts import ROOT, python_path
from transports import DTYPES, OPS, SHAPES, WEIGHTED, WEIGHTS, has, name_of, value

REDUCTIONS = {"avg": np.add, "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
TOLERANCE = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-12}

TRANSPORTS = [
    *[pytest.param(("shared memory", "cpu", n), id=f"shared-memory-{n}") for n in (1, 2, 3, 5)],
    *[
        pytest.param((way, "opencl", n), id=f"opencl-{way}-{n}", marks=[pytest.mark.opencl, pytest.mark.slow])
        for way in ("host", "stand-in")
        for n in (1, 2, 3, 5)
    ],
    *[
        pytest.param((way, "cuda", n), id=f"cuda-{way}-{n}", marks=[pytest.mark.cuda, pytest.mark.slow])
        for way in ("host", "nccl")
        for n in (1, 2, 4, 8)
    ],
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What `transports.py` has found, run once for each transport and number of ranks."""
    done = {}

    def outcome(way, kind, n_ranks):
        if (way, kind, n_ranks) not in done:
            there = ["cpu"] if kind == "cpu" else gpus(kind)
            if way == "nccl" and n_ranks > len(there):
                pytest.skip(f"{len(there)} GPUs")
            devices = ",".join((there * n_ranks)[:n_ranks])
            file = tmp_path_factory.mktemp("outcome") / "results.npz"
            command = [sys.executable, "tests/gpu/transports.py", way, devices, str(file)]
            environment = {**os.environ, "PYTHONPATH": python_path()}
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
            assert run.returncode == 0, run.stderr
            with np.load(file) as results:
                done[way, kind, n_ranks] = dict(results)
        return done[way, kind, n_ranks]

    return outcome


def expected(op, dtype, shape, n_ranks, returned):
    """The reduction, computed by NumPy with the dtypes that the documentation promises."""
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
    def test_reductions(self, outcomes, transport, op, dtype):
        if not has(op, dtype):
            pytest.skip("truth values are not added")
        found, n_ranks = outcomes(*transport), transport[2]
        for shape in SHAPES:
            kept = expected(op, dtype, shape, n_ranks, returned=False)
            first = found[name_of(f"all_reduce {op}/rank 0", dtype, shape)]
            for rank in range(n_ranks):
                got = found[name_of(f"all_reduce {op}/rank {rank}", dtype, shape)]
                check(got, kept, dtype)
                np.testing.assert_array_equal(got, first)  # the same to the bit
            if op == WEIGHTED:
                continue
            for rank in range(n_ranks):  # the master is the last one
                got = found[name_of(f"reduce in place {op}/rank {rank}", dtype, shape)]
                check(got, kept if rank == n_ranks - 1 else value(rank, dtype, shape), dtype)
            returned = found[name_of(f"reduce {op}", dtype, shape)]
            check(returned, expected(op, dtype, shape, n_ranks, returned=True), dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_copies(self, outcomes, transport, dtype):
        found, n_ranks = outcomes(*transport), transport[2]
        for shape in SHAPES:
            together = np.concatenate([value(rank, dtype, shape) for rank in range(n_ranks)])
            check_equal(found[name_of("gather", dtype, shape)], together)
            for rank in range(n_ranks):
                got = found[name_of(f"broadcast/rank {rank}", dtype, shape)]
                check_equal(got, value(n_ranks - 1, dtype, shape))
                if shape != "row":
                    got = found[name_of(f"all_gather/rank {rank}", dtype, shape)]
                    check_equal(got, together)

    def test_takes_the_way_that_it_says(self, outcomes, transport):
        found = outcomes(*transport)
        if transport[0] == "stand-in":
            root = transport[2] - 1
            kinds = ["all_gather", "all_reduce", f"broadcast from {root}", f"reduce to {root}"]
            assert found["collectives of the stand-in"].tolist() == kinds
        else:
            assert "collectives of the stand-in" not in found
