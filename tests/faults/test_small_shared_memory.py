"""Too little shared memory: the error reports the required and the free bytes, and nothing changes."""

import pytest
from mount_namespace import may_mount
from scripts import run_script
from seccomp import may_refuse

needs_mount = pytest.mark.skipif(
    not (may_mount() and may_refuse), reason="mounting a small /dev/shm is not permitted here"
)

#: Without ``memfd_create``, shared memory lies in /dev/shm, whose size is limited.
SMALL = """
from mount_namespace import shrink_shared_memory
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
    """Run a script after `SMALL`, in a new process, because `SMALL` restarts the program in its own namespace."""
    return run_script(SMALL + source, fresh=True)


@needs_mount
def test_little_shared_memory_for_data():
    run_in_little_memory(
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
    wait_for(lambda: free() >= room, lambda: f"{room} free bytes, of which there are {free()}")
    assert d.shape == (100_000,) and (d.data == np.arange(100_000)).all() and f(d) == expected
refused(lambda: synk.data(np.ones(1_000_000)), 8_000_000)
few = synk.data(np.ones(1000))
assert f(few) == 1000
d.free_memory()
d.set_value(np.ones(200_000))
assert f(d) == 200_000
synk.close()
wait_for(lambda: free() > 3_000_000, "freed memory")
"""
    )


@needs_mount
def test_little_shared_memory_for_inputs():
    run_in_little_memory(
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
wait_for(lambda: free() == 5 * 2**20, lambda: f"all memory, of which {free()} bytes are free")
"""
    )


@needs_mount
def test_little_shared_memory_for_outputs():
    run_in_little_memory(
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
refused(lambda: synk.broadcast(w, np.ones(600_000)))
assert synk.get_lengths(w) == [600_000, 10]
synk.broadcast(w)  # from the controller's own memory
assert synk.get_lengths(w) == [600_000, 600_000]
synk.broadcast(w, np.ones(10))
synk.all_gather(w)
assert synk.gather(w).shape == (2, 20)
synk.close()
wait_for(lambda: free() == 5 * 2**20, lambda: f"all memory, of which {free()} bytes are free")
"""
    )


@needs_mount
def test_little_shared_memory_for_functions():
    run_in_little_memory(
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
wait_for(lambda: free() == 5 * 2**20, lambda: f"all memory, of which {free()} bytes are free")
"""
    )


@needs_mount
def test_little_shared_memory_for_fork():
    out, err = run_in_little_memory(
        """
for _ in range(30):
    refused(lambda: synk.fork(9))
    assert worker_pids() == []
gc.collect()
wait_for(lambda: free() == 5 * 2**20, lambda: f"all memory, of which {free()} bytes are free")
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
    """A failing rank shortens its report if there is no memory for the full one."""
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
