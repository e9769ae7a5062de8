"""`_utils.rows`: selections of rows, compared with NumPy's indexing."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_strategies import batches

from synkhronos._utils.rows import Rows, pieces, select, select_per_rank, shares, shift, take

LENGTHS = st.integers(0, 60)


def expand(selection):
    """Return the row numbers of a selection as a list."""
    return list(range(*selection.bounds)) if isinstance(selection, Rows) else list(selection)


@given(LENGTHS, st.integers(1, 12))
def test_shares_are_those_of_array_split(n, n_ranks):
    assert [expand(one) for one in shares(n, n_ranks)] == [list(one) for one in np.array_split(np.arange(n), n_ranks)]


@given(LENGTHS, st.integers(1, 80))
def test_pieces_cover_all_rows_and_are_not_empty(n, num_slices):
    parts = pieces(n, num_slices)
    assert [row for part in parts for row in expand(part)] == list(range(n))
    assert len(parts) == max(1, min(n, num_slices))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(st.data(), LENGTHS)
def test_select_means_what_numpy_means(data, length):
    """`select` returns the rows that NumPy's index selects, as a `Rows` within bounds or as int64 row numbers."""
    batch, index = data.draw(batches(length))
    selection = select(batch, length)
    assert expand(selection) == list(np.arange(length)[index])
    if isinstance(selection, Rows):
        assert 0 <= selection.start <= selection.stop <= length
    else:
        assert (selection.dtype, selection.ndim) == (np.int64, 1)


@given(st.data(), LENGTHS, st.integers(1, 6))
def test_shares_of_a_selection_put_together_are_the_selection(data, length, n_ranks):
    selection = select(data.draw(batches(length))[0], length)
    parts = [expand(take(selection, share)) for share in shares(len(selection), n_ranks)]
    assert [row for part in parts for row in part] == expand(selection)


REFUSED = {
    ValueError: [11, -1, slice(0, 5, 0), [[0, 1]], np.ones((10, 1), bool)],
    IndexError: [slice(0, 11), slice(-11, None), [0, 10], [-11], [True] * 9, np.array([2**63], dtype="uint64")],
    TypeError: [slice("a", None), [0.5], True, np.bool_(True), np.array(3)],
    (TypeError, ValueError): [[[0], [1, 2]], 2.0, "ab", [None], {1, 2}],
}


@pytest.mark.parametrize(("batch", "error"), [(one, error) for error, refused in REFUSED.items() for one in refused])
def test_an_invalid_batch_is_refused_by_name(batch, error):
    with pytest.raises(error, match="batch"):
        select(batch, 10)


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 4), st.integers(0, 3))
def test_shift_moves_the_lowest_row_of_a_slice_to_0(start, stop, step, more):
    rows = np.arange(40)[start:stop:step]
    needed = rows[-1] - rows[0] + 1 if len(rows) else 0
    assert expand(shift(slice(start, stop, step), needed + more)) == list(rows - rows.min() if len(rows) else rows)
    if needed:
        with pytest.raises(IndexError, match=f"batch spans {needed} rows.*has only {needed - 1}"):
            shift(slice(start, stop, step), needed - 1)


@given(st.data(), st.integers(1, 40))
def test_row_i_of_minibatch_data_belongs_to_the_ith_index(data, length):
    indices = st.lists(st.integers(-length, length - 1))
    masks = st.lists(st.booleans(), min_size=length, max_size=length)
    batch = data.draw(indices | indices.map(np.array).map(lambda one: one.astype(int)) | masks | masks.map(np.array))
    n = len(np.arange(length)[np.asarray(batch, int if not len(batch) else None)])
    assert shift(batch, n) == Rows(0, n)
    for other in (n - 1, n + 1):
        with pytest.raises(IndexError, match=f"batch has {n} indices, and the minibatch data {other} rows"):
            shift(batch, other)


def test_shift_leaves_a_number_of_rows_alone():
    assert shift(7, 7) == shift(7, 9) == Rows(0, 7)
    with pytest.raises(IndexError, match="batch spans 7 rows"):
        shift(7, 6)


WRONG_SLICES = [slice(-3, None), slice(0, None), slice(5, 0, -1), slice(0, 5, 0), slice(0, 2**62, 3)]
WRONG_LISTS = [[0.5], [[1, 2]], [2**63], np.ones((10, 1), bool)]


@pytest.mark.parametrize("batch", [*WRONG_SLICES, *WRONG_LISTS, -3, True, "ab", 1.5])
def test_shift_refuses_what_has_no_meaning_for_minibatch_data(batch):
    with pytest.raises((TypeError, ValueError, IndexError), match="batch"):
        shift(batch, 10)


LENGTHS_OF_RANKS = (5, 4, 0)


@pytest.mark.parametrize(
    ("batch_s", "expected"),
    [
        (None, [[0, 1, 2, 3, 4], [0, 1, 2, 3], []]),
        ([slice(0, 2), slice(None), slice(None)], [[0, 1], [0, 1, 2, 3], []]),
        ([[4, 0], [1], []], [[4, 0], [1], []]),
        ([np.array([4, 4]), slice(-1, None), []], [[4, 4], [3], []]),
        (([4], [-1], []), [[4], [3], []]),
        (slice(None, None, 2), [[0, 2, 4], [0, 2], []]),
        ([], [[], [], []]),
    ],
)
def test_batch_s_picks_for_each_rank(batch_s, expected):
    assert [expand(one) for one in select_per_rank(batch_s, LENGTHS_OF_RANKS)] == expected


@pytest.mark.parametrize("batch_s", [[0, 1], np.array([0, 1]), (0, 1), range(2)])
def test_one_batch_s_for_all_ranks(batch_s):
    assert [expand(one) for one in select_per_rank(batch_s, (2, 3))] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("batch_s", "error", "words"),
    [
        ([slice(1), slice(1)], ValueError, "3 ranks"),
        ([0], IndexError, "rank 2"),
        ([[0], [4], []], IndexError, "rank 1"),
        (3, TypeError, "batch_s"),
        ("abc", TypeError, "batch_s"),
        (np.zeros((3, 1), int), TypeError, "batch_s"),
    ],
)
def test_a_wrong_batch_s_is_refused_by_name_and_rank(batch_s, error, words):
    with pytest.raises(error, match=words):
        select_per_rank(batch_s, LENGTHS_OF_RANKS)


def test_rows_take_constant_time_and_memory():
    """No operation lists the rows of a `Rows`."""
    rows = Rows(5, 3 * 10**15)
    assert len(rows) == 3 * 10**15 - 5
    assert rows.bounds == (5, 3 * 10**15)
    for call in (tuple, list, iter, lambda rows: slice(*rows)):
        # Python 3.9 allocates the list before the iteration fails.
        with pytest.raises((TypeError, MemoryError)):
            call(rows)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(rows, protocol))
        assert type(again) is Rows and again == rows
    assert copy.deepcopy(rows) == rows
    assert [one.bounds for one in shares(3 * 10**15, 2)] == [(0, 15 * 10**14), (15 * 10**14, 3 * 10**15)]
    assert take(rows, Rows(10, 20)) == Rows(15, 25)
    assert repr(rows) == "Rows(start=5, stop=3000000000000000)"


@pytest.mark.parametrize("choose", [select, shift])
def test_lists_of_different_lengths_are_refused_by_name(choose):
    with pytest.raises(ValueError, match="batch has lists of different lengths"):
        choose([[1, 2], [3]], 2)
