"""Large arrays, which nodes send in pieces: rounding, gathers, 16-bit wire dtypes, interrupts, and slow links.

Each process that mpiexec starts is a node. Pieces are small in most tests, so that each array has many of them.
"""

import json
import signal
import time

import pytest
from deadline import wait_for
from mpi_jobs import HELPERS, ends_badly, ends_well, hear, needs_mpi, output_of

pytestmark = needs_mpi

#: Bytes of a piece: ranks of a node reduce arrays below 16 KiB through staging buffers, and larger ones in place.
SMALL, LARGE = 1 << 14, 1 << 16

PRELUDE = f"""
    import os, signal, sys, threading, time
    import numpy as np
    sys.path.insert(0, {str(HELPERS)!r})
    from backend import T, theano
    import synkhronos as synk
    import synkhronos._collectives.buckets as parts_of_collectives
    import synkhronos._session.lifecycle as lifecycle
    piece = int(os.environ["PIECE"])
    parts_of_collectives.PIECE_BYTES, parts_of_collectives.SHARED_BYTES = piece, piece // 2
    sizes = [int(size) for size in os.environ["RANKS"].split()]
    exchange = os.environ.get("EXCHANGE") or None
    own, find_devices = sizes[int(os.environ["PMI_RANK"])], lifecycle.find_free_devices
    lifecycle.find_free_devices = lambda n_parallel, *others: find_devices(own, *others)
    n = synk.fork(use_gpu=False, timeout=60, wire_dtype=exchange)
    assert n == sum(sizes)

    def shared(values):
        return theano.shared(np.asarray(values))

    def use(*variables):
        synk.function([], [v.sum() for v in variables])

    def spread(variables, values):
        for variable, own in zip(variables, values):
            for rank in range(n):
                synk.set_value(rank, variable, own[rank])
"""


def run(source, ranks, piece=SMALL, **environment):
    """Run a program with these numbers of ranks on the nodes, and return the lines that it printed."""
    environment |= {"RANKS": " ".join(map(str, ranks)), "PIECE": str(piece)}
    return output_of(PRELUDE, source, n=len(ranks), **environment).splitlines()


@pytest.mark.parametrize("ranks, piece", [((2, 1, 2), SMALL), ((3, 1), LARGE)], ids=str)
def test_arrays_of_many_pieces_are_rounded_once_and_gathered_completely(ranks, piece):
    """Arrays have no, one or many pieces here; `tests/transports/test_contract.py` has every op and dtype."""
    lines = run(
        """
        draw = np.random.RandomState(3)
        lengths = [0, 1, 5, 3000, 20_000]
        halves = [(draw.rand(n, length) * 9).astype("float16") for length in lengths]
        variables = [shared(value[0]) for value in halves]
        use(*variables)
        spread(variables, halves)
        synk.all_reduce(variables, "sum")
        for variable, value in zip(variables, halves):
            expected = value.astype("float64").sum(axis=0).astype("float16")
            assert all((synk.get_value(rank, variable) == expected).all() for rank in range(n))
        for length in lengths:  # gathered, of different lengths
            parts = [draw.rand(length + 7 * rank, 2).astype("float32") for rank in range(n)]
            variable = shared(parts[0])
            use(variable)
            spread([variable], [parts])
            assert (synk.gather(variable, nd_up=0) == np.concatenate(parts)).all()
            synk.all_gather(variable)
            assert (synk.get_value(n - 1, variable) == np.concatenate(parts)).all()
        huge = shared(np.ones(20_000))
        use(huge)
        spread([huge], [np.arange(n)[:, None] * np.ones((n, 20_000))])
        synk.all_reduce(huge, "avg", weights=[1.7e308] * n)
        assert np.allclose(synk.get_value(n - 1, huge), (n - 1) / 2)
        print("fine")
        """,
        ranks,
        piece,
    )
    assert lines[-1] == "fine"


