"""Heartbeats: nodes that are silent for a while or lost, and heartbeat processes that are frozen or killed."""

import contextlib
import errno
import os
import resource
import select
import socket
import struct
import threading
import time

import psutil
import pytest
from backend import theano_only
from deadline import scaled, wait_for
from mpi_jobs import ends_badly, hear, hosts_or_skip, start, start_until_ready, until_nothing_is_left

import synkhronos as synk
from synkhronos._multinode.heartbeat import (
    NOBODY,
    WARNING_SECONDS,
    Endpoint,
    FailureDetector,
    Heartbeat,
    Loss,
    Message,
    Reason,
    peers,
)

pytestmark = theano_only("heartbeats, which do not depend on the backend")

OUTAGE_SECONDS = 3.0

BEGIN = """
    synk.fork(2, use_gpu=False, heartbeat={heartbeat})
    X = np.random.RandomState(0).rand(13, 3).astype(theano.config.floatX)
    x, w = T.matrix("x"), theano.shared(np.ones(2_000_000, "float32"), "w")
    f = synk.function([x], [synk.averaged(x.mean() + 0 * w[0])])
    f(X)
"""

#: Repeats an action until the test has created a file, then compares results.
PHASES = """
    for phase in {phases!r}:
        time.sleep(0.6)  # until the nodes have heard from each other
        say(phase)
        while not os.path.exists({folder!r} + "/" + phase):
            if "idle" in phase:
                time.sleep(0.01)
            elif "reduce" in phase:
                synk.all_reduce(w)
            else:
                f(X)
        assert abs(f(X)[0] - X.mean()) < 1e-5
        synk.all_reduce(w, op="sum")
        assert (w.get_value() == 4).all()
        w.set_value(np.ones(2_000_000, "float32"))
        synk.broadcast(w)
        say("right")
"""

CALLS = """
    say("ready")
    try:
        while True:
            f(X)
    except synk.NodeLost as error:
        say(error.machine, error)
"""


def python_processes(hosts, name):
    return [one for one in hosts.processes(name) if one.name() == "python"]


def pair(hosts, name):
    """Return the guardian and the heartbeat process of a host."""
    leader = hosts.leader(name)
    found = [one for one in python_processes(hosts, name) if one != leader and one.ppid() != leader.pid]
    (heartbeat,) = [one for one in found if one.ppid() in [other.pid for other in found]]
    (guardian,) = [one for one in found if one != heartbeat]
    return guardian, heartbeat


@contextlib.contextmanager
def frozen(processes):
    """Freeze processes, as a virtual machine or a batch system does."""
    for one in processes:
        one.suspend()
    try:
        yield
    finally:
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()


class Lines:
    """Lines that a job prints on stderr while it runs."""

    def __init__(self, job):
        self.found = []
        self._job = job
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        for line in self._job.stderr:
            self.found.append(line)
            print(line, end="")  # pytest shows it if the test fails

    def warnings(self):
        return [line for line in self.found if line.startswith("synkhronos: ")]

    def end(self):
        """Wait until the job ends, and return its exit code."""
        self._job.stdout.read()
        self._job.stdout.close()
        self._thread.join(60)
        self._job.stderr.close()
        return self._job.wait(60)


# ---------------------------------------------------------------- sessions that continue


