"""Malformed calls of every public function: they raise only documented errors, and the session stays usable.

Hypothesis draws a function and an argument for each of its parameters, valid and invalid ones mixed. A call succeeds,
or raises one of Python's errors for invalid arguments. Invalid arguments never reach a worker, and after each call the
session computes a known result.
"""

import collections
import contextlib
import warnings

import multinode_sessions
import numpy as np
import pytest
from backend import T, on_theano, theano
from hypothesis import given, settings
from hypothesis import strategies as st
from process_state import worker_pids

import synkhronos as synk

N_RANKS = 3
EXAMPLES = 100 if settings.default.derandomize else 600  # when exploring, see conftest
DOCUMENTED = (TypeError, ValueError, IndexError, MemoryError)

x, y, m, b = T.dvector("x"), T.lvector("y"), T.fmatrix("m"), T.dscalar("b")
w, v, n = theano.shared(np.zeros(3), "w"), theano.shared(np.zeros((4, 2), "float32"), "v"), theano.shared(0, "n")
unused, row = theano.shared(np.ones(2), "unused"), theano.shared(np.ones((1, 2)), "row", broadcastable=(True, False))
RESTORE = {w: np.zeros(3), v: np.zeros((4, 2), "float32"), n: np.int64(0), row: np.ones((1, 2))}
_built = {}
counted = collections.Counter()


@pytest.fixture
def fuzzed(synchronize):
    """Make a session, and return functions and data of each kind."""
    synchronize(N_RANKS)
    if not _built:
        _built["sum"] = synk.function([x], (x.sum(), "sum"), name="known")
        _built["two"] = synk.function([x, y], [(x * y, "gather"), x.sum(), ((x + 0).max(), "max")], name="two")
        _built["matrix"] = synk.function([m], (m * 2).sum(), bcast_inputs=[b], updates=[(w, w + b)], name="matrix")
        _built["rows"] = synk.function([], (v.sum(1) + n + row.sum(), "gather"), sliceable_shareds=[v], name="rows")
        _built["none"] = synk.function([], name="none", updates=[(n, n + 1)])
        _built["data"] = [
            synk.data(np.arange(7.0)),
            synk.data(np.arange(7)),
            synk.data(np.ones((5, 2), "float32"), minibatch=True),
            synk.data(dtype="float64", ndim=1),
        ]
    return _built


# ---------------------------------------------------------------- what is drawn

oddities = st.sampled_from([None, True, False, "", "x", "avg", "no", b"bytes", {}, {"a": 1}, set(), range(3)])
oddities |= st.sampled_from([object(), len, ..., Exception("no")])
lengths = st.sampled_from([(), (0,), (1,), (3,), (7,), (2, 2), (5, 2), (7, 1), (1, 2), (0, 2), (2, 2, 2)])
kinds = ["float64", "float32", "int64", "int32", "uint8", "bool", "complex128", ">f8", "S3", "U2", "M8[s]", object]
arrays = st.builds(np.ones, lengths, st.sampled_from(kinds))
numbers = st.sampled_from([0, 1, 2, 3, -1, -7, 7, 8, 10**6, 2**63, 2**70, 0.5, 2.0, 1e300, np.nan, np.inf, 1j])
parts = [0, 1, 6, 7, -1, -7, -8, 2**40, 2**64, 0.5, True, None, "a", [0], slice(0, 2)]
slices = st.builds(slice, *[st.sampled_from([None, 0, 1, -1, 3, -9, 100, 1.5, "a"])] * 3)
indices = st.one_of(slices, st.lists(st.sampled_from(parts), max_size=4), numbers, arrays)
with_value = theano.In(x, value=[1.0]) if on_theano else theano.In(x)
theano_things = st.sampled_from([x, y, m, b, w, v, n, unused, row, x + 1, x.sum(), with_value, T.zeros((2,))])
anything = st.one_of(numbers, oddities, arrays, indices, theano_things)
nested = st.one_of(anything, st.lists(anything, max_size=3), st.tuples(anything, anything))
shapes = st.one_of(st.lists(st.sampled_from([0, 1, 2, 7, -1, 1.5, None, "a", 2**40, 2**62]), max_size=3), nested)
dtypes = st.sampled_from(["float32", "float64", "int64", np.int8, float, ">f8", "no", object, "S", 7, None, "f4,i4"])
ops = st.sampled_from(["avg", "sum", "max", "min", "prod", "c_avg", "gather", None, "mean", "", 3, ["sum"], True])
good = st.sampled_from([np.ones(3), [1.0, 2.0, 3.0], np.arange(7), np.ones((5, 2), "float32"), np.ones((1, 2)), 1, 2.0])
values = st.one_of(good, good, arrays, nested, st.integers(0, 3).map(lambda i: _built["data"][i]))
variables = st.one_of(
    st.sampled_from([w, v, n, row, w]),
    st.sampled_from([w, v, n, row, unused]),
    st.lists(st.sampled_from([w, v, n, row, unused, x]), max_size=3),
    nested,
)
ranks = st.one_of(st.sampled_from([0, 1, 2, np.int64(1)]), anything)
flags = st.one_of(st.booleans(), anything)
oversizes = st.one_of(st.sampled_from([1, 1.5, 2]), anything)
output = st.one_of(theano_things, st.tuples(theano_things, ops))
outputs = st.one_of(output, st.lists(output, max_size=3), nested)
updates = st.one_of(
    st.lists(st.tuples(st.sampled_from([w, v, n, x]), theano_things), max_size=2),
    st.lists(st.tuples(st.sampled_from([w, n]), theano_things, ops), max_size=2),
    nested,
)
inputs = st.one_of(st.lists(theano_things, max_size=3), nested)


