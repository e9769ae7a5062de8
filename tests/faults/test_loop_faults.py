"""Faults in training loops: interrupts, steps and rules that fail, ranks that die or hang, locks of dead processes."""

import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
from backend import T, theano
from scripts import run_script

import synkhronos as synk
from synkhronos import rules
from synkhronos._memory import LOCK_BYTES, SharedLocks
from synkhronos._memory.segments import Segment

ENGINES = {
    "average": "rules.LocalSGD(every=7)",
    "delayed": 'rules.Outer(every=7, delay=3, merge="delta")',
    "centre": "rules.EASGD(every=3)",
    "gossip": "rules.GoSGD(probability=0.2)",
    "sum": "rules.ASGD(every=3, scale=1.0)",  # the centre counts all steps
}

#: A step that adds 1 to each parameter, so that the parameters count the steps.
COUNT = """
from synkhronos import rules
synk.fork({n}{options})
w, x = theano.shared(np.zeros(200_000), "w"), T.dvector("x")
f = synk.function([x], w[0] + x.sum(), updates=[(w, w + 1)])
rule = {rule}
def train(**options):
    return synk.loop(f, [np.zeros(1000)], params=[w], batch_size=1, rule=rule, **options)
train(steps=20)
w.set_value(np.zeros(200_000))
"""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seconds", [0.02, 0.3])
def test_ctrl_c_returns_what_was_done(engine, seconds):
    out, err = run_script(
        COUNT.format(n=3, options="", rule=ENGINES[engine])
        + f"""
threading.Timer({seconds}, os.killpg, (0, signal.SIGINT)).start()
began = time.monotonic()
run = train(steps=10_000_000)
print(run.interrupted, time.monotonic() - began < {seconds} + 10)
steps, values = run.steps, run.params[0]
print(min(steps) > 0 or {seconds < 0.1}, len(run.outputs[2]) == steps[2])
print(abs(values - values[0]).max() < 1e-6 or {engine == "centre"}, 0 <= values[0] <= sum(steps))
print(all((one == values).all() for one in synk.gather(w)))
if {engine in ("average", "delayed")}:
    print(abs(values[0] - np.mean(steps)) < 1e-6)
if {engine == "sum"}:
    print(values[0] == sum(steps))
again = train(steps=20)  # the session is usable, and the parameters go on from there
print(again.interrupted, again.params[0][0] > values[0])
synk.close()
""",
        start_new_session=True,
    )
    expected = ["True True", "True True", "True True", "True", "False True"]
    if engine not in ("centre", "gossip"):
        expected.insert(-1, "True")
    assert out.splitlines() == expected, err


def test_a_signal_handler_that_raises_another_exception_ends_the_loop():
    out, err = run_script(
        COUNT.format(n=2, options="", rule=ENGINES["average"])
        + """
class Enough(Exception):
    pass
def stop(number, frame):
    raise Enough("enough")
signal.signal(signal.SIGUSR1, stop)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
try:
    train(steps=10_000_000)
except Enough as error:
    print(error)
values = synk.gather(w)
print((values[0] == values[1]).all(), values[0][0] > 0)
print(train(steps=20).steps)
synk.close()
"""
    )
    assert out.splitlines() == ["enough", "True True", "[20, 20]"], err


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("restart", [False, True])
def test_a_worker_is_killed(engine, restart):
    options = ", restart_workers=True" if restart else ""
    out, err = run_script(
        COUNT.format(n=3, options=options, rule=ENGINES[engine])
        + """
victim = [one for one in psutil.Process().children() if one.pid in worker_pids()][-1]
threading.Timer(0.3, victim.kill).start()
began = time.monotonic()
try:
    train(steps=10_000_000)
except synk.SynkhronosError as error:
    print(type(error).__name__, "in Loop" in str(error), time.monotonic() - began < 30)
if {restart}:
    print(train(steps=20).steps == [20] * 3 or sum(train(steps=20).steps) == 60)
synk.close()
""".replace("{restart}", str(restart))
    )
    expected = ["WorkerRestarted True True", "True"] if restart else ["WorkerDied True True"]
    assert out.splitlines() == expected, err


