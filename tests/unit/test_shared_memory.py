"""Collectives between bare processes, through staging buffers and in place: bitwise equal to NumPy."""

import functools
import os

import numpy as np
import pytest
from rank_processes import Ranks

from synkhronos._collectives.transport import ShapesDiffer
from synkhronos._native import native

UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
STAGING_BYTES = native.STAGING_BYTES


@pytest.fixture(params=["direct", "staged", "mixed"])
def way(request):
    """Return how ranks read arrays: "direct" in the shared heap, "staged" in buffers, or "mixed" by the rank."""
    return request.param


def run(way, n_ranks, work):
    Ranks(n_ranks, shared_heap=way != "staged").run(work)


def placed(way, me, array):
    """Return a copy of an array, in the shared heap or in private memory."""
    if way == "direct" or (way == "mixed" and me.rank == 0):
        return array.copy()
    memory = bytearray(array.nbytes + 64)  # allocated by Python, so not in the shared heap
    copy = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


def values_of(rank, size, dtype):
    values = np.random.RandomState(rank).uniform(-9, 9, size)
    return np.abs(values).astype(dtype) if np.dtype(dtype).kind == "u" else values.astype(dtype)


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_every_op_equals_numpys_reduction_in_rank_order_on_every_rank(ranks, way, op):
    sizes = [(3, "float32"), (300_001, "float32"), (1000, "uint8"), (100_000, "int64"), (70_000, "float64")]
    sizes += [(5000, "complex128"), (17, "complex64"), (0, "float64")]

    def work(me):
        arrays = [placed(way, me, values_of(me.rank, size, dtype)) for size, dtype in sizes]
        assert me.transport.all_reduce(arrays, op, None) == (way == "direct" or ranks == 1)
        for array, (size, dtype) in zip(arrays, sizes):
            every = [values_of(rank, size, dtype) for rank in range(me.n_ranks)]
            assert array.tobytes() == functools.reduce(UFUNCS[op], every).tobytes()

    if op in ("max", "min"):
        sizes = [pair for pair in sizes if "complex" not in pair[1]]
    run(way, ranks, work)


@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
def test_averages(ranks, way, dtype):
    weights = [float(rank != 1) * (rank + 1) for rank in range(ranks)]

    def work(me):
        for number, given in enumerate([None, weights], 1):
            me.begin(number)
            array = placed(way, me, values_of(me.rank, 150_000, dtype))
            if me.rank == 1 and given and array.dtype.kind == "f":
                array[:] = np.nan  # ignored because of its weight of 0
            me.transport.all_reduce([array], "avg", given)
            every = np.array([values_of(rank, 150_000, dtype) for rank in range(me.n_ranks)], "float64")
            expected = np.average(every, axis=0, weights=given)
            expected = np.rint(expected) if array.dtype.kind == "i" else expected
            np.testing.assert_allclose(array, expected, rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-2)
            me.barrier()

    run(way, ranks, work)


def test_many_arrays_and_blocks_one_after_the_other(way):
    """Random delays of ranks show a rank that reads too early or writes too late."""

    def work(me):
        random = np.random.RandomState(7)
        slow = np.random.RandomState(me.rank)
        for number in range(1, 40):
            me.begin(number)
            sizes = [int(2 ** random.uniform(0, 19)) for _ in range(random.choice([1, 3, 6, 300]))]
            base = [random.randint(0, 100, size if len(sizes) < 9 else size % 9000) for size in sizes]
            arrays = [placed(way, me, (one * (me.rank + 1)).astype("int32")) for one in base]
            for _ in range(slow.randint(3)):
                os.sched_yield()
            me.transport.all_reduce(arrays, "sum", None)
            for array, one in zip(arrays, base):
                assert (array == 10 * one).all()
            me.barrier()

    run(way, 4, work)


@pytest.mark.parametrize(
    ("op", "result"), [("sum", "int64"), ("sum", "float32"), ("max", "float32"), ("avg", "int16"), ("avg", "float64")]
)
def test_reduce_returns_the_result_to_one_rank_and_changes_no_input(ranks, way, op, result):
    root, size, dtype = ranks // 2, 400_001, "float32" if result == "float32" else "int16"

    def work(me):
        given = [placed(way, me, values_of(me.rank, size, dtype)), values_of(me.rank, 3, dtype)]
        copies = [array.copy() for array in given]
        outs = [placed(way, me, np.empty(array.shape, result)) for array in given] if me.rank == root else None
        me.transport.reduce(given, op, outs, [np.dtype(result)] * 2)
        assert all((array == copy).all() for array, copy in zip(given, copies))
        for out in outs or []:
            every = [values_of(rank, out.size, dtype).astype("float64") for rank in range(me.n_ranks)]
            expected = np.mean(every, axis=0) if op == "avg" else functools.reduce(UFUNCS[op], every)
            expected = np.rint(expected) if result == "int16" else expected
            np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-5)
        if outs is not None:
            me.board[0] = 1
        me.barrier()
        assert me.board[0] == 1

    run(way, ranks, work)


