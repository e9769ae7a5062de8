"""Failures and Ctrl-C while a reduction over nodes is on its way that has begun before all of its operands exist."""

import pytest
from early_reductions import FAULTY, run
from mpi_jobs import ends_well, hear, needs_mpi

pytestmark = needs_mpi

#: The same with statistics over all ranks before each layer.
NORMALISED = FAULTY.replace("T.dot(x, layers[0])", "normalised(T.dot(x, layers[0]))").replace(
    "fault = [",
    """def normalised(h):
        h = h - synk.averaged(h.mean(axis=0))
        return h / T.sqrt(synk.averaged(T.sqr(h).mean(axis=0)) + np.float32(1e-3))
    fault = [""",
)


@pytest.mark.parametrize(
    ("network", "ranks"), [(FAULTY, (1, 1)), (FAULTY, (2, 2)), (NORMALISED, (2, 1))], ids=["two", "four", "normalised"]
)
def test_shapes_that_differ_between_ranks(network, ranks):
    """An array that differs is named, even if other ranks have reached a collective before its reduction."""
    lines = run(
        network,
        """
        for one in fault[:3]:
            for rank in range(n):
                synk.set_value(rank, one, SHRINK)
                try:
                    f(X)
                    raise SystemExit("no error")
                except (ValueError, synk.WorkerError) as error:
                    assert "got the shapes" in str(error), error
                synk.set_value(rank, one, NOTHING)
                works()
        print("fine")
        """,
        ranks=ranks,
    )
    assert lines[-1] == "fine"


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 1, 1, 1, 1)], ids=str)
def test_a_rank_that_fails_between_the_begin_and_the_end(ranks):
    lines = run(
        FAULTY,
        """
        for one in fault:
            for rank in range(n):
                synk.set_value(rank, one, RAISE)
                before = totals()
                try:
                    f(X)
                    raise SystemExit("no error")
                except synk.WorkerError as error:
                    assert error.rank == rank, error
                synk.set_value(rank, one, NOTHING)
                if one is fault[3]:  # after the reduction: other ranks may have stored their updates
                    synk.broadcast(sums)
                else:
                    assert all((a == b).all() for a, b in zip(totals(), before))
                works()
        print("fine")
        """,
        ranks=ranks,
    )
    assert lines[-1] == "fine"


def test_a_worker_that_is_killed_is_replaced():
    lines = run(
        FAULTY,
        """
        for one in fault:
            for rank in (1, 3):
                synk.set_value(rank, one, KILL)
                try:
                    f(X)
                    raise SystemExit("no error")
                except synk.WorkerRestarted as error:
                    assert error.ranks == (rank,), error
                synk.broadcast(fault + sums)
                works()
        print("fine")
        """,
        ranks=(2, 2),
        RESTART="1",
    )
    assert lines[-1] == "fine"


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 1, 1, 1)], ids=str)
def test_ctrl_c_at_any_instant(ranks):
    lines = run(
        FAULTY,
        """
        for round in range(40):
            timer = threading.Timer(draw.rand() * 0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                timer.start()
                while True:
                    f(X)
            except KeyboardInterrupt:
                timer.join()
            synk.broadcast(sums)  # an interrupt may come between the updates of two ranks
            works()
        print("fine")
        """,
        ranks=ranks,
    )
    assert lines[-1] == "fine"


@pytest.mark.parametrize("rank", [2, 3])
def test_ctrl_c_while_another_node_computes(rank):
    """The leader (2) waits for its worker (3), or computes itself and completes the exchange only afterwards."""
    lines = run(
        FAULTY,
        """
        import synkhronos._multinode.node_group as node_group
        from fault_ops import LONG_SLEEP
        node_group._STOP_SECONDS = 60
        synk.set_value(int(os.environ["RANK"]), fault[1], LONG_SLEEP)
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
        began = time.monotonic()
        try:
            timer.start()
            f(X)
        except KeyboardInterrupt:
            print(time.monotonic() - began < 10)  # the rank computes for 20 s
        timer.join()
        synk.close()
        synk.fork(use_gpu=False, timeout=60)
        print(all((a == b).all() for a, b in zip(f(X), expected)))
        """,
        ranks=(2, 2),
        RANK=str(rank),
    )
    assert lines[-2:] == ["True", "True"]


#: A program that calls an early function twice, and then waits until the link is slow.
SLOW = """
    import threading
    from pathlib import Path
    from deadline import wait_for
    from synkhronos._collectives.hierarchical import HierarchicalTransport

    n_early, finish = [], HierarchicalTransport.finish
    HierarchicalTransport.finish = lambda *arguments: n_early.append(1) or finish(*arguments)
    n = synk.fork(1, use_gpu=False, timeout=TIMEOUT)
    x, means = T.matrix("x", dtype="float32"), []
    factor = x.sum()
    for i, length in enumerate(LENGTHS):
        factor = T.tanh(factor) + i
        means.append(synk.averaged(theano.shared(np.ones(length, "float32"), f"w{i}") * factor))
    f, X = synk.function([x], [(mean[-1], "avg") for mean in means]), np.ones((n, 4), "float32")
    expected = f(X), f(X)
    assert len(n_early) == 1, n_early
    say("ready")
    wait_for(Path("PATH").exists, "the limit of the link")
"""


def slow(lengths, timeout):
    """Return the start of a program whose gradients have these lengths."""
    return SLOW.replace("LENGTHS", str(lengths)).replace("TIMEOUT", str(timeout))


def test_the_timeout_limits_a_piece(hosts, start_slow):
    """The reduction takes 8 s, and each of its six pieces a sixth of that."""
    job = start_slow(
        "6mbit",
        slow([800_000] * 2, timeout=4),
        """
        began = time.monotonic()
        got = f(X)
        say(time.monotonic() - began > 7, list(map(float, got)) == list(map(float, expected[0])))
        synk.close()
        """,
    )
    assert hear(job)[1] == "True True"
    ends_well(hosts, job)


@pytest.mark.parametrize("lengths", [[800_000] * 2, [120_000] * 30], ids=["large", "small"])
@pytest.mark.parametrize("rate", ["10mbit", "20mbit"])
def test_ctrl_c_over_a_slow_link(hosts, start_slow, rate, lengths):
    """The link's rate limits the bytes in flight, so an interrupt ends a reduction soon, and nothing is lost."""
    job = start_slow(
        rate,
        slow(lengths, timeout=60),
        """
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        since = time.monotonic() + 1
        try:
            f(X)
        except KeyboardInterrupt:
            say(time.monotonic() - since)
        say(list(map(float, f(X))) == list(map(float, expected[0])))
        """,
    )
    seconds = float(hear(job)[1])
    hosts.limit(None)
    assert hear(job)[1] == "True"
    ends_well(hosts, job)
    assert seconds < 3