@pytest.mark.parametrize("ranks, piece", [((2, 1, 2), SMALL), ((2, 2), LARGE)], ids=str)
def test_many_arrays_of_all_lengths_in_one_collective(ranks, piece):
    """Small arrays share pieces, also if they lie between large arrays or arrays of another dtype."""
    lines = run(
        """
        draw = np.random.RandomState(5)
        dtypes = ["float32", "float32", "float32", "float64", "int32"]
        for lengths in [draw.randint(1, 1500, 40), draw.randint(1500, 9000, 20), [40_000, 900, 1200, 80_001] * 2]:
            values = [(9 * draw.rand(n, length)).astype(dtypes[i % 5]) for i, length in enumerate(lengths)]
            variables = [shared(value[0]) for value in values]
            use(*variables)
            for op, ufunc in [("sum", np.add), ("max", np.maximum)]:
                spread(variables, values)
                expected = [ufunc.reduce(value, axis=0, dtype=value.dtype) for value in values]
                got = synk.reduce(variables, op, in_place=False)
                assert all(np.allclose(*both, rtol=1e-5) for both in zip(got, expected))
                assert (synk.get_value(n - 1, variables[7]) == values[7][n - 1]).all()
                synk.all_reduce(variables, op)
                for rank in range(n):
                    for variable, one in zip(variables, expected):
                        assert np.allclose(synk.get_value(rank, variable), one, rtol=1e-5), (op, rank)
                assert synk.check_replicas(variables) == {}
        x = T.matrix("x", dtype="float32")
        sums = [(synk.summed(x[:, :length].sum(axis=0)), None) for length in (5, 3000, 1500, 30_000, 1600, 1700)]
        most = [(synk.reduced(x[:, :length].max(axis=0), "max"), None) for length in (7, 1800, 1700)]
        rows = draw.rand(3 * n, 30_000).astype("float32")
        for got in synk.function([x], sums + most)(rows), synk.function([x], most + sums)(rows)[3:] + [None] * 3:
            for i, one in enumerate(got[:6]):
                assert np.allclose(one, rows[:, : len(one)].sum(axis=0), rtol=1e-5), i
        print("fine")
        """,
        ranks,
        piece,
    )
    assert lines[-1] == "fine"


