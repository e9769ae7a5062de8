"""The shared heap alone: blocks compared with a model, pages of its file, limits and forks."""

import contextvars
import ctypes
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import run_script

from synkhronos._memory.descriptors import new_descriptor
from synkhronos._native import native

MEGABYTE = 1 << 20
SIZE = 256 * MEGABYTE
PAGE = 4096


class Made:
    """A shared heap whose file the test can inspect, and calls that allocate in it."""

    def __init__(self, n_ranks=2, rank=0, size=SIZE, keep=SIZE, shared=True):
        fd = new_descriptor() if shared else -1
        self.heap = native.Heap(fd, n_ranks, rank, size, keep)
        self.heap.allow(size)
        self.rank = rank
        self._file = os.dup(fd) if shared else None

    def make(self, function, *arguments, **keywords):
        """Return the result of a function, whose arrays are allocated in this rank's region."""
        return self.heap.call(lambda _: function(*arguments, **keywords), None)

    def run(self, n_commands):
        for _ in range(n_commands):
            self.heap.call(lambda _: None, None)

    def counts(self):
        return self.heap.counts()[self.rank]

    def pages(self):
        """Return the bytes of the file's pages, without the page of counts."""
        return os.fstat(self._file).st_blocks * 512 - PAGE

    def close(self):
        self.heap.close()
        if self._file is not None:
            os.close(self._file)


@pytest.fixture
def made():
    one = Made()
    yield one
    one.close()


