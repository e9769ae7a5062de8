"""Faults beyond those of `test_failures`: what happens to one process, to the machine, or at the terminal.

Everything is the real thing: real signals, real limits of the kernel, a ``/dev/shm`` that really is too small.
"""

import os
import pty
import resource
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from backend import T, theano
from fault_op import KILL, LONG_SLEEP, NOTHING, RAISE, Fault
from process_state import is_running, shared_memory_names, wait_until, worker_pids
from scripts import run_script, start_script
from seccomp import may_refuse

import synkhronos as synk
from synkhronos._collectives import SharedMemoryTransport

_built = {}


def build():
    """A function that fails when told to, one of nothing, and the variables that they use."""
    if not _built:
        x = T.dvector("x")
        fault, big = theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.ones(1), "big")
        _built["fault"], _built["big"] = fault, big
        _built["f"] = synk.function([x], (Fault()(x, fault).sum() + 0 * big.sum(), "sum"), name="counting")
    synk.distribute()
    synk.broadcast([_built["fault"], _built["big"]], [NOTHING, np.ones(1)])
    assert _built["f"](np.ones(9)) == 9
    return _built["f"], _built["fault"], _built["big"]


@pytest.fixture
def three(synchronize):
    """A session of three ranks, the function, and its variables."""
    synchronize(3)
    return build()


@pytest.fixture
def fresh(no_session):
    """The same, in a session that the test may break."""
    synk.fork(3)
    return build()


def later(seconds, action, *arguments):
    """Do something after a while, and note when that was."""
    happened = []

    def act():
        happened.append(time.monotonic())
        action(*arguments)

    threading.Timer(seconds, act).start()
    return happened


def assert_broken(pids):
    """Each call says that the session is broken; `close` returns at once, and nothing is left."""
    function, fault, big = _built["f"], _built["fault"], _built["big"]
    for call in (
        lambda: function(np.ones(6)),
        lambda: synk.broadcast(fault),
        lambda: synk.all_reduce(big),
        lambda: synk.scatter(big, np.ones(5)),
        lambda: synk.get_value(1, fault),
        synk.distribute,
    ):
        with pytest.raises(synk.SessionError, match=r"broken.*close\(\)"):
            call()
    began = time.monotonic()
    synk.close()
    assert time.monotonic() - began < 10
    assert not any(map(is_running, pids))
    assert not shared_memory_names()


# ---------------------------------------------------------------- exceptions on a rank


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_raises_in_the_midst_of_a_collective(no_session, monkeypatch, rank):
    """The other ranks wait for it at the next barrier, and are released."""
    all_reduce = SharedMemoryTransport.all_reduce

    def fail(self, arrays, op, *others):
        if arrays[0][0] == rank and op == "prod":
            raise FloatingPointError("overflow")
        return all_reduce(self, arrays, op, *others)

    monkeypatch.setattr(SharedMemoryTransport, "all_reduce", fail)  # the workers inherit it
    synk.fork(5)
    function, _, big = build()
    for _ in range(3):
        for each in range(5):
            synk.set_value(each, big, np.full(600_000, float(each)))
        began = time.monotonic()
        with pytest.raises(
            synk.WorkerError, match=rf"rank {rank} \(cpu\) failed in AllReduce.*FloatingPoint"
        ) as caught:
            synk.all_reduce(big, op="prod")
        assert time.monotonic() - began < 1
        assert caught.value.rank == rank
        assert "Traceback (most recent call last)" in caught.value.traceback_text
        assert "broadcast" in str(caught.value)
        synk.broadcast(big, np.ones(600_000))
        synk.all_reduce(big, op="sum")
        assert (synk.gather(big) == 5).all()
        assert function(np.ones(6)) == 6


def test_a_rank_that_cannot_map_data(three):
    """It has no descriptor left to open them by; when it has again, they are there."""
    function, _, _ = three
    pid = worker_pids()[0]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    data = [synk.data(np.full(6, float(i))) for i in range(3)]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(synk.WorkerError, match=r"rank 1 \(cpu\).*Too many open files"):
            function(data[1])
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    for i, each in enumerate(data):
        assert function(each) == 6 * i