@pytest.mark.parametrize("dies", ["Centre(every=1)", "Gossip(probability=1.0)"])
def test_a_worker_is_killed_with_a_part_of_the_centre_or_a_message(dies):
    """It holds a lock then, for which the controller waits."""
    out, err = run_script(
        COUNT.format(n=2, options=", restart_workers=True", rule=ENGINES["average"])
        + f"""
controller = os.getpid()
def die(x):
    if os.getpid() != controller and x[0] > 20:
        os.kill(os.getpid(), signal.SIGKILL)
class Centre(rules.EASGD):
    def meet(self, x, centre, state):
        die(x)
        return super().meet(x, centre, state)
class Gossip(rules.GoSGD):
    def merge(self, x, weight, other, other_weight):
        die(x)
        return super().merge(x, weight, other, other_weight)
before, rule = rule, {dies}
began = time.monotonic()
try:
    train(steps=10_000_000)
except synk.WorkerRestarted as error:
    print(error.ranks, time.monotonic() - began < 30)
rule = before
print(train(steps=20).steps)
synk.close()
"""
    )
    assert out.splitlines() == ["(1,) True", "[20, 20]"], err


def test_a_step_that_fails_on_one_rank(session):
    w, x = theano.shared(0.0, "w"), T.ivector("x")
    table = theano.shared(np.ones(3), "table")
    f = synk.function([x], w, updates=[(w, w + table[x[0]])])
    never = rules.LocalSGD(every=10**7)  # the others do not wait for the rank that fails: they look in each step
    for rule in (rules.LocalSGD(every=2), never, rules.EASGD(every=2), rules.GoSGD(probability=0.5)):

        def batches(rank, n_ranks, epoch, rng):
            for step in range(10**7):
                yield [np.array([5 if step == 31 and rank == n_ranks - 1 else 0], "int32")]

        with pytest.raises(synk.WorkerError, match=f"rank {session - 1} .*failed in Loop"):
            synk.loop(f, batches, params=[w], batch_size=1, steps=10**7, rule=rule)
        run = synk.loop(f, [np.zeros(8 * session, "int32")], params=[w], batch_size=1, epochs=1, rule=rule)
        assert sum(run.steps) == 8 * session


@pytest.mark.parametrize("seconds", [0.02, 0.3])
def test_ctrl_c_with_a_collective_in_every_step(seconds):
    out, err = run_script(
        f"""
synk.fork(3)
w, x = theano.shared(np.zeros(200_000), "w"), T.dvector("x")
f = synk.function([x], w[0] + x.sum(), updates=[(w, w + synk.averaged(x.sum() + 1))])
def train(**options):
    return synk.loop(f, [np.zeros(1000)], params=[w], batch_size=1, **options)
train(steps=20)
synk.broadcast(w, np.zeros(200_000))
threading.Timer({seconds}, os.killpg, (0, signal.SIGINT)).start()
run = train(steps=10_000_000)
values = run.params[0]
print(run.interrupted, (values == values[0]).all(), run.steps == [int(values[0])] * 3)
print(all((one == values).all() for one in synk.gather(w)), synk.check_replicas())
print(train(steps=20).params[0][0] == values[0] + 20)
synk.close()
""",
        start_new_session=True,
    )
    assert out.splitlines() == ["True True True", "True {}", "True"], err


#: A function that presses Ctrl-C once a second, as soon as the controller makes a step with an `Event`.
INTERRUPT_STEPS = """
def interrupt_steps(n_times):
    wait_for(lambda: events, "a step of the controller")
    for _ in range(n_times):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)
"""


#: Functions whose step waits for `hanging`, and their rules. With collectives, the controller waits in its own step.
HANGING_STEPS = {
    "alone": ("synk.function([x], hanging, updates=[(w, w + 1)], mode=mode)", "rules.LocalSGD(every=2)"),
    "collectives": ("synk.function([x], w, updates=[(w, w + synk.averaged(hanging))], mode=mode)", "None"),
}


