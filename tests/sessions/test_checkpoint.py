"""`extensions.checkpoint`: every rank's values come back, and a kill while saving leaves the previous file whole."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import theano

import synkhronos as synk
from synkhronos.extensions import checkpoint


@pytest.fixture(scope="module")
def variables():
    """Three shared variables on three ranks, with values of each rank's own."""
    synk.fork(3)
    weights = theano.shared(np.zeros((4, 2), "float32"), "weights")
    counter = theano.shared(np.int64(0), "counter")
    rows = theano.shared(np.zeros(3, "float64"), "rows")
    synk.function([], [weights.sum(), counter, rows.sum()])
    yield [weights, counter, rows]
    synk.close()


def set_apart(variables, offset=0.0):
    """Give each rank other values, the last variable even other lengths; returns them by rank."""
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


def test_every_rank_gets_its_own_values_back(variables, tmp_path):
    values = set_apart(variables)
    checkpoint.save(tmp_path / "one.npz", variables)
    set_apart(variables, offset=100.0)
    checkpoint.load(tmp_path / "one.npz", variables)
    for rank in range(3):
        for got, expected in zip(synk.get_value(rank, variables), values[rank]):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
    assert os.listdir(tmp_path) == ["one.npz"]


def test_one_variable_without_a_list(variables, tmp_path):
    set_apart(variables)
    checkpoint.save(str(tmp_path / "one.npz"), variables[0])
    synk.broadcast(variables[0], np.zeros((4, 2), "float32"))
    checkpoint.load(str(tmp_path / "one.npz"), variables[0])
    np.testing.assert_array_equal(synk.gather(variables[0])[:, 0, 0], [0, 1, 2])


def test_what_does_not_match_is_refused_and_changes_nothing(variables, tmp_path):
    set_apart(variables)
    path = tmp_path / "one.npz"
    checkpoint.save(path, variables)
    with pytest.raises(ValueError, match="3 variables were saved; got 2"):
        checkpoint.load(path, variables[:2])
    with pytest.raises(ValueError, match="expected int64 of 0 dimensions for counter; found float32 of 2"):
        checkpoint.load(path, [variables[1], variables[0], variables[2]])
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none.npz", variables)
    np.testing.assert_array_equal(synk.gather(variables[1]), [10, 11, 12])


def test_a_failed_save_leaves_the_old_file(variables, tmp_path):
    set_apart(variables)
    checkpoint.save(tmp_path / "one.npz", variables)
    before = (tmp_path / "one.npz").read_bytes()
    (tmp_path / "one.npz.partial").mkdir()
    with pytest.raises(OSError, match="partial"):
        checkpoint.save(tmp_path / "one.npz", variables)
    assert (tmp_path / "one.npz").read_bytes() == before


def write(path, values):
    """A checkpoint as `save` lays it out, of one variable."""
    np.savez(path, **{f"0/{rank}": value for rank, value in enumerate(values)})


def test_another_number_of_ranks(variables, tmp_path):
    same = np.full((4, 2), 7, "float32")
    write(tmp_path / "same.npz", [same, same])
    checkpoint.load(tmp_path / "same.npz", variables[0])
    np.testing.assert_array_equal(synk.gather(variables[0]), np.stack([same] * 3))
    write(tmp_path / "other.npz", [same, same + 1])
    with pytest.raises(ValueError, match="different values on 2 ranks; the session has 3"):
        checkpoint.load(tmp_path / "other.npz", variables[0])


SAVER = """
import sys, numpy as np, synkhronos as synk, theano
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
def test_a_kill_while_saving_leaves_a_whole_file(tmp_path, delay):
    path = tmp_path / "killed.npz"
    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2):
            last = int(saver.stdout.readline())
        time.sleep(delay)
    finally:
        saver.send_signal(signal.SIGKILL)
        saver.wait(timeout=30)
        saver.stdout.close()
    with np.load(path) as archive:
        for rank in range(2):
            value = archive[f"0/{rank}"]
            assert value.shape == (2_000_000,)
            assert value[0] >= last
            assert (value == value[0]).all()
