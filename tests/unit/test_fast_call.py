"""`native.FastCall`: accepts the arrays that its function accepts, and no others. Records of sent values."""

import gc
import sys
import weakref

import numpy as np
import pytest

from synkhronos._native import native


def made(n_outputs=1):
    """Return a `FastCall` that adds a matrix and a column, and its cells."""
    cells = [[None], [None], ["kept until the end"]]
    inputs = ((cells[0], np.dtype("float32"), (False, False)), (cells[1], np.dtype("float32"), (False, True)))
    runner = native.FastCall(lambda: [cells[0][0] + cells[1][0], "an update"], inputs, n_outputs, tuple(cells), ())
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
        native.FastCall(fail, (), 0, (), ())([])
    with pytest.raises(TypeError):
        native.FastCall(fail, (), 0, ([None], "no cell"), ())
    with pytest.raises(TypeError):
        native.FastCall(fail, (([], "no dtype"),), 0, (), ())
    for wrong in (([None], "no dtype", ()), ([None], np.dtype("float32"), 1), ([], np.dtype("float32"), ())):
        cell = wrong[0]
        count = sys.getrefcount(cell)
        with pytest.raises(TypeError):
            native.FastCall(fail, (wrong,), 0, (), ())
        assert sys.getrefcount(cell) == count
    with pytest.raises(TypeError):
        native.FastCall(fail, (), 0, (), ())(())


def test_it_follows_the_records_of_what_it_updates():
    storages = [[1], [2], [3]]
    records = tuple(map(native.SentValue, storages))
    native.note_values(records[:2], False)

    def update():
        storages[0][0], storages[2][0] = 5, 6
        return []

    runner = native.FastCall(update, (), 0, (), records)
    assert runner([None]) is None and records[0].sent == 1  # not called
    assert runner([]) == []
    assert [one.sent for one in records] == [5, 2, None]
    with pytest.raises(KeyError):
        native.FastCall({}.popitem, (), 0, (), records)([])
    with pytest.raises(TypeError):
        native.FastCall(update, (), 0, (), ("no record",))


def test_kinds_of_arrays():
    one, other = np.ones((2, 3)), np.ones(4, "int32")
    kinds = ((one.shape, one.dtype), (other.shape, other.dtype))
    assert native.are_of_kinds((one, other), kinds)
    assert native.are_of_kinds((np.asfortranarray(one)[::-1], other[::-1]), kinds)
    assert native.are_of_kinds((), ()) and native.are_of_kinds((np.float64(1) + np.zeros(()),)[:0], ())
    assert native.are_of_kinds((np.array(1.0),), (((), one.dtype),))
    other_dtype = one.astype(one.dtype.newbyteorder())
    for wrong in (one[:1], one.T, one[0], other_dtype, one.astype("f4"), one.view(np.recarray), [1.0], None, 1.0):
        assert not native.are_of_kinds((wrong, other), kinds)
    assert not native.are_of_kinds((one,), kinds) and not native.are_of_kinds((one, other, other), kinds)
    for wrong in (([one, other], kinds), ((one, other), list(kinds)), ((one,), (one.shape,)), ((one,), (None,))):
        with pytest.raises(TypeError):
            native.are_of_kinds(*wrong)
    with pytest.raises(TypeError):
        native.are_of_kinds((one,), (((2, "three"), one.dtype),))
    with pytest.raises(OverflowError):
        native.are_of_kinds((one,), (((2, 2**70), one.dtype),))


def test_records_of_sent_values():
    storages = [[np.zeros(1)], [np.ones(1)], ["any object"]]
    records = tuple(map(native.SentValue, storages))
    assert [(one.sent, one.stale) for one in records] == [(None, None)] * 3
    assert native.first_set(records) == 0 and native.first_set(()) == -1
    native.note_values(records, True)
    assert native.first_set(records) == -1
    assert all(one.sent is one.stale is one.storage[0] for one in records)
    storages[1][0], storages[2][0], records[2].sent = 5, 6, None
    assert native.first_set(records) == 1
    native.follow_values(records)
    assert [one.sent for one in records[1:]] == [5, None]  # the program had set the last one
    native.set_stale(records[:2], "in work")
    assert [one.stale for one in records] == ["in work", "in work", "any object"]
    native.note_values(records, False)
    assert [(one.sent, one.stale) for one in records[1:]] == [(5, None), (6, None)]


def test_records_own_their_values_and_nothing_else():
    storage = [np.zeros(3)]
    record, value = native.SentValue(storage), weakref.ref(storage[0])
    native.note_values((record,), True)
    storage[0] = record  # a cycle
    native.follow_values((record,))
    native.set_stale((record,), None)
    assert value() is None
    ended = weakref.ref(record)
    del record, storage
    gc.collect()
    assert ended() is None
    count = sys.getrefcount(None)
    for _ in range(1000):
        native.note_values((native.SentValue([None]),), True)
    assert abs(sys.getrefcount(None) - count) < 500


@pytest.mark.parametrize("wrong", [None, [], (None,), "records", "without a value"], ids=str)
def test_other_objects_are_refused(wrong):
    wrong = (native.SentValue([]),) if wrong == "without a value" else wrong
    for function in (native.first_set, native.follow_values):
        with pytest.raises(TypeError):
            function(wrong)
    with pytest.raises(TypeError):
        native.set_stale(wrong, None)
    with pytest.raises(TypeError):
        native.note_values(wrong, True)
    with pytest.raises(TypeError):
        native.SentValue(())
