"""`native.FastCall`: accepts the arrays that its function accepts, and no others."""

import sys

import numpy as np
import pytest

from synkhronos._native import native


def made(n_outputs=1):
    """Return a `FastCall` that adds a matrix and a column, and its cells."""
    cells = [[None], [None], ["kept until the end"]]
    inputs = ((cells[0], np.dtype("float32"), (False, False)), (cells[1], np.dtype("float32"), (False, True)))
    runner = native.FastCall(lambda: [cells[0][0] + cells[1][0], "an update"], inputs, n_outputs, tuple(cells))
    return runner, cells


@pytest.mark.parametrize("n_outputs", [0, 1, 2])
def test_it_returns_the_first_outputs_and_empties_the_cells(n_outputs):
    runner, cells = made(n_outputs)
    matrix, column = np.ones((2, 3), "float32"), np.full((2, 1), 2, "float32")
    results = runner([matrix, column])
    assert len(results) == n_outputs
    assert all(np.array_equal(one, np.full((2, 3), 3)) for one in results[:1])
    assert cells == [[None]] * 3


def test_it_takes_nothing_else():
    runner, cells = made()
    good = [np.ones((2, 3), "float32"), np.ones((2, 1), "float32")]
    unaligned = np.zeros(25, "uint8")[1:].view("float32").reshape(2, 3)
    others = [np.ones((2, 3)), np.ones((2, 3), ">f4"), np.ones(3, "float32"), 1.0, None, unaligned]
    for other in [*others, good[0].view(np.recarray)]:
        assert runner([other, good[1]]) is None
    assert runner([good[0], np.ones((2, 3), "float32")]) is None  # the column's axis 1 must have length 1
    assert runner(good[:1]) is None
    assert runner([*good, good[0]]) is None
    assert cells[:2] == [[None], [None]]
    assert runner([good[0][::-1, ::-1], good[1]])[0].sum() == 12


def test_exceptions_pass():
    def fail():
        raise KeyError("so it is")

    with pytest.raises(KeyError, match="so it is"):
        native.FastCall(fail, (), 0, ())([])
    with pytest.raises(TypeError):
        native.FastCall(fail, (), 0, ([None], "no cell"))
    with pytest.raises(TypeError):
        native.FastCall(fail, (([], "no dtype"),), 0, ())
    for wrong in (([None], "no dtype", ()), ([None], np.dtype("float32"), 1), ([], np.dtype("float32"), ())):
        cell = wrong[0]
        count = sys.getrefcount(cell)
        with pytest.raises(TypeError):
            native.FastCall(fail, (wrong,), 0, ())
        assert sys.getrefcount(cell) == count
    with pytest.raises(TypeError):
        native.FastCall(fail, (), 0, ())(())