@pytest.mark.parametrize("kind, most", [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_errors_of_16_bit_wire_dtypes(kind, most):
    """The error is at most two roundings: one of the values that another leader sends, and one of the sum."""
    lines = run(
        """
        draw = np.random.RandomState(3)
        values = [draw.randn(n, 20_000).astype(dtype) for dtype in ("float32", "float64")]
        values.append(draw.randn(n, 100).astype("float32"))
        variables = [shared(value[0]) for value in values]
        use(*variables)
        for op, expected in [("sum", [value.sum(0) for value in values]), ("avg", [value.mean(0) for value in values])]:
            spread(variables, values)
            synk.all_reduce(variables, op)
            for variable in variables:
                got = [synk.get_value(rank, variable) for rank in range(n)]
                assert all(one.tobytes() == got[0].tobytes() for one in got)
            scale = np.abs(values[0]).sum(0) / (n if op == "avg" else 1)
            off = np.abs(variables[0].get_value() - expected[0]) / scale
            print(off.max(), *(np.abs(variables[k].get_value() - expected[k]).max() for k in (1, 2)))
        inf = np.float32([np.inf, -np.inf, np.nan, 0, -0.0] * 4000)
        synk.broadcast(variables[0], inf)
        synk.all_reduce(variables[0], "max")
        assert np.array_equal(variables[0].get_value(), inf, equal_nan=True)
        """,
        (1, 2),
        EXCHANGE=kind,
    )
    for line in lines:
        halves, doubles, small = map(float, line.split())
        assert most / 50 < halves < 2.1 * most and doubles < 1e-12 and small < 1e-5
    assert len(lines) == 2


def test_ctrl_c_at_any_instant():
    """After an interrupt in a collective of many pieces, the session works, and later results are right."""
    lines = run(
        """
        draw = np.random.RandomState(5)
        values = draw.rand(n, 400_000).astype("float32")
        variable = shared(values[0])
        use(variable)
        spread([variable], [values])
        n_interrupted = 0
        for round in range(30):
            timer = threading.Timer(draw.rand() * 0.02, lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                timer.start()
                for _ in range(1000):
                    synk.all_reduce(variable, "avg")
                raise SystemExit("not interrupted")
            except KeyboardInterrupt:
                n_interrupted += 1
            timer.join()
            spread([variable], [values])
            synk.all_reduce(variable, "avg")
            for rank in range(n):
                assert np.allclose(synk.get_value(rank, variable), values.mean(0))
            spread([variable], [values])
        print(n_interrupted)
        """,
        (2, 1),
    )
    assert lines == ["30"]


def test_a_rank_that_fails_during_an_exchange():
    """An exception on one rank releases those in collectives of large arrays, and the session continues to work."""
    lines = run(
        """
        x = T.matrix("x")
        large = synk.averaged(T.dot(x.T, x))  # too large to be sent with the votes
        checked = T.opt.Assert("no ones")(x, T.all(T.neq(x, 1))) if hasattr(T, "opt") else None
        if checked is None:
            from pytensor.raise_op import Assert
            checked = Assert("no ones")(x, T.all(T.neq(x, 1)))
        late = synk.summed(T.dot(checked.T, checked).sum() + large.sum())
        f = synk.function([x], [large, late])
        X = np.random.RandomState(0).rand(4 * n, 80).astype(theano.config.floatX)
        expected = f(X)
        for bad in range(len(X)):
            wrong = X.copy()
            wrong[bad] = 1
            try:
                f(wrong)
                raise SystemExit("no error")
            except synk.WorkerError as error:
                assert error.rank == bad // 4, error
            assert all(np.allclose(*both) for both in zip(f(X), expected))
        print("fine")
        """,
        (2, 1),
    )
    assert lines[-1] == "fine"


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("rate", ["10mbit", "40mbit"])
def test_ctrl_c_during_an_exchange_over_a_slow_link(hosts, start_slow, rate, collective):
    """The bytes in flight are limited by the link's rate, so an interrupt ends an exchange of 40 MB soon."""
    job = start_slow(
        rate,
        f"""
        import threading
        synk.fork(1, use_gpu=False)
        large, small = theano.shared(np.ones(10_000_000, "float32")), theano.shared(np.ones(9))
        synk.broadcast([large, small])
        say("ready")
        while not os.path.exists("PATH"):
            time.sleep(0.01)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        since = time.monotonic() + 1
        try:
            synk.{collective}(large)
        except KeyboardInterrupt:
            say(time.monotonic() - since)
        synk.all_reduce(small, "sum")
        say(*set(small.get_value().tolist()))
        """,
    )
    seconds = float(hear(job)[1])
    assert hear(job)[1] == "2.0"
    hosts.limit(None)
    ends_well(hosts, job)
    print(f"Ctrl-C in {collective} at {rate}: {seconds:.2f} s")
    assert seconds < 3


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1, 1)], ids=str)
def test_an_error_with_a_long_message_on_another_node(ranks):
    """Failures are never left out, unlike the large results of a command that has failed."""
    lines = run(
        """
        x, w = T.vector("x", dtype="float64"), shared(np.zeros(3))
        checked = T.opt.Assert("y" * 200_000)(x, T.all(x < 10))
        large = T.zeros((50_000,)) + checked.sum()
        for f in [
            synk.function([x], [], updates=[(w, w + checked.sum())]),
            synk.function([x], [(large, "sum")]),
            synk.function([x], [synk.summed(checked.sum()), (large, "sum")]),
        ]:
            for bad in range(n):
                X = np.ones(n)
                X[bad] = 20
                try:
                    f(X)
                    raise SystemExit("no error")
                except synk.WorkerError as error:
                    assert error.rank == bad and "y" * 200_000 in str(error)
                    assert "sequence" not in str(error)
                f(np.ones(n))
                try:
                    with synk.sequence():
                        f(np.ones(n))
                        f(X)
                    raise SystemExit("no error")
                except synk.WorkerError as error:
                    assert error.rank == bad and "This was part 2 of a sequence of 2" in str(error)
        print("fine")
        """,
        ranks,
    )
    assert lines[-1] == "fine"


