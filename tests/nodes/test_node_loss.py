"""Losses on several nodes: the errors that the script gets, and when; nothing is left on any node.

Each test prints how long it took until the script was notified, and until nothing was left.
"""

import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from deadline import wait_for
from mpi_jobs import PRELUDE, ends_well, hear, start, until_nothing_is_left
from namespace_hosts import Hosts, reason_to_skip

from synkhronos._multinode.launch import sweep

pytestmark = pytest.mark.timeout(320)  # for programs that wait for each other on a machine that is busy

BEGIN = """
    n = synk.fork(2, use_gpu=False, timeout=3, heartbeat=2.5)
    X = np.random.RandomState(0).rand(13, 3).astype(theano.config.floatX)
    x = T.matrix("x")
    f = synk.function([x], [synk.averaged(x.mean())])
    f(X)
"""

#: Calls until an exception, and prints it.
CALLS = """
    say("ready")
    try:
        while True:
            f(X)
    except synk.SynkhronosError as error:
        say(type(error).__name__, error)
"""

#: The most seconds that a test allows on a busy machine: until the script is notified, and until nothing is left.
NOTIFIED, LEFT = 4, 6


def test_the_script_ends_by_itself_after_the_others():
    """The launcher ends all processes of a machine when one goes without leave."""
    source = "".join(map(textwrap.dedent, [PRELUDE, BEGIN])).replace("sleep(0.3)", "sleep(1)")
    job = subprocess.run(
        [Path(sys.executable).with_name("mpiexec"), "-n", "2", sys.executable, "-c", source],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (job.returncode, job.stdout[:4], job.stdout[-6:]) == (0, "says", "parts\n"), job.stdout + job.stderr


def test_ranks_that_die_or_stand_still_are_named_and_the_next_session_works(hosts):
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
        assert len(worker) == 1  # the heartbeat is no child of its leader
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


@pytest.mark.parametrize("victim", ["master", "leader", "mpiexec"])
def test_nothing_is_left_when_a_part_of_the_job_is_killed(hosts, victim):
    job = start(hosts, BEGIN, CALLS)
    assert hear(job)[1] == "ready"
    since = time.monotonic()
    if victim == "mpiexec":
        job.kill()
    else:
        hosts.leader({"master": "hosta", "leader": "hostb"}[victim]).kill()
    out, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert victim != "leader" or "RUNNING AT hostb" in out
    print(f"SIGKILL to {victim}: nothing is left after {until_nothing_is_left(hosts, since, LEFT, of_mpi=True):.2f} s")


@pytest.mark.parametrize("how", ["cut", "drop"])
def test_a_machine_that_is_out_of_reach_is_named(hosts, how):
    job = start(hosts, BEGIN, CALLS)
    assert hear(job)[1] == "ready"
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
    job.communicate(timeout=60)
    assert job.returncode != 0
    until_nothing_is_left(hosts, time.monotonic(), limit=30, of_mpi=True)
    print(f"{how}: NodeLost after {when - since:.2f} s, no rank is left after {left:.2f} s")


def test_a_line_that_is_cut_between_two_others_is_noticed():
    """The first machine hears both; each of them reports that it misses the other one."""
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(3) as hosts:
        job = start(hosts, BEGIN, CALLS)
        assert hear(job)[1] == "ready"
        since = time.monotonic()
        for one, other in (("hostb", 3), ("hostc", 2)):
            nobody = ("lladdr", "02:00:00:00:00:99", "dev", "eth0")  # so nothing is refused, and nothing arrives
            hosts.inside(one, "ip", "neigh", "replace", f"10.77.0.{other}", *nobody)
        when, text = hear(job)
        assert "heard nothing from node 2 (hostc) for 2.5 s" in text or "from node 1 (hostb) for 2.5 s" in text
        assert when - since < NOTIFIED
        job.communicate(timeout=60)
        assert job.returncode != 0
        left = until_nothing_is_left(hosts, since, limit=LEFT, of_mpi=True)
        print(f"cut between two others: NodeLost after {when - since:.2f} s, nothing is left after {left:.2f} s")


@pytest.mark.parametrize(("number", "at"), [("SIGINT", "mpiexec"), ("SIGTERM", "mpiexec"), ("SIGINT", "master")])
def test_a_handler_of_the_script_runs_and_the_ranks_are_there(hosts, number, at):
    job = start(
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
    assert hear(job)[1] == "ready"
    since = time.monotonic()
    os.kill(job.pid if at == "mpiexec" else hosts.leader("hosta").pid, signal.Signals[number])
    when, text = hear(job)
    assert text == {"SIGINT": "KeyboardInterrupt", "SIGTERM": "Asked"}[number] + " True"
    _, err = job.communicate(timeout=60)
    assert at == "mpiexec" or job.returncode == 0, err
    left = until_nothing_is_left(hosts, since, LEFT)
    print(f"{number} to {at}: notified after {when - since:.2f} s, nothing is left after {left:.2f} s")


@pytest.mark.parametrize("at", ["mpiexec", "master"])
def test_sigterm_without_a_handler_ends_all(hosts, at):
    job = start(hosts, BEGIN, CALLS)
    assert hear(job)[1] == "ready"
    since = time.monotonic()
    os.kill(job.pid if at == "mpiexec" else hosts.leader("hosta").pid, signal.SIGTERM)
    out, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "Error" not in out
    left = until_nothing_is_left(hosts, since, LEFT, of_mpi=True)
    print(f"SIGTERM to {at}, no handler: nothing is left after {left:.2f} s")


def test_a_leader_that_stands_still_is_named(hosts):
    job = start(hosts, BEGIN, CALLS)
    assert hear(job)[1] == "ready"
    shown = hosts.inside("hostb", sys.executable, "-m", "synkhronos", "top", "--once").splitlines()
    leader = hosts.leader("hostb").pid
    assert [str(leader), "2", "leader", str(leader)] in [
        line.split()[:4] for line in shown
    ]  # those of hosta are shown, too: one kernel
    assert shown[-1] == "the same command on other nodes shows their ranks"
    since = time.monotonic()
    os.kill(leader, signal.SIGSTOP)
    when, text = hear(job)
    assert text.startswith("WorkerTimeout rank 2, which leads node 1 (hostb), did not answer within 3 seconds")
    assert when - since < 9 + NOTIFIED  # the time-out, a second for who is named, and five in which it may still come
    job.communicate(timeout=60)
    assert job.returncode != 0
    left = until_nothing_is_left(hosts, since, limit=20, of_mpi=True)
    print(f"SIGSTOP to a leader: WorkerTimeout after {when - since:.2f} s, nothing is left after {left:.2f} s")


def test_a_machine_without_room_refuses_and_the_session_goes_on(hosts):
    """Where memory lies in ``/dev/shm``, because the kernel offers no other, which has a size."""
    hosts.inside("hostb", "mount", "-o", "remount,size=3m", "/dev/shm")
    try:
        job = start(
            hosts,
            """
            from seccomp import refuse
            refuse("memfd_create")
            """,
            BEGIN,
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


def test_what_mpi_has_left_is_removed_if_nobody_holds_it(tmp_path):
    names = ["mpich_shm_1a_0", "sm_segment.host.0.1", "mpich_shm_3c_0", "mpich_shm_4d_0", "another"]
    files = [tmp_path / name for name in names]
    for file in files:
        file.write_bytes(bytes(4096))
    with files[2].open("r+b") as mapped, files[3].open("r+b"):
        held = mmap.mmap(mapped.fileno(), 0)
        sweep(tmp_path)
    held.close()
    assert sorted(tmp_path.iterdir()) == sorted(files[2:])
    sweep(tmp_path / "nothing")
