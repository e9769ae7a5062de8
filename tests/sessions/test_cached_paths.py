"""Invalidation of cached calls: every change of a program against every path that caches data for the next call.

Plans of calls, pickled messages, prepared work on ranks, reductions of collectives, and placements and views of results
are cached from call to call. A test repeats a path until all caches are in use, and then changes the program. The
results must still be those of the backend.
"""

import gc

import numpy as np
import pytest
from backend import T, theano
from collective_values import get, put
from comparison import close
from fault_ops import NOTHING, RAISE, Fault
from process_state import kill, worker_pids

import synkhronos as synk

N_RANKS = 3
ROWS, COLUMNS = 20, 3


def values(number, *shape):
    """Return small integers as floats, different for each number. Their sums are exact in any order."""
    return np.random.default_rng(number).integers(-9, 9, shape).astype("float64")


class Program:
    """Functions, variables and data, and copies of the values that they should hold."""

    def __init__(self):
        self.n_changes = 0
        self.w = theano.shared(values(0, COLUMNS), "w")
        self.fault = theano.shared(np.int64(NOTHING), "fault")
        self.by_dtype = {dtype: theano.shared(np.ones(2, dtype), dtype) for dtype in ("float64", "int64")}
        self.v = self.by_dtype["float64"]
        self.x = synk.data(np.zeros((ROWS, COLUMNS)))
        self.other = synk.data(values(1, ROWS, COLUMNS))
        self.per_rank = [values(rank, 2) for rank in range(N_RANKS)]
        self.build(2.0)
        self.fill(ROWS)

    def build(self, factor):
        """Build all functions, with a constant factor."""
        x = T.dmatrix("x")
        sums = (factor * Fault()(x, self.fault)).sum(axis=1)
        self.plain = synk.function([x], [(factor * x.dot(self.w), "gather"), (sums.max(), "max")])
        self.exact = synk.function([x], [factor * x.dot(self.w).mean(), x.max(axis=0)], exact=True)
        average = synk.averaged(x.mean(axis=0))  # weighted by the number of rows of each rank
        self.in_graph = synk.function([x], [factor * average + self.w, synk.summed(x.sum(axis=0)), synk.gathered(x)])
        synk.distribute()

    def fill(self, n_rows):
        """Set new values of the data, the array and the shared variable, and the rows of data and array."""
        self.n_changes += 1
        self.points = values(self.n_changes, n_rows, COLUMNS)
        self.x.set_value(self.points)
        self.array = self.points.copy()
        self.w.set_value(values(-self.n_changes % 97, COLUMNS))
        synk.broadcast(self.w)


@pytest.fixture(scope="module")
def made():
    """Return a dictionary for the program, which all tests of this module share."""
    return {}


@pytest.fixture
def program(synchronize, made):
    """Return the program, with new values and the initial number of rows. Earlier tests may have changed it."""
    synchronize(N_RANKS, restart_workers=True)
    if not made:
        made["program"] = Program()
    program = made["program"]
    program.fill(ROWS)
    return program


# ---------------------------------------------------------------- paths: each returns its results and the expected ones


def plain(p):
    return p.plain(p.x), p.plain.as_theano(p.points)


def plain_on_an_array(p):
    return p.plain(p.array), p.plain.as_theano(p.points)


def one_output(p):
    return p.plain(p.x, output_subset=[1]), p.plain.as_theano(p.points, output_subset=[1])


def in_slices(p):
    return p.plain(p.x, num_slices=2), p.plain.as_theano(p.points)


def exact(p):
    return p.exact(p.x), p.exact.as_theano(p.points)


def exact_on_an_array(p):
    return p.exact(p.array), p.exact.as_theano(p.points)


def of_batches(p, functions, batches):
    got, expected = [], []
    for batch in batches:
        for function in functions:
            got += function(p.x, batch=batch)
            expected += function.as_theano(p.points[:batch] if isinstance(batch, int) else p.points[batch])
    return got, expected


def ranges(p):
    return of_batches(p, [p.plain, p.exact], [slice(start, start + 6) for start in (0, 4, 1)])


def lists(p):
    return of_batches(p, [p.plain, p.exact], [[3, 1, 1, 5], [0, 2, 4, 6]])


def numbers_of_rows(p):
    return of_batches(p, [p.plain], [5, 7])


def in_a_graph(p):
    return of_batches(p, [p.in_graph], [4, 5, 8])


def other_data(p):
    """Call the function with other data of the same shape, then with the first data."""
    return [*p.plain(p.other), *p.plain(p.x)], [*p.plain.as_theano(p.other), *p.plain.as_theano(p.points)]


def collectives(p):
    got, expected = [], []
    for op, combined in (("sum", np.sum), ("max", np.max)):
        put(p.v, [value.astype(p.v.dtype) for value in p.per_rank])
        got.append(synk.reduce(p.v, op, in_place=False))
        synk.all_reduce(p.v, op)
        got += get(p.v, N_RANKS)
        expected += [combined(p.per_rank, axis=0).astype(p.v.dtype)] * (1 + N_RANKS)
    return got, expected


