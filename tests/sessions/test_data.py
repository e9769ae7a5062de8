"""`synk.data`: arrays in shared memory that grow, shrink, are files, and go away with the last who holds them."""

import copy
import gc
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys

import numpy as np
import psutil
import pytest
from backend import T
from comparison import assert_close
from hypothesis import given
from hypothesis import strategies as st
from multinode_sessions import one_machine
from process_state import wait_until, worker_pids
from scripts import ROOT, run_script

import synkhronos as synk

MEGABYTE = 1 << 20


@pytest.fixture
def two(synchronize):
    return synchronize(2)


@pytest.fixture
def summing(two):
    """A function that sums what it is given on the ranks, rank by rank."""
    return sum_of("float64", 1)


_built = {}


def sum_of(dtype, ndim):
    if (dtype, ndim) not in _built:
        x = T.TensorType(dtype, (False,) * ndim)("x")
        _built[dtype, ndim] = synk.function([x], (x.sum(), "sum"))
    return _built[dtype, ndim]


# ---------------------------------------------------------------- making


@pytest.mark.parametrize(
    ("arguments", "dtype", "shape"),
    [
        ({"value": [1.0, 2.0]}, "float64", (2,)),
        ({"value": [[1, 2], [3, 4]]}, "int64", (2, 2)),
        ({"value": np.ones((2, 3), "float32")}, "float32", (2, 3)),
        ({"value": 2.5}, "float64", ()),
        ({"value": True}, "bool", ()),
        ({"value": [1, 2], "dtype": "float32"}, "float32", (2,)),
        ({"value": [1, 2], "var": T.fvector()}, "float32", (2,)),
        ({"var": T.imatrix()}, "int32", (0, 0)),
        ({"var": T.imatrix(), "shape": (2, 5)}, "int32", (2, 5)),
        ({"dtype": "complex64", "ndim": 3}, "complex64", (0, 0, 0)),
        ({"dtype": "float16", "shape": (3, 0, 2)}, "float16", (3, 0, 2)),
        ({"dtype": "float16", "shape": 3}, "float16", (3,)),
        ({"dtype": "uint8", "ndim": 1, "shape": (4,)}, "uint8", (4,)),
        ({"value": np.float64(0.1), "dtype": "float32", "force_cast": True}, "float32", ()),
        ({"value": [0.1, 0.2], "dtype": np.float32, "force_cast": True}, "float32", (2,)),
    ],
)
def test_dtype_and_dimensions_come_from_var_value_or_by_name(two, arguments, dtype, shape):
    x = synk.data(**arguments)
    assert isinstance(x, synk.Data)
    assert x.dtype == np.dtype(dtype)
    assert x.shape == shape
    assert x.ndim == len(shape)
    assert x.size == np.prod(shape)
    assert len(x.data.shape) == x.ndim
    if "value" in arguments:
        assert_close(x, np.asarray(arguments["value"], dtype))
    else:
        assert not x.data.any()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TypeError, "dtype"),
        ({"dtype": "float32"}, TypeError, "dimensions"),
        ({"ndim": 2}, TypeError, "dtype"),
        ({"shape": (3,)}, TypeError, "dtype"),
        ({"var": T.fvector(), "dtype": "float64"}, TypeError, "dtype"),
        ({"var": T.fvector(), "ndim": 2}, TypeError, "ndim"),
        ({"var": "x"}, TypeError, "var"),
        ({"dtype": "float32", "ndim": -1}, (TypeError, ValueError), "ndim"),
        ({"dtype": "float32", "ndim": 1.0}, TypeError, "ndim"),
        ({"dtype": "float32", "ndim": 2, "shape": (3,)}, TypeError, "2 dimensions"),
        ({"dtype": "float32", "shape": (-3,)}, ValueError, "-3"),
        ({"dtype": "float32", "shape": (1.5,)}, TypeError, "1.5"),
        ({"dtype": "object", "ndim": 1}, TypeError, "object"),
        ({"value": [object()]}, TypeError, "object"),
        ({"value": [1], "dtype": "nonsense"}, TypeError, "nonsense"),
        ({"value": [0.5], "dtype": "int32"}, TypeError, "int32.*force_cast"),
        ({"value": np.ones(3), "dtype": "float32"}, TypeError, "float32.*force_cast"),
        ({"value": np.ones(3), "ndim": 2}, TypeError, "2 dimensions"),
        ({"value": np.ones(3), "shape": (4,)}, ValueError, "shape"),
        ({"value": np.ones(3), "oversize": 3}, ValueError, "oversize"),
        ({"value": np.ones(3), "oversize": "2"}, TypeError, "oversize"),
    ],
)
def test_what_makes_no_data_is_refused(two, arguments, error, words):
    with pytest.raises(error, match=words):
        synk.data(**arguments)


