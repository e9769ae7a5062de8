"""`extensions.checkpoint`: every rank's values are restored, and a kill while saving keeps the previous file."""

import contextlib
import errno
import io
import os
import re
import signal
import sys
import time
import zipfile

import numpy as np
import pytest
from backend import theano
from scripts import run_script, start_script

import synkhronos as synk
from synkhronos.extensions import checkpoint


@pytest.fixture(scope="module")
def variables():
    """Yield three shared variables in a session of three ranks."""
    synk.fork(3)
    weights = theano.shared(np.zeros((4, 2), "float32"), "weights")
    counter = theano.shared(np.int64(0), "counter")
    rows = theano.shared(np.zeros(3, "float64"), "rows")
    synk.function([], [weights.sum(), counter, rows.sum()])
    yield [weights, counter, rows]
    synk.close()


def set_apart(variables, offset=0.0):
    """Set different values on each rank, for the last variable also different lengths, and return them by rank."""
    values = []
    for rank in range(3):
        mine = [
            np.full((4, 2), rank + offset, "float32"),
            np.asarray(rank + 10, "int64"),
            np.arange(rank + 1.0) + offset,
        ]
        synk.set_value(rank, variables, mine)
        values.append(mine)
    return values


@pytest.fixture
def saved(variables, tmp_path):
    """Return the path of a checkpoint, and the values in it by rank."""
    values, path = set_apart(variables), tmp_path / "one.npz"
    checkpoint.save(path, variables)
    return path, values


@pytest.mark.numba
def test_every_rank_gets_its_own_values_back(variables, saved, tmp_path):
    path, values = saved
    set_apart(variables, offset=100.0)
    checkpoint.load(path, variables)
    for rank in range(3):
        for got, expected in zip(synk.get_value(rank, variables), values[rank]):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
    assert os.listdir(tmp_path) == ["one.npz"]


@pytest.mark.parametrize("form", [str, os.fsencode])
def test_one_variable_without_a_list_and_other_forms_of_names(variables, tmp_path, form):
    path = form(tmp_path / "one.npz")
    set_apart(variables)
    checkpoint.save(path, variables[0])
    synk.broadcast(variables[0], np.zeros((4, 2), "float32"))
    checkpoint.load(path, variables[0])
    np.testing.assert_array_equal(synk.gather(variables[0])[:, 0, 0], [0, 1, 2])


def test_a_mismatch_is_refused_and_changes_nothing(variables, saved, tmp_path):
    path, _ = saved
    with pytest.raises(ValueError, match="got 2 variables to load; expected 3"):
        checkpoint.load(path, variables[:2])
    with pytest.raises(ValueError, match="has float32 of 2 dimensions for counter; expected int64 of 0"):
        checkpoint.load(path, [variables[1], variables[0], variables[2]])
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none.npz", variables)
    np.testing.assert_array_equal(synk.gather(variables[1]), [10, 11, 12])


def test_a_failed_save_leaves_the_old_file(variables, saved, tmp_path):
    path, _ = saved
    before = path.read_bytes()
    (tmp_path / "one.npz.partial").mkdir()
    with pytest.raises(OSError, match="partial"):
        checkpoint.save(path, variables)
    assert path.read_bytes() == before


def test_a_link_in_the_way_is_not_followed(variables, tmp_path):
    values = set_apart(variables)
    (tmp_path / "target").write_text("of somebody else")
    (tmp_path / "one.npz.partial").symlink_to(tmp_path / "target")
    checkpoint.save(tmp_path / "one.npz", variables)
    assert (tmp_path / "target").read_text() == "of somebody else"
    assert sorted(os.listdir(tmp_path)) == ["one.npz", "target"]
    checkpoint.load(tmp_path / "one.npz", variables)
    np.testing.assert_array_equal(synk.gather(variables[0]), [one[0] for one in values])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_nothing(variables, saved, tmp_path, monkeypatch, error):
    path, _ = saved
    before = path.read_bytes()

    def fail(descriptor):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)) as caught:
        checkpoint.save(path, variables)
    if isinstance(error, OSError):
        assert str(caught.value) == f"[Errno 28] No space left on device: '{path}'"
    assert os.listdir(tmp_path) == ["one.npz"]
    assert path.read_bytes() == before


