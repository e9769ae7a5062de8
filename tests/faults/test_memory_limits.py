"""Low limits of memory, addresses and file sizes for ranks, and workers that die while they hold memory."""

import os
import signal
import textwrap

import numpy as np
import pytest
from backend import T, theano
from every_function import restarted
from fault_ops import KILL, Fault
from process_state import kill, worker_pids
from scripts import run_script

import synkhronos as synk

SESSION = """
    def work(n_ranks):
        x, w = T.fmatrix("x"), theano.shared(np.zeros((1000, 500), "float32"), "w")
        f = synk.function([x], [(x * 2, "gather"), (x.sum(), "sum")], updates=[(w, w + x.sum())])
        for n in range(1, 4):
            twice, total = f(np.ones((300, 1000), "float32"))
            assert (twice == 2).all() and total == 300_000
            synk.all_reduce(w)
        synk.broadcast(w, np.ones((1000, 500), "float32"))
        assert (synk.gather(w) == 1).all()
        return synk.memory()
"""


def run(source, **options):
    """Run a script that can call `work`; return what it printed to stdout and stderr."""
    return run_script(textwrap.dedent(SESSION) + textwrap.dedent(source), **options)


@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.parametrize("megabytes", [3_000, 6_000])
def test_few_addresses(n_ranks, megabytes):
    """With few addresses, the shared heap is smaller or absent, and malloc serves requests that do not fit."""
    out, err = run(
        f"""
        import resource
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + {megabytes} * 2**20,) * 2)
        synk.fork({n_ranks})
        print(all(work({n_ranks}).largest.values()))
        heap = synk._session.current().replica.heap
        before = [heap.call(np.ones, 2**21) for _ in range(40)]
        print(len(before))
        synk.close()
        """
    )
    assert out.split() == ["True", "40"]
    assert err == ""


def test_too_few_addresses_are_reported_once():
    out, err = run(
        """
        import resource
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 1400 * 2**20,) * 2)
        synk.fork(6)
        print(sum(work(6).largest.values()))
        synk.close()
        """
    )
    assert out.split() == ["0"]
    assert err.count("\n") == 1
    assert "ulimit -v" in err


@pytest.mark.parametrize(("megabytes", "works"), [(20, False), (600, True)])
def test_a_limit_of_files(megabytes, works):
    """A limit of file sizes is reported, and no rank exceeds it, because SIGXFSZ would end the process."""
    out, err = run(
        f"""
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({megabytes} * 2**20,) * 2)
        synk.fork(3)
        print(all(work(3).largest.values()))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20,) * 2)
        synk.close()
        """
    )
    assert out.split() == [str(works)]
    assert ("ulimit -f" in err) != works


def test_memory_that_is_not_free_is_not_taken():
    """The heap takes no more memory than is free. malloc serves larger requests, since it may overcommit."""
    run(
        """
        import synkhronos._memory.heap as heap
        heap.free_memory = lambda: iter([(64 * 2**20, "by this test")])
        synk.fork(2)
        memory = work(2)
        assert all(0 < largest <= 32 * 2**20 for largest in memory.largest.values()), memory
        x = T.fmatrix("x")
        f = synk.function([x], [(x + 1, None)])
        assert (f(np.ones((8_000, 4_000), "float32"))[0] == 2).all()
        assert all(largest <= 32 * 2**20 for largest in synk.memory().largest.values())
        synk.close()
        """
    )


def test_descriptors_that_the_program_closes():
    """Ranks allocate memory after the program has closed all memfd descriptors, as daemons do."""
    out, err = run(
        """
        synk.fork(3)
        first = [work(3), work(3)][1].in_use
        for fd in range(3, 100):
            try:
                if "memfd" in os.readlink(f"/proc/self/fd/{fd}"):
                    os.close(fd)
            except OSError:
                pass
        print(all(work(3).largest[rank] >= first[rank] > 0 for rank in range(3)))
        synk.close()
        """
    )
    assert (out.split(), err) == (["True"], "")


N = 1_000_000


@pytest.mark.parametrize("when", ["computing", "idle"])
def test_a_worker_is_replaced(synchronize, when):
    """A new worker gets the dead worker's region of the heap, empty; the regions of other ranks do not change."""
    synchronize(3, restart_workers=True)
    x, fault, w = T.fvector("x"), theano.shared(np.int64(0), "fault"), theano.shared(np.zeros(N, "float32"), "w")
    f = synk.function([x], [(Fault()(x, fault).sum(), "sum")], updates=[(w, w + 1)], mode="FAST_COMPILE")
    f(np.ones(N, "float32"))
    in_use, pids = synk.memory().in_use, worker_pids()
    kept = [np.ones(3)]
    if when == "computing":
        synk.set_value(2, fault, KILL)
    else:
        kill(pids[1])
    restarted(f, np.ones(N, "float32"))
    synk.broadcast([fault, w], [0, np.zeros(N, "float32")])
    for n in range(1, 5):
        assert f(np.ones(N, "float32")) == [N]
        assert (synk.gather(w) == n).all()
    after = synk.memory()
    assert len(worker_pids()) == 2
    assert all(4 * N <= after.in_use[rank] <= in_use[rank] + 4 * N for rank in range(3)), (in_use, after)
    assert (kept[0] == 1).all()


def test_workers_that_die_one_after_the_other_leak_no_memory(synchronize):
    synchronize(2, restart_workers=True)
    x, w = T.fvector("x"), theano.shared(np.zeros(N, "float32"), "w")
    f = synk.function([x], [((x + w[0]).sum(), "sum")], updates=[(w, w + 1)])
    in_use = []
    for _ in range(6):
        f(np.ones(N, "float32"))
        in_use.append(synk.memory().in_use[1])
        os.kill(worker_pids()[0], signal.SIGKILL)
        with pytest.raises(synk.WorkerRestarted):
            while True:
                f(np.ones(N, "float32"))
    assert max(in_use) <= in_use[0] + 4 * N