def test_name_and_description(two):
    x = synk.data(np.ones((2, 3)), name="points", minibatch=True)
    assert (x.name, x.minibatch) == ("points", True)
    assert synk.data(var=T.dvector("targets")).name == "targets"
    assert repr(x) == "<synkhronos.Data 'points', shape (2, 3), float64, 48 bytes, minibatch>"
    assert repr(synk.data(np.zeros(300_000, "int8"))) == "<synkhronos.Data shape (300000,), int8, 300,000 bytes>"


# ---------------------------------------------------------------- reading and writing


@given(data=st.data())
def test_indexing_is_that_of_numpy(two, data):
    array = np.arange(24.0).reshape(4, 3, 2)
    x = synk.data(array)
    bound = st.none() | st.integers(-5, 5)
    index = data.draw(
        st.integers(-4, 3)
        | st.builds(slice, bound, bound, st.none() | st.sampled_from([-2, -1, 1, 2]))
        | st.lists(st.integers(-4, 3), min_size=1)
        | st.just(Ellipsis)
        | st.tuples(st.integers(-4, 3), st.integers(-3, 2))
        | st.tuples(st.just(slice(None)), st.just([0, 2]), st.just(1))
        | st.just(array > 11)
    )
    np.testing.assert_array_equal(x[index], array[index])
    array[index] = -1
    x[index] = -1
    np.testing.assert_array_equal(x.data, array)
    assert len(x) == 4
    assert [row.tolist() for row in x] == array.tolist()


def test_numpy_sees_the_memory_itself(two, summing):
    x = synk.data(np.zeros(5))
    view = np.asarray(x)
    view[:] = 2
    assert x[0] == 2
    assert np.shares_memory(view, x.data)
    assert np.asarray(x, dtype="float32").dtype == np.float32
    assert np.add(x, 1).tolist() == [3.0] * 5
    x.data[1:3] = [7, 8]
    assert summing(x) == 2 * 3 + 15
    assert not np.shares_memory(np.array(x), x.data)


@pytest.mark.numba
def test_what_is_written_between_calls_is_seen_by_every_rank(synchronize):
    synchronize(3)
    function = sum_of("float64", 1)
    x = synk.data(np.zeros(10))
    for value in (1.0, 2.0, 3.0):
        x[:] = value
        assert function(x) == 10 * value


@pytest.mark.parametrize("dtype", [">f8", ">i4", "<u2", "datetime64[s]", "S5", "U3", "complex128", "float16", "bool"])
def test_dtypes_beyond_those_of_theano(two, dtype):
    value = np.arange(6).astype(dtype)
    x = synk.data(value)
    assert x.dtype == value.dtype
    np.testing.assert_array_equal(x.data, value)
    x.set_length(8, oversize=1.5)
    np.testing.assert_array_equal(x[:6], value)


def test_structured_dtypes(two):
    value = np.array([(1, 2.5, [1, 2]), (3, 4.5, [3, 4])], dtype=[("a", "i4"), ("b", ">f8"), ("c", "u1", (2,))])
    x = synk.data(value)
    assert x.dtype == value.dtype
    np.testing.assert_array_equal(x["b"], value["b"])
    x["a"] = 9
    x.set_length(3)
    assert x["a"].tolist() == [9, 9, 0]
    assert x[1]["c"].tolist() == [3, 4]
    with pytest.raises(TypeError, match="dtype"):
        sum_of("float64", 1)(x)


# ---------------------------------------------------------------- sizes


