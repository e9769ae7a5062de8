"""Ctrl-C at any moment: `KeyboardInterrupt` is raised within a second, and the session works or reports an error."""

import os
import pty
import time

import pytest
from fault_ops import LONG_SLEEP, SLEEP
from process_state import wait_for_a_call
from scripts import run_script, start_script

# ---------------------------------------------------------------- Ctrl-C

INTERRUPTED = """
synk.fork(3)
x, fault = T.dvector("x"), theano.shared(np.int64(NOTHING), "fault")
f = synk.function([x], {output})
assert f(np.ones(6)) == 6
synk.set_value({rank}, fault, {kind})
def interrupt():
    for _ in range({times}):
        sent.append(time.monotonic())
        os.killpg(0, signal.SIGINT)
        time.sleep(0.05)
sent = []
pressing = threading.Timer(0.3, interrupt)
pressing.start()
try:
    f(np.ones(6))
    pressing.join()
except KeyboardInterrupt:
    waited = time.monotonic() - sent[0]
    with contextlib.suppress(KeyboardInterrupt):
        pressing.join()
    print("interrupted", waited < 1.0)
try:
    synk.broadcast(fault, NOTHING)
    print("usable", f(np.ones(6)))
except synk.SessionError as error:
    print("broken", "close()" in str(error))
    synk.close()
    synk.fork(2)
    synk.broadcast(fault, NOTHING)
    print("again", f(np.ones(6)))
pids = worker_pids()
synk.close()
print(any(map(is_running, pids)))
"""


PLAIN, COLLECTIVE = "(Fault()(x, fault).sum(), 'sum')", "(synk.summed(Fault()(x, fault).sum()), None)"


@pytest.mark.parametrize(
    ("output", "rank", "kind", "times", "states"),
    [
        (PLAIN, 1, SLEEP, 1, ["usable 6.0", "broken True"]),
        (PLAIN, 1, LONG_SLEEP, 1, ["broken True"]),
        (PLAIN, 1, LONG_SLEEP, 2, ["broken True"]),
        (PLAIN, 0, SLEEP, 1, ["usable 6.0"]),
        (COLLECTIVE, 1, SLEEP, 1, ["usable 6.0", "broken True"]),
        (COLLECTIVE, 1, LONG_SLEEP, 1, ["broken True"]),
    ],
)
def test_the_user_interrupts_a_call(output, rank, kind, times, states):
    """Ctrl-C interrupts a call while ranks compute, and while they wait in a collective of the function."""
    source = INTERRUPTED.format(output=output, rank=rank, kind=kind, times=times)
    out, err = run_script(source, start_new_session=True)
    lines = out.splitlines()
    assert lines[0] == "interrupted True"
    assert lines[1] in states
    if lines[1] == "broken True":
        assert lines[2] == "again 6.0"
    assert lines[-1] == "False"
    assert "Traceback" not in err and "replicas" not in err  # the function has no updates
    assert ("interrupted; the session is usable\n" in err) == (lines[1] == "usable 6.0")


def test_the_user_interrupts_a_distribution():
    out, err = run_script(
        """
        synk.fork(3)
        x, w, v = T.dvector("x"), theano.shared(np.ones(1), "w"), theano.shared(np.ones(1), "v")
        f = synk.function([x], ((Slow(os.getpid())(x) * w.sum()).sum(), "sum"))
        pressing = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        pressing.start()
        try:
            synk.distribute()
            pressing.join()
        except KeyboardInterrupt:
            print("interrupted")
        g = synk.function([x], ((x * w.sum() * v.sum()).sum(), "sum"))
        try:
            synk.broadcast(w)
        except synk.SessionError:
            synk.close()
            synk.fork(3)
        synk.broadcast([v, w])
        print(g(np.ones(6)), f(np.ones(6)))
        synk.broadcast(w, np.full(1, 2.0))
        print(g(np.ones(6)), f(np.ones(6)), synk.gather(w).tolist())
        """
    )
    assert out.splitlines() == ["interrupted", "6.0 6.0", "12.0 12.0 [[2.0], [2.0], [2.0]]"]
    assert "Traceback" not in err


def test_after_interrupts_at_any_moment_results_are_right_or_an_error_is_raised():
    out, err = run_script(
        """
        x = T.dvector("x")
        synk.fork(3)
        f = synk.function([x], [(x, "gather"), (x.sum(), "sum")])
        w = theano.shared(np.zeros(100_000), "w")
        g = synk.function([], updates=[(w, w + 1)])
        d = synk.data(np.arange(9.0))
        g()
        stop = []
        def interrupt():
            rng = np.random.RandomState(0)
            while not stop:
                time.sleep(0.02 + 0.03 * rng.rand())
                if armed:
                    armed.clear()
                    os.kill(os.getpid(), signal.SIGINT)
        armed = []
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        interrupted = broken = 0
        i = 0
        while interrupted < 40:
            try:
                armed.append(1)
                while True:
                    i += 1
                    values, total = f(np.arange(9.0) + i)
                    assert values.tolist() == (np.arange(9.0) + i).tolist(), values
                    assert f(d, batch=[0, i % 9, 8])[1] == 8 + i % 9
                    synk.broadcast(w, np.full(100_000, 1.0))
                    synk.all_reduce(w, op="sum")
                    assert (synk.gather(w) == 3).all()
            except KeyboardInterrupt:
                interrupted += 1
            except synk.SessionError:
                broken += 1
                armed.clear()
                synk.close()
                synk.fork(3)
        stop.append(1)
        armed.clear()
        thread.join()
        print(interrupted, broken < 20)
        """,
        timeout=100,
    )
    assert out == "40 True\n"
    assert "Traceback" not in err


# ---------------------------------------------------------------- Ctrl-C at a terminal