def test_sessions_go_on_after_an_outage_of_three_seconds(hosts, tmp_path):
    """After processes were frozen or a link was cut, results are right, and one warning has named the silent node."""
    of_b = "nothing was heard from node 1 (hostb) for 2 seconds"
    of_a = "node 1 (hostb) has heard nothing from node 0 (hosta) for 2 seconds"

    @contextlib.contextmanager
    def cut():
        hosts.cut("hostb")
        try:
            yield
        finally:
            hosts.reconnect("hostb")

    outages = {
        "reduce, link down": (cut, of_b),
        "idle, link down": (cut, of_b),
        "call, link down": (cut, of_b),
        "reduce, other node frozen": (lambda: frozen(python_processes(hosts, "hostb")), of_b),
        "call, controller's node frozen": (lambda: frozen(python_processes(hosts, "hosta")), of_a),
        "call, heartbeat process frozen": (lambda: frozen([pair(hosts, "hosta")[1]]), of_a),
    }
    program = PHASES.format(phases=list(outages), folder=str(tmp_path))
    job = start(hosts, BEGIN.format(heartbeat=10), program)
    lines = Lines(job)
    for i, (phase, (outage, warning)) in enumerate(outages.items()):
        assert hear(job)[1] == phase
        with outage():
            end = time.monotonic() + OUTAGE_SECONDS
            wait_for(lambda: len(lines.warnings()) > i, "a warning")  # noqa: B023
            assert time.monotonic() < end
            time.sleep(max(0.0, end - time.monotonic()))
        (tmp_path / phase).touch()
        assert hear(job)[1] == "right"
        assert warning in lines.warnings()[-1]
    assert lines.end() == 0
    assert len(lines.warnings()) == len(outages), lines.found


def test_killed_heartbeat_processes_are_started_again(hosts, tmp_path):
    """The heartbeat process and its guardian restart each other; the leader restarts both if both were killed."""
    job = start(hosts, BEGIN.format(heartbeat=2.5), PHASES.format(phases=["call", "idle"], folder=str(tmp_path)))
    lines = Lines(job)
    for phase in ("call", "idle"):
        assert hear(job)[1] == phase
        for name in hosts.names if phase == "call" else ["hostb"]:  # an idle controller does not check its processes
            for victims in ([1], [0], [0, 1]):
                before = pair(hosts, name)
                for victim in victims:
                    before[victim].kill()

                def is_new():
                    with contextlib.suppress(ValueError, psutil.NoSuchProcess):
                        return before[victims[-1]] not in pair(hosts, name)  # noqa: B023

                wait_for(is_new, "a new heartbeat process")
        (tmp_path / phase).touch()
        assert hear(job)[1] == "right"
    assert lines.end() == 0
    assert lines.warnings() == []
    until_nothing_is_left(hosts, time.monotonic(), limit=10)


# ---------------------------------------------------------------- nodes that are lost


def test_a_closed_connection_is_detected_at_once(hosts, tmp_path):
    """The launcher is frozen, because it would end the job; the script therefore writes its report to a file."""
    reported = tmp_path / "reported"
    say = f"""
    def say(*what):
        if what != ("ready",):
            with open({str(reported)!r}, "w") as file:
                print(*what, file=file)
        else:
            print("says", time.monotonic(), *what, flush=True)
    """
    job = start_until_ready(hosts, say, BEGIN.format(heartbeat=60), CALLS)
    launchers = [one for one in hosts.processes("hosta") if one.name() != "python"]
    with frozen(launchers):
        since = time.monotonic()
        hosts.leader("hostb").kill()
        wait_for(lambda: reported.exists() and reported.read_text(), "the error")
        assert time.monotonic() - since < scaled(2)
    text = reported.read_text()
    assert text.startswith("1 node 1 (hostb) has closed its connection: its processes were killed")
    ends_badly(hosts, job, time.monotonic(), limit=10)


def test_a_controller_that_is_frozen_for_too_long_is_reported(hosts):
    """The other nodes report that node 0 is silent and end, which ends the job."""
    job = start_until_ready(hosts, BEGIN.format(heartbeat=2.5), CALLS)
    lines = Lines(job)
    with frozen(python_processes(hosts, "hosta")):
        since = time.monotonic()
        text = "nothing was heard from node 0 (hosta) for 2.5 seconds"
        wait_for(lambda: any(text in line and "node 1 (hostb) ends" in line for line in lines.found), "the last words")
        assert 2.0 < time.monotonic() - since < scaled(6)
    assert lines.end() != 0
    assert not any("from node 1" in line for line in lines.warnings())
    until_nothing_is_left(hosts, time.monotonic(), limit=10, of_mpi=True)


#: Waits, without a call, until the heartbeat process reports a lost node.
IDLE = """
    from deadline import wait_for
    from synkhronos._multinode import launch
    {before}
    say("ready")
    wait_for(launch._comm._heartbeat.loss, "the loss")
    try:
        synk.{call}()
    except synk.NodeLost as error:
        say(error)
"""