def test_growing_keeps_the_contents(session):
    function = sum_of("float64", 2)
    x = synk.data(np.ones((4, 3)))
    x.set_length(7)
    assert x.shape == (7, 3)
    assert x.data.sum() == 12
    assert not x[4:].any()
    x[4:] = 2
    assert function(x) == 12 + 18
    x.set_shape((8, 5))
    assert x[:7, :3].sum() == 30
    assert x.data.sum() == 30
    x.set_shape((2, 2))
    assert x.data.tolist() == [[1, 1], [1, 1]]
    assert function(x) == 4


def test_rows_that_come_back_are_zero(two):
    x = synk.data(np.arange(1.0, 11.0))
    x.set_length(4)
    x.set_length(8)
    assert x.data.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]


def test_shrinking_does_not_allocate(two, summing):
    x = synk.data(np.arange(1000.0))
    address, room = x.data.ctypes.data, x.alloc_size
    for length in (999, 500, 3, 0):
        x.set_length(length)
        assert len(x) == length
        assert x.alloc_size == room
    assert summing(x) == 0
    x.set_length(1000)
    assert x.data.ctypes.data == address
    x.set_value(np.ones(10))
    assert x.data.ctypes.data == address
    assert summing(x) == 10


def test_oversize_allocates_ahead(two, summing):
    x = synk.data(np.ones(1000), oversize=2)
    assert x.alloc_size >= 2000
    address = x.data.ctypes.data
    x.set_length(2000)
    assert x.data.ctypes.data == address
    assert x[:1000].all()
    x.set_length(4000, oversize=1.5)
    assert x.alloc_size >= 6000
    assert summing(x) == 1000
    assert synk.data(np.ones(10)).alloc_size >= 10


@given(sizes=st.lists(st.tuples(st.integers(0, 50), st.floats(1, 2)), max_size=8))
def test_any_sequence_of_lengths_keeps_what_numpy_would_keep(two, sizes):
    expected = np.arange(1.0, 6.0)
    x = synk.data(expected)
    for length, oversize in sizes:
        x.set_length(length, oversize=oversize)
        expected = np.concatenate([expected[:length], np.zeros(max(0, length - len(expected)))])
        assert x.data.tolist() == expected.tolist()
    assert sum_of("float64", 1)(x) == pytest.approx(expected.sum())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: x.set_length(-1), ValueError),
        (lambda x: x.set_length(1.5), TypeError),
        (lambda x: x.set_length("3"), TypeError),
        (lambda x: x.set_shape((3,)), TypeError),
        (lambda x: x.set_shape((3, -1)), ValueError),
        (lambda x: x.set_shape(None), TypeError),
        (lambda x: x.set_length(3, oversize=0.5), ValueError),
        (lambda x: x.set_length(3, oversize=None), TypeError),
        (lambda x: x.set_value(np.ones(3)), TypeError),
        (lambda x: x.set_value([[1, 2], [3]]), (TypeError, ValueError)),
        (lambda x: x.set_value(np.ones((2, 2), complex)), TypeError),
        (lambda x: x.set_value([["a"]]), TypeError),
        (lambda x: x.set_value(None), TypeError),
        (lambda x: x.set_value(np.ones((2, 2)), oversize=2.5), ValueError),
    ],
)
@pytest.mark.filterwarnings("ignore:Creating an ndarray from ragged")
def test_a_refused_change_changes_nothing(two, change, error):
    x = synk.data(np.arange(6.0).reshape(2, 3))
    with pytest.raises(error):
        change(x)
    np.testing.assert_array_equal(x.data, np.arange(6.0).reshape(2, 3))
    assert sum_of("float64", 2)(x) == 15


