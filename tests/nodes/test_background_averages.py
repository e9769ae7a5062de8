"""Averages between nodes in the background of a training loop: overlap, and faults while they are on their way.

Each process that mpiexec starts is a node in the first tests. The others have two hosts with two ranks each, and a slow
link, so that an exchange takes longer than the steps between: an average is on its way nearly all the time.
"""

import signal
import time

import pytest
from mpi_jobs import (
    HELPERS,
    ends_badly,
    ends_well,
    hear,
    needs_mpi,
    output_of,
    start_until_ready,
)

pytestmark = needs_mpi

#: A step adds 1 to each parameter; the rule conserves the sum of the parameters, which therefore count the steps.
LOOP = """
    import threading
    from synkhronos import rules
    from synkhronos._collectives.pipeline import Lead

    def fork(**options):
        return synk.fork(2, use_gpu=False, **options)

    def train(steps, batches=None, **options):
        options = {"rule": rules.Outer(every=12, delay=10, merge="delta"), **options}
        w.set_value(np.zeros(SIZE, "float32"))
        if batches is None:
            options["batch_size"] = 1
            return synk.loop(f, [np.ones(4000, "float32")], params=[w], steps=steps, **options)
        return synk.loop(f, batches, params=[w], steps=steps, batch_size=1, **options)

    def make():
        w, x = theano.shared(np.zeros(SIZE, "float32"), "w"), T.fvector("x")
        return w, synk.function([x], w[0] + x.sum() * 0, updates=[(w, w + 1)])

    def is_on_its_way():
        return bool(Lead.made) and not Lead.made[-1]._is_complete

    def when_on_its_way(act):
        def watch():
            while not is_on_its_way() or Lead.made[-1]._place is not None:
                time.sleep(1e-3)
            act()

        del Lead.made[:]
        threading.Thread(target=watch).start()

    def interrupt(number=signal.SIGINT):
        os.kill(os.getpid(), number)

    def init(self, *arguments, made=Lead.__init__):
        made(self, *arguments)
        Lead.made.append(self)

    Lead.made = []
    Lead.__init__ = init
"""

SLOW = LOOP.replace("SIZE", "1_000_000")

#: Time limits in seconds, on a busy computer: until the script gets an error, and until no process is left.
NOTIFIED, LEFT = 6, 8


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 1, 1, 1)], ids=str)
def test_averages_go_on_while_ranks_make_steps(ranks):
    """The batches of a leader wait until its node has all votes, and later until the exchange is over."""
    out = output_of(
        f"""
        import os, signal, sys, time
        import numpy as np
        sys.path.insert(0, {str(HELPERS)!r})
        from backend import T, theano
        """,
        LOOP.replace("SIZE", "300_000"),
        """
        import synkhronos as synk
        import synkhronos._session.lifecycle as lifecycle
        from deadline import wait_for

        sizes = [int(size) for size in os.environ["RANKS"].split()]
        own, find_devices = sizes[int(os.environ["PMI_RANK"])], lifecycle.find_free_devices
        lifecycle.find_free_devices = lambda n_parallel, *others: find_devices(own, *others)
        n = synk.fork(use_gpu=False, timeout=60)
        w, f = make()

        def batches(rank, n_ranks, epoch, rng):
            from synkhronos._collectives.pipeline import Lead
            for step in range(30):
                if Lead.made:
                    lead = Lead.made[-1]
                    votes, between, n_nodes = lead._comm._votes, lead._between, lead._comm.n_nodes
                    if step == 14:  # two steps after the parameters were sent
                        wait_for(lambda: lead._place is None or len(votes.of(lead._place)) == n_nodes, "votes")
                    elif step == 17:
                        wait_for(lambda: all(piece.is_complete for piece in between._under_way), "the exchange")
                        assert between._n_begun == 2  # pieces of 1.2 MB
                yield [np.ones(1, "float32")]

        run = train(30, batches)
        print(run.steps == [30] * n, run.staleness, run.params[0][0], [one[-1, 0] for one in run.outputs] == [29.0] * n)
        print(all(when[1] < one.computing[1] for one in Lead.made[:1] for when in one.times), len(Lead.made))
        synk.close()
        """,
        n=len(ranks),
        RANKS=" ".join(map(str, ranks)),
    )
    assert out.splitlines() == ["True [10, 6] 30.0 True", "True 2"]


def test_an_epoch_may_end_before_an_average(hosts):
    """At the end of an epoch nothing is on its way; what was sent after its last step is sent in the next one."""
    job = start_until_ready(
        hosts,
        SLOW,
        """
        n = fork(timeout=60)
        w, f = make()
        say("ready")
        seen = []

        def look(run):
            seen.append((len(Lead.made), is_on_its_way(), float(run.params[0][0])))

        for every in (5, 6):
            del Lead.made[:], seen[:]
            rule = rules.Outer(every=every, delay=3, merge="delta")
            w.set_value(np.zeros(1_000_000, "float32"))
            options = {"batch_size": 1, "epochs": 3, "rule": rule, "on_epoch": look}
            run = synk.loop(f, [np.ones(6 * n, "float32")], params=[w], **options)
            say(seen, run.staleness, run.params[0][0])
        synk.close()
        """,
    )
    assert hear(job)[1] == "[(1, False, 6.0), (2, False, 12.0), (3, False, 18.0)] [3, 3, 3] 18.0"
    assert hear(job)[1] == "[(0, False, 6.0), (1, False, 12.0), (2, False, 18.0)] [3, 3, 0] 18.0"
    ends_well(hosts, job)


