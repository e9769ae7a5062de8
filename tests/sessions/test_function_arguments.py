"""Arguments of calls and of `synk.function`: names, defaults, dtypes, batches; wrong ones are refused."""

import numpy as np
import pytest
from backend import T, theano, theano_only
from comparison import assert_close
from point_functions import adding, draw_points

import synkhronos as synk
from synkhronos.extensions import updates

ROWS = np.zeros(3)
NAMES = ["x", "y", "output_subset", "batch", "batch_s", "num_slices"]
BATCH = "expected an int, a slice, or a list or 1-d array of indices or booleans"


@theano_only("default values of inputs")
def test_inputs_by_name_and_default(session):
    x, y = T.fvector("x"), T.fvector("y")
    a, b = T.fscalar("a"), T.fvector("b")
    given = [theano.In(a, value=np.float32(3)), theano.In(b, value=np.arange(3, dtype="float32"), name="bias")]
    outputs = [((x + y) * a + b.sum(), "gather")]
    function = synk.function([x, theano.In(y, name="other")], outputs, bcast_inputs=given)
    one, two = draw_points(7)[1], draw_points(7, seed=1)[1]
    expected = (one + two) * 3 + 3
    assert_close(function(one, two)[0], expected)
    assert_close(function(one, other=two)[0], expected)
    assert_close(function(other=two, x=one)[0], expected)
    assert_close(function.as_theano(one, other=two)[0], expected)
    assert_close(function(one, two, bias=np.ones(5, "float32"), a=1.0)[0], one + two + 5)
    assert_close(function(one, two)[0], expected)  # the defaults are unchanged


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        ((), {}, TypeError, "no value for input x, y"),
        ((ROWS,), {}, TypeError, "no value for input y"),
        ((ROWS,) * 3, {}, TypeError, "got 3 inputs; .* takes 2"),
        ((ROWS,) * 2, {"y": ROWS}, TypeError, "'y'.*twice"),
        ((ROWS,), {"z": ROWS}, TypeError, f"^the function has no argument 'z'\\. It takes {', '.join(NAMES)}$"),
        ((ROWS,) * 2, {"num_slice": 2}, TypeError, "has no argument 'num_slice'; did you mean num_slices"),
        ((np.zeros((3, 1)), ROWS), {}, TypeError, "input x"),
        ((ROWS, np.zeros(3, complex)), {}, TypeError, "input y"),
        ((ROWS, "text"), {}, TypeError, "input y"),
        ((ROWS, object()), {}, TypeError, "input y"),
        ((ROWS, np.zeros(4)), {}, ValueError, "numbers of data points.*3.*4"),
        ((ROWS,) * 2, {"num_slices": 1.5}, TypeError, "num_slices"),
        ((ROWS,) * 2, {"num_slices": True}, TypeError, "num_slices"),
        ((ROWS,) * 2, {"num_slices": 0}, ValueError, "num_slices"),
        ((ROWS,) * 2, {"output_subset": 0}, TypeError, "output_subset"),
        ((ROWS,) * 2, {"output_subset": [1]}, IndexError, "output_subset"),
        ((ROWS,) * 2, {"batch": 1.5}, TypeError, f"^batch is 1.5; {BATCH}$"),
        ((ROWS,) * 2, {"batch": 2.0}, TypeError, r"is 2\.0; .*\. Did you mean 2\?$"),
        ((ROWS,) * 2, {"batch": np.float32(2)}, TypeError, r"is 2\.0; .*\. Did you mean 2\?$"),
        ((ROWS,) * 2, {"batch": "text"}, TypeError, "is 'text'; expected"),
        ((ROWS,) * 2, {"batch": {1, 2}}, TypeError, r"is \{1, 2\}; expected"),
        ((ROWS,) * 2, {"batch": 4}, ValueError, "batch"),
        ((ROWS,) * 2, {"batch": [3]}, IndexError, "batch"),
        ((ROWS,) * 2, {"batch": [[0]]}, ValueError, "batch"),
        ((ROWS,) * 2, {"batch": slice(0, 4)}, IndexError, "batch"),
        ((ROWS,) * 2, {"batch_s": slice(0, 1)}, ValueError, "batch_s.*sliceable_shareds"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_sent(two, args, kwargs, error, words):
    function = adding()
    with pytest.raises(error, match=words):
        function(*args, **kwargs)
    assert_close(function(np.ones(3), np.ones(3))[0], np.full(3, 2.0))


def test_numpy_inputs_are_cast_where_theano_would_cast(two):
    x, allow, n = T.fvector("x"), T.fvector("allow"), T.ivector("n")
    function = synk.function([x, theano.In(allow, allow_downcast=True), n], [(x + allow + n, "gather")])
    good = [
        ([1, 2], [0.1, 0.2], [1, 2]),
        (np.array([1, 2], "int8"), np.array([0.1, 0.2]), np.array([3, 4], "int16")),
        (np.array([1, 2], "float16"), np.array([1, 2]), np.array([3, 4], "uint8")),
        (np.array([1, 2], ">f4"), np.array([1, 2], ">f8"), np.array([1, 2], ">i4")),
        ((0.5, 1.5), (1, 2), (3, 4)),
    ]
    for values in good:
        assert_close(function(*values)[0], function.as_theano(*values)[0])
        assert function(*values)[0].dtype == function.as_theano(*values)[0].dtype
    valid = np.zeros(2, "float32"), np.zeros(2, "float32"), np.zeros(2, "int32")
    bad = [(0, np.zeros(2)), (0, [0.1, 0.2]), (0, np.zeros(2, "int64"))]
    bad += [(2, np.zeros(2)), (2, [2**40, 0]), (2, [1.5, 0])]
    for position, value in bad:
        values = [*valid[:position], value, *valid[position + 1 :]]
        with pytest.raises((TypeError, OverflowError)):  # the class depends on NumPy's version
            function.as_theano(*values)
        with pytest.raises(TypeError, match=("x", "allow", "n")[position]):
            function(*values)
    assert_close(function(*valid)[0], np.zeros(2))


def test_the_order_of_inputs_is_named(two):
    x, rate = T.dmatrix("x"), T.dscalar("rate")
    f = synk.function([x], x.sum() * rate, bcast_inputs=[rate])
    with pytest.raises(TypeError, match=r"input x: .*\. The inputs are x, rate, in this order"):
        f(0.1, np.ones((3, 2)))


def test_strict_inputs_are_strict(two):
    x = T.dvector("x")
    function = synk.function([theano.In(x, strict=True)], x.sum())
    with pytest.raises(TypeError):
        function.as_theano([1.0, 2.0])
    with pytest.raises(TypeError, match="x"):
        function([1.0, 2.0])
    assert function(np.ones(2)) == 1.0


def test_data_must_have_the_dtype_and_the_dimensions_of_the_variable(two):
    x, row = T.fmatrix("x"), T.row("row", dtype="float32")
    function = synk.function([x], x.sum(), bcast_inputs=[row], on_unused_input="ignore")
    good = synk.data(np.ones((4, 2), "float32")), synk.data(np.ones((1, 2), "float32"))
    wrong = [np.ones((4, 2)), np.ones(4, "float32"), np.ones((2, 2), "float32")]
    for x_data, row_data, name in ((wrong[0], good[1], "x"), (wrong[1], good[1], "x"), (good[0], wrong[2], "row")):
        with pytest.raises(TypeError, match=f"input {name}"):
            function(synk.data(x_data), synk.data(row_data))
    assert function(*good) == 4.0
    assert function(synk.data(np.ones((4, 2), ">f4")), good[1]) == 4.0  # another byte order
    with pytest.raises(ValueError, match="memory"):
        function(synk.data(var=x), good[1])


def test_batch_needs_scattered_inputs(two):
    x = T.fvector("x")
    function = synk.function([], x.sum(), bcast_inputs=[x])
    with pytest.raises(ValueError, match="batch"):
        function(np.ones(3, "float32"), batch=2)
    assert function(np.ones(3, "float32")) == 3.0
    assert function.counts == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"inputs": T.dvector("x")}, TypeError, "inputs"),
        ({"inputs": ["x"]}, TypeError, "inputs"),
        ({"inputs": [T.dscalar("point")]}, TypeError, "point.*bcast_inputs"),
        ({"inputs": [], "bcast_inputs": T.dvector()}, TypeError, "bcast_inputs"),
        ({"inputs": [], "bcast_inputs": [(1, 2)]}, TypeError, "^bcast_inputs has .1, 2.; .*updates by name"),
        ({"inputs": [], "outputs": [(T.constant(1.0), "mean")]}, ValueError, "'mean'"),
        ({"inputs": [], "outputs": [(T.constant(1.0), "c_median")]}, ValueError, "median"),
        ({"inputs": [], "outputs": "text"}, TypeError, "output"),
        ({"inputs": [], "updates": [(1, 2, 3, 4)]}, TypeError, "updates"),
        ({"inputs": [], "updates": [(theano.shared(0.0), T.constant(1.0), "gather")]}, ValueError, "gather"),
        ({"inputs": [], "sliceable_shareds": theano.shared(np.zeros(2))}, TypeError, "sliceable_shareds"),
        ({"inputs": [], "update": []}, TypeError, "has no argument 'update'; did you mean updates"),
        ({"inputs": [], "allow_downcast": True}, TypeError, "did you mean allow_input_downcast"),
        (
            {"inputs": [], "updates": updates.sgd([T.zeros(2)], [theano.shared(np.zeros(2))], 0.1)},
            TypeError,
            "^updates is .grad_updates, .* from a rule of synkhronos.extensions.updates; .*make_train_function",
        ),
    ],
)
def test_invalid_functions_are_refused(two, arguments, error, words):
    with pytest.raises(error, match=words):
        synk.function(**arguments)


@pytest.mark.parametrize("options", [{}, {"blocked": True}, {"plan": "controller"}], ids=str)
def test_a_missing_input_is_named(two, options):
    x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.zeros(3), "w")
    missing = "^the graph needs the input y, which is not in inputs; add it to inputs, or to bcast_inputs"
    with pytest.raises(theano.gof.fg.MissingInputError, match=missing):
        synk.function([x], T.sqr(x.dot(w) - y).sum(), exact=True, **options)
    with pytest.raises(theano.gof.fg.MissingInputError, match=missing):
        synk.function([x], [], updates=[(w, w + (x.dot(w) - 2 * y).sum())], exact=True)