def test_0_dimensional_data(two):
    x = synk.data(3.0)
    with pytest.raises(TypeError):
        x.set_length(1)
    x[()] = 4.0
    scale = T.dscalar("scale")
    assert synk.function([], (scale * 2, "max"), bcast_inputs=[scale])(x) == 8
    x.set_value(5)
    assert float(x.data) == 5


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (np.array([1, 2], "int8"), "float32", True),
        (np.array([1, 2], "int64"), "float32", False),
        (np.array([1, 2], "float64"), "float32", False),
        (np.array([1, 2], "float16"), "float32", True),
        (np.array([True, False]), "int8", True),
        (np.array([1, 2], "uint8"), "int8", False),
        ([1, 2], "float32", True),
        ([1, 2], "int8", True),
        ([1, 300], "int8", False),
        ([0.5, 1.5], "float32", True),
        ([0.5, 1.5], "int32", False),
        ([float("nan"), float("inf")], "float32", True),
        ([1 + 1j, 2], "float64", False),
        (np.array([1, 2], ">i4"), "float64", True),
        (np.array(["a", "b"]), "float64", False),
    ],
)
def test_set_value_casts_only_without_loss(two, value, dtype, fits):
    x = synk.data(np.array([9, 9], dtype))
    if fits:
        conditioned = x.condition_data(value)
        assert conditioned.dtype == dtype
        np.testing.assert_array_equal(conditioned, value)
        assert (x.data == 9).all()
        x.set_value(value)
        np.testing.assert_array_equal(x.data, value)
        return
    for store in (x.set_value, x.condition_data):
        with pytest.raises(TypeError, match=dtype):
            store(value)
    assert (x.data == 9).all()
    if np.asarray(value).dtype.kind != "U":
        x.set_value(np.real(value), force_cast=True)
        np.testing.assert_array_equal(x.data, np.real(value).astype(dtype))


def test_a_python_float_becomes_any_floating_dtype(two):
    x = synk.data(0.1, dtype="float32")
    assert x.data == np.float32(0.1)


def test_set_value_from_its_own_memory(two):
    x = synk.data(np.arange(10.0))
    x.set_value(x.data[::-1])
    assert x.data.tolist() == list(range(9, -1, -1))
    x.set_value(x.data[3:])
    assert x.data.tolist() == list(range(6, -1, -1))
    x.set_value(np.concatenate([x, x, x]))
    assert x.data.tolist() == list(range(6, -1, -1)) * 3
    x.set_value(x)
    assert len(x) == 21
    y = synk.data(x)
    y[:] = 0
    assert x[0] == 6


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed", "broadcast"])
def test_values_in_any_memory_layout(two, order):
    base = np.arange(40.0).reshape(8, 5)
    value = {
        "C": base,
        "F": np.asfortranarray(base),
        "strided": base[::2, 1::3],
        "reversed": base[::-1, ::-1],
        "broadcast": np.broadcast_to(base[0], (3, 5)),
    }[order]
    x = synk.data(value)
    np.testing.assert_array_equal(x.data, value)
    assert x.data.flags.c_contiguous
    assert_close(sum_of("float64", 2)(x), value.sum())


# ---------------------------------------------------------------- files


@pytest.fixture
def file(tmp_path):
    """The path of a file of 60 float64: 0 to 59."""
    path = tmp_path / "numbers"
    np.arange(60.0).tofile(path)
    return path