def test_a_full_disk(tmp_path):
    """A save that fills the disk keeps the old file. A limit on the size of files simulates the full disk."""
    script = """
    import resource
    from synkhronos.extensions import checkpoint
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    synk.fork(2)
    big = theano.shared(np.zeros(100_000), "big")
    function = synk.function([], big[0])
    checkpoint.save(sys.argv[1], big)
    synk.broadcast(big, np.ones(100_000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        checkpoint.save(sys.argv[1], big)
    except OSError as error:
        assert error.filename == sys.argv[1] and "File too large" in str(error), error
    else:
        raise AssertionError
    assert os.listdir(os.path.dirname(sys.argv[1])) == ["one.npz"]
    checkpoint.load(sys.argv[1], big)
    assert not synk.gather(big).any()
    """
    _, err = run_script(script, tmp_path / "one.npz")
    assert "Exception" not in err


def npy_of(shape, dtype="float32"):
    """Return a .npy file whose header declares an array of this shape, followed by 32 bytes of data."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": False, "descr": dtype})
    return file.getvalue() + bytes(32)


def zipped(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, contents in members.items():
            archive.writestr(name.replace("_", "/") + ".npy", contents)
    return file.getvalue()


GOOD = npy_of((4, 2))
NOT_ONE = "arrays, not one for each variable and rank"

FOREIGN = {
    "nothing": (b"", "File is not a zip file"),
    "text": (b"not a checkpoint", "File is not a zip file"),
    "a single array": (GOOD, "File is not a zip file"),
    "an empty archive": (zipped(), f"it holds 0 {NOT_ONE}"),
    "other names": (zipped(weights=GOOD), "it holds 'weights.npy'"),
    "a rank is missing": (zipped(**{"0_0": GOOD, "1_1": GOOD}), f"it holds 2 {NOT_ONE}"),
    "no array": (zipped(**{"0_0": b"text"}), "magic string"),
    "a short array": (zipped(**{"0_0": npy_of((5, 2))}), r"as an array of float32 of shape \(5, 2\)"),
    "a huge array": (zipped(**{"0_0": npy_of((10**15, 2))}), r"as an array of float32 of shape \(10+, 2\)"),
    "a rank twice": (zipped(**{"0_0": GOOD, "00_0": GOOD}), "it holds '00/0.npy'"),
    "objects": (zipped(**{"0_0": npy_of((4,), "O")}), "as an array of object of shape"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file(variables, tmp_path, kind):
    path = tmp_path / "foreign.npz"
    contents, reason = FOREIGN[kind]
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is damaged, or not a checkpoint: .*{reason}"):
        checkpoint.load(path, variables[0])


def test_a_damaged_file_changes_nothing(variables, saved):
    """A truncated file, or one with a wrong byte, raises ValueError or loads the saved values."""
    path, values = saved
    intact = path.read_bytes()
    rng = np.random.default_rng(0)
    n_refused = 0
    for step in range(300):
        at = int(rng.integers(len(intact)))
        wrong = intact[:at] if step % 3 == 0 else intact[:at] + bytes([intact[at] ^ 1 << step % 8]) + intact[at + 1 :]
        path.write_bytes(wrong)
        try:
            checkpoint.load(path, variables)
        except ValueError as error:
            assert str(path) in str(error)
            n_refused += 1
        np.testing.assert_equal([synk.get_value(rank, variables) for rank in range(3)], values)
    assert n_refused > 200


def test_a_flipped_bit_in_the_directory_of_the_archive(variables, tmp_path):
    """A file with hidden entries is not taken for a complete checkpoint of fewer ranks or variables."""
    path, counter = tmp_path / "one.npz", variables[1]
    for rank in range(3):
        synk.set_value(rank, counter, np.int64(rank))
    checkpoint.save(path, counter)
    intact = path.read_bytes()
    for at in range(8 * intact.index(b"PK\x01\x02"), 8 * len(intact)):
        wrong = bytearray(intact)
        wrong[at // 8] ^= 1 << at % 8
        path.write_bytes(wrong)
        with contextlib.suppress(ValueError):
            checkpoint.load(path, counter)
            assert [int(synk.get_value(rank, counter)) for rank in range(3)] == [0, 1, 2]


def test_a_checkpoint_of_an_earlier_version_has_no_comment(variables, saved):
    path, values = saved
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b""
    set_apart(variables, offset=1.0)
    checkpoint.load(path, variables)
    np.testing.assert_array_equal(synk.get_value(2, variables[0]), values[2][0])


def test_a_folder_is_refused(variables, tmp_path):
    with pytest.raises(IsADirectoryError):
        checkpoint.load(tmp_path, variables)


def test_a_pipe_is_refused(variables, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is damaged, or not a checkpoint: it is not a regular file"):
        checkpoint.load(tmp_path / "pipe", variables)


def write(path, values):
    """Write a checkpoint of one variable in the format of `save`."""
    np.savez(path, **{f"0/{rank}": value for rank, value in enumerate(values)})


def test_another_number_of_ranks(variables, tmp_path):
    same = np.full((4, 2), 7, "float32")
    write(tmp_path / "same.npz", [same, same])
    checkpoint.load(tmp_path / "same.npz", variables[0])
    np.testing.assert_array_equal(synk.gather(variables[0]), np.stack([same] * 3))
    write(tmp_path / "other.npz", [same, same + 1])
    with pytest.raises(ValueError, match="different values on 2 ranks; expected a session of as many, got 3"):
        checkpoint.load(tmp_path / "other.npz", variables[0])


SAVER = """
from synkhronos.extensions import checkpoint
synk.fork(2)
big = theano.shared(np.zeros(2_000_000), "big")
synk.function([], big[0])
for step in range(1, 10_000):
    synk.broadcast(big, np.full(2_000_000, float(step)))
    checkpoint.save(sys.argv[1], big)
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.02, 0.04])
def test_a_kill_while_saving_leaves_a_complete_file(tmp_path, delay):
    path = tmp_path / "killed.npz"
    with start_script(SAVER, path, fresh=True) as saver:
        try:
            for _ in range(2):
                last = int(saver.stdout.readline())
            time.sleep(delay)
        finally:
            saver.kill()
    with np.load(path) as archive:
        for rank in range(2):
            value = archive[f"0/{rank}"]
            assert value.shape == (2_000_000,)
            assert value[0] >= last
            assert (value == value[0]).all()


