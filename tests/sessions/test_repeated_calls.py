"""Calls that repeat the last one with other rows."""

import functools
import sys

import numpy as np
import pytest
from backend import T, theano

import synkhronos as synk

POINTS = np.arange(60.0).reshape(20, 3)
TARGETS = np.arange(20.0) ** 2


@functools.cache
def built(session):
    """Return functions of rows and targets, one gathered and one averaged, a third function, and the data."""
    x, y, scale = T.dmatrix("x"), T.dvector("y"), T.dscalar("scale")
    rows = synk.function([x, y], [(x.sum(axis=1) + y, "gather")], bcast_inputs=[])
    mean = synk.function([x, y], (x.sum(axis=1) * y).mean() * scale, bcast_inputs=[scale])
    other = synk.function([x], [(x * 2, "gather")])
    synk.distribute()
    return rows, mean, other, synk.data(POINTS), synk.data(TARGETS)


@pytest.fixture
def made(session):
    """Return the functions and data for this session."""
    return built(session)


def chosen(batch):
    """Return the points and targets of a batch."""
    some = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
    return POINTS[some], TARGETS[some]


BATCHES = [
    *(slice(start, start + 5) for start in (0, 5, 15, 3, 0)),
    *(slice(-5, None), slice(None, -15), slice(np.int64(2), np.int64(7))),
    *(slice(start, start + 10, 2) for start in (0, 4, 10)),
    slice(9, 4, -1),
    *([4, 1, 1, 19, number] for number in (0, 7, -1)),
    *(np.array([3, 2, 1, 0, 5]), TARGETS > 200, TARGETS < 30, 5, 7, None),
    *(slice(start, stop) for start, stop in ((7, 7), (8, 8), (4, 5), (19, 20))),
]


def test_each_batch_gives_its_rows(made):
    rows, mean, other, x, y = made
    for turn in range(2):
        for batch in BATCHES if turn else BATCHES[::-1]:
            points, targets = chosen(batch)
            np.testing.assert_array_equal(rows(x, y, batch=batch)[0], points.sum(axis=1) + targets)
            if turn:  # another call stages its batch in between
                np.testing.assert_array_equal(other(POINTS, batch=batch)[0], 2 * points)
            if len(points):
                expected = (points.sum(axis=1) * targets).mean() * turn
                np.testing.assert_allclose(mean(x, y, turn, batch=batch), expected, rtol=1e-12)
                assert sum(mean.counts) == len(points)


def test_wrong_batches_are_refused_in_repeated_calls(made):
    rows, _, _, x, y = made
    rows(x, y, batch=slice(0, 5))
    wrong = [(slice(0, 21), IndexError), (slice(-21, 5), IndexError), (slice(0.0, 5.0), TypeError)]
    wrong += [([0, 20], IndexError), (np.ones(19, bool), IndexError), (21, ValueError), (5.0, TypeError)]
    for batch, error in wrong:
        with pytest.raises(error, match="batch"):
            rows(x, y, batch=batch)
    np.testing.assert_array_equal(rows(x, y, batch=slice(5, 10))[0], POINTS[5:10].sum(axis=1) + TARGETS[5:10])


def test_data_of_other_lengths(made):
    """Negative bounds count from the end of each array, and minibatch data begin at the batch."""
    rows, _, _, x, _ = made
    longer = synk.data(np.concatenate([TARGETS, TARGETS]))
    part = synk.data(TARGETS[:5], minibatch=True)
    for start in (-5, -7, -20):
        batch = slice(start, start + 4)
        expected = POINTS[batch].sum(axis=1) + np.concatenate([TARGETS, TARGETS])[batch]
        np.testing.assert_array_equal(rows(x, longer, batch=batch)[0], expected)
    for start in (0, 10, 15):
        batch = slice(start, start + 5)
        np.testing.assert_array_equal(rows(x, part, batch=batch)[0], POINTS[batch].sum(axis=1) + TARGETS[:5])
    for batch in ([3, 4, 5, 6, 7], [19, 0, 1, 2, 3]):
        np.testing.assert_array_equal(rows(x, part, batch=batch)[0], POINTS[batch].sum(axis=1) + TARGETS[:5])


def test_parts_of_a_sequence_keep_their_rows(made):
    rows, _, _, x, y = made
    for shift in range(3):
        moved = [slice(start + shift, start + shift + 5) for start in (0, 5, 0)]
        moved += [list(range(start + shift, start + shift + 3)) for start in (1, 4)]
        with synk.sequence():
            futures = [rows(x, y, batch=batch) for batch in moved]
        for future, batch in zip(futures, moved):
            np.testing.assert_array_equal(future.result()[0], POINTS[batch].sum(axis=1) + TARGETS[batch])


class Address(theano.Op):
    """The address of a matrix."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [T.lscalar()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.array(inputs[0].__array_interface__["data"][0])


LAYOUTS = {
    "C order": lambda x: x,
    "Fortran order": np.asfortranarray,
    "reversed": lambda x: x[::-1],
    "other dtype": lambda x: x.astype("float32"),
    "read-only": lambda x: np.frombuffer(x.tobytes()).reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n_ranks", "master_rank"), [(2, 0), (3, 1), (3, 2)])
def test_numpy_inputs_of_any_layout(synchronize, layout, n_ranks, master_rank):
    synchronize(n_ranks, master_rank=master_rank)
    x, shift = T.dmatrix("x"), T.drow("shift")
    function = synk.function([x], [(x + shift, "gather"), (x.sum(), "sum")], [shift])
    exact = synk.function([x], [x + shift, x.sum(), x], [shift], exact=True)
    for i, n in enumerate((7, 7, 7, 3, 7)):
        array = LAYOUTS[layout](np.random.RandomState(i).randn(n, 4000))
        before = array.copy()
        row = np.full((1, 4000), float(i))
        for outputs in (function(array, row), exact(array, row)[:2]):
            np.testing.assert_allclose(outputs[0], before + i)
            np.testing.assert_allclose(outputs[1], before.astype("float64").sum(), rtol=1e-9)
        copied = exact(array, row)[2]
        copied[:] = 0  # results belong to the program
        part = [2, 0, 1, 1]
        np.testing.assert_allclose(exact(array, row, batch=part)[2], before[part])
        np.testing.assert_allclose(exact(array, row, batch=slice(0, 3))[2], before[:3])
        np.testing.assert_array_equal(array, before)


def test_the_controller_reads_its_rows_of_numpy_inputs_in_place(synchronize):
    synchronize(2)
    x = T.dmatrix("x")
    function = synk.function([x], [(Address()(x), None)])
    array = np.ones((6, 4000))
    n_references = sys.getrefcount(array)
    for _ in range(3):
        assert function(array) == [array.ctypes.data]
        assert sys.getrefcount(array) == n_references
    assert function(array[:1]) != [array.ctypes.data]  # the other rank reads that row, too


def test_a_sequence_uses_the_values_at_the_time_of_the_call(synchronize):
    synchronize(2)
    x = T.dmatrix("x")
    function = synk.function([x], x.sum(), exact=True)
    array = np.ones((6, 4))
    with synk.sequence():
        futures = []
        for i in range(3):
            array[:] = i
            futures.append(function(array))
    assert [future.result() for future in futures] == [0.0, 24.0, 48.0]
