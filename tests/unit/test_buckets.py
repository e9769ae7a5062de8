"""Division of the arrays of a collective on several nodes: sent with the votes, alone or together."""

import numpy as np
import pytest

from synkhronos._collectives.buckets import divide, length_of, split_memory, way_of

F4, F8, F2 = np.dtype("float32"), np.dtype("float64"), np.dtype("float16")


def part(n_bytes, dtype=F4, op="sum", sizes=(2, 2), returned=None):
    way_of.cache_clear()  # equal ways may be different objects
    array = np.empty(n_bytes // dtype.itemsize, dtype)
    way = way_of(op, dtype, returned or dtype, (1,) * sum(sizes), sizes)[1]
    return array, np.empty(array.size, way.returned), way


def sizes_of(parts):
    small, pieces = divide(parts)
    return [one.array.nbytes for one in small], [[one.array.nbytes for one in piece] for piece in pieces]


def test_smaller_arrays_share_pieces_up_to_their_size():
    kb = 1024
    many = [256] * 5
    small, pieces = sizes_of([part(n * kb) for n in (4, 2, 8, 4, 200, *many, 256, 128, 300, 8, 2, 8, 2050, 8, 8)])
    assert small == [4 * kb, 2 * kb, 2 * kb]
    assert pieces[:3] == [[n * kb for n in some] for some in ((8, 4, 200, *many), (256, 128), (300,))]
    assert pieces[3] == [8 * kb, 8 * kb]
    assert [len(piece) for piece in pieces[4:]] == [1, 1, 1, 2]
    assert sum(piece[0] for piece in pieces[4:7]) == 2050 * kb


@pytest.mark.parametrize(
    ("n_mib", "n_pieces"), [(1, 1), (1.5, 2), (3, 3), (4, 4), (8, 6), (12, 8), (12.5, 9), (98, 66)]
)
def test_a_large_array_is_in_pieces_of_1_to_1_5_mib(n_mib, n_pieces):
    mib = 1 << 20
    sizes = [n_bytes for (n_bytes,) in sizes_of([part(int(n_mib * mib))])[1]]
    assert (len(sizes), sum(sizes)) == (n_pieces, n_mib * mib)
    assert max(sizes) - min(sizes) <= 4 and max(sizes) <= 1.5 * mib


def test_what_one_rank_sends_to_all_is_in_pieces():
    n = 2_000_000
    sent, outs = np.arange(n, dtype=F4), np.zeros((2, n), F4)
    sides = [divide([(array, out, [0, n, 0, 0])])[1] for array, out in ((sent, outs[0]), (sent[:0], outs[1]))]
    assert [len(pieces) for pieces in sides] == [6, 6]
    for (one,), (other,) in zip(*sides):
        assert one.how == other.how == [0, one.array.size, 0, 0]
        assert one.array.nbytes <= 3 << 19 and other.array.size == 0
        one.out[:] = other.out[:] = one.array
    assert (outs == sent).all()
    assert len(divide([(sent, outs[0], [0, n - 1, 0, 1])])[1]) == 1  # of two ranks


def test_only_what_is_reduced_the_same_way_shares():
    n = 16 * 1024
    for one, other in [
        (part(n), part(n, F8)),
        (part(n), part(n, op="max")),
        (part(n, F2), part(n, F2)),  # leaders send each rank's array
        (part(n), (np.empty(n, F4), None, [n // 4] * 4)),  # gathered
    ]:
        assert sizes_of([one, other, one])[1] == [[some[0].nbytes] for some in (one, other, one)]
    assert [len(piece) for piece in divide([part(n, F2, sizes=(1, 1))] * 3)[1]] == [3]


def test_the_memory_of_a_piece_is_that_of_its_parts():
    _, (piece,) = divide([part(n * 1024) for n in (16, 20, 12)])
    memory = np.arange(length_of(piece))
    for one, expected in zip(split_memory(piece, memory), np.split(memory, [4096, 9216])):
        np.testing.assert_array_equal(one, expected)
    assert split_memory(piece[:1], memory)[0] is memory
    assert split_memory(piece, None) == [None] * 3


def test_what_counts_are_the_bytes_of_what_leaders_bring_and_get():
    I1, I8 = np.dtype("int8"), np.dtype("int64")
    widened = part(1 << 20, I1, returned=I8)
    assert len(divide([widened])[1]) == len(divide([part(8 << 20)])[1]) == 6
    small, pieces = divide([part(1 << 10, I1, returned=I8)] * 2)
    assert (len(small), len(pieces)) == (1, 1)