@pytest.mark.parametrize(
    ("step", "options", "signals"),
    [("alone", "", 2), ("alone", ", timeout=1.5", 1), ("collectives", "", 2), ("collectives", ", timeout=2.5", 1)],
)
def test_ctrl_c_in_a_step_that_hangs(step, options, signals):
    """The timeout limits the wait for the step, and a second Ctrl-C ends it."""
    function, rule = HANGING_STEPS[step]
    out, err = run_script(
        INTERRUPT_STEPS
        + f"""
from synkhronos import rules
synk.fork(2{options})
w, x, fault, mode = theano.shared(0.0, "w"), T.dvector("x"), theano.shared(0, "fault"), "FAST_COMPILE"
hanging = Fault()(Event(0)(x), fault).sum()
f = {function}
synk.distribute()
synk.set_value(1, fault, LONG_SLEEP)
threading.Thread(target=interrupt_steps, args=({signals},)).start()
began = time.monotonic()
try:
    synk.loop(f, [np.zeros(100)], params=[w], batch_size=1, epochs=3, rule={rule})
except KeyboardInterrupt:
    print(time.monotonic() - began < 15)
try:
    f(np.zeros(2))
except synk.SessionError:
    print("broken")
"""
    )
    assert out.splitlines() == ["True", "broken"], err


class Fails(rules.Average):
    """A rule that fails on one rank only, where the parameters have a certain value."""

    def after(self, x, sent, received, age, state):
        if x[0] > 5:
            raise KeyError("no such state")
        return received.copy()


def test_errors_of_a_rule_name_it_and_the_step(session):
    w, x = theano.shared(np.zeros(2), "w"), T.vector("x", "float64")
    f = synk.function([x], x.sum(), updates=[(w, w + 1)])
    with pytest.raises(synk.WorkerError, match=r"in the rule Fails\(every=2, delay=0\) after step 6: .*no such state"):
        synk.loop(f, [np.ones(100)], params=[w], batch_size=1, steps=8, rule=Fails(every=2))
    assert synk.loop(f, [np.ones(100)], params=[w], batch_size=1, steps=2, rule=rules.LocalSGD(every=2)).steps


class Reads(rules.Average):
    def after(self, x, sent, received, age, state):
        raise FileNotFoundError(2, "no such file")


class TooShort(rules.Average):
    def after(self, x, sent, received, age, state):
        return received[1:]


class NoState(rules.Centre):
    def begin(self, x, n_members):
        raise KeyError("no state")

    def meet(self, x, centre, state):
        return x, centre


def test_what_a_rule_returns_or_raises_is_reported(session):
    w, x = theano.shared(np.zeros(3), "w"), T.vector("x", "float64")
    f = synk.function([x], x.sum(), updates=[(w, w + 1)])
    with pytest.raises(synk.WorkerError, match=r"rule TooShort.* after step 2: .*shape \(2,\); expected \(3,\)"):
        synk.loop(f, [np.ones(100)], params=[w], batch_size=1, steps=8, rule=TooShort(every=2))
    with pytest.raises(synk.WorkerError, match=r"FileNotFoundError in the rule Reads.* after step 2: .*no such file"):
        synk.loop(f, [np.ones(100)], params=[w], batch_size=1, steps=8, rule=Reads(every=2))
    with pytest.raises(synk.WorkerError, match=r"rule NoState.* after step 0: .*no state"):
        synk.loop(f, [np.ones(100)], params=[w], batch_size=1, steps=8, rule=NoState(every=2))
    seen = []
    data = [np.ones(2 * session)]
    with pytest.raises(synk.WorkerError, match="TooShort"):
        synk.loop(f, data, params=[w], batch_size=1, epochs=4, rule=TooShort(every=3), on_epoch=seen.append)
    with pytest.raises(synk.SessionError, match="has no result"):
        seen[0].params  # noqa: B018


def test_a_loop_that_cannot_begin(session):
    w, x, rate = theano.shared(np.zeros(3), "w"), T.vector("x", "float64"), T.scalar("rate", "float64")
    f = synk.function([x], x.sum(), bcast_inputs=[rate], updates=[(w, w + rate)])

    class Unpicklable(rules.Average):
        def __reduce__(self):
            raise ValueError("not to be pickled")

    arguments = {"params": [w], "batch_size": 1, "epochs": 1}
    with pytest.raises(ValueError, match="not to be pickled"):
        synk.loop(f, [np.ones(9)], rule=Unpicklable(every=2), schedule={"rate": 1.0}, **arguments)
    for nonsense in ("fast", "0.1", None, 1j):
        with pytest.raises(TypeError, match=r"schedule of rate got values of dtype .*; expected float64"):
            synk.loop(f, [np.ones(9)], rule=rules.EASGD(), schedule={"rate": nonsense}, **arguments)
    run = synk.loop(f, [np.ones(9)], rule=rules.EASGD(), schedule={"rate": 1.0}, **arguments)
    assert sum(run.steps) >= 9