def mapped_by(pid, path):
    with open(f"/proc/{pid}/maps") as maps:
        return str(path) in maps.read()


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(
    ("offset", "part"),
    [(0, slice(None)), (0, slice(4, 9)), (16, slice(2, None)), (0, slice(0, 0)), (0, slice(None, None, 2))],
)
def test_a_memmap_is_shared_as_its_file(session, file, mode, offset, part):
    memmap = np.memmap(file, "float64", mode, offset=offset, shape=(19, 3))[part]
    expected = np.array(memmap)
    x = synk.data(memmap)
    assert sum_of("float64", 2)(x) == expected.sum()
    np.testing.assert_array_equal(x.data, expected)
    if len(expected) and part.step is None:
        assert np.shares_memory(x.data, memmap) or mapped_by(os.getpid(), file)
        for pid in worker_pids():
            assert mapped_by(pid, file)
        if mode == "r+":
            x[0] = 100
            assert sum_of("float64", 2)(x) == expected[1:].sum() + 300
            assert (memmap[0] == 100).all()
            assert np.fromfile(file)[offset // 8 + 3 * (part.start or 0)] == 100
        else:
            with pytest.raises(ValueError, match="read-only"):
                x[0] = 100
    x.free_memory()
    assert x.shape == (0, 0)


@one_machine("workers are looked at")
def test_a_read_only_memmap_shrinks_in_place_and_grows_by_a_copy(two, file):
    x = synk.data(np.memmap(file, "float64", "r"))
    x.set_length(10)
    assert sum_of("float64", 1)(x) == 45
    assert mapped_by(worker_pids()[0], file)
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1
    x.set_length(70)
    assert sum_of("float64", 1)(x) == 45
    x[0] = 1
    assert sum_of("float64", 1)(x) == 46
    np.testing.assert_array_equal(np.fromfile(file), np.arange(60.0))


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_set_value_never_writes_to_the_file(two, file, mode):
    x = synk.data(np.memmap(file, "float64", mode))
    x.set_value(np.full(5, 7.0))
    assert sum_of("float64", 1)(x) == 35
    x[:] = 8
    x.set_length(60)
    x[:] = 9
    np.testing.assert_array_equal(np.fromfile(file), np.arange(60.0))


def test_a_copy_on_write_memmap_is_copied(two, file):
    memmap = np.memmap(file, "float64", "c")
    memmap[0] = 1000  # nobody but this process sees it in the file
    x = synk.data(memmap)
    assert sum_of("float64", 1)(x) == 1000 + np.arange(60).sum()


def test_a_memmap_at_an_odd_offset(two, tmp_path):
    path = tmp_path / "odd"
    path.write_bytes(b"#" + np.arange(20.0).tobytes())
    x = synk.data(np.memmap(path, "float64", "r", offset=1))
    assert sum_of("float64", 1)(x) == 190


def test_a_memmap_whose_file_is_gone_or_replaced(two, file):
    memmap = np.memmap(file, "float64", "r")
    file.unlink()
    np.zeros(60).tofile(file)
    x = synk.data(memmap)
    assert sum_of("float64", 1)(x) == np.arange(60).sum()
    file.unlink()
    y = synk.data(memmap)
    assert sum_of("float64", 1)(y) == np.arange(60).sum()


def test_data_of_a_file_that_goes_away_do_not_harm_other_calls(two, file):
    x = synk.data(np.memmap(file, "float64", "r"))
    y = synk.data(np.ones(5))
    file.unlink()
    assert sum_of("float64", 1)(y) == 5
    assert sum_of("float64", 1)(x) == np.arange(60).sum()
    file.write_bytes(np.zeros(60).tobytes())
    z = synk.data(np.memmap(file, "float64", "r"))
    file.unlink()
    del z
    assert sum_of("float64", 1)(y) == 5


def test_the_dtype_of_a_memmap_can_be_forced_by_a_copy(two, file):
    x = synk.data(np.memmap(file, "float64", "r"), dtype="float32", force_cast=True)
    assert sum_of("float32", 1)(x) == np.arange(60).sum()
    x[0] = 1


# ---------------------------------------------------------------- other processes


def test_processes_forked_later_read_and_write(two, summing):
    x = synk.data(np.zeros(4))
    context = multiprocessing.get_context("fork")

    def write(data):
        data[1] = 5
        np.asarray(x)[2] = data[0] + 6

    x[0] = 1
    process = context.Process(target=write, args=(x.data,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert x.data.tolist() == [1, 5, 7, 0]
    assert summing(x) == 13


def test_a_child_may_drop_its_data(two, summing):
    x = synk.data(np.ones(4))
    pid = os.fork()
    if pid == 0:
        x.free_memory()
        x.set_value(np.full(100, 3.0))
        os._exit(0 if x.data.sum() == 300 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert summing(x) == 4
    x[0] = 2
    assert summing(x) == 5


def test_data_survive_their_session(no_session, synchronize):
    synchronize(2)
    x = synk.data(np.arange(10.0))
    assert sum_of("float64", 1)(x) == 45
    synk.close()
    assert x[3] == 3
    x[3] = 4
    x.set_length(5)
    assert x.data.tolist() == [0, 1, 2, 4, 4]
    with pytest.raises(synk.SessionError, match="fork"):
        synk.data(np.ones(3))
    synk.fork(3)
    assert sum_of("float64", 1)(x) == 11
    x.set_length(8)
    x[5:] = 1
    assert sum_of("float64", 1)(x) == 14


def test_data_that_no_worker_has_seen_survive_their_session(no_session, synchronize, file):
    synchronize(2)
    x, y = synk.data(np.arange(10.0)), synk.data(np.memmap(file, "float64", "r"))
    synk.close()
    synk.fork(2)
    assert sum_of("float64", 1)(x) == 45
    assert sum_of("float64", 1)(y) == np.arange(60).sum()


def test_data_before_fork_say_so(no_session):
    with pytest.raises(RuntimeError, match="fork"):
        synk.data(np.ones(3))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: copy.deepcopy([one, one])[1]])
def test_copies_have_memory_of_their_own(two, summing, file, copied):
    originals = [
        synk.data(np.arange(4.0), name="it", minibatch=True, oversize=2),
        synk.data(np.memmap(file, "float64", "r+")[:4]),
        synk.data(dtype="float64", ndim=1),
        synk.data(np.zeros(0)),
    ]
    for x in originals:
        y = copied(x)
        assert (y.dtype, y.shape, y.name, y.minibatch) == (x.dtype, x.shape, x.name, x.minibatch)
        if not x.size:
            continue
        before = x.data.copy()
        y[1] = 100
        assert np.array_equal(x.data, before)
        assert summing(x) == before.sum()
        x.free_memory()
        del x
        assert summing(y) == before.sum() - before[1] + 100
    assert np.memmap(file, "float64", "r")[1] != 100


def test_a_deep_copy_copies_what_is_twice_in_it_once(two):
    x = synk.data(np.ones(3))
    first, second = copy.deepcopy((x, x))
    assert first is second
    assert first is not x


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_data_are_the_same_memory(two, summing, protocol):
    x = synk.data(np.arange(4.0), name="it", minibatch=True)
    y = pickle.loads(pickle.dumps(x, protocol))
    assert (y.name, y.minibatch, y.shape) == ("it", True, (4,))
    y[0] = 10
    assert x[0] == 10
    del x
    gc.collect()
    assert summing(y) == 16  # the memory is there as long as any of them
    z = pickle.loads(pickle.dumps(y, protocol))
    y.free_memory()
    assert y.shape == (0,)
    assert summing(z) == 16
    y.set_value(np.ones(2))
    assert (summing(y), summing(z)) == (2, 16)
    pickled = pickle.dumps(z, protocol)
    del z
    with pytest.raises(TypeError, match=r"numpy\.asarray"):
        pickle.loads(pickled)
    assert pickle.loads(pickle.dumps(synk.data(dtype="int8", ndim=2), protocol)).shape == (0, 0)


def test_pickled_data_of_a_file_and_of_structures(two, file):
    x = synk.data(np.memmap(file, "float64", "r+")[10:20])
    y = pickle.loads(pickle.dumps(x))
    y[0] = -5
    assert np.memmap(file, "float64", "r")[10] == -5
    structured = synk.data(np.zeros(3, [("a", "i4"), ("b", "f8")]))
    assert pickle.loads(pickle.dumps(structured)).dtype == structured.dtype


def test_pickled_data_in_other_processes(two, summing):
    x = synk.data(np.arange(4.0))
    with multiprocessing.get_context("fork").Pool(1) as pool:  # forked later: it has the memory
        assert pool.apply(_write_through, (x,)) == 6
    assert x.data.tolist() == [50, 1, 2, 3]
    assert summing(x) == 56
    script = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))"
    command = [sys.executable, "-c", script, pickle.dumps(x).hex()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("TypeError: Data of shape (4,) was pickled")
    assert "numpy.asarray(data)" in done.stderr


def _write_through(data):
    total = data.data.sum()
    data[0] = 50
    return total


# ---------------------------------------------------------------- memory


def shared_bytes(pid):
    """Bytes of the segments that a process has mapped."""
    total = 0
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            if "/memfd:synkhronos" in line:
                start, end = line.split()[0].split("-")
                total += int(end, 16) - int(start, 16)
    return total


def test_free_memory_gives_it_back_on_every_rank(synchronize, summing):
    synchronize(3)
    summing(np.ones(10))
    pids = [os.getpid(), *worker_pids()]
    before = [shared_bytes(pid) for pid in pids]
    x = synk.data(np.zeros(4 * MEGABYTE))
    assert summing(x) == 0
    assert all(shared_bytes(pid) >= old + 32 * MEGABYTE for pid, old in zip(pids, before))
    x.free_memory()
    assert x.shape == (0,)
    assert x.alloc_size == 0
    assert wait_until(lambda: all(shared_bytes(pid) < old + MEGABYTE for pid, old in zip(pids, before)), 2)
    x.set_value(np.ones(3))
    assert summing(x) == 3


@pytest.mark.parametrize("used", [True, False])
def test_memory_of_dropped_data_comes_back(two, summing, used):
    summing(np.ones(10))
    before = [shared_bytes(pid) for pid in (os.getpid(), *worker_pids())]
    x = synk.data(np.zeros(4 * MEGABYTE))
    if used:
        summing(x)
        summing(x)  # the same call again
    del x
    gc.collect()
    if used:  # else it waits to be given to the workers
        assert shared_bytes(os.getpid()) < before[0] + MEGABYTE
    summing(np.ones(10))
    for pid, old in zip((os.getpid(), *worker_pids()), before):
        assert shared_bytes(pid) < old + MEGABYTE


def test_many_data_do_not_pile_up(two, summing):
    pids = [os.getpid(), *worker_pids()]
    before = [shared_bytes(pid) for pid in pids]
    for _ in range(60):
        x = synk.data(dtype="uint8", shape=(20 * MEGABYTE,))
    assert x.size == 20 * MEGABYTE
    assert all(shared_bytes(pid) - old < 200 * MEGABYTE for pid, old in zip(pids, before))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        x = synk.data(np.ones(3))
    assert len(os.listdir("/proc/self/fd")) < before + 150
    assert summing(x) == 3


def test_more_data_than_descriptors(two):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        kept = [synk.data(np.full(3, float(i))) for i in range(400)]
        assert sum_of("float64", 1)(kept[-1]) == 3 * 399
        assert sum_of("float64", 1)(kept[0]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_dropped_before_close_is_freed():
    run_script(
        """
        x = T.dvector("x")
        synk.fork(2)
        f = synk.function([x], x.sum())
        f(np.ones(3))
        def mapped():
            return sum("/memfd:synkhronos" in line for line in open("/proc/self/maps"))
        before = mapped()
        d = synk.data(np.zeros(1_000_000))
        f(d)
        del d
        e = synk.data(np.zeros(1_000_000))
        del e
        synk.close()
        import gc; gc.collect()
        assert mapped() <= before, (mapped(), before)
        """
    )


def test_too_little_shared_memory_is_a_memory_error_and_changes_nothing(two, summing):
    x = synk.data(np.arange(10.0))
    too_much = psutil.virtual_memory().total * 2
    with pytest.raises(MemoryError, match=r"wanted.*free"):
        x.set_length(too_much // 8)
    assert x.data.tolist() == list(range(10))
    with pytest.raises(MemoryError):
        x.set_shape((too_much,))
    with pytest.raises(MemoryError):
        synk.data(dtype="float64", shape=(too_much,))
    assert x.data.tolist() == list(range(10))
    assert summing(x) == 45
    x.set_length(20)
    assert summing(x) == 45


def test_sizes_beyond_all_memory_are_refused(two):
    for shape in ((2**62,), (2**40, 2**40), (2**63,)):
        with pytest.raises((MemoryError, ValueError, OverflowError)):
            synk.data(dtype="float64", shape=shape)


def test_freed_memory_can_be_used_at_once():
    """In memory that holds one of the two: simulated by a limit that stands for the machine's."""
    run_script(
        """
        import resource
        synk.fork(2)
        x = T.dvector("x")
        f = synk.function([x], (x.sum(), "sum"))
        f(np.ones(3))
        from synkhronos._memory import anonymous
        from test_data import shared_bytes
        def most():  # workers forget later
            return max(shared_bytes(pid) for pid in (os.getpid(), *worker_pids()))
        limit = most() + 50_000_000
        def counting(size):
            if most() + size > limit:
                raise MemoryError("as if the machine were full")
        anonymous.check_room = counting
        for _ in range(5):
            d = synk.data(np.ones(4_000_000))
            assert f(d) == 4_000_000
            d.free_memory()
        for _ in range(5):
            d = synk.data(np.ones(4_000_000))
            assert f(d) == 4_000_000
            del d
        """
    )
