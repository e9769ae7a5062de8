"""Containers: refused system calls, namespaces, and memory limits of control groups."""

import os
import tempfile
from pathlib import Path

import psutil
import pytest
from deadline import wait_for
from scripts import run_script
from seccomp import needs_seccomp

import synkhronos as synk
from synkhronos._utils.resources import free_memory

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only the superuser may do that")


#: Uses everything that ranks share: data, staged inputs, results, long messages, and collectives of all sizes.
WORK = """
def work(n_ranks=3):
    assert synk.fork(n_ranks) == n_ranks
    x = T.dvector("x")
    w, large = theano.shared(np.ones(10), "w"), theano.shared(np.ones(3_000_000), "large")
    f = synk.function([x], [(x * w[0] * large[0], "gather"), (x.sum(), "sum")], mode="FAST_COMPILE")
    for n in (10, 200_000):
        data = synk.data(np.arange(float(n)))
        for values in (data, data.data.copy()):
            gathered, total = f(values)
            assert (gathered == np.arange(n)).all() and total == n * (n - 1) / 2
        assert f(data, batch=[3, 1])[0].tolist() == [3, 1]
    synk.set_value(n_ranks - 1, w, np.full(10, 1 + n_ranks))
    synk.all_reduce(w, op="avg")
    assert (synk.gather(w) == 2).all()
    synk.all_reduce(large, op="sum")
    assert (synk.get_value(n_ranks - 1, large) == n_ranks).all()
    most = theano.shared(5.0, "most")
    g = synk.function([x], T.opt.Assert("long " * 30_000)(x, T.lt(x.max(), most)).sum(), mode="FAST_COMPILE")
    assert g(np.ones(6)) == 2
    synk.set_value(1, most, 0.0)
    try:
        g(np.ones(6))
    except synk.WorkerError as error:  # a long message needs new memory
        assert error.rank == 1 and str(error).count("long") >= 30_000
    else:
        raise AssertionError("no error")
    memory = synk.memory()
    synk.close()
    print("worked")
    return memory
"""

FORBIDDEN = {
    "fallocate": "refuse('fallocate')",
    "memfd_create": "refuse('memfd_create')",
    "memfd_create is not there": "import errno; refuse('memfd_create', error=errno.ENOSYS)",
    "pidfd_open": "refuse('pidfd_open')",
    "all of them": "refuse('fallocate', 'memfd_create', 'pidfd_open', 'sched_getaffinity')",
    "to look into this process": "import ctypes; assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0",
}


@needs_seccomp
@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_sandbox_refuses_system_calls(what):
    script = f"{WORK}\nfrom seccomp import refuse\n{FORBIDDEN[what]}\nprint(all(work().largest.values()))\n"
    assert run_script(script) == ("worked\nTrue\n", "")


IN_A_NAMESPACE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def own_mounts():
    assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0
def cover(path, options):
    assert libc.mount(b"none", path, b"tmpfs", options, None) == 0
"""

SURROUNDINGS = {
    "without /proc": "own_mounts(); cover(b'/proc', 0)",
    "a /dev/shm that cannot be written": "own_mounts(); cover(b'/dev/shm', 1)",
    "without /proc and /dev/shm": "own_mounts(); cover(b'/proc', 0); cover(b'/dev/shm', 1)",
    "a namespace of processes, with the /proc of its parent": """
assert libc.unshare(0x20000000) == 0
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
}


LIBRARIES_FOUND = """
from threadpoolctl import ThreadpoolController
def found():
    try:
        return len(ThreadpoolController().info()) > 0
    except OSError:
        return False
"""


@needs_root
@pytest.mark.parametrize("where", SURROUNDINGS)
def test_surroundings_of_containers(where):
    setting = f"{WORK}\n{IN_A_NAMESPACE}\n{SURROUNDINGS[where]}"
    out, err = run_script(f"{setting}\nwork()\n{LIBRARIES_FOUND}\nprint(found())\nsys.stdout.flush()\n")
    worked, found = out.splitlines()
    assert worked == "worked"
    if found == "True":
        assert err == ""
    else:
        assert "without /proc" in where  # some versions of threadpoolctl read /proc/self/maps
        assert err == (
            "cannot limit the threads of BLAS and OpenMP to each rank's cores "
            "([Errno 2] No such file or directory: '/proc/self/maps'); set OMP_NUM_THREADS\n"
        )


def test_more_memory_than_the_node_has_is_refused_before_it_is_allocated(synchronize, monkeypatch):
    synchronize(2)
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: pytest.fail("it was taken"))
    with pytest.raises(
        MemoryError, match=r"cannot allocate [\d,]+ bytes of shared memory: .* are free on this machine"
    ):
        synk.data(dtype="uint8", shape=(psutil.virtual_memory().total,))