def test_records_of_ranks_that_were_ahead_survive_an_interrupt():
    out, err = run_script(
        """
from synkhronos import rules
synk.fork(2)
w, x = theano.shared(0.0, "w"), T.dvector("x")
f = synk.function([x], w + x.sum(), updates=[(w, w + x.sum())])
def batches(rank, n_ranks, epoch, rng):
    for step in range(20):
        if rank and step == 4:
            time.sleep(1)  # until rank 0 waits at the end of its steps
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.5)
        yield [np.ones(1)]
run = synk.loop(f, batches, params=[w], batch_size=1, steps=20, rule=rules.LocalSGD(every=25))
print(run.interrupted, run.steps[0], 3 <= run.steps[1] < 20, run.params[0] == np.mean(run.steps))
synk.close()
"""
    )
    assert out.splitlines() == ["True 20 True True"], err


def test_errors_of_on_epoch_and_of_batches(session):
    w, x = theano.shared(np.zeros(2), "w"), T.vector("x", "float64")
    f = synk.function([x], x.sum(), updates=[(w, w + x.mean())])
    rule = rules.LocalSGD(every=50)

    def on_epoch(run):
        raise KeyError(run.epoch)

    def on_epoch_of_synkhronos(run):
        raise synk.SessionError("of the program")

    data = [np.ones(4)]
    with pytest.raises(synk.SessionError, match="of the program"):
        synk.loop(f, data, params=[w], batch_size=1, epochs=3, rule=rule, on_epoch=on_epoch_of_synkhronos)
    values = synk.gather(w, nd_up=1)
    assert (values == values[0]).all()
    synk.broadcast(w, np.zeros(2))
    with pytest.raises(KeyError, match="1"):
        synk.loop(f, [np.ones(4 * session)], params=[w], batch_size=1, epochs=3, rule=rule, on_epoch=on_epoch)
    for rank in range(session):
        np.testing.assert_array_equal(synk.get_value(rank, w), [4.0, 4.0])  # the loop has ended as it should

    for changed in ([1.0], np.ones(8 * session)):
        kept = synk.data(np.ones(4 * session))
        synk.broadcast(w, np.zeros(2))
        with pytest.raises(ValueError, match=rf"{len(changed)} rows; expected {4 * session} as before"):
            options = {"params": [w], "batch_size": 1, "epochs": 3, "rule": rule}
            synk.loop(f, [kept], on_epoch=lambda run, new=changed, kept=kept: kept.set_value(new), **options)
        assert all((synk.get_value(rank, w) == 4).all() for rank in range(session))

    def three(rank, n_ranks, epoch, rng):
        for _ in range(3):
            yield [np.ones(1)]

    with pytest.raises(synk.WorkerError, match="no more items"):
        synk.loop(f, three, params=[w], batch_size=1, steps=9, rule=rule)

    def fails(rank, n_ranks, epoch, rng):
        yield [np.ones(1)]
        raise OSError("the file is gone")

    with pytest.raises(synk.WorkerError, match="the file is gone"):
        synk.loop(f, fails, params=[w], batch_size=1, steps=9, rule=rule)
    assert synk.loop(f, [np.ones(4)], params=[w], batch_size=1, steps=2, rule=rule).steps == [2] * session


def test_errors_of_a_schedule_end_the_loop_with_equal_parameters(session):
    w, x, count = theano.shared(np.zeros(2), "w"), T.vector("x", "float64"), T.iscalar("count")
    f = synk.function([x], x.sum() + count, bcast_inputs=[count], updates=[(w, w + x.mean())])
    options = {"params": [w], "batch_size": 1, "epochs": 3, "rule": rules.LocalSGD(every=50)}

    def fails(step):
        if step >= 4:
            raise KeyError("no rate")
        return np.int64(step)

    for schedule, error in ((fails, KeyError), (lambda step: step if step < 4 else 0.5, TypeError)):
        synk.broadcast(w, np.zeros(2))
        with pytest.raises(error):
            synk.loop(f, [np.arange(4.0 * session)], schedule={"count": schedule}, **options)
        values = [synk.get_value(rank, w) for rank in range(session)]
        np.testing.assert_allclose(values, np.full((session, 2), (4 * session - 1) / 2 * 4), rtol=1e-12)