# ---------------------------------------------------------------- death


def test_a_worker_dies_while_another_waits_for_a_stopped_one(fresh):
    pids = worker_pids()
    os.kill(pids[1], signal.SIGSTOP)
    killed = later(0.3, os.kill, pids[0], signal.SIGKILL)
    with pytest.raises(synk.WorkerDied, match=rf"rank 1 .*pid {pids[0]}.*SIGKILL"):
        synk.all_reduce(_built["big"])
    assert time.monotonic() - killed[0] < 1
    assert_broken(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_a_worker_dies_between_the_blocks_of_a_large_array(fresh, number):
    big = _built["big"]
    big.set_value(np.ones(30_000_000))
    synk.broadcast(big)
    pids = worker_pids()
    killed = later(0.01, os.kill, pids[1], number)
    with pytest.raises(synk.WorkerDied, match=rf"rank 2 .*pid {pids[1]}.*{signal.Signals(number).name}"):
        while True:
            synk.all_reduce(big, op="max")
    assert time.monotonic() - killed[0] < 1
    big.set_value(np.ones(1))
    assert_broken(pids)


def test_two_workers_die_at_once(fresh):
    pids = worker_pids()
    synk.broadcast(_built["fault"], LONG_SLEEP)
    synk.set_value(0, _built["fault"], NOTHING)
    killed = later(0.2, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    with pytest.raises(synk.WorkerDied, match="SIGKILL"):
        _built["f"](np.ones(6))
    assert time.monotonic() - killed[0] < 1
    assert_broken(pids)


def test_a_worker_dies_during_fork():
    """Killed as soon as it is born, gone by itself, or failing before its first command."""
    out, _ = run_script(
        """
        from synkhronos import _graphs
        born, ending = [], None
        def die():
            if len(born) == nth and ending is not None:
                ending()
        os.register_at_fork(before=lambda: born.append(1), after_in_child=die)
        start_worker = _graphs.start_worker
        def fail(*some):
            if len(born) == nth:
                1 / 0
            return start_worker(*some)
        for nth in (1, 3):
            for kind in ("killed", "gone", "failing"):
                ending = {
                    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "gone": lambda: os._exit(3), "failing": None
                }[kind]
                _graphs.start_worker = fail if kind == "failing" else start_worker
                born.clear()
                before = time.monotonic()
                try:
                    synk.fork(4)
                except synk.WorkerDied as error:
                    print(error.rank == nth, error.exitcode, time.monotonic() - before < 3, error.__class__.__name__)
                assert not worker_pids() and not shared_memory_names()
        ending, _graphs.start_worker = None, start_worker
        print(synk.fork(2))
        synk.close()
        """
    )
    expected = [f"True {code} True WorkerDied" for code in (-9, 3, 1)]
    assert out.splitlines() == [*expected, *expected, "2"]


# ---------------------------------------------------------------- the end of the master


class Hog(theano.Op):
    """Computes for long without ever letting go of the interpreter's lock, as Theano's C code does."""

    __props__ = ("pid",)

    def __init__(self, pid):
        self.pid = pid

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        if os.getpid() != self.pid:
            pow(3, 60_000_000)
        outputs[0][0] = inputs[0].copy()


HOGGING = """
from test_faults import Hog, later
def main():
    synk.fork(3)
    x = T.dvector("x")
    f = synk.function([x], (Hog(os.getpid())(x).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    print(*worker_pids(), flush=True)
    {before}
    f(np.ones(3))
    time.sleep(60)
"""

ENDINGS = {
    "SIGKILL": "later(0.5, os.kill, os.getpid(), signal.SIGKILL)",
    "SIGTERM": "later(0.5, os.kill, os.getpid(), signal.SIGTERM)",
    "os._exit": "later(0.5, os._exit, 4)",
    "sys.exit": "signal.signal(signal.SIGALRM, lambda *some: sys.exit(3)); signal.setitimer(signal.ITIMER_REAL, 0.5)",
    "exception": "signal.signal(signal.SIGALRM, lambda *some: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.5)",
}


@pytest.mark.parametrize(
    ("ending", "thread"), [*((ending, False) for ending in ENDINGS), ("SIGKILL", True), ("os._exit", True)]
)
def test_the_master_ends_while_workers_compute(ending, thread):
    before = shared_memory_names()
    call = "t = threading.Thread(target=main, daemon=True); t.start(); t.join()" if thread else "main()"
    process = start_script(HOGGING.format(before=ENDINGS[ending]) + call)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2, process.communicate()
    try:
        process.communicate(timeout=20)
        assert wait_until(lambda: not any(map(is_running, pids)), 2)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    assert shared_memory_names() <= before


KILLED_ANYWHERE = """
x = T.dvector("x")
mode = theano.Mode(linker="py", optimizer=None)
rng = np.random.RandomState(int(sys.argv[1]))
total = (x.sum(), "sum")

def live():
    while True:
        synk.fork(3)
        f = synk.function([x], total, mode=mode)
        data = [synk.data(np.ones(100 * 2**i)) for i in range(8)]
        synk.distribute()
        assert f(data[3]) == 800
        for each in data:
            each.set_length(2 * len(each))
        f(np.ones(30_000))
        del data
        synk.close()

def left():
    return {name for name in os.listdir("/dev/shm") if name.startswith(("synkhronos-", "sem."))}

before, left_behind, orphans = left(), 0, 0
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        live()
    time.sleep(0.01 + 0.25 * rng.rand())
    family = psutil.Process(pid).children()
    os.setpgid(pid, pid) if not family else None
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    orphans += not wait_until(lambda: not any(is_running(one.pid) for one in family), 2)
    left_behind += len(left() - before)
print(left_behind, orphans)
"""


@pytest.mark.slow
def test_nothing_is_left_whenever_the_whole_process_group_is_killed():
    out, _ = run_script(KILLED_ANYWHERE, 1, 50)
    assert out == "0 0\n"


# ---------------------------------------------------------------- Ctrl-C at a terminal

AT_A_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # what is typed there reaches this process and its workers
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
    time.sleep(5)
    raise AssertionError("no interrupt came")
def wait():
    time.sleep(0.5)
    seen.append(os.getpid())
todo = [wait, be_interrupted]
while not seen:
    try:  # the user goes on pressing, and Python may look at signals within an except clause, too
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


def type_ctrl_c(setting, call, delay, times=1, restart=False):
    """Run a call at a terminal, and type Ctrl-C; returns the state of the session then.

    Checked: the interrupt comes within one second, in the master alone; no worker says anything; nothing is left.
    """
    master, slave = pty.openpty()
    source = AT_A_TERMINAL.format(setting=setting, call=call, restart=restart)
    process = start_script(source, stdin=slave, start_new_session=True)
    try:
        assert process.stdout.readline() == "ready\n", process.communicate()
        time.sleep(delay)
        pressed = time.monotonic()
        for _ in range(times):
            os.write(master, b"\x03")
            time.sleep(0.03)
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
    assert float(when) - 0.5 - 0.05 * times - pressed < 1.0 + 0.15  # of which the script slept half a second
    assert lines[2:] == ["0 0"]
    return lines[1]


SLEEPING = "f = prepare(); synk.set_value(1, fault, LONG_SLEEP)"


@pytest.mark.parametrize("times", [1, 6])
def test_ctrl_c_while_a_worker_computes(times):
    assert type_ctrl_c(SLEEPING, "f(np.ones(6))", 0.3, times) == "broken"


def test_ctrl_c_while_all_wait_for_a_worker_in_a_collective():
    setting = "f = prepare(); os.kill(worker_pids()[0], signal.SIGSTOP)"
    assert type_ctrl_c(setting, "synk.all_reduce(big)", 0.3, 2) == "broken"


def test_ctrl_c_between_collectives():
    call = "\n    while True: synk.all_reduce(big, op='max'); synk.data(np.ones(100_000))"
    assert type_ctrl_c("f = prepare()", call, 0.4) == "usable"


def test_ctrl_c_while_a_worker_is_replaced():
    setting = SLEEPING + "; synk.set_value(2, fault, KILL)"
    assert type_ctrl_c(setting, "f(np.ones(6))", 0.6, restart=True) == "broken"


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_ctrl_c_during_fork(delay):
    call = "\n    while True: synk.fork(6); synk.close()"
    setting = "f = prepare(); synk.close()"
    assert type_ctrl_c(setting, call, delay, 2) in ("none", "usable")


def test_nothing_that_ends_is_forgotten_whatever_interrupts_it():
    """Data, functions and variables come and go, and a handler raises at any moment."""
    out, _ = run_script(
        """
        import gc
        from test_data import shared_bytes
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
                for _ in range(10):  # Python drops an interrupt that comes in the finalizer of somebody else
                    data = synk.data(np.ones(1 << 17))  # 1 MiB
                    f(data)
                    data = None
                    variable = theano.shared(np.ones(5))
                    synk.broadcast(variable)
                    variable = None
            except Interrupt:
                n_interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            data = variable = None
        for _ in range(20):
            g = synk.function([x], (graph, "sum"), mode="FAST_COMPILE")
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-3, 3e-2))
                g(np.ones(4))
                g = None
            except Interrupt:
                n_interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            g = None
        print(before == held() or (before, held()))
        """
    )
    assert out == "True\n"


# ---------------------------------------------------------------- too little shared memory


def shrink_shared_memory(n_bytes):
    """Give this script a ``/dev/shm`` of its own: it starts again, in a mount namespace of its own."""
    if "SYNKHRONOS_TEST_SHRUNK" in os.environ:
        return
    os.environ["SYNKHRONOS_TEST_SHRUNK"] = "1"
    with open("/proc/self/cmdline") as file:
        command = file.read().split("\0")[:-1]
    mount = f'mount -t tmpfs -o size={n_bytes} tmpfs /dev/shm && exec "$@"'
    os.execvp("unshare", [*unshare(), "sh", "-c", mount, "sh", *command])


def unshare():
    return ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-r", "-m"]


def may_mount():
    if shutil.which("unshare") is None:
        return False
    command = [*unshare(), "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


needs_mount = pytest.mark.skipif(
    not (may_mount() and may_refuse), reason="mounting a small /dev/shm is not permitted here"
)

#: Where the kernel offers no ``memfd_create``, memory lies in /dev/shm, which has a size.
SMALL = """
from test_faults import shrink_shared_memory
shrink_shared_memory(5 * 2**20)
from seccomp import refuse
refuse("memfd_create")
import gc, re
def free():
    room = os.statvfs("/dev/shm")
    return room.f_bavail * room.f_frsize
def refused(call, wanted=None):
    try:
        call()
    except MemoryError as error:
        words = str(error)
    except synk.WorkerError as error:
        words = str(error)
        assert "MemoryError" in words, words
    else:
        raise AssertionError("it was not refused")
    numbers = [int(number.replace(",", "")) for number in re.findall(r"([\\d,]+) bytes", words)]
    assert len(numbers) == 2 and numbers[0] > numbers[1] and "/dev/shm" in words, words
    assert wanted is None or wanted <= numbers[0] <= 1.1 * wanted + 10_000, (wanted, words)
x = T.dvector("x")
total, doubled = (x.sum(), "sum"), (2 * x, "gather")
def build(*output, **options):
    return synk.function([x], *output, mode="FAST_COMPILE", **options)
"""


def run_in_little_memory(source):
    """Run a script after `SMALL`; it starts itself again, so it is a program of its own."""
    return run_script(SMALL + source, fresh=True)


@needs_mount
def test_little_shared_memory_for_data():
    out, _ = run_in_little_memory(
        """
synk.fork(2)
f = build(total)
d = synk.data(np.arange(100_000.0))
expected = f(d)
for grow in (lambda: d.set_length(1_000_000), lambda: d.set_shape(900_000), lambda: d.set_value(np.ones(800_000)),
             lambda: synk.data(np.ones(700_000)), lambda: synk.data(shape=700_000, dtype="float64"),
             lambda: synk.data(np.ones(300_000), oversize=2.0), lambda: f.build_inputs(np.ones(700_000))):
    room = free()
    for _ in range(3):
        refused(grow)
    gc.collect()
    assert free() >= room, (free(), room)
    assert d.shape == (100_000,) and (d.data == np.arange(100_000)).all() and f(d) == expected
refused(lambda: synk.data(np.ones(1_000_000)), 8_000_000)
few = synk.data(np.ones(1000))
assert f(few) == 1000
d.free_memory()
d.set_value(np.ones(200_000))
assert f(d) == 200_000
synk.close()
print(free() > 3_000_000)
"""
    )
    assert out == "True\n"


@needs_mount
def test_little_shared_memory_for_inputs():
    out, _ = run_in_little_memory(
        """
synk.fork(2)
f = build(total)
for _ in range(4):
    for n in (1000, 100_000, 150_000, 10, 120_000):
        assert f(np.ones(n)) == n
    refused(lambda: f(np.ones(600_000)), 4_800_000)
    assert f(np.ones(150_000)) == 150_000
    assert f(np.ones(200_000), batch=[0, 1, 2]) == 3
w = theano.shared(np.ones(10), "w")
g = synk.function([x], (x.sum() + w.sum(), "sum"), mode="FAST_COMPILE")
assert g(np.ones(6)) == 26
refused(lambda: synk.broadcast(w, np.ones(600_000)))
refused(lambda: synk.scatter(w, np.ones(600_000)))
refused(lambda: synk.set_value(1, w, np.ones(600_000)))
assert g(np.ones(6)) == 26
synk.close()
print(free() == 5 * 2**20)
"""
    )
    assert out == "True\n"


@needs_mount
def test_little_shared_memory_for_outputs():
    out, _ = run_in_little_memory(
        """
synk.fork(2)
f = build(total)
n = theano.shared(np.int64(1000), "n")
g = synk.function([], (T.ones((n,)), "gather"), mode="FAST_COMPILE")
for _ in range(4):
    for size in (100_000, 1000, 120_000):
        synk.broadcast(n, size)
        assert g().sum() == 2 * size
    synk.broadcast(n, 600_000)
    refused(g, 4_800_000)
    assert f(np.ones(100)) == 100
w = theano.shared(np.ones(10), "w")
h = synk.function([], w.sum(), mode="FAST_COMPILE")
h()
w.set_value(np.ones(600_000))
refused(lambda: synk.broadcast(w))
assert synk.get_lengths(w) == [600_000, 10]
w.set_value(np.ones(10))
synk.all_gather(w)
assert synk.gather(w).shape == (2, 20)
synk.close()
print(free() == 5 * 2**20)
"""
    )
    assert out == "True\n"


@needs_mount
def test_little_shared_memory_for_functions():
    out, _ = run_in_little_memory(
        """
synk.fork(2)
f = build(total)
assert f(np.ones(6)) == 6
w = theano.shared(np.ones(600_000), "w")
g = synk.function([x], (x.sum() * w[0], "sum"), mode="FAST_COMPILE")
for _ in range(3):
    refused(synk.distribute, 4_800_000)
    refused(lambda: g(np.ones(6)), 4_800_000)
    assert f(np.ones(6)) == 6
w.set_value(np.full(10, 2.0))
assert g(np.ones(6)) == 12
synk.broadcast(w, np.full(10, 3.0))
assert g(np.ones(6)) == 18
synk.close()
print(free() == 5 * 2**20)
"""
    )
    assert out == "True\n"


@needs_mount
def test_little_shared_memory_for_fork():
    out, err = run_in_little_memory(
        """
for _ in range(30):
    refused(lambda: synk.fork(9))
    assert worker_pids() == []
gc.collect()
assert free() == 5 * 2**20, free()
filler = open("/dev/shm/filler", "wb")
for room in range(0, 64, 8):
    filler.truncate(0)
    os.posix_fallocate(filler.fileno(), 0, free() - 4096 * room)
    refused(lambda: synk.fork(2))
filler.truncate(0)
print(synk.fork(2), build(total)(np.ones(6)))
"""
    )
    assert out == "2 6.0\n"
    assert err == ""


@needs_mount
def test_little_shared_memory_and_a_long_traceback():
    """There is no room for what the failing rank has to tell; it tells less."""
    out, _ = run_in_little_memory(
        """
synk.fork(2)
y, fault = T.dvector("long" * 100_000), theano.shared(np.int64(NOTHING), "fault")
f = synk.function([y], (Fault()(y + 0, fault).sum(), "sum"), mode="FAST_COMPILE")
assert f(np.ones(6)) == 6
synk.set_value(1, fault, RAISE)
filler = open("/dev/shm/filler", "wb")
os.posix_fallocate(filler.fileno(), 0, free())
try:
    f(np.ones(6))
except synk.WorkerError as error:
    print(error.rank, "ZeroDivisionError" in str(error))
filler.truncate(0)
synk.broadcast(fault, NOTHING)
print(f(np.ones(6)))
"""
    )
    assert out == "1 True\n6.0\n"


# ---------------------------------------------------------------- silence


def test_a_timeout_names_rank_and_command(no_session):
    synk.fork(3, timeout=0.5)
    function, fault, _ = build()
    pids = worker_pids()
    synk.set_value(2, fault, LONG_SLEEP)
    with pytest.raises(synk.WorkerTimeout, match=rf"rank 2 \(cpu, pid {pids[1]}\).*0\.5 seconds.*Call"):
        function(np.ones(6))
    assert_broken(pids)


def test_a_timeout_in_a_collective_names_the_rank_that_the_others_wait_for(no_session):
    synk.fork(4, timeout=0.5)
    build()
    pids = worker_pids()
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(synk.WorkerTimeout, match=rf"rank 2 \(cpu, pid {pids[1]}\).*AllReduce") as caught:
        synk.all_reduce(_built["big"])
    assert (caught.value.rank, caught.value.pid) == (2, pids[1])
    assert isinstance(caught.value, TimeoutError)
    assert_broken(pids)


def test_a_timeout_during_fork():
    out, _ = run_script(
        """
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))
        before = time.monotonic()
        try:
            synk.fork(3, timeout=0.5)
        except synk.WorkerTimeout as error:
            print(error.rank, time.monotonic() - before < 3)
        print(worker_pids())
        """
    )
    assert out == "1 True\n[]\n"


def test_a_timeout_is_no_limit_for_the_master_itself(no_session):
    """Its own share may take as long as it takes."""
    synk.fork(2, timeout=0.5)
    function, fault, _ = build()
    synk.set_value(0, fault, 2)  # one second
    assert function(np.ones(6)) == 6


@pytest.mark.parametrize("n_ranks", [2, 5])
def test_ranks_that_stand_still_by_turns_are_slow_and_never_wrong(synchronize, n_ranks):
    synchronize(n_ranks)
    function, _, big = build()
    done, pids = threading.Event(), worker_pids()

    def disturb():
        rng = np.random.RandomState(0)
        while not done.is_set():
            pid = pids[rng.randint(len(pids))]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02 + 0.1 * rng.rand())
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        deadline = time.monotonic() + 3
        rounds = 0
        while time.monotonic() < deadline or rounds < 5:
            rounds += 1
            n = 7 * rounds % 23
            assert function(np.full(n, 2.0)) == 2 * n
            synk.scatter(big, np.arange(1000.0 * n_ranks))
            synk.all_reduce(big, op="sum")
            expected = np.arange(1000.0 * n_ranks).reshape(n_ranks, 1000).sum(0)
            np.testing.assert_array_equal(synk.gather(big), [expected] * n_ranks)
    finally:
        done.set()
        thread.join()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------- unusual arrays

RNG = np.random.RandomState(0)
BASE = RNG.randn(40, 6)


@pytest.mark.parametrize(
    "array",
    [
        BASE[::-1, ::2],
        np.asfortranarray(BASE),
        BASE.astype(">f8"),
        np.array(BASE, dtype=[("a", "f8")])["a"],
        np.ma.masked_array(BASE),
        BASE.tolist(),
        np.where(BASE > 1, np.nan, np.where(BASE < -1, np.inf, BASE)),
        BASE[:0],
        BASE[:2],
    ],
    ids=["strided", "Fortran", "big-endian", "field", "masked", "list", "nan", "empty", "fewer than ranks"],
)
def test_arrays_of_any_layout(synchronize, array):
    synchronize(3)
    if "m" not in _built:
        m, w = T.dmatrix("m"), theano.shared(np.zeros((1, 1)), "matrix")
        _built["m"] = synk.function([m], [(m * 1, "gather"), (m.sum(1), "gather")], givens=[], updates=[(w, w)])
        _built["matrix"] = w
    plain = np.array(array, dtype="float64")
    for value in (array, synk.data(array, dtype="float64", force_cast=True)):
        same, sums = _built["m"](value)
        np.testing.assert_array_equal(same, plain)
        np.testing.assert_allclose(sums, plain.sum(1))
    synk.distribute()
    synk.broadcast(_built["matrix"], array)
    np.testing.assert_array_equal(synk.gather(_built["matrix"]), [plain] * 3)
    synk.scatter(_built["matrix"], array)
    np.testing.assert_array_equal(synk.gather(_built["matrix"], nd_up=0), plain)
    synk.all_gather(_built["matrix"])
    np.testing.assert_array_equal(synk.get_value(2, _built["matrix"]), plain)


def test_structured_arrays_are_refused(three):
    records = np.zeros(6, dtype=[("a", "f8"), ("b", "i4")])
    with pytest.raises(TypeError):
        three[0](records)
    with pytest.raises(TypeError):
        synk.broadcast(_built["big"], records)
    assert three[0](np.ones(6)) == 6


def test_a_huge_list_of_indexes(three):
    indexes = np.arange(3_000_000) % 7
    assert three[0](np.arange(7.0), batch=indexes) == indexes.sum()
    data = synk.data(np.arange(7.0))
    assert three[0](data, batch=indexes) == indexes.sum()
    assert three[0](data, batch=indexes[:1000].tolist()) == indexes[:1000].sum()


def test_a_fault_that_is_over_leaves_no_trace(three):
    function, fault, big = three
    for kind in (RAISE, NOTHING, RAISE):
        synk.set_value(1, fault, kind)
        if kind == RAISE:
            with pytest.raises(synk.WorkerError, match="rank 1"):
                function(np.ones(6))
        else:
            assert function(np.ones(6)) == 6
        synk.all_reduce(big, op="min")


def test_the_kernel_kills_a_worker_for_its_memory(fresh):
    """Out of memory looks like SIGKILL: the message says so."""
    pids = worker_pids()
    synk.set_value(1, _built["fault"], KILL)
    with pytest.raises(synk.WorkerDied, match="out of memory"):
        _built["f"](np.ones(6))
    assert_broken(pids)


def test_broken_sessions_one_after_the_other_leave_nothing(no_session):
    """A session, a death, a close: nothing adds up over many of them."""
    sizes = []
    for _ in range(6):
        synk.fork(3)
        build()
        os.kill(worker_pids()[0], signal.SIGKILL)
        with pytest.raises(synk.WorkerDied):
            _built["f"](np.ones(6))
        synk.close()
        with open("/proc/self/maps") as maps:
            sizes.append((len(os.listdir("/proc/self/fd")), len(maps.readlines())))
    assert sizes[-1][0] <= sizes[1][0]
    assert sizes[-1][1] <= sizes[1][1] + 3