def test_a_result_without_memory_for_it():
    """The controller receives the parts all the same, and the session continues."""
    lines = run(
        """
        import resource
        w, small = shared(np.arange(float(80 << 17))), shared(np.ones(3))
        synk.broadcast([w, small])
        for _ in range(2):
            [synk.get_value(n - 1, small) for _ in range(3)]
            used = int(open("/proc/self/statm").read().split()[0]) * 4096
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), before[1]))
            try:
                synk.get_value(n - 1, w)
                raise SystemExit("no error")
            except MemoryError:
                pass
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)
            assert (synk.get_value(n - 1, small) == 1).all()
            assert (synk.get_value(n - 1, w) == w.get_value()).all()
        synk.close()
        synk.fork(use_gpu=False)
        synk.broadcast(w)
        assert (synk.get_value(n - 1, w) == w.get_value()).all()
        print("fine")
        """,
        (1, 2),
    )
    assert lines[-1] == "fine"


#: A program that waits until the link is slow, and has variables whose values another node sends.
RESULTS = """
    import threading
    from pathlib import Path
    from deadline import wait_for
    synk.fork(1, use_gpu=False, timeout=3)
    large, small = theano.shared(np.arange(4_000_000, dtype="float32")), theano.shared(np.ones(9))
    medium = theano.shared(np.arange(1_500_000, dtype="float32"))
    x = T.vector("x")
    f = synk.function([x], [(large * x.sum(), "sum"), (x.sum(), "sum")])
    synk.broadcast([large, medium, small])
    say("ready")
    wait_for(Path("PATH").exists, "the limit of the link")
"""


def test_the_timeout_limits_a_part_of_a_result_of_another_node(hosts, start_slow):
    """The value of 6 MB arrives in about 5 s."""
    job = start_slow(
        "10mbit",
        RESULTS,
        """
        began = time.monotonic()
        got = synk.get_value(1, medium)
        say(time.monotonic() - began > 4, (got == medium.get_value()).all())
        synk.close()
        """,
    )
    assert hear(job)[1] == "True True"
    ends_well(hosts, job)


@pytest.mark.parametrize("rate, call", [("10mbit", "synk.get_value(1, large)"), ("40mbit", "f(np.ones(2))")])
def test_ctrl_c_while_another_node_sends_a_result_over_a_slow_link(hosts, start_slow, rate, call):
    job = start_slow(
        rate,
        RESULTS,
        f"""
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        since = time.monotonic() + 1
        try:
            {call}
        except KeyboardInterrupt:
            say(time.monotonic() - since)
        synk.all_reduce(small, "sum")
        say(*set(small.get_value().tolist()))
        say((synk.get_value(1, large) == large.get_value()).all())
        synk.close()
        """,
    )
    seconds = float(hear(job)[1])
    hosts.limit(None)
    assert [hear(job)[1] for _ in range(2)] == ["2.0", "True"]
    ends_well(hosts, job)
    print(f"Ctrl-C during {call} at {rate}: {seconds:.2f} s")
    assert seconds < 3


@pytest.mark.parametrize("stopped", ["SIGSTOP", "SIGKILL"])
def test_a_leader_that_is_lost_while_it_sends_a_result(hosts, start_slow, stopped):
    job = start_slow(
        "10mbit",
        RESULTS,
        """
        try:
            synk.get_value(1, large)
        except synk.SynkhronosError as error:
            say(type(error).__name__, error)
        """,
    )
    leader = hosts.leader("hostb")

    def sent():
        return json.loads(hosts.inside("hostb", "ip", "-s", "-j", "link", "show", "eth0"))[0]["stats64"]["tx"]["bytes"]

    before = sent()
    wait_for(lambda: sent() > before + 500_000, "the first bytes of the result")
    leader.send_signal(signal.Signals[stopped])
    if stopped == "SIGSTOP":
        text = hear(job)[1]
        assert text.startswith(
            "WorkerTimeout the leader of node 1 (hostb) did not continue an exchange within 3 seconds"
        )
    hosts.limit(None)
    ends_badly(hosts, job, time.monotonic(), 30)