given_inputs = st.tuples(st.sampled_from(["sum", "two", "matrix", "rows", "none"]), st.lists(values, max_size=3))
options = {"force_cast": flags, "oversize": oversizes, "minibatch": flags}


def optional(**strategies):
    """Draw a dictionary with some of these arguments."""
    return st.fixed_dictionaries({}, optional=strategies)


keywords = optional(
    batch=indices,
    batch_s=st.one_of(indices, st.lists(indices, max_size=4)),
    num_slices=st.one_of(st.sampled_from([1, 2, 3, 100]), anything),
    output_subset=st.one_of(st.lists(st.sampled_from([0, 1, 2, 3, -1, "a", None]), max_size=3), anything),
    x=values,
    b=values,
    nonsense=values,
)

CALLS = {
    "call": (st.tuples(given_inputs, keywords), lambda a: _built[a[0][0]](*a[0][1], **a[1])),
    "as_theano": (given_inputs, lambda a: _built[a[0]].as_theano(*a[1])),
    "build_inputs": (
        st.tuples(given_inputs, optional(x=values, **options)),
        lambda a: _built[a[0][0]].build_inputs(*a[0][1], **a[1]),
    ),
    "data": (
        optional(value=values, var=theano_things, dtype=dtypes, ndim=anything, shape=shapes, name=anything, **options),
        lambda a: synk.data(**a),
    ),
    "Data.set_value": (
        st.tuples(values, optional(force_cast=flags, oversize=oversizes)),
        lambda a: scratch().set_value(a[0], **a[1]),
    ),
    "Data.set_length": (st.tuples(anything, oversizes), lambda a: scratch().set_length(*a)),
    "Data.set_shape": (st.tuples(shapes, oversizes), lambda a: scratch().set_shape(*a)),
    "Data.condition_data": (st.tuples(values, flags), lambda a: scratch().condition_data(*a)),
    "Data.__setitem__": (st.tuples(indices, values), lambda a: scratch().__setitem__(*a)),
    "Data.__getitem__": (indices, lambda a: scratch()[a]),
    "broadcast": (st.tuples(variables, values), lambda a: synk.broadcast(*a)),
    "scatter": (st.tuples(variables, values, indices), lambda a: synk.scatter(*a)),
    "gather": (st.tuples(variables, anything), lambda a: synk.gather(*a)),
    "all_gather": (variables, lambda a: synk.all_gather(a)),
    "reduce": (st.tuples(variables, ops, flags), lambda a: synk.reduce(*a)),
    "all_reduce": (
        st.tuples(variables, ops, st.one_of(st.none(), st.lists(numbers, min_size=3, max_size=3), anything)),
        lambda a: synk.all_reduce(a[0], a[1], weights=a[2]),
    ),
    "set_value": (st.tuples(ranks, variables, values, indices), lambda a: synk.set_value(*a)),
    "get_value": (st.tuples(ranks, variables), lambda a: synk.get_value(*a)),
    "get_lengths": (variables, lambda a: synk.get_lengths(a)),
    "get_shapes": (variables, lambda a: synk.get_shapes(a)),
}