@pytest.fixture
def slow(hosts):
    hosts.limit("80mbit")
    yield hosts
    hosts.limit(None)


def test_ctrl_c(slow):
    job = start_until_ready(
        slow,
        SLOW,
        """
        n = fork(timeout=60)
        w, f = make()
        say("ready")
        for _ in range(3):
            when_on_its_way(interrupt)
            run = train(10**6)
            values = synk.gather(w, nd_up=1)
            mean = np.mean(run.steps)
            say(run.interrupted, (values == values[0]).all(), bool(abs(values[0, 0] - mean) < 1e-3), is_on_its_way())
        run = train(24)
        say(run.interrupted, run.params[0][0])
        synk.close()
        """,
    )
    for _ in range(3):
        assert hear(job)[1] == "True True True True"  # the last ticket was left
    assert hear(job)[1] == "False 24.0"
    ends_well(slow, job)


def test_a_step_fails(slow):
    job = start_until_ready(
        slow,
        SLOW,
        """
        class Fails:
            def __init__(self, bad):
                self.bad = bad

            def __call__(self, rank, n_ranks, epoch, rng):
                for step in range(60):
                    if rank == self.bad and step == 16:
                        raise OSError("no more rows")
                    yield [np.ones(1, "float32")]
        n = fork(timeout=60)
        w, f = make()
        say("ready")
        for bad in range(n):
            try:
                train(60, Fails(bad))
            except synk.WorkerError as error:
                say(error.rank, "no more rows" in str(error))
        say(train(24).params[0][0])
        synk.close()
        """,
    )
    for rank in range(4):
        assert hear(job)[1] == f"{rank} True"
    assert hear(job)[1] == "24.0"
    ends_well(slow, job)


@pytest.mark.parametrize("restart", [False, True])
def test_a_worker_is_killed(slow, restart):
    job = start_until_ready(
        slow,
        SLOW,
        f"""
        n = fork(timeout=60, restart_workers={restart})
        w, f = make()
        say("ready")
        for _ in range(2):
            when_on_its_way(lambda: say("sends"))
            try:
                train(10**6)
            except synk.WorkerRestarted as error:
                say(type(error).__name__, *error.ranks)
            except synk.WorkerDied as error:
                say(type(error).__name__, error.rank)
                synk.close()
                n = fork(timeout=60)
                w, f = make()
        say(train(24).params[0][0])
        synk.close()
        """,
    )
    for name, rank in (("hosta", 1), ("hostb", 3)):
        assert hear(job)[1] == "sends"
        since = time.monotonic()
        slow.leader(name).children()[0].kill()
        when, text = hear(job)
        assert text == f"{'WorkerRestarted' if restart else 'WorkerDied'} {rank}"
        assert when - since < NOTIFIED
    assert hear(job)[1] == "24.0"
    ends_well(slow, job)


LARGE = LOOP.replace("SIZE", "1_600_000")

#: A loop that waits after its first epoch until the link is slow, and then calls ``act``.
BEGIN = """
    from pathlib import Path
    from deadline import wait_for

    n = fork(timeout=4)
    w, f = make()

    def train_slowly(rule, act=lambda run: None):
        def on_epoch(run):
            if run.epoch == 1:
                say("ready")
                wait_for(Path("PATH").exists, "the limit of the link")
                del Lead.made[:]
                act(run)

        options = {"params": [w], "batch_size": 1, "rule": rule, "on_epoch": on_epoch}
        return synk.loop(f, [np.ones(7 * n, "float32")], epochs=2, **options)
"""


def test_the_timeout_limits_a_piece_and_not_an_average(hosts, start_slow):
    """The average takes 8 s, and each of its pieces a part of that."""
    job = start_slow(
        "6mbit",
        LARGE,
        BEGIN,
        """
        run = train_slowly(rules.Outer(every=6, delay=1, merge="delta"))
        (lead,) = Lead.made
        say(run.staleness, run.params[0][0], len(lead.times), lead.times[-1][1] - lead.computing[1] > 6e9)
        synk.close()
        """,
    )
    assert hear(job)[1] == "[1, 1] 14.0 5 True"
    ends_well(hosts, job)