def test_the_timeout_limits_a_step_and_not_the_loop():
    out, err = run_script(
        """
from synkhronos import rules
synk.fork(2, timeout=1.5)
w, x = theano.shared(0.0, "w"), T.dvector("x")
f = synk.function([x], w, updates=[(w, w + x.sum())])
def slow(rank, n_ranks, epoch, rng):
    for step in range(12):
        time.sleep(0.25)
        yield [np.ones(1)]
print(synk.loop(f, slow, params=[w], batch_size=1, steps=12, rule=rules.LocalSGD(every=6)).steps)
def hangs(rank, n_ranks, epoch, rng):
    for step in range(12):
        if rank and step == 5:
            time.sleep(60)
        yield [np.ones(1)]
began = time.monotonic()
try:
    synk.loop(f, hangs, params=[w], batch_size=1, steps=12, rule=rules.LocalSGD(every=6))
except synk.WorkerTimeout as error:
    print("rank 1" in str(error), time.monotonic() - began < 20)
synk.close()
"""
    )
    assert out.splitlines() == ["[12, 12]", "True True"], err


@pytest.mark.parametrize("engine", ENGINES)
def test_the_timeout_limits_the_batches_of_the_controller(engine):
    """The thread that makes them cannot be ended; the session stays usable."""
    out, err = run_script(
        f"""
from synkhronos import rules
synk.fork(2, timeout=1.5)
w, x = theano.shared(0.0, "w"), T.dvector("x")
f = synk.function([x], w, updates=[(w, w + x.sum())])
def hangs_later(rank, n_ranks, epoch, rng):
    for step in range(12):
        if not rank and step == 5:
            time.sleep(60)
        yield [np.ones(1)]
def hangs_at_once(rank, n_ranks, epoch, rng):
    if not rank:
        time.sleep(60)
    return iter([[np.ones(1)]] * 12)
for batches in (hangs_later, hangs_at_once):
    began = time.monotonic()
    try:
        synk.loop(f, batches, params=[w], batch_size=1, steps=12, rule={ENGINES[engine]})
    except synk.WorkerError as error:
        print(error.rank, str(error).splitlines()[0][-70:], time.monotonic() - began < 20)
print(sum(synk.loop(f, [np.ones(12)], params=[w], batch_size=1, epochs=2, rule={ENGINES[engine]}).steps))
synk.close()
"""
    )
    text = "TimeoutError: batches(...) returned no item for step {} within 1.5 seconds"
    assert out.splitlines() == [f"0 {text.format(step)[-70:]} True" for step in (5, 0)] + ["24"], err


# -- locks


def take_and_die(memory, ready):
    with SharedLocks(memory).hold(1, lambda: None):
        ready.set()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_lock_of_a_dead_process_is_free():
    segment = Segment.create(2 * LOCK_BYTES)
    memory = segment.bytes[: 2 * LOCK_BYTES].reshape(2, LOCK_BYTES)
    locks = SharedLocks.create(memory)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=take_and_die, args=(memory, ready))
    process.start()
    assert ready.wait(30)
    process.join(30)
    for _ in range(2):  # the first one inherits the lock from the dead process
        with locks.hold(1, lambda: None):
            pass
    segment.close_fd()


def test_a_wait_for_a_lock_ends_if_the_check_raises():
    segment = Segment.create(LOCK_BYTES)
    locks = SharedLocks.create(segment.bytes[:LOCK_BYTES].reshape(1, LOCK_BYTES))
    held, leave = threading.Event(), threading.Event()

    def keep():
        with locks.hold(0, lambda: None):
            held.set()
            leave.wait(30)

    thread = threading.Thread(target=keep)
    thread.start()
    assert held.wait(30)
    looked = []

    def check():
        looked.append(1)
        if len(looked) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"), locks.hold(0, check):
        pass
    leave.set()
    thread.join()
    with locks.hold(0, check):
        pass
    segment.close_fd()
