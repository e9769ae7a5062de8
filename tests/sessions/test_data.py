"""`synk.data`: make, read, write, resize and set arrays in shared memory."""

import numpy as np
import pytest
from backend import T
from comparison import assert_close
from hypothesis import given
from hypothesis import strategies as st
from summing_function import sum_of

import synkhronos as synk

# ---------------------------------------------------------------- making


@pytest.mark.parametrize(
    ("arguments", "dtype", "shape"),
    [
        ({"value": [1.0, 2.0]}, "float64", (2,)),
        ({"value": [[1, 2], [3, 4]]}, "int64", (2, 2)),
        ({"value": np.ones((2, 3), "float32")}, "float32", (2, 3)),
        ({"value": 2.5}, "float64", ()),
        ({"value": True}, "bool", ()),
        ({"value": 0.1, "dtype": "float32"}, "float32", ()),
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
        np.testing.assert_array_equal(x, np.asarray(arguments["value"], dtype))
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
        ({"value": [0.5], "dtype": "int32"}, TypeError, "which int32 cannot hold"),
        ({"value": [2**53 + 1], "dtype": "float64"}, TypeError, "which float64 cannot hold"),
        ({"value": np.ones(3), "dtype": "float32"}, TypeError, "which float32 cannot hold"),
        ({"value": np.ones(3), "ndim": 2}, TypeError, "got 1 dimensions .*; expected 2"),
        ({"value": np.ones(3), "shape": (4,)}, ValueError, "shape"),
        ({"value": np.ones(3), "oversize": 3}, ValueError, "oversize"),
        ({"value": np.ones(3), "oversize": "2"}, TypeError, "oversize"),
    ],
)
def test_invalid_arguments_are_refused(two, arguments, error, words):
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
    assert np.shares_memory(x.__array__(copy=False), x.data)
    with pytest.raises(ValueError, match="dtype is float32; expected float64"):
        x.__array__("float32", copy=False)


@pytest.mark.numba
def test_every_rank_sees_values_written_between_calls(three):
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