BUILD = (
    st.tuples(
        inputs,
        outputs,
        optional(bcast_inputs=inputs, updates=updates, givens=updates, sliceable_shareds=inputs, name=anything),
    ),
    lambda a: synk.function(a[0], a[1], **{"mode": "FAST_COMPILE", **a[2]}),
)
FORK = optional(
    n_parallel=anything, use_gpu=anything, master_rank=anything, devices=nested, timeout=anything, max_n_var=anything
)


def scratch():
    """Return data that a malformed call may overwrite."""
    return synk.data(np.arange(6.0).reshape(3, 2))


def attempt(call, argument, more=()):
    """Make a call, and check that it raises only documented errors, and only errors of computations on workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(argument)
        except synk.SynkhronosError as error:
            # ranks raise errors of the computation, such as shapes that do not match
            assert isinstance(error, synk.WorkerError), repr(error)
            assert is_computation(error), repr(error)
            counted["computation"] += 1
        except (*DOCUMENTED, *more) as error:
            assert str(error), repr(error)
            counted["refused"] += 1
        else:
            counted["accepted"] += 1


def is_computation(error):
    """Return whether a WorkerError is the backend's error for well-formed arguments, in a call."""
    return "failed in Call" in str(error) and "Apply node that caused the error" in str(error)


def check_session():
    data = _built["data"][0]
    assert _built["sum"](np.arange(5.0)) == 10
    assert data.data.tolist() == list(range(7))
    assert _built["sum"](data, batch=[6, 0, -1]) == 12
    assert len(worker_pids()) == N_RANKS - multinode_sessions.N  # each node has one rank that is not a worker


def restore():
    for var, value in RESTORE.items():
        synk.broadcast(var, value)
        assert (synk.gather(var) == value).all()


@pytest.mark.parametrize("name", CALLS)
def test_malformed_calls(fuzzed, name):
    arguments, call = CALLS[name]
    # NumPy's errors for an index such as 2**64, and Theano's for an array of objects
    more = (OverflowError,) if "item" in name else (AttributeError, OverflowError) if name == "as_theano" else ()

    @settings(max_examples=EXAMPLES * (4 if name == "call" else 1))
    @given(arguments)
    def throw(argument):
        attempt(call, argument, more)
        check_session()

    throw()
    restore()


@pytest.mark.parametrize(
    "call",
    [
        lambda data: data.set_length(2**63),
        lambda data: data.set_shape((2**40, 2**40)),
        *(lambda data, n=n: synk.data(dtype="float64", shape=n) for n in ((2**62, 4), 2**62, 2**63, (2**40, 2**40))),
        lambda data: synk.data(np.ones(3), ndim=2**63),
    ],
)
def test_sizes_beyond_64_bits(fuzzed, call):
    data = scratch()
    with pytest.raises(DOCUMENTED):
        call(data)
    assert data.data.tolist() == [[0, 1], [2, 3], [4, 5]]
    check_session()


@pytest.mark.slow
def test_malformed_functions(fuzzed):
    arguments, build = BUILD

    def build_and_drop(argument):
        words = (theano.gof.fg.MissingInputError, theano.compile.UnusedInputError, AssertionError)
        with contextlib.suppress(*words):  # Theano's errors for invalid graphs
            build(argument)

    @settings(max_examples=EXAMPLES)
    @given(arguments)
    def throw(argument):
        attempt(build_and_drop, argument)

    throw()
    check_session()
    restore()


def test_malformed_forks(no_session):
    def fork_and_close(arguments):
        if isinstance(arguments.get("n_parallel"), int) and arguments["n_parallel"] > 8:
            return
        with contextlib.suppress(synk.DeviceError):
            synk.fork(**arguments)
            synk.close()

    @settings(max_examples=EXAMPLES)
    @given(FORK)
    def throw(arguments):
        attempt(fork_and_close, arguments)
        assert worker_pids() == []

    throw()


def test_a_thousand_calls_were_made():
    """The tests above have made enough calls of each kind, if all of them ran."""
    if counted["refused"] + counted["accepted"] + counted["computation"] < 500:
        pytest.skip("the tests above were not all run")
    assert sum(counted.values()) >= 1000
    assert counted["refused"] >= 500
    assert counted["accepted"] >= 80