def gathering(p):
    put(p.v, [value.astype(p.v.dtype) for value in p.per_rank])
    synk.all_gather(p.v)
    return get(p.v, N_RANKS), [np.concatenate(p.per_rank).astype(p.v.dtype)] * N_RANKS


def a_sequence(p):
    with synk.sequence():
        futures = [p.plain(p.x), p.exact(p.x), p.plain(p.array)]
    wanted = p.plain.as_theano(p.points), p.exact.as_theano(p.points), p.plain.as_theano(p.points)
    return [one for future in futures for one in future.result()], [one for outputs in wanted for one in outputs]


PATHS = [plain, plain_on_an_array, one_output, in_slices, exact, exact_on_an_array, ranges, lists, numbers_of_rows]
PATHS += [in_a_graph, other_data, collectives, gathering, a_sequence]


def check(program, path):
    """Check that the results are the backend's, and that later calls do not overwrite them."""
    earlier, expected = path(program)
    for _ in range(2):
        close(path(program)[0], expected, rtol=1e-12)
    close(earlier, expected, rtol=1e-12)


# ---------------------------------------------------------------- changes


def values_set(p):
    p.fill(ROWS)


def values_set_in_place(p):
    p.points = p.points + 1
    p.x[:], p.array[:] = p.points, p.points


def value_set_on_one_rank(p):
    synk.set_value(1, p.w, p.w.get_value() + 1)
    p.w.set_value(p.w.get_value() - 1)
    synk.broadcast(p.w)


def memory_allocated_again(p):
    """Free the memory of the data, drop the array, and allocate another array at its address."""
    address = p.array.ctypes.data
    p.points = p.points[::-1] + 2
    p.array = None
    kept = []
    while len(kept) < 1000 and (not kept or kept[-1].ctypes.data != address):
        kept.append(np.empty((ROWS, COLUMNS)))
    assert kept[-1].ctypes.data == address
    p.array = kept[-1]
    p.array[:] = p.points
    p.x.free_memory()
    p.x.set_value(p.points)


def data_replaced(p):
    p.x = None
    gc.collect()
    p.points = p.points * 2
    p.array, p.x = p.points.copy(), synk.data(p.points)


def resized(p):
    p.fill(ROWS - 4)
    p.per_rank = [values(p.n_changes + rank, len(p.per_rank[0]) + 2) for rank in range(N_RANKS)]


def grown(p):
    p.fill(2 * ROWS)


def length_set(p):
    p.points = p.points[:-3]
    p.x.set_length(len(p.points))
    p.array = p.array[:-3]


def dtype_changed(p):
    """Change to integers of another shape, or back to fractions, which a cached integer dtype would truncate."""
    if p.array.dtype == "float64":
        p.points = np.floor(p.points[:-1])
        p.array = p.points.astype("int64")
    else:
        p.points = p.points + 1 / 3
        p.array = p.points.copy()
    p.x.set_value(p.points)
    p.v = p.by_dtype[str(p.array.dtype)]


def order_changed(p):
    p.array = np.asfortranarray(p.array)


def function_rebuilt(p):
    p.plain = p.exact = p.in_graph = None
    gc.collect()
    p.n_changes += 1
    p.build(2.0 + p.n_changes % 2)


def other_function_dropped(p):
    x = T.dvector("x")
    synk.function([x], (x.sum() * p.w.sum(), "sum"))(np.ones(5))
    gc.collect()


def wrong_arguments(p):
    for function in (p.plain, p.exact, p.in_graph):
        with pytest.raises((TypeError, ValueError)):
            function(np.zeros(3))
        with pytest.raises(IndexError):
            function(p.x, batch=[0, 1, 10**6, 2])


def exception_on_a_rank(p):
    synk.set_value(1, p.fault, RAISE)
    for path in (plain, plain_on_an_array, ranges, lists, a_sequence):
        with pytest.raises(synk.WorkerError, match="the fault that the test ordered"):
            path(p)
    synk.set_value(1, p.fault, NOTHING)


def shapes_differ(p):
    """Set different shapes on the ranks, so that an all-reduce fails on every rank before it changes anything."""
    before = p.per_rank[0].astype(p.v.dtype)
    synk.set_value(1, p.v, np.ones(len(before) + 1, p.v.dtype))
    with pytest.raises(Exception, match="shape"):
        synk.all_reduce(p.v)


def worker_replaced(p):
    kill(worker_pids()[0])
    with pytest.raises(synk.WorkerRestarted):
        p.plain(p.x)


CHANGES = [values_set, values_set_in_place, value_set_on_one_rank, memory_allocated_again, data_replaced, resized]
CHANGES += [grown, length_set, dtype_changed, order_changed, function_rebuilt, other_function_dropped, wrong_arguments]
CHANGES += [exception_on_a_rank, shapes_differ, worker_replaced]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_a_path_follows_a_change(program, path, change):
    for _ in range(2):
        check(program, path)
        change(program)
    check(program, path)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_paths_in_turn_follow_a_change(program, change):
    """Paths that share functions and data do not use each other's caches."""
    for _ in range(2):
        for path in PATHS:
            close(*path(program), rtol=1e-12)
        change(program)
