"""Nodes with different clocks: times in traces, the first of several failures, and `memory` of all ranks."""

import json

import pytest
from backend import theano_only
from mpi_jobs import ends_well, hear, hosts_or_skip, start

AHEAD = 1000  # seconds


@pytest.fixture(scope="module")
def hosts():
    with hosts_or_skip(2, ahead=(0, AHEAD)) as made:
        clock = ["python3", "-c", "import time; print(time.monotonic())"]
        there = [float(made.inside(name, *clock)) for name in made.names]
        assert there[1] - there[0] > AHEAD - 1
        yield made


@theano_only("as_op")
def test_traces_first_failures_and_memory(hosts, tmp_path):
    job = start(
        hosts,
        f"""
        from theano.compile.ops import as_op

        @as_op([T.dvector, T.dvector], [T.dvector])
        def late(x, delay):
            time.sleep(delay.max())
            if delay.max():
                raise ValueError("after %s seconds" % delay.max())
            return x

        n = synk.fork(2, use_gpu=False, timeout=60)
        x, delay = T.dvector("x"), T.dvector("delay")
        f = synk.function([x, delay], late(x, delay).sum())
        w = theano.shared(np.zeros(100_000))
        step = synk.function([x], updates=[(w, w + x.sum())])
        ones = np.ones(8)
        f(ones, np.zeros(8))
        for delays in ([0, 0.7, 0, 0.1], [0, 0.1, 0, 0.7]):
            try:
                f(ones, np.repeat(delays, 2))
            except synk.WorkerError as error:
                say(error.rank)
        step(ones)
        with synk.trace({str(tmp_path / "trace.json")!r}) as times:
            for _ in range(20):
                step(ones)
                synk.all_reduce(w)
        held = synk.memory()
        assert sorted(held.in_use) == list(range(n)), held
        assert min(held.in_use.values()) >= w.get_value(borrow=True).nbytes, held
        assert held.in_use == synk.memory().in_use
        assert sorted(times.seconds) == list(range(n))
        """,
    )
    assert [hear(job)[1] for _ in range(2)] == ["3", "1"]
    ends_well(hosts, job)
    commands = {rank: [] for rank in range(4)}
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "command" and event["name"] in ("AllReduce", "Call step"):
            commands[event["pid"]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    assert [len(found) for found in commands.values()] == [len(commands[0])] * 4
    assert commands[0]
    slack = 5000  # microseconds; clocks are compared to within half a round trip, on a busy computer
    for of_ranks in zip(*commands.values()):
        assert len({name for name, _, _ in of_ranks}) == 1
        _, begun, ended = of_ranks[0]
        for _, start_there, end_there in of_ranks[1:]:
            assert begun - slack < start_there
            assert end_there < ended + slack
    first = max(of_ranks[0][1] - min(one[1] for one in of_ranks) for of_ranks in zip(*commands.values()))
    last = max(max(one[2] for one in of_ranks) - of_ranks[0][2] for of_ranks in zip(*commands.values()))
    print(f"others begin {first:.0f} µs before the controller at most, and end {last:.0f} µs after it")
