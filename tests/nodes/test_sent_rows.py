"""Bytes sent to another node: each row once, and changed rows again."""

import os
import shutil
import sys
import textwrap

import numpy as np
from mpi_jobs import HELPERS

PRELUDE = """
    import os, socket, sys
    import numpy as np
    sys.path.insert(0, os.environ["HELPERS"])
    from backend import T, theano
    import synkhronos as synk
    from synkhronos._memory import descriptors as anonymous

    if os.environ.get("SMALL") == socket.gethostname():  # use /dev/shm, whose size the test has set
        anonymous._libc = object()
    synk.fork(int(os.environ.get("RANKS", 1)), use_gpu=False, timeout=60)
    X = np.random.RandomState(0).rand(4000, 256)
    x = T.dmatrix("x")
    f = synk.function([x], (x.sum(0), "sum"))
    BLOCK = 4096

    def sent(calls):
        with synk.profile() as times:
            calls()
        return times.sent

    def over(data, batches):
        def epoch():
            for rows in batches:
                assert np.allclose(f(data, batch=rows), data[rows].sum(0))
        return epoch
"""


def run(hosts, source, **environment):
    """Run a program on both hosts, and return what it printed."""
    environment["HELPERS"] = str(HELPERS)
    job = hosts.start(sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(source), **environment)
    out, err = job.communicate(timeout=280)
    assert job.returncode == 0, out + err
    return out


def test_rows_are_sent_once_and_again_after_writes(hosts):
    out = run(
        hosts,
        """
        data = synk.data(X)
        slices = [slice(start, start + 500) for start in range(0, 4000, 500)]
        lists = BLOCK * len(slices)  # starts of the slices
        first = sent(over(data, slices))
        assert X.nbytes / 2 <= first < X.nbytes / 2 + 2 * lists, first
        assert sent(over(data, slices)) <= lists

        def write():
            data[990:993] = 7
            over(data, slices)()
        assert 3 * X[0].nbytes <= sent(write) <= 3 * X[0].nbytes + 2 * BLOCK + lists
        np.asarray(data)[3000] = 8  # a write that the library cannot intercept
        X[990:993], X[3000] = 7, 8
        X[3999] = 9
        data.set_value(X)
        assert X[0].nbytes <= sent(over(data, slices)) <= 2 * (X[0].nbytes + BLOCK) + lists
        assert sent(over(data, slices)) <= lists

        shuffled = synk.data(X)
        total, random, lists = 0, np.random.RandomState(1), 2 * X.shape[0] * 8 + len(slices) * BLOCK
        for _ in range(4):
            order = random.permutation(4000)
            epoch = over(shuffled, [order[start : start + 500] for start in range(0, 4000, 500)])
            total += sent(epoch)
        assert 0.9 * X.nbytes < total < X.nbytes + 4 * lists, total / X.nbytes
        assert sent(epoch) < lists
        print("fine")
        """,
    )
    assert out.endswith("fine\n")


def test_scattered_variables_are_not_sent_again(hosts):
    out = run(
        hosts,
        """
        s = theano.shared(np.zeros((1, 256)), "s")
        w = theano.shared(np.zeros(256), "w")
        g = synk.function([], (s.sum(0), "sum"), updates=[(w, w + s.sum(0))], sliceable_shareds=[s])
        synk.distribute()
        assert X.nbytes / 2 <= sent(lambda: synk.scatter(s, X)) < X.nbytes / 2 + 3 * BLOCK

        def use():
            for batch in (None, slice(100, 200), slice(300, 1000)):
                rows = slice(None) if batch is None else batch
                parts = [X[:2000][rows], X[2000:][rows]]
                assert np.allclose(g(batch_s=batch), sum(part.sum(0) for part in parts))
        use()
        assert sent(use) <= 3 * BLOCK
        assert sent(lambda: synk.all_reduce(w)) == 0
        assert np.allclose(synk.gather(s, nd_up=0), X)
        print("fine")
        """,
    )
    assert out.endswith("fine\n")