def test_the_memory_limit_of_a_container_is_read(tmp_path):
    """`free_memory` reads the files of memory cgroups of versions 1 and 2."""

    def write(folder, texts):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def limits(folder):
        return [n_bytes for n_bytes, _ in free_memory(folder / "proc", folder / "cgroup")]

    unified, old = tmp_path / "unified", tmp_path / "old"
    batch = unified / "cgroup" / "batch"
    write(unified / "proc", {"self/cgroup": "0::/batch/job\n", "meminfo": "MemAvailable: 1000 kB\nSwapFree: 24 kB\n"})
    write(batch, {"job/memory.max": "max\n", "memory.max": "9000", "memory.current": "5000"})
    write(batch, {"memory.stat": "anon 1\ninactive_file 700\nactive_file 50\n"})
    assert limits(unified) == [1024 * 1024, 4750 + 24 * 1024]
    for maximum, swap in (("max\n", 24 * 1024), ("4000\n", 3500), ("600\n", 100), ("0\n", 0)):
        # the part of the node's swap that a cgroup may use
        write(batch, {"memory.swap.max": maximum, "memory.swap.current": "500"})
        assert limits(unified) == [1024 * 1024, 4750 + swap]
    write(old / "proc", {"self/cgroup": "4:memory:/docker/abc\n0::/\n"})  # the container sees its own cgroup at the top
    write(old / "proc", {"meminfo": "MemAvailable: 1 kB\nSwapFree: 0 kB\n"})
    memory = old / "cgroup" / "memory"
    write(memory, {"memory.limit_in_bytes": "9223372036854771712"})
    assert limits(old) == [1024]
    write(memory, {"memory.limit_in_bytes": "9000", "memory.usage_in_bytes": "8000"})
    write(memory, {"memory.stat": "total_inactive_file 100\ntotal_active_file 20\n"})
    assert limits(old) == [1024, 1120]
    write(old / "proc", {"meminfo": "MemAvailable: 1 kB\nSwapFree: 1 kB\n"})
    of_both = {"memory.memsw.limit_in_bytes": "9600", "memory.memsw.usage_in_bytes": "8100"}  # memory and swap together
    write(memory, of_both)
    assert limits(old) == [2048, 1120 + 500]


CGROUP = Path("/sys/fs/cgroup/memory") / f"synkhronos-{os.getpid()}"


@pytest.fixture
def little_cgroup():
    """Create a memory cgroup of 1 GiB, or skip the test if that is not possible."""
    try:
        CGROUP.mkdir()
        (CGROUP / "memory.limit_in_bytes").write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield CGROUP
    wait_for(lambda: not (CGROUP / "tasks").read_text(), "the end of the processes of the control group")
    CGROUP.rmdir()


def test_a_container_of_little_memory(little_cgroup):
    """Arrays that exceed the limit of the container raise `MemoryError`; the kernel kills no process."""
    out, _ = run_script(
        """
        open(sys.argv[1] + "/tasks", "w").write(str(os.getpid()))
        synk.fork(2)
        for size in (2 << 30, 1 << 30):
            try:
                synk.data(dtype="uint8", shape=(size,))
            except MemoryError as error:
                print("memory cgroup" in str(error))
        x = T.bvector("x")
        f = synk.function([x], (x[:1].sum(), "sum"), mode="FAST_COMPILE")
        data = synk.data(dtype="uint8", shape=(1 << 28,))
        print(f(synk.data(np.ones(4, "int8"))))
        """,
        little_cgroup,
    )
    assert out.split() == ["True", "True", "2"]


def test_results_and_data_in_a_container_of_little_memory(little_cgroup):
    """Results in the shared heap, freed blocks that ranks keep, and data fit by turns; the kernel kills no process."""
    out, err = run_script(
        """
        open(sys.argv[1] + "/tasks", "w").write(str(os.getpid()))
        synk.fork(2)
        x, w = T.bvector("x"), theano.shared(np.zeros(2 << 20), "w")
        arrays = [T.alloc(w[0] + x[0], size << 17).sum() for size in (100, 150, 120)]  # MiB on each rank
        f = synk.function([x], [(array, "avg") for array in arrays], updates=[(w, w + 1)], mode="FAST_COMPILE")
        for i in range(4):
            print(*f(np.ones(4, "int8")) == (1.0 + i) * 2**17 * np.array([100, 150, 120]))
            kept = synk.memory().kept
            print(len(synk.data(np.ones(420 << 20, "int8"))) >> 20, kept[0] + kept[1] > 100 << 20)
        """,
        little_cgroup,
    )
    assert err == ""
    assert out.split() == ["True", "True", "True", "420", "True"] * 4


@needs_root
def test_another_user_after_setuid():
    """A session works after `setuid`, although the kernel then refuses other processes access to the controller."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        out, err = run_script(
            # imported here, because the new user may not be allowed to read their files
            f"{WORK}\nimport mmap, setuptools\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\nwork()\n",
            environment={
                "THEANO_FLAGS": f"base_compiledir={folder},cxx=",
                "PYTENSOR_FLAGS": f"base_compiledir={folder},cxx=,linker=vm",
                "HOME": folder,
            },
        )
    assert out == "worked\n"
    assert [line for line in err.splitlines() if "g++" not in line] == []
