"""Losses of ranks and nodes: the errors that the script gets, the time until then, and no processes left on any node.

Each test prints how long it took until the script got the error, and until no process was left.
"""

import os
import signal
import sys
import textwrap
import time

import numpy as np
import pytest
from deadline import wait_for
from mpi_jobs import (
    PRELUDE,
    ends_badly,
    ends_well,
    hear,
    hosts_or_skip,
    output_of,
    start,
    start_until_ready,
    until_nothing_is_left,
)

BEGIN = """
    n = synk.fork(2, use_gpu=False, timeout=3, heartbeat=2.5)
    X = np.random.RandomState(0).rand(13, 3).astype(theano.config.floatX)
    x = T.matrix("x")
    w = theano.shared(np.ones((300, 400), theano.config.floatX), "w")
    late = T.dot(T.dot(w * x.mean(), w.T), w)  # while it is computed, the nodes exchange what exists before
    f = synk.function([x], [synk.averaged(one) for one in (x.mean(), w * x.mean(), late)])
    f(X)
    f(X)
"""

#: Calls a function until an exception is raised, and prints the exception.
CALLS = """
    say("ready")
    try:
        while True:
            f(X)
    except synk.SynkhronosError as error:
        say(type(error).__name__, error)
"""

#: Time limits in seconds, on a busy computer: until the script gets the error, and until no process is left.
NOTIFIED, LEFT = 4, 6


def test_the_script_ends_by_itself_after_the_others():
    """Leaders finalize MPI before they exit; otherwise the launcher would end the script, which exits later."""
    out = output_of(PRELUDE.replace("sleep(0.3)", "sleep(1)"), BEGIN, timeout=100)
    assert out.startswith("says ")
    assert out.endswith(" parts\n")


def test_ranks_that_die_or_stop_are_reported_and_the_next_session_works(hosts):
    job = start(
        hosts,
        BEGIN,
        f"""
        for round in range(3):
            {textwrap.indent(textwrap.dedent(CALLS), 12 * " ").strip()}
            synk.close()
            n = synk.fork(2, use_gpu=False, timeout=3)
            say(f(X)[0] - X.mean())
        """,
    )
    for name, number, rank, error in (
        ("hostb", signal.SIGKILL, 3, "WorkerDied"),
        ("hosta", signal.SIGKILL, 1, "WorkerDied"),
        ("hostb", signal.SIGSTOP, 3, "WorkerTimeout"),
    ):
        assert hear(job)[1] == "ready"
        worker = hosts.leader(name).children()
        assert len(worker) == 1  # the heartbeat process is not a child of the leader
        pid = worker[0].pid
        since = time.monotonic()
        worker[0].send_signal(number)
        when, text = hear(job)
        assert text.startswith(error + " ")
        assert f"pid {pid}" in text
        assert ("SIGKILL" in text) == (error == "WorkerDied")
        assert f"rank {rank} " in text
        assert ("node 1 (hostb)" in text) == (name == "hostb")
        assert when - since < NOTIFIED + (3 if error == "WorkerTimeout" else 0)
        print(f"{number.name} to a worker on {name}: {text.split()[0]} after {when - since:.2f} s")
        assert abs(float(hear(job)[1])) < 1e-6
    ends_well(hosts, job)


def test_kills_at_random_instants(hosts):
    """Workers are killed one after the other and replaced, and then a leader; `make node-kills` repeats it."""
    n_rounds, n_workers = int(os.environ.get("SYNKHRONOS_KILL_ROUNDS", 1)), 4
    chance = np.random.RandomState(n_rounds)
    for _ in range(n_rounds):
        job = start_until_ready(
            hosts,
            BEGIN.replace("timeout=3", "timeout=30, restart_workers=True"),
            f"""
            expected = f(X)
            say("ready")
            for _ in range({n_workers}):
                for _ in range(3):
                    assert all((a == b).all() for a, b in zip(f(X), expected))
                say("works")
                try:
                    while True:
                        assert all((a == b).all() for a, b in zip(f(X), expected))
                except synk.WorkerRestarted as error:
                    say(*error.ranks)
            say("works")
            while True:
                f(X)
            """,
        )
        for _ in range(n_workers):
            assert hear(job)[1] == "works"
            name = ("hosta", "hostb")[chance.randint(2)]
            time.sleep(0.05 * chance.rand())
            hosts.leader(name).children()[0].kill()
            assert hear(job)[1] == {"hosta": "1", "hostb": "3"}[name]
        assert hear(job)[1] == "works"
        time.sleep(0.05 * chance.rand())
        since = time.monotonic()
        hosts.leader("hostb").kill()
        ends_badly(hosts, job, since, LEFT)  # mpiexec ends the other processes


@pytest.mark.parametrize(
    ("number", "victim"),
    [
        *((signal.SIGKILL, victim) for victim in ("master", "leader", "mpiexec")),
        *((signal.SIGTERM, victim) for victim in ("master", "mpiexec")),
    ],
)
def test_nothing_is_left_when_a_part_of_the_job_is_ended(hosts, number, victim):
    """Nothing is left after SIGKILL, and after a signal that the script does not handle."""
    job = start_until_ready(hosts, BEGIN, CALLS)
    since = time.monotonic()
    pid = job.pid if victim == "mpiexec" else hosts.leader({"master": "hosta", "leader": "hostb"}[victim]).pid
    os.kill(pid, number)
    out, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert victim != "leader" or "RUNNING AT hostb" in out
    assert number == signal.SIGKILL or "Error" not in out
    left = until_nothing_is_left(hosts, since, LEFT, of_mpi=True)
    print(f"{number.name} to {victim}: nothing is left after {left:.2f} s")