@pytest.mark.parametrize(("call", "before"), [("close", ""), ("fork", "synk.close()")])
def test_a_node_that_is_lost_between_calls_is_reported_by_fork_and_close(hosts, call, before):
    job = start_until_ready(hosts, BEGIN.format(heartbeat=2.5), IDLE.format(call=call, before=before))
    with frozen(python_processes(hosts, "hostb")):
        text = "nothing was heard from node 1 (hostb) for 2.5 seconds: it is down or frozen, or the link to it is cut"
        assert hear(job)[1] == f"{text}; start the program again"
    job.communicate(timeout=60)
    until_nothing_is_left(hosts, time.monotonic(), limit=10, of_mpi=True)


@pytest.mark.parametrize("silent", ["frozen hostb", "cut off hosta"])
def test_of_three_nodes_the_silent_one_is_reported_and_the_others_continue(silent, tmp_path):
    wait = f"""
    from deadline import wait_for
    wait_for(lambda: os.path.exists({str(tmp_path / "seen")!r}), "the test")
    say("end")
    """

    def goes_on():
        (tmp_path / "seen").touch()
        return hear(job)[1] == "end"

    with hosts_or_skip(3) as hosts:
        job = start_until_ready(hosts, BEGIN.format(heartbeat=2.5), CALLS, wait)
        lines = Lines(job)
        third = hosts.leader("hostc")
        if silent == "frozen hostb":
            with frozen(python_processes(hosts, "hostb")):
                assert hear(job)[1].startswith("1 nothing was heard from node 1 (hostb) for 2.5 seconds")
                assert third.is_running()
                assert third.status() != "zombie"
                assert goes_on()
        else:
            hosts.drop("hosta")
            try:
                assert hear(job)[1].startswith("0 node 0 (hosta) has heard from no other node for 2.5 seconds")
                assert goes_on()
            finally:
                hosts.reconnect("hosta")
        assert len([line for line in lines.warnings() if "for 2 seconds" in line]) == 1
        assert lines.end() != 0


# ---------------------------------------------------------------- without a session


def holders(fd):
    """Return the processes that hold the other end of a pipe."""
    pipe, found = os.readlink(f"/proc/self/fd/{fd}"), []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            numbers = os.listdir(f"/proc/{process.pid}/fd") if process.pid != os.getpid() else []
            if any(os.readlink(f"/proc/{process.pid}/fd/{number}") == pipe for number in numbers):
                found.append(process)
    return found


def test_a_heartbeat_process_is_started_again_twenty_times(capfd):
    heartbeat = Heartbeat(0)
    heartbeat.start(["here"], [heartbeat.door])
    try:
        killed, end = set(), time.monotonic() + 100
        while heartbeat._shared.n_starts < 20 or holders(heartbeat._alive.fileno()):
            assert time.monotonic() < end
            alive = set(holders(heartbeat._alive.fileno()))
            for one in alive - killed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if one.ppid() in [other.pid for other in alive]:
                        one.kill()
                        killed.add(one)
        assert len(killed) == heartbeat._shared.n_starts == 20
        heartbeat.look_after()
        assert heartbeat._shared.n_starts == 20
    finally:
        heartbeat.stop()
    err = capfd.readouterr().err
    assert err.startswith("synkhronos: the heartbeat process of node 0 (here) was killed 20 times, and is not started")