def block(n_bytes):
    """Return the expected block size for ``n_bytes``, computed independently of the library."""
    if n_bytes < native.SMALLEST_BLOCK:
        return 0
    pages = -(-n_bytes // PAGE)
    unit = 1
    while pages > 8 * unit:
        unit *= 2
    return max(4, -(-pages // unit)) * unit * PAGE


# ---------------------------------------------------------------- blocks

n_bytes = st.one_of(st.integers(1, 100_000), st.integers(1, 12 * MEGABYTE), st.integers(1, 40).map(lambda n: n * PAGE))
action = st.one_of(
    st.tuples(st.sampled_from(["empty", "zeros"]), n_bytes),
    st.tuples(st.just("resize"), st.tuples(st.integers(0, 99), n_bytes)),
    st.tuples(st.just("free"), st.integers(0, 99)),
    st.tuples(st.just("run"), st.integers(1, 200)),
    st.tuples(st.just("trim"), st.none()),
)


def act(one, arrays, marks, what, how):
    if what in ("empty", "zeros"):
        arrays.append(one.make(getattr(np, what), how, np.uint8))
        assert what == "empty" or not arrays[-1].any()
        marks.append(len(marks) % 251 + 1)
    elif what == "resize" and arrays:
        which, size = how[0] % len(arrays), how[1]
        kept = min(size, arrays[which].size)
        arrays[which].resize(size, refcheck=False)
        assert (arrays[which][:kept] == marks[which]).all()
    elif what == "free" and arrays:
        del arrays[how % len(arrays)], marks[how % len(marks)]
        return
    elif what == "run":
        one.run(how)
    elif what == "trim":
        one.heap.trim()
        assert one.counts()[1] == 0
    for array, mark in zip(arrays[-1:], marks[-1:]):
        array[:] = mark
    if what == "resize" and arrays:
        arrays[which][:] = marks[which]


def check(one, arrays, marks):
    for array, mark in zip(arrays, marks):
        assert (array == mark).all()
        inside = one.heap.offset(array)
        if inside is not None:
            assert inside % 4096 == 0
            assert one.heap.base + inside == array.ctypes.data
            assert SIZE <= inside < 2 * SIZE


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("keep", [0, 3 * MEGABYTE, SIZE])
@given(actions=st.lists(action, max_size=40))
def test_blocks_against_a_model(actions, keep, shared):
    one = Made(n_ranks=3 if shared else 1, rank=1 if shared else 0, keep=keep, shared=shared)
    arrays, marks = [], []
    for what, how in actions:
        act(one, arrays, marks, what, how)
        check(one, arrays, marks)
        in_use, kept, largest = one.counts()
        assert in_use <= largest
        assert kept <= keep
        if shared:
            assert in_use == sum(block(each.nbytes) for each in arrays if one.heap.offset(each) is not None)
            assert one.pages() == in_use + kept
    one.close()


def test_blocks_are_a_quarter_too_large_at_most(made):
    for size in [native.SMALLEST_BLOCK, *np.random.RandomState(0).randint(native.SMALLEST_BLOCK, 9 * MEGABYTE, 300)]:
        array = made.make(np.empty, int(size), np.uint8)
        assert made.counts()[0] == block(size) <= max(1.25 * size + PAGE, native.SMALLEST_BLOCK)
        del array
    small = made.make(np.empty, native.SMALLEST_BLOCK - 1, np.uint8)
    assert made.heap.offset(small) is None


def test_freed_blocks_are_used_again_and_zeroed_where_zeros_are_wanted(made):
    where = made.make(np.ones, 100_000, np.uint8).ctypes.data
    for function in (np.ones, np.zeros, np.ones, np.zeros):
        array = made.make(function, 100_000, np.uint8)
        assert array.ctypes.data == where
        assert (array == (function is np.ones)).all()
        del array


def test_memory_that_commands_no_longer_need_is_freed(made):
    for _ in range(300):
        made.make(lambda: [np.ones(MEGABYTE, np.uint8) for _ in range(2)])
    assert made.counts()[:2] == (0, 2 * MEGABYTE)
    made.make(np.ones, 20 * MEGABYTE, np.uint8)
    assert made.counts()[1] == 22 * MEGABYTE == made.pages()
    for _ in range(130):
        made.make(np.ones, MEGABYTE, np.uint8)
    assert made.counts()[1] == MEGABYTE == made.pages()


def test_pages_are_kept_up_to_a_bound():
    one = Made(keep=5 * MEGABYTE)
    arrays = one.make(lambda: [np.ones(MEGABYTE, np.uint8) for _ in range(20)])
    arrays.clear()
    assert one.counts()[1] == 5 * MEGABYTE == one.pages()
    one.close()
    assert one.counts() == (0, 0, 0)


def test_freed_addresses_are_merged():
    """After arrays of one size are freed, arrays of another size fill the region."""
    one = Made(size=8 * MEGABYTE)
    for n in (20_000, 70_000, 300_000, 3_000_000, 8 * MEGABYTE):
        arrays = one.make(lambda n=n: [np.ones(n, np.uint8) for _ in range(8 * MEGABYTE // block(n))])
        assert all(one.heap.offset(array) is not None for array in arrays)
        arrays.clear()
        one.heap.trim()
    one.close()


def test_copies_for_the_program(made):
    array, own = made.make(np.zeros, (100, 300)), np.zeros(10_000)
    values = (array, own, array[5:, 3], None, 1.5)
    found = made.heap.private(values)
    assert found[1:2] == [own] and found[3:] == [None, 1.5] and type(found) is list
    for one, value in zip(found[0:3:2], (array, array[5:, 3])):
        assert made.heap.offset(one) is None and not np.shares_memory(one, value)
        assert np.array_equal(one, value) and one.flags.c_contiguous and one.flags.owndata
    assert made.heap.private([]) == []
    for wrong in (array, array[0, 0], None):
        with pytest.raises(TypeError, match="expected a list or tuple"):
            made.heap.private(wrong)


def test_where_arrays_lie(made):
    array = made.make(np.zeros, (100, 300))
    start = made.heap.offset(array)
    assert made.heap.offset(array[3:, 7:]) == start + 8 * (3 * 300 + 7)
    assert made.heap.offset(array.T[::-1]) == start + 8 * 299
    assert made.heap.offset(array[::-2, ::-1]) == start + 8 * (99 * 300 + 299)
    assert made.heap.offset(array[:0]) == start
    assert made.heap.offset(np.zeros(10_000)) is None
    assert made.heap.offset(np.zeros(())) is None
    with pytest.raises(TypeError, match="expected an array"):
        made.heap.offset([1])
    beyond = np.lib.stride_tricks.as_strided(array, (2**40,), (8,))
    assert made.heap.offset(beyond) is None


# ---------------------------------------------------------------- the allocation handler


def test_the_handler_is_set_within_a_call_alone(made):
    def fails():
        assert made.heap.offset(np.ones(10_000)) is not None
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made.make(fails)
    assert made.heap.offset(np.ones(10_000)) is None
    inner = made.make(lambda: made.make(np.ones, 10_000))
    assert made.heap.offset(inner) is not None
    context = contextvars.copy_context()
    assert made.heap.offset(context.run(made.make, np.ones, 10_000)) is not None
    assert made.heap.offset(context.run(np.ones, 10_000)) is None
    assert made.make(lambda: made.heap.offset(contextvars.Context().run(np.ones, 10_000))) is None


def test_another_handler_comes_back():
    other, one = Made(), Made()
    array = other.make(lambda: (one.make(np.ones, 10_000), np.ones(10_000)))
    assert one.heap.offset(array[0]) is not None
    assert other.heap.offset(array[1]) is not None
    one.close(), other.close()


def test_threads_do_not_allocate_there_and_may_free(made):
    with ThreadPoolExecutor(4) as pool:
        offset = made.make(lambda: pool.submit(lambda: made.heap.offset(np.ones(10_000))).result())
        assert offset is None
        arrays = made.make(lambda: [np.ones(10_000) for _ in range(100)])
        assert len(list(pool.map(lambda _: [arrays.pop() for _ in range(25)], range(4)))) == 4
    assert made.counts()[0] == 0


def mapped(text="/memfd:synkhronos"):
    with open("/proc/self/maps") as maps:
        return [line for line in maps if text in line]


def test_a_mapping_lives_as_long_as_its_last_block():
    before = len(mapped())
    one = Made()
    small, large = one.make(lambda: (np.ones(3), np.ones(100_000)))
    one.close()
    assert len(mapped()) > before
    late = one.make(np.ones, 100_000)
    assert one.heap.offset(late) is None
    del one
    large += 1
    assert (large == 2).all()
    del large
    assert len(mapped()) == before
    assert (small == 1).all()
    small.resize(100_000, refcheck=False)
    del small, late


def test_closing_twice_and_within_a_command():
    one = Made()
    one.close()
    one.heap.close()
    one.heap.trim()
    assert one.make(np.ones, 100_000).all()
    other = Made()
    array = other.make(np.ones, 100_000)
    other.make(lambda: (other.close(), array.resize(0, refcheck=False)))
    other.heap.close()


def test_freeing_at_exit_and_at_any_time_after_closing():
    run_script(
        """
        from synkhronos._native import native
        from synkhronos._memory.descriptors import new_descriptor
        kept = []
        for _ in range(3):
            heap = native.Heap(new_descriptor(), 2, 0, 1 << 28, 1 << 28)
            heap.allow(1 << 28)
            kept.append(heap.call(np.ones, 100_000))
            kept.append(heap.call(np.ones, 3))
            heap.close()
        class Late:
            def __del__(self):
                assert (self.array == 1).all()
        late = Late()
        late.array = kept[0]
        late.itself = late
        del kept[1]
        """
    )


# ---------------------------------------------------------------- too little memory


def test_arrays_beyond_the_allowed_bytes_are_allocated_by_malloc(made):
    made.heap.allow(10 * MEGABYTE)
    arrays = made.make(lambda: [np.ones(3 * MEGABYTE, np.uint8) for _ in range(5)])
    assert sum(made.heap.offset(array) is not None for array in arrays) == 3
    assert made.heap.short
    assert all((array == 1).all() for array in arrays)
    arrays.clear()
    array = made.make(np.ones, 8 * MEGABYTE, np.uint8)  # replaces the kept blocks
    assert made.heap.offset(array) is not None
    assert made.pages() == 8 * MEGABYTE


def test_more_than_a_region():
    one = Made(size=4 * MEGABYTE)
    one.heap.allow(SIZE)
    arrays = one.make(lambda: [np.ones(n * MEGABYTE, np.uint8) for n in (3, 1, 1, 9)])
    assert [one.heap.offset(array) is not None for array in arrays] == [True, True, False, False]
    arrays[0].resize(9 * MEGABYTE, refcheck=False)
    assert arrays[0].sum() == 3 * MEGABYTE
    one.close()
    with pytest.raises(MemoryError):
        one.make(np.empty, 2**60, np.uint8)


def test_a_descriptor_that_the_program_has_closed_is_not_touched():
    run_script(
        """
        from synkhronos._native import native
        from synkhronos._memory.descriptors import new_descriptor
        fd = new_descriptor()
        heap = native.Heap(fd, 2, 0, 1 << 28, 1 << 28)
        heap.allow(1 << 28)
        first = heap.call(np.ones, 100_000)
        os.close(fd)
        with open("theirs", "w+b") as theirs:
            assert theirs.fileno() == fd
            second = heap.call(np.ones, 100_000)
            assert os.fstat(fd).st_size == 0 == os.fstat(fd).st_blocks
            del first
            heap.trim()
            heap.close()
            assert os.fstat(fd).st_size == 0
            assert (second == 1).all()
        os.unlink("theirs")
        """
    )


# ---------------------------------------------------------------- forks


def in_child(function):
    """Return whether a function returns a true value in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_has_its_own_copy_of_the_values_at_the_fork(made):
    arrays = made.make(lambda: [np.full(n, 3.0) for n in (5_000, 100_000, 9_000, 20_000)])
    del arrays[2]  # leaves a gap between arrays
    ready, go = os.pipe(), os.pipe()

    def live():
        os.write(ready[1], b"x")
        os.read(go[0], 1)  # until the parent has written
        right = all((array == 3).all() for array in arrays)
        for array in arrays:
            array[:] = 7
        other = made.make(np.ones, 100_000)
        right &= made.heap.offset(other) is None and made.heap.offset(arrays[0]) is None
        arrays.pop()
        right &= (arrays[0] == 7).all() and bool((other == 1).all())
        grandchild = in_child(lambda: (arrays[0] == 7).all() and arrays.clear() is None)
        arrays.clear()
        gc.collect()
        return right and grandchild

    pid = os.fork()
    if pid == 0:
        os._exit(0 if live() else 1)
    os.read(ready[0], 1)
    in_use = made.counts()
    for array in arrays:
        array[:] = 5
    fresh = made.make(np.full, 9_000, 5.0)
    os.write(go[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert all((array == 5).all() for array in [*arrays, fresh])
    assert made.counts()[0] == in_use[0] + block(fresh.nbytes)
    for end in (*ready, *go):
        os.close(end)


def test_a_child_maps_no_shared_memory(made):
    array = made.make(np.ones, 100_000)
    assert in_child(lambda: not [line for line in mapped() if "s " in line.split()[1]] and (array == 1).all())


def test_forks_while_threads_allocate(made):
    """A child never waits for a lock that another thread held at the fork."""
    over = threading.Event()
    held = made.make(np.full, 30_000, 4.0)

    def allocate():
        while not over.is_set():
            made.make(lambda: [np.ones(n * 3_000) for n in range(1, 9)])

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(allocate) for _ in range(3)]
        try:
            for _ in range(40):
                assert in_child(lambda: (held == 4).all() and made.make(np.ones, 50_000).all())
        finally:
            over.set()
    assert (held == 4).all() and not any(one.exception() for one in running)


def test_a_child_without_memory_for_copies_is_reported(made):
    array = made.make(np.ones, MEGABYTE)
    made.heap.allow(MEGABYTE)
    with pytest.warns(RuntimeWarning, match=r"no copy of the 8,?388,?608 bytes"):
        pid = os.fork()
        if pid == 0:
            os._exit(int(array[0]))
    assert os.waitpid(pid, 0)[1] == 11  # SIGSEGV instead of wrong values
    made.heap.allow(9 * MEGABYTE)
    assert in_child(lambda: array[0] == 1)


def test_ranks_share_and_take_regions_over():
    """A rank forked to replace another finds its own region empty, and the regions of others unchanged."""
    one = Made(n_ranks=3, rank=0)
    array = one.make(np.full, 100_000, 2.0)
    start = one.heap.offset(array)

    def live(rank):
        def work(_):
            pid = os.fork()
            if pid == 0:
                one.heap.take(rank)
                one.heap.allow(SIZE)
                right = one.heap.counts()[rank] == (0, 0, 0)
                own = one.make(np.zeros, 100_000)  # on pages that another process had written to
                right &= not own.any() and one.heap.offset(own) == rank * SIZE
                own[:] = rank
                array[rank] = 10 + rank
                os._exit(0 if right and not in_child(lambda: own[0] != rank) else 1)
            return pid

        return work

    for rank in (1, 2, 2):
        assert os.waitpid(one.heap.share(live(rank), None), 0)[1] == 0
    assert (array[:4] == [2, 11, 12, 2]).all()
    assert one.heap.offset(array) == start
    assert [count[0] for count in one.heap.counts()] == [block(array.nbytes)] * 3
    memory = (ctypes.c_char * (3 * SIZE - start)).from_address(array.ctypes.data)  # the heap from the array on
    neighbor = np.ndarray(100_000, np.float64, memory, 2 * SIZE - start)
    assert (neighbor == 2).all()
    assert in_child(lambda: array[1] == 11)  # the child is not a rank
    one.close()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("length", [50_000, 99_999, 200_000, 10])
def test_a_rank_resizes_an_array_of_the_process_that_forked_it(shared, length):
    """The rank gets a copy, because the block belongs to the other process; new elements are zeros."""
    one = Made(shared=shared)
    array = one.make(np.arange, 100_000.0)
    original = array.ctypes.data

    def work(_):
        pid = os.fork()
        if pid == 0:
            one.heap.take(1)
            one.heap.allow(SIZE)
            before = one.pages() if shared else 0
            one.make(array.resize, length, refcheck=False)
            right = array.ctypes.data != original and array.shape == (length,)
            right &= np.array_equal(array[:100_000], np.arange(100_000.0)[:length]) and not array[100_000:].any()
            right &= not shared or one.pages() - before <= block(array.nbytes)
            os._exit(0 if right else 1)
        return pid

    assert os.waitpid(one.heap.share(work, None), 0)[1] == 0
    assert np.array_equal(array, np.arange(100_000.0))
    one.close()