@pytest.mark.parametrize("how", ["cut", "drop"])
def test_a_node_that_cannot_be_reached_is_reported(hosts, how):
    job = start_until_ready(hosts, BEGIN, CALLS)
    since = time.monotonic()
    getattr(hosts, how)("hostb")
    try:
        when, text = hear(job)
        assert text.startswith("NodeLost nothing was heard from node 1 (hostb) for 2.5 seconds")
        assert when - since < NOTIFIED
        ranks = lambda: any(one.name() == "python" for name in hosts.names for one in hosts.processes(name))  # noqa: E731
        wait_for(lambda: not ranks(), lambda: f"the end of {hosts.left()}", LEFT)
        left = time.monotonic() - since
    finally:
        hosts.reconnect("hostb")
    ends_badly(hosts, job, time.monotonic(), limit=30)
    print(f"{how}: NodeLost after {when - since:.2f} s, no rank is left after {left:.2f} s")


def test_a_link_that_is_cut_between_two_other_nodes_is_detected():
    """Node 0 hears from both nodes; each of them reports that it hears nothing from the other."""
    with hosts_or_skip(3) as hosts:
        job = start_until_ready(hosts, BEGIN, CALLS)
        since = time.monotonic()
        for one, other in (("hostb", 3), ("hostc", 2)):
            nobody = ("lladdr", "02:00:00:00:00:99", "dev", "eth0")  # packets are lost without an error
            hosts.inside(one, "ip", "neigh", "replace", f"10.77.0.{other}", *nobody)
        when, text = hear(job)
        assert "heard nothing from node 2 (hostc) for 2.5 s" in text or "from node 1 (hostb) for 2.5 s" in text
        assert when - since < NOTIFIED
        left = ends_badly(hosts, job, since, LEFT)
        print(f"cut between two others: NodeLost after {when - since:.2f} s, nothing is left after {left:.2f} s")


@pytest.mark.parametrize(("number", "at"), [("SIGINT", "mpiexec"), ("SIGTERM", "mpiexec"), ("SIGINT", "master")])
def test_a_handler_of_the_script_runs_while_ranks_still_work(hosts, number, at):
    job = start_until_ready(
        hosts,
        BEGIN,
        """
        class Asked(Exception):
            pass

        def ask(number, frame):
            raise Asked

        signal.signal(signal.SIGTERM, ask)
        try:
            say("ready")
            while True:
                f(X)
        except (Asked, KeyboardInterrupt) as error:
            say(type(error).__name__, abs(f(X)[0] - X.mean()) < 1e-6)
        """,
    )
    since = time.monotonic()
    os.kill(job.pid if at == "mpiexec" else hosts.leader("hosta").pid, signal.Signals[number])
    when, text = hear(job)
    assert text == {"SIGINT": "KeyboardInterrupt", "SIGTERM": "Asked"}[number] + " True"
    _, err = job.communicate(timeout=60)
    assert at == "mpiexec" or job.returncode == 0, err
    left = until_nothing_is_left(hosts, since, LEFT)
    print(f"{number} to {at}: notified after {when - since:.2f} s, nothing is left after {left:.2f} s")


def test_a_leader_that_is_stopped_is_reported(hosts):
    job = start_until_ready(hosts, BEGIN, CALLS)
    shown = hosts.inside("hostb", sys.executable, "-m", "synkhronos", "top", "--once").splitlines()
    leader = hosts.leader("hostb").pid
    assert [str(leader), "2", "leader", str(leader)] in [
        line.split()[:4] for line in shown
    ]  # ranks of hosta are shown, too, because both hosts have the same kernel
    assert shown[-1] == "the same command on other nodes shows their ranks"
    since = time.monotonic()
    os.kill(leader, signal.SIGSTOP)
    when, text = hear(job)
    answers = "WorkerTimeout rank 2, which leads node 1 (hostb), did not answer within 3 seconds"
    exchanges = "WorkerTimeout the leader of node 1 (hostb) did not continue an exchange within 3 seconds"
    assert text.startswith((answers, exchanges))  # by what it did when it was stopped
    assert when - since < 4 + NOTIFIED  # the timeout, and 1 s for the leader's report
    left = ends_badly(hosts, job, since, limit=20)
    print(f"SIGSTOP to a leader: WorkerTimeout after {when - since:.2f} s, nothing is left after {left:.2f} s")


def test_a_node_without_free_memory_refuses_and_the_session_continues(hosts):
    """Without ``memfd_create``, memory lies in ``/dev/shm``, whose size is limited here."""
    hosts.inside("hostb", "mount", "-o", "remount,size=3m", "/dev/shm")
    try:
        job = start(
            hosts,
            """
            from seccomp import refuse
            refuse("memfd_create")
            """,
            BEGIN.replace("(300, 400)", "(3, 4)"),
            """
            small, large = synk.data(X), synk.data(np.tile(X, (100_000, 1)))
            for _ in range(3):
                try:
                    f(large)
                except synk.WorkerError as error:
                    say(error.rank, error)
                say(abs(f(small)[0] - X.mean()) < 1e-6)
            synk.data(np.ones(1))
            """,
        )
        for _ in range(3):
            text = hear(job)[1]
            assert text.startswith("2 rank 2 (node 1 (hostb): cpu) failed in Call")
            assert "MemoryError" in text
            assert hear(job)[1] == "True"
        ends_well(hosts, job)
    finally:
        hosts.inside("hostb", "mount", "-o", "remount,size=50%", "/dev/shm")
