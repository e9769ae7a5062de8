"""Replaced workers, `fork(restart_workers=True)`: rows of a dead worker are restored, or reported as lost."""

import functools

import numpy as np
import pytest
from backend import theano
from every_function import built, restarted
from fault_ops import KILL
from process_state import kill, worker_pids

import synkhronos as synk


def replace_worker(rank=1):
    """Kill a worker during a call, and return the error, which reports that the worker was replaced."""
    synk.set_value(rank, built["fault"], KILL)
    error = restarted(built["f"], np.ones(6))
    assert error.ranks == (rank,)
    return error


@functools.cache
def using_rows(exact):
    """Build a function of a scattered variable, and the variable; float32 represents all scattered integers exactly."""
    rows = theano.shared(np.zeros((1, 3), "float32"), f"rows of {'exact' if exact else 'plain'}")
    total = rows.sum(axis=0) if exact else (rows.sum(axis=0), "sum")
    return synk.function([], total, sliceable_shareds=[rows], exact=exact), rows


X = np.arange(45, dtype="float32").reshape(15, 3)
COLUMNS, INTEGERS = np.asfortranarray(X), X.astype("int16")
SCATTERED = {
    "an array": (lambda: (X, {}), X),
    "a view": (lambda: (X[2:13:2], {}), X[2:13:2]),
    "a view in another order": (lambda: (COLUMNS[1:, ::-1], {}), X[1:, ::-1]),
    "an array of another dtype": (lambda: (INTEGERS, {}), X),
    "a slice of an array": (lambda: (X, {"batch": slice(3, 12)}), X[3:12]),
    "rows that a list picks": (lambda: (X, {"batch": [14, 0, 0, 7, 3, 1]}), X[[14, 0, 0, 7, 3, 1]]),
    "rows that a mask picks": (lambda: (X, {"batch": X[:, 0] > 9}), X[X[:, 0] > 9]),
    "fewer rows than ranks": (lambda: (X[:2], {}), X[:2]),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "plain"])
@pytest.mark.parametrize("kind", SCATTERED)
def test_scattered_rows_are_restored(restarting, exact, kind):
    function, rows = using_rows(exact)
    make, expected = SCATTERED[kind]
    values, options = make()
    synk.scatter(rows, values, **options)
    del values
    parts = [synk.get_value(rank, rows) for rank in range(3)]
    for rank in (1, 2):
        error = replace_worker(rank)
        assert error.lost == []
        assert "the next call will work" in str(error)
        for part, again in zip(parts, [synk.get_value(rank, rows) for rank in range(3)]):
            np.testing.assert_array_equal(part, again)
        np.testing.assert_array_equal(synk.gather(rows, nd_up=0), expected)
        if not exact or all(map(len, parts)):
            np.testing.assert_array_equal(function(), expected.sum(axis=0))


def test_scattered_data_and_rows_that_were_set_are_restored(restarting):
    function, rows = using_rows(False)
    data = synk.data(X)
    synk.scatter(rows, data, batch=[1, 3, 5, 7])
    replace_worker(2)
    np.testing.assert_array_equal(synk.gather(rows, nd_up=0), X[[1, 3, 5, 7]])
    own = X[9:] * 2
    synk.set_value(1, rows, own, batch=slice(1, 3))
    replace_worker(1)
    np.testing.assert_array_equal(synk.get_value(1, rows), own[1:3])
    with synk.sequence():
        synk.scatter(rows, X[:4])
        synk.scatter(rows, X)
    kill(*worker_pids())
    restarted(function)
    np.testing.assert_array_equal(function(), X.sum(axis=0))


def scatter_a_temporary_array(rows):
    synk.scatter(rows, X * 2)


def change_the_array(rows):
    values = X.copy()
    synk.scatter(rows, values)
    built["values"] = values
    values[6, 1] += 1


def shrink_data(rows):
    built["values"] = data = synk.data(X)
    synk.scatter(rows, data)
    data.set_length(2)


def scatter_and_update(rows):
    synk.scatter(rows, X)
    if "updating" not in built:
        built["updating"] = synk.function([], (rows.sum(), "sum"), updates=[(rows, rows * 2)])
    built["updating"]()