AT_A_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C there interrupts this process and its workers
main = os.getpid()
x, fault, big = T.dvector("x"), theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.ones(4_000_000), "big")
def prepare():
    synk.fork(3, restart_workers={restart})
    f = synk.function([x], (Fault()(x, fault).sum() + 0 * big[0], "sum"), mode="FAST_COMPILE")
    synk.distribute()
    return f
{setting}
seen = []
def be_interrupted():
    print("ready", flush=True)
    {call}
    wait_for(lambda: False, "an interrupt", 5)
def wait():
    sys.stdin.readline()  # the test types this line after the last Ctrl-C
    seen.append(os.getpid())
todo = [wait, be_interrupted]
while not seen:
    try:  # the user presses repeatedly, and Python handles signals within an except clause, too
        try:
            todo.pop()() if todo else wait()
        except KeyboardInterrupt:
            pass
    except KeyboardInterrupt:
        pass
print("interrupted", time.monotonic(), *seen, flush=True)
try:
    synk.distribute()
    state = "usable"
except synk.SessionError as error:
    state = "broken" if "close()" in str(error) else "none"
print(state, flush=True)
if state != "none":
    if state == "usable":
        synk.broadcast(fault, NOTHING)
        assert f(np.ones(6)) == 6
        synk.all_reduce(big, op="max")
    synk.close()
print(len(worker_pids()), len(shared_memory_names()), flush=True)
synk.fork(2)
synk.close()
"""


def type_ctrl_c(setting, call, times=1, delay=None, restart=False):
    """Run a call at a terminal, type Ctrl-C after a delay or once ranks compute, and return the session's state then.

    Asserts that only the controller raises `KeyboardInterrupt`, within a second, that workers print nothing, and that
    no process or shared memory is left.
    """
    master, slave = pty.openpty()
    source = AT_A_TERMINAL.format(setting=setting, call=call, restart=restart)
    process = start_script(source, stdin=slave, start_new_session=True)
    try:
        assert process.stdout.readline() == "ready\n", process.communicate()
        if delay is None:
            wait_for_a_call(process.pid)
        else:
            time.sleep(delay)
        pressed = time.monotonic()
        for _ in range(times):
            os.write(master, b"\x03")
            time.sleep(0.03)
        os.write(master, b"no more\n" * 3)  # an interrupt that comes late may drop a line
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        os.close(master)
        os.close(slave)
    lines = out.splitlines()
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    word, when, *pids = lines[0].split()
    assert (word, pids) == ("interrupted", [str(process.pid)])
    assert float(when) - 0.05 * times - pressed < 1.0 + 0.15
    assert lines[2:] == ["0 0"]
    return lines[1]


SLEEPING = "f = prepare(); synk.set_value(1, fault, LONG_SLEEP)"


@pytest.mark.parametrize("times", [1, 6])
def test_ctrl_c_while_a_worker_computes(times):
    assert type_ctrl_c(SLEEPING, "f(np.ones(6))", times) == "broken"


def test_ctrl_c_while_all_wait_for_a_worker_in_a_collective():
    setting = "f = prepare(); os.kill(worker_pids()[0], signal.SIGSTOP)"
    assert type_ctrl_c(setting, "synk.all_reduce(big)", 2, delay=0.3) == "broken"


def test_ctrl_c_between_collectives():
    call = "\n    while True: synk.all_reduce(big, op='max'); synk.data(np.ones(100_000))"
    assert type_ctrl_c("f = prepare()", call, delay=0.4) == "usable"


def test_ctrl_c_while_a_worker_is_replaced():
    setting = SLEEPING + "; synk.set_value(2, fault, KILL)"
    assert type_ctrl_c(setting, "f(np.ones(6))", delay=0.6, restart=True) == "broken"


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_ctrl_c_during_fork(delay):
    call = "\n    while True: synk.fork(6); synk.close()"
    setting = "f = prepare(); synk.close()"
    assert type_ctrl_c(setting, call, 2, delay) in ("none", "usable")


def test_interrupted_finalizers_free_all_memory():
    """Data, functions and variables are freed on all ranks, although a signal handler raises at any moment."""
    out, _ = run_script(
        """
        import gc
        from process_state import shared_bytes
        class Interrupt(Exception):
            pass
        def interrupt(number, frame):
            raise Interrupt
        signal.signal(signal.SIGALRM, interrupt)
        synk.fork(2)
        x, w = T.dvector("x"), theano.shared(np.ones(3), "w")
        graph = (x * w[0]).sum()
        f = synk.function([x], (graph, "sum"), mode="FAST_COMPILE")
        f(np.ones(4))
        def held():
            gc.collect()
            f(np.ones(4)); f(np.ones(4))
            session = current("here")
            tables = len(session.replica.functions), len(session.replica.variables.items())
            return tables, [shared_bytes(pid) >> 20 for pid in (os.getpid(), *worker_pids())]
        from synkhronos._session.lifecycle import current
        before = held()
        rng, n_interrupts = np.random.RandomState(0), 0
        while n_interrupts < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 4e-3))
                for _ in range(10):  # Python drops an exception that is raised in another object's finalizer
                    data = synk.data(np.ones(1 << 17))  # 1 MiB
                    f(data)
                    data = None
                    variable = theano.shared(np.ones(5))
                    synk.broadcast(variable)
                    variable = None
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:  # at any of these lines, the last one included
                n_interrupts += 1
            data = variable = None
        for _ in range(20):
            g = synk.function([x], (graph, "sum"), mode="FAST_COMPILE")
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-3, 3e-2))
                g(np.ones(4))
                g = None
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                n_interrupts += 1
            g = None
        print(before == held() or (before, held()))
        """
    )
    assert out == "True\n"
