"""Errors of `fork` in programs that MPI starts, as if each process were on its own node."""

import re

import numpy as np
import pytest
from backend import theano_only
from mpi_jobs import needs_mpi, run_processes
from scripts import ROOT

pytestmark = needs_mpi


@theano_only("the program of the page imports Theano")
def test_the_program_of_the_page():
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    program, output = re.findall(r"```(?:python|text)\n(.*?)```", page, re.S)
    code, out, err = run_processes(program)
    assert (code, out) == (0, output), out + err
    X, w = np.random.RandomState(0).rand(1000, 3), np.zeros(3)
    for _ in range(4):
        off = X @ w - 1
        w = w - 0.3 * 2 * off @ X / len(X)
    assert output == f"4 ranks: {np.mean(off**2):.4f}\n"


@pytest.mark.parametrize("given", [{}, {"UCX_TCP_RX_SEG_SIZE": "64k"}], ids=["", "set"])
def test_ucx_gets_larger_tcp_buffers_unless_the_user_sets_them(given):
    code, out, err = run_processes(
        """
        import os
        import synkhronos as synk
        synk.fork(1, use_gpu=False)
        print(os.environ["UCX_TCP_RX_SEG_SIZE"])
        """,
        **given,
    )
    assert (code, out) == (0, given.get("UCX_TCP_RX_SEG_SIZE", "256k") + "\n"), out + err


@theano_only("flags in THEANO_FLAGS")
def test_nodes_with_different_settings_are_refused():
    code, out, err = run_processes(
        """
        import os
        os.environ["THEANO_FLAGS"] = "floatX=float" + ("32", "64")[int(os.environ["PMI_RANK"])]
        import synkhronos as synk
        try:
            synk.fork(1, use_gpu=False)
        except synk.DeviceError as error:
            print(error)
        """,
        fresh=True,
    )
    assert code == 0, err
    assert out.startswith("floatX is float64 on node 1 (") and "and float32 on node 0 (" in out, out


def test_a_launcher_of_another_mpi_is_refused():
    code, _, err = run_processes("import synkhronos as synk; synk.fork(1, use_gpu=False)", n=1, PMI_SIZE="3")
    assert code == 1
    assert (
        "one of 3 processes that were launched together, and MPI knows 1: the launcher belongs to another MPI library"
        in err
    )


@theano_only("as_op")
def test_a_silent_rank_of_another_node_is_reported():
    """The error names the silent worker or leader of the other node, not the ranks of node 0 that wait for it."""
    code, out, err = run_processes(
        """
        import time
        import numpy as np, theano, theano.tensor as T
        from theano.compile.ops import as_op
        import synkhronos as synk

        @as_op([T.dvector], [T.dvector])
        def linger(value):
            end = time.monotonic() + 60 * value[0]
            while time.monotonic() < end:
                time.sleep(0.01)
            return value

        for rank in (3, 2):
            n = synk.fork(2, use_gpu=False, timeout=5)
            x = T.dvector("x")
            f = synk.function([x], [synk.averaged(linger(x).sum())])
            f(np.zeros(n))
            try:
                f(np.eye(n)[rank])
            except synk.WorkerTimeout as error:
                print(error.rank, error, flush=True)
            if rank == 3:
                synk.close()
        """
    )
    lines = [line for line in out.splitlines() if line[:2] in ("2 ", "3 ")]
    assert [line[0] for line in lines] == ["3", "2"], (code, out + err)
    assert all("node 1" in line for line in lines)