def test_reduce_in_place_and_all_gather_one_after_the_other(way):
    """Arrays have uneven lengths, some of them 0, and many blocks; the last rank gets the result of `reduce`."""

    def work(me):
        random = np.random.RandomState(7)
        slow = np.random.RandomState(me.rank)
        for number in range(1, 40):
            me.begin(2 * number)
            sizes = [[random.randint(0, 2 ** random.randint(1, 19)) for _ in range(4)] for _ in range(3)]
            arrays = [
                placed(way, me, np.full(size[me.rank], 10 * i + me.rank, "int16")) for i, size in enumerate(sizes)
            ]
            for _ in range(slow.randint(3)):
                os.sched_yield()
            for i, (size, gathered) in enumerate(zip(sizes, me.transport.all_gather(arrays, sizes)[0])):
                assert (gathered == np.repeat(10 * i + np.arange(4), size)).all()
            me.barrier()
            me.begin(2 * number + 1)
            total = placed(way, me, np.arange(number * 10_000) * (me.rank + 1))
            me.transport.reduce([total], "sum", [total] if me.rank == 3 else None, [total.dtype])
            assert (total == np.arange(number * 10_000) * (10 if me.rank == 3 else me.rank + 1)).all()
            me.barrier()

    run(way, 4, work)


@pytest.mark.parametrize("differing", [(5,), (100_000,), (4, 3)], ids=str)
@pytest.mark.parametrize("reduce", [False, True], ids=["all_reduce", "reduce"])
def test_different_shapes_change_nothing(way, differing, reduce):
    def work(me):
        shape = differing if me.rank == 1 else (3, 4)
        arrays = [placed(way, me, array) for array in (np.ones(200_000, "float32"), np.full(shape, me.rank, "float32"))]
        with pytest.raises(ShapesDiffer):
            if reduce:
                outs = arrays if me.rank == 0 else None
                me.transport.reduce(arrays, "sum", outs, [array.dtype for array in arrays])
            else:
                me.transport.all_reduce(arrays, "sum", None)
        assert (arrays[0] == 1).all()
        assert (arrays[1] == me.rank).all()
        me.begin(2)
        me.barrier()
        again = np.ones(STAGING_BYTES, "uint8")
        me.transport.all_reduce([again], "sum", None)
        assert (again == 3).all()

    run(way, 3, work)


def test_empty_arrays_and_none_at_all(way):
    def work(me):
        for number, arrays in enumerate([[], [np.empty(0)], [np.empty((0, 3)), np.ones(()), np.empty(0)]], 1):
            me.begin(number)
            me.transport.all_reduce(arrays, "sum", None)
            assert all((array == 2).all() for array in arrays)
            me.barrier()

    run(way, 2, work)


def test_arguments_that_do_not_fit_together_are_refused():
    def work(me):
        core = me.transport._core
        one = np.ones(4)
        add = native.Reduction("sum", "float64", "float64", [1])
        for part in [
            (one, np.ones(4, "float32"), add),
            (np.ones(4, "float32"), None, add),
            (np.ones(4, int), None, add),
        ]:
            with pytest.raises(ValueError, match="other dtypes"):
                core.run([part], 0, None, None, False)
        with pytest.raises(ValueError, match="other numbers of arrays"):
            core.run([(one, one, native.Reduction("sum", "float64", "float64", [1, 1]))], 0, None, None, False)
        with pytest.raises(ValueError, match="4 elements, and 3 of the result"):
            core.run([(one, np.ones(3), add)], 0, None, None, False)
        for part in [(one[::2], None, add), (one, [1.0], add), (1.0, one, add)]:
            with pytest.raises(TypeError, match="C-contiguous"):
                core.run([part], 0, None, None, False)
        with pytest.raises(ValueError, match="got 2 lengths; expected 1"):
            core.run([(one, one, [4, 4])], 0, None, None, False)
        for lengths, out in (([5], np.ones(5)), ([4], np.ones(5)), ([5], None)):
            with pytest.raises(ValueError, match=r"4 elements here, \d of all ranks"):
                core.run([(one, out, lengths)], 0, None, None, False)

    Ranks(1).run(work)