def test_the_timeout_limits_a_piece_of_a_first_broadcast_and_of_a_function(hosts, start_slow):
    """A loop begins with a broadcast, and a function has a constant: each takes 8 s."""
    job = start_slow(
        "6mbit",
        LARGE,
        BEGIN,
        """
        train_slowly(rules.LocalSGD(every=7))
        w.set_value(np.full(SIZE, 5, "float32"))
        began = time.monotonic()
        run = synk.loop(f, [np.ones(n, "float32")], params=[w], batch_size=1, epochs=1, rule=rules.LocalSGD(every=7))
        say(run.steps, run.params[0][[0, -1]], time.monotonic() - began > 7)
        x, constant = T.fvector("x"), T.constant(np.arange(SIZE, dtype="float32"))
        began = time.monotonic()
        g = synk.function([x], (constant[-x.shape[0]] + x.sum(), "sum"))  # not known when it is compiled
        synk.distribute()
        say(time.monotonic() - began > 7, float(g(np.zeros(n, "float32"))) / n)
        synk.close()
        """.replace("SIZE", "1_600_000"),
    )
    assert hear(job)[1] == "[1, 1, 1, 1] [6. 6.] True"
    assert hear(job)[1] == "True 1599999.0"
    ends_well(hosts, job)


def test_an_average_without_progress_is_reported(hosts, start_slow):
    job = start_slow(
        "6mbit",
        LARGE,
        BEGIN,
        """
        def act(run):
            when_on_its_way(lambda: say("on its way"))

        try:
            train_slowly(rules.Outer(every=6, delay=1, merge="delta"), act)
        except synk.WorkerTimeout as error:
            say(error)
        """,
    )
    assert hear(job)[1] == "on its way"
    since = time.monotonic()
    hosts.leader("hostb").send_signal(signal.SIGSTOP)
    when, text = hear(job)
    assert text.startswith("the leader of node 1 (hostb) did not continue an exchange within 4 seconds")
    assert when - since < NOTIFIED + 10
    ends_badly(hosts, job, since, limit=30)


def test_the_timeout_limits_a_part_of_a_state(hosts, start_slow):
    """The state of the ranks of a node takes 8 s, and a part of it a third of that."""
    job = start_slow(
        "12mbit",
        LARGE,
        BEGIN,
        """
        states, seconds = [], []

        def act(run):
            began = time.monotonic()
            states.append(run.state())
            seconds.append(time.monotonic() - began)

        train_slowly(rules.LocalSGD(every=9), act)
        say(seconds[0] > 6, [bool((states[0][f"{rank}/variables/0"] == 7).all()) for rank in range(n)])
        synk.close()
        """,
    )
    assert hear(job)[1] == "True [True, True, True, True]"
    ends_well(hosts, job)


def test_a_worker_hangs(slow):
    job = start_until_ready(
        slow,
        SLOW,
        """
        n = fork(timeout=3)
        w, f = make()
        when_on_its_way(lambda: say("ready"))
        try:
            train(10**6)
        except synk.WorkerTimeout as error:
            say("rank 3" in str(error))
        synk.close()
        """,
    )
    since = time.monotonic()
    slow.leader("hostb").children()[0].send_signal(signal.SIGSTOP)
    when, text = hear(job)
    assert text == "True"
    assert when - since < NOTIFIED + 3
    ends_well(slow, job)


def test_a_leader_is_killed(slow):
    job = start_until_ready(
        slow,
        SLOW,
        """
        n = fork(timeout=60)
        w, f = make()
        when_on_its_way(lambda: say("ready"))
        train(10**6)
        """,
    )
    since = time.monotonic()
    slow.leader("hostb").kill()
    ends_badly(slow, job, since, LEFT)


@pytest.mark.parametrize("how", ["cut", "drop"])
def test_a_node_that_cannot_be_reached_is_reported(slow, how):
    job = start_until_ready(
        slow,
        SLOW,
        """
        n = fork(timeout=60, heartbeat=2.5)
        w, f = make()
        when_on_its_way(lambda: say("ready"))
        try:
            train(10**6)
        except synk.NodeLost as error:
            say(error)
        """,
    )
    since = time.monotonic()
    getattr(slow, how)("hostb")
    try:
        when, text = hear(job)
        assert text.startswith("nothing was heard from node 1 (hostb) for 2.5 seconds")
        assert when - since < NOTIFIED
    finally:
        slow.reconnect("hostb")
    ends_badly(slow, job, time.monotonic(), limit=30)


def test_a_handler_closes_the_session(slow):
    job = start_until_ready(
        slow,
        SLOW,
        """
        n = fork(timeout=60)
        w, f = make()
        signal.signal(signal.SIGUSR1, lambda number, frame: synk.close())
        say("ready")
        for _ in range(2):
            when_on_its_way(lambda: interrupt(signal.SIGUSR1))
            try:
                train(10**6)
            except synk.SessionError:
                say("closed")
            n = fork(timeout=60)
            w, f = make()
            say(train(24).params[0][0])
        synk.close()
        """,
    )
    for _ in range(2):
        assert hear(job)[1] == "closed"
        assert hear(job)[1] == "24.0"
    ends_well(slow, job)
