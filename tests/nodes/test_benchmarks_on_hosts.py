"""Benchmarks on several hosts: commands to contestants, limited links, and small measurements."""

import json
import os
import sys
import textwrap
from types import SimpleNamespace

import pytest
from backend import theano_only
from scripts import ROOT

sys.path.append(str(ROOT))

from benchmarks import nodes, plan_validation, rules
from benchmarks.harness import Contest
from benchmarks.nodes_predicted import Line, predict
from benchmarks.processes import Contestant
from benchmarks.report import make_details
from benchmarks.results import Result
from benchmarks.samples import Sample
from synkhronos._costs import Cluster, Curve, Link, RowTimes, Workload

CONTESTANT = """
    import os, socket, time
    from benchmarks.contestants._serve import compete, rank

    def of_mpi():
        from mpi4py import MPI
        return MPI.COMM_WORLD.allreduce

    def of_synkhronos():
        import synkhronos as synk
        n_ranks = synk.fork(2, use_gpu=False)
        return lambda n: n * n_ranks

    def of_sockets():
        port = int(os.environ["PORT"])
        if rank():
            def send(n):
                with socket.create_connection(("hosta", port), 60) as line:
                    line.sendall(bytes(n))
                    assert line.recv(1) == b""
                return 0
            return send
        server = socket.create_server(("hosta", port))

        def receive(n):
            start = time.perf_counter()
            with server.accept()[0] as line:
                while n:
                    n -= len(line.recv(n))
            return time.perf_counter() - start
        return receive

    def make(kind):
        what = globals()[f"of_{kind}"]()
        return lambda n: [what(n)], {"host": socket.gethostname()}

    compete(make)
"""


def test_contestants_on_hosts(hosts, tmp_path):
    (tmp_path / "some_contestant.py").write_text(textwrap.dedent(CONTESTANT))
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PORT": "7357"}

    def contestant(kind, **options):
        return Contestant(kind, "some_contestant", {"kind": kind}, environment=environment, hosts=hosts, **options)

    sockets = contestant("sockets", processes=2)
    with Contest([contestant("mpi", processes=4, mpi=True), contestant("synkhronos", mpi=True)], [sockets]) as contest:
        measured = contest.run(1, contest.alike(n=10), warm_up=0)
        assert measured == {"mpi": Sample([[40]]), "synkhronos": Sample([[40]])}
        assert set(contest.facts) == {"mpi", "synkhronos", "sockets"}
        assert contest.facts["synkhronos"] == {"host": "hosta"}
        for rate, slow in (("8mbit", True), (None, False)):
            hosts.limit(rate)
            ((seconds,),) = contest.run(1, {"one": (sockets, {"n": 800_000})}, warm_up=0)["one"].rounds
            limits = [json.loads(hosts.inside(name, "tc", "-json", "qdisc", "show")) for name in hosts.names]
            assert [any(one["kind"] == "tbf" for one in each) for each in limits] == [slow] * 2
            assert seconds > (0.6 if slow else 0)  # 8 bits take 1 µs, except for the 128 kB of the bucket
    assert not hosts.left()


@theano_only("contestants in Theano's names")
def test_figures_on_hosts_in_small(hosts):
    result = Result("nodes", "Several machines", "")
    nodes.measure_calls(result, hosts, rounds=1, calls=8, seconds=4)  # several clock ticks, the unit of CPU times
    nodes.measure_rows(result, hosts)
    assert not hosts.left()
    rows = {row.key.partition("/")[2]: row for row in result.rows}
    assert 0 < rows["idle"].value < 100
    assert abs(rows["succession"].value) < 1e6  # a difference of times, which may be negative on a busy machine
    assert rows["again"].value == 0
    assert 0.9 < rows["shuffled"].value <= 1.01  # nearly all rows are sent once, in all epochs together


@theano_only("contestants in Theano's names")
def test_training_rules_on_hosts_in_small(hosts, monkeypatch):
    result, name = Result("rules", "Training rules"), "benchmarks.contestants.rules"
    ours = nodes.on(hosts, Contestant("2 hosts × 1 rank", name, {"model": "mlp", "ranks": 1}))
    with Contest([ours]) as contest:
        rules.measure_bytes(result, contest, ours)
        monkeypatch.setattr(rules, "ON_LINK", {name: rules.ON_LINK[name] for name in (rules.COMPUTE, rules.STEPWISE)})
        hosts.limit(rules.RATE)
        rules.measure_link(result, contest, ours, rounds=1, rows=8)
        hosts.limit(None)
    values = {row.key.partition("/")[2]: row.value for row in result.rows}
    assert values["bytes"] == 1 / 50
    assert values["bytes-link"] == pytest.approx(1 / 50, rel=0.1)
    assert values["exchange"] > 400  # 5 MB take 0.4 s
    assert not hosts.left()


@theano_only("contestants in Theano's names")
def test_predictions_of_a_step_on_hosts_in_small(capsys):
    """The time of the link is predicted from its ping-pong and the number of bytes; a busy machine adds to a step."""
    n_bytes = 4 * 1_276_810
    work = Workload((RowTimes((8.0,), (0.01,), 0.0),), n_bytes=n_bytes)
    cluster = Cluster(Link(0.0, 1.0), Link(0.0, 1e9), contention=Curve((1.0, 2.0), (1.0, 1.5)))
    plan = SimpleNamespace(_workload=work, _cluster=cluster)
    link = Link(0.0, n_bytes)  # one second
    assert plan_validation.seconds_on_hosts(plan, link, 16) == pytest.approx((1.015, 1.015))
    (error,) = plan_validation.validate_on_hosts({"mlp": plan}, {"100mbit": 2}, [16], rounds=1)
    *_, titles, row = capsys.readouterr().out.splitlines()
    assert titles.split()[:3] == ["model", "link", "rows"]
    assert row.split()[:3] == ["mlp", "100mbit", "16"]
    predicted, measured = map(float, row.split()[3:5])
    assert error == pytest.approx(abs(predicted / measured - 1), abs=1e-3)
    assert 0.05 < float(row.split()[-4]) < 0.11, "Gbit/s, as measured"
    assert min(predicted, measured) > 0.8 * 1e3 * 8 * n_bytes / 1e8, "no faster than the link"


def test_predictions():
    line = Line.through(2e-3, 0, 1.002, 25_000_000)
    assert (line.alpha, line.beta) == (2e-3, 1e-8)
    assert line.seconds(2, 25_000_000) == pytest.approx(1.002)
    assert line.seconds(64, 25_000_000) == pytest.approx(63 * 2e-3 + 2 * 63 / 64)
    result = Result("nodes", "Several machines", "")
    predict(result, {"1 Gbit/s": line}, Sample([[0.02]]))
    text = make_details([result], "some", {})
    assert "Prediction, not measured: 1 Gbit/s, α = 2000 µs, β = 10.00 ns/byte:" in text
    assert "| 2 | 1,026 | 53.1 | 73.1 | 27.4 |" in text