def test_processes_that_cannot_be_started_again_are_reported(monkeypatch, caplog):
    """The running command continues, and heartbeats start again once the kernel allows new processes."""
    heartbeat = Heartbeat(0)
    heartbeat.start(["here"], [heartbeat.door])

    def kill_all():  # one of them may start the other again meanwhile
        for process in holders(heartbeat._alive.fileno()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return closed.poll(0)

    try:
        wait_for(lambda: len(holders(heartbeat._alive.fileno())) == 2, "both processes")
        closed = select.poll()
        closed.register(heartbeat._alive.fileno(), 0)
        wait_for(kill_all, "the end of both processes")
        with monkeypatch.context() as patch:
            patch.setattr("synkhronos._multinode.heartbeat.start_detached", refuse)
            heartbeat.look_after()
        assert "node 0 (here) could not start its heartbeat processes again: [Errno 11]" in caplog.text
        assert not heartbeat._is_starting
        heartbeat.look_after()
        wait_for(lambda: len(holders(heartbeat._alive.fileno())) == 2, "two new processes")
    finally:
        heartbeat.stop()


def refuse(*arguments, **options):
    raise OSError(errno.EAGAIN, "no room for a process")


def test_messages_that_count_as_heartbeats():
    """A node that becomes silent is lost; a node that left is not. Messages without the token are ignored."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]  # so that descriptors are too large for `select`
    heartbeat = Heartbeat(0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.bind(("", 0))
        door = Endpoint(mine.getsockname()[1], bytes(16))
        heartbeat.start(["localhost"] * 5, [door] * 5)
        heartbeat.set_limit(WARNING_SECONDS + 0.5)

        def send(node, leaves=False, silent=NOBODY, is_lost=False):
            message = struct.pack("<16sH?H?Q", heartbeat.door.token, node, leaves, silent, is_lost, 0)
            mine.sendto(message, ("localhost", heartbeat.door.port))

        try:
            there = "localhost", heartbeat.door.port
            stranger = struct.pack("<16sH?H?Q", bytes(16), 4, False, NOBODY, False, 0)
            for datagram in (b"", b"abc", bytes(30), heartbeat.door.token, stranger, bytes(5000)):
                mine.sendto(datagram, there)
            send(1)
            send(1, leaves=True)
            send(1)
            send(9)
            send(2)
            assert mine.recv(100) == struct.pack("<16sH?H?Q", bytes(16), 0, False, NOBODY, False, 0)
            assert heartbeat.loss() is None
            wait_for(heartbeat.loss, "the loss")
            assert heartbeat.loss() == Loss(2, Reason.SILENT, 0)
        finally:
            heartbeat.stop()
            for file in files:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        mine.settimeout(5)
        while not mine.recv(100)[18]:
            pass


# ---------------------------------------------------------------- the failure detector of a node


def silence(own, n, heard=()):
    found = FailureDetector(own, memoryview(bytearray(n)))
    found.receive(map(Message, heard))
    return found


def wait(one, seconds, hears=()):
    for _ in range(int(seconds / 0.25)):
        one.advance(0.25)
        one.receive(map(Message, hears))


def test_time_in_which_the_process_did_not_run_is_not_counted():
    one = silence(0, 2, heard=[1])
    for _ in range(3):
        one.advance(3600.0)
    assert (one.warnings(), one.losses(2.5)) == ({}, {})
    wait(one, 2)
    assert one.warnings() == {1: 0}
    assert one.losses(2.5) == {1: Loss(1, Reason.SILENT, 0)}


def test_one_warning_for_each_silence():
    one = silence(0, 3, heard=[1, 2])
    for _ in range(2):
        wait(one, 2.25, hears=[2])
        assert [one.warnings(), one.warnings()] == [{1: 0}, {}]
        one.receive([Message(2, silent=1)])
        assert one.warnings() == {}
        one.receive([Message(1)])
        assert one.warnings() == {}
        one.receive([Message(2)])
        assert one.warnings() == {}


def test_only_the_first_of_the_nodes_that_hear_each_other_warns():
    first, second, third = (silence(own, 4, heard={0, 1, 2, 3} - {own}) for own in (0, 1, 2))
    for one in (first, second, third):
        wait(one, 2.25, hears={0, 1, 2} - {0 if one is first else 1 if one is second else 2})
    assert [one.warnings() for one in (first, second, third)] == [{3: 0}, {}, {}]
    second, third = (silence(own, 3, heard={0, 1, 2} - {own}) for own in (1, 2))
    wait(second, 2.25, hears=[2])
    wait(third, 2.25, hears=[1])
    assert [second.warnings(), third.warnings()] == [{0: 1}, {}]


@pytest.mark.parametrize("own", [0, 1])
def test_a_node_that_hears_neither_of_two_others_reports_itself(own):
    one = silence(own, 3, heard={0, 1, 2} - {own})
    wait(one, 1, hears=[2])
    wait(one, 1.75)
    assert one.warnings() == ({} if own else {0: 0})
    assert one.report(2.5) == Message(own)
    wait(one, 1)
    assert one.losses(2.5)[own] == Loss(own, Reason.CUT_OFF, own)
    assert 0 in one.losses(2.5)


def test_a_node_that_cannot_send_reports_itself():
    one = silence(0, 2, heard=[1])
    one.sent([], can_send=False)
    wait(one, 3)
    assert one.losses(2.5) == {0: Loss(0, Reason.CUT_OFF, 0)}
    one.sent([], can_send=True)
    assert one.losses(2.5) == {1: Loss(1, Reason.SILENT, 0)}


@pytest.mark.parametrize("n", [2, 16, 17, 40, 300])
def test_nodes_of_a_large_job_exchange_heartbeats_with_few_others(n):
    of = [set(peers(node, n)) for node in range(n)]
    assert all(node in of[other] for node in range(n) for other in of[node])
    assert of[0] == set(range(1, n))
    assert all(len(one) <= (n - 1 if n <= 16 else 5) for one in of[1:])


def test_a_lost_node_of_a_large_job_is_reported_once():
    n, lost = 40, 11
    nodes = [silence(own, n, heard=peers(own, n)) for own in range(n)]
    warnings = []
    for _ in range(12):
        sent = [one.report(2.5) for one in nodes]
        for own, one in enumerate(nodes):
            one.advance(0.25)
            one.receive([sent[node] for node in peers(own, n) if node != lost])
            warnings += [(own, *warning) for warning in one.warnings().items() if own != lost]
    assert warnings == [(0, lost, 0)]
    assert nodes[0].losses(2.5) == {lost: Loss(lost, Reason.SILENT, 0)}
    watching = [own for own, one in enumerate(nodes) if own != lost and lost in one.losses(2.5)]
    assert watching == [0, *sorted(set(peers(lost, n)) - {0})]


def test_a_refusal_is_a_loss_within_a_second_unless_the_node_has_left():
    one = silence(1, 4, heard=[0, 2])
    one.receive([Message(2, leaves=True)])
    one.sent([0, 2, 3], can_send=True)
    wait(one, 0.75)
    assert one.losses(10) == {0: Loss(0, Reason.ENDED, 1)}


def test_a_refusal_is_no_loss_while_the_node_is_heard():
    one = silence(0, 2, heard=[1])
    one.sent([1], can_send=True)
    wait(one, 1, hears=[1])
    wait(one, 1)
    assert one.losses(10) == {}


def test_node_0_counts_losses_that_others_report_also_its_own():
    one = silence(0, 3, heard=[1, 2])
    one.receive([Message(1, silent=2, is_lost=True), Message(2, silent=0, is_lost=True), Message(2, silent=77)])
    assert one.losses(10) == {2: Loss(2, Reason.SILENT, 1)}
    one.receive([Message(2, silent=0, is_lost=True)])
    assert one.losses(10)[0] == Loss(0, Reason.SILENT, 2)
    other = silence(1, 3, heard=[0, 2])
    other.receive([Message(2, silent=0, is_lost=True)])
    assert other.losses(10) == {}


def test_a_new_process_watches_the_same_nodes_and_counts_from_0():
    states = memoryview(bytearray(3))
    FailureDetector(0, states).receive([Message(1), Message(2), Message(2, leaves=True)])
    new = FailureDetector(0, states)
    wait(new, 2)
    assert new.losses(2.5) == {}
    wait(new, 1)
    assert list(new.losses(2.5)) == [1]


# ---------------------------------------------------------------- the option


@pytest.mark.parametrize("seconds", [2, 0, -1, float("inf"), float("nan"), True, None, "10"])
def test_invalid_seconds_are_refused(seconds):
    with pytest.raises(ValueError, match=r"heartbeat is .*; expected a finite number of seconds above 2, "):
        synk.fork(1, use_gpu=False, heartbeat=seconds)


def test_one_node_has_no_heartbeat():
    with synk.session(1, use_gpu=False, heartbeat=2.5) as n_ranks:
        assert n_ranks == 1