def test_a_node_needs_memory_only_for_its_own_rows(hosts):
    hosts.inside("hostb", "mount", "-o", "remount,size=22m", "/dev/shm")
    try:
        out = run(
            hosts,
            """
            X = np.random.RandomState(0).rand(4000, 1200)
            data = synk.data(X)
            for start in (0, 1700):  # the missing rows would be sent in several pieces, or in one
                assert np.allclose(f(data), X.sum(0))
                try:
                    f(data, batch=slice(start, 2000))
                    raise SystemExit("no error")
                except synk.WorkerError as error:
                    print(error.rank, error)
                assert np.allclose(f(data, batch=slice(2000, 4000)), X[2000:].sum(0))
            other = synk.data(np.ones((300, 100)))
            data.free_memory()
            data = synk.data(X[::-1].copy())
            assert np.allclose(f(data), X.sum(0)) and np.allclose(f(other), 300)
            print("fine")
            """,
            SMALL="hostb",
        )
    finally:
        hosts.inside("hostb", "mount", "-o", "remount,size=50%", "/dev/shm")
    lines = out.splitlines()
    assert lines[-1] == "fine"
    failures = [line for line in lines if line.startswith("1 rank 1 (node 1 (hostb): cpu) failed in Call")]
    assert len(failures) == 2 and "cannot allocate 1,572,864" in failures[0], out
    assert "cannot allocate 1,44" in failures[1], out


def test_files_that_are_on_both_nodes_are_not_sent(hosts, tmp_path):
    for name in ("same", "copy", "other"):
        np.save(tmp_path / f"{name}.npy", np.random.RandomState(0).rand(4000, 256))
    shutil.copy2(tmp_path / "copy.npy", tmp_path / "copy.there")
    np.save(tmp_path / "other.there", np.zeros((4000, 256)))
    os.rename(tmp_path / "other.there.npy", tmp_path / "other.there")
    for name in ("copy", "other"):
        hosts.inside("hostb", "mount", "--bind", tmp_path / f"{name}.there", tmp_path / f"{name}.npy")
    try:
        out = run(
            hosts,
            """
            folder = os.environ["FOLDER"]
            data = {
                name: synk.data(np.load(f"{folder}/{name}.npy", mmap_mode="r")) for name in ("same", "copy", "other")
            }
            batches = [slice(1000, 3000), slice(0, 4000), np.arange(0, 4000, 3)]
            lists = BLOCK * 3 + 4000 * 8
            assert sent(over(data["same"], batches)) < lists
            assert sent(over(data["copy"], batches)) < lists
            assert 0.5 * X.nbytes < sent(over(data["other"], batches)) < X.nbytes
            assert sent(over(data["other"], batches)) < lists
            os.utime(f"{folder}/copy.there")
            try:
                f(data["copy"])
                raise SystemExit("no error")
            except synk.WorkerError as error:
                print(error)
            assert X.nbytes / 2 <= sent(over(data["copy"], [slice(0, 4000)])) < X.nbytes / 2 + lists
            os.utime(f"{folder}/same.npy")  # on both nodes: the file is opened again
            assert sent(over(data["same"], batches)) < lists
            own = np.load(f"{folder}/same.npy", mmap_mode="r+")  # a writable file: its rows are sent
            shared = synk.data(own)
            assert X.nbytes / 2 <= sent(lambda: f(shared)) < X.nbytes / 2 + lists
            own[3000] = 5
            assert X[0].nbytes <= sent(over(shared, [slice(0, 4000)])) < X[0].nbytes + 3 * BLOCK
            print("fine")
            """,
            FOLDER=str(tmp_path),
            RANKS="2",
        )
    finally:
        for name in ("copy", "other"):
            hosts.inside("hostb", "umount", tmp_path / f"{name}.npy")
    lines = out.splitlines()
    assert lines[-1] == "fine"
    assert "node 1 (hostb)" in lines[0] and "copy.npy was changed on this node" in lines[0]


def test_rows_whose_sending_was_interrupted_are_sent_again(hosts):
    out = run(
        hosts,
        """
        import signal

        class Stop(BaseException):
            pass

        def stop(*_):
            raise Stop

        signal.signal(signal.SIGALRM, stop)
        X, n = np.random.RandomState(0).rand(8000, 1000), 0
        for i in range(5):
            data = synk.data(X)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.01 * i)
                f(data)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                n += 1
            assert np.allclose(f(data), X.sum(0))
            assert sent(lambda: f(data)) <= BLOCK
        print(n, "interrupts")
        """,
    )
    assert 1 <= int(out.split()[-2]) <= 5