def set_a_temporary_array(rows):
    synk.scatter(rows, X)
    synk.set_value(1, rows, X * 3)


def interrupted_scatter(rows):
    synk.broadcast(rows, X)
    kill(worker_pids()[0])
    error = restarted(synk.scatter, rows, X)
    assert error.lost == [rows]
    return error.ranks[0]


LOSSES = [
    scatter_a_temporary_array,
    change_the_array,
    shrink_data,
    scatter_and_update,
    set_a_temporary_array,
    interrupted_scatter,
]


@pytest.mark.parametrize("lose", LOSSES)
def test_rows_that_only_the_dead_worker_had_are_lost(restarting, lose):
    function, rows = using_rows(False)
    rank = lose(rows)
    if rank is None:
        error, rank = replace_worker(1), 1
        assert error.lost == [rows]
        assert 'its rows of "rows of plain" are lost' in str(error)
    uses = [synk.gather, synk.get_shapes, synk.get_lengths, synk.check_replicas]
    uses += [synk.all_gather, synk.all_reduce, synk.reduce, functools.partial(synk.get_value, rank)]
    for use in [function, *(functools.partial(use, rows) for use in uses)]:
        with pytest.raises(synk.SessionError, match=f'the rows of "rows of plain" on rank {rank} are lost'):
            use()
    with pytest.raises(synk.SessionError, match="are lost, because its worker died"), synk.sequence():
        synk.all_reduce(rows)
    assert len(synk.get_value(3 - rank, rows)) > 0  # other ranks still have their rows
    assert built["f"](np.ones(6)) == 6
    synk.set_value(3 - rank, rows, X)
    with pytest.raises(synk.SessionError, match="are lost, because its worker died"):
        function()
    with synk.sequence():
        synk.scatter(rows, X)
        synk.set_value(rank, rows, X[5 * rank : 5 * rank + 5])
    np.testing.assert_array_equal(function(), X.sum(axis=0))
    assert replace_worker(1).lost == []
    np.testing.assert_array_equal(function(), X.sum(axis=0))


@pytest.mark.parametrize("again", ["set", "broadcast"])
def test_lost_rows_are_set_again(restarting, again):
    function, rows = using_rows(False)
    scatter_a_temporary_array(rows)
    replace_worker(2)
    part = np.ones((2, 3), "float32")
    if again == "set":
        synk.set_value(2, rows, part)
        np.testing.assert_array_equal(function(), X[:10].sum(axis=0) * 2 + 2)
        assert replace_worker(2).lost == []  # the array `part` still exists
        np.testing.assert_array_equal(function(), X[:10].sum(axis=0) * 2 + 2)
    else:
        synk.broadcast(rows, part)
        np.testing.assert_array_equal(function(), [6, 6, 6])
    synk.broadcast(rows, part)
    assert replace_worker(1).lost == []
    np.testing.assert_array_equal(function(), [6, 6, 6])


@pytest.mark.parametrize("combine", [synk.all_reduce, synk.all_gather])
def test_variables_that_collectives_have_made_equal_are_not_lost(restarting, combine):
    _, rows = using_rows(False)
    synk.scatter(rows, X * 2)
    combine(rows)
    expected = synk.get_value(0, rows)
    assert replace_worker(1).lost == []
    for rank in range(3):
        np.testing.assert_array_equal(synk.get_value(rank, rows), expected)


def test_an_exact_update_of_scattered_rows_is_lost(restarting):
    rows = theano.shared(np.zeros((1, 3), "float32"), "exact rows")
    function = synk.function([], rows.sum(), updates=[(rows, rows * 2)], sliceable_shareds=[rows], exact=True)
    synk.scatter(rows, X)
    assert replace_worker(1).lost == []
    assert function() == X.sum()
    assert replace_worker(1).lost == [rows]
    with pytest.raises(synk.SessionError, match='"exact rows" on rank 1 are lost'):
        function()
    synk.scatter(rows, X)
    assert function() == X.sum()