def test_exceptions_of_signal_handlers_are_not_reported_as_damage(synchronize, tmp_path, monkeypatch):
    """An exception of a signal handler passes through unchanged, even an `OSError` such as `TimeoutError`."""

    def timed_out(number, frame):
        raise TimeoutError("of the program")

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGALRM)

    synchronize(2)
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)  # the alarm may go off in a finalizer
    old = signal.signal(signal.SIGALRM, timed_out)
    try:
        path = tmp_path / "one.npz"
        var = theano.shared(np.ones(3))
        synk.broadcast(var)
        checkpoint.save(path, var)
        before = path.read_bytes()
        for module, name in ((checkpoint, "_array"), (zipfile, "ZipFile")):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, interrupted)
                with pytest.raises(TimeoutError, match="of the program"):
                    checkpoint.load(path, var)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupted)
            with pytest.raises(TimeoutError, match="of the program"):
                checkpoint.save(path, var)
        for delay in np.random.RandomState(0).uniform(1e-5, 3e-3, 300):  # at random times
            with contextlib.suppress(TimeoutError):
                signal.setitimer(signal.ITIMER_REAL, delay)
                for _ in range(10):  # Python drops exceptions that are raised in a finalizer
                    checkpoint.save(path, var)
                signal.setitimer(signal.ITIMER_REAL, 0)
        assert os.listdir(tmp_path) == ["one.npz"]
        assert path.read_bytes() == before
    finally:
        signal.signal(signal.SIGALRM, old)
