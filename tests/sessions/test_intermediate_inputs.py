"""Inputs and givens that are intermediate results of a graph, as in Keras' ``K.function([layer.output], …)``."""

import numpy as np
import pytest
import scipy.sparse
from backend import T, theano, theano_only
from comparison import close

import synkhronos as synk

H = np.random.RandomState(0).randn(7, 4)


def weights():
    rng = np.random.RandomState(1)
    return theano.shared(rng.randn(3, 4), "w"), theano.shared(rng.randn(4, 2), "v")


def features():
    """Build a program whose input is a layer. The inputs of that layer are not needed."""
    (w, v), x = weights(), T.dmatrix("x")
    h = T.tanh(T.dot(x, w))
    y = T.dot(h, v)
    loss = T.sqr(y - y.mean(axis=0)).mean()
    return [h], [y, loss, T.grad(loss, v), h], {}, (H,)


def a_layer_and_its_input():
    (w, v), x = weights(), T.dmatrix("x")
    h = T.tanh(T.dot(x, w))
    loss = T.sqr(T.dot(h, v)).mean() + (x - x.mean()).max()
    return [x, theano.In(h, name="h")], [loss, T.grad(loss, v)], {}, (H[:, :3], H)


def givens_of_a_layer():
    (w, v), x = weights(), T.dmatrix("x")
    doubled = 2 * x
    h = T.tanh(T.dot(doubled, w))
    return [x], [T.dot(h, v).mean(axis=0), h], {doubled: x - x.mean(axis=0)}, (H[:, :3],)


PROGRAMS = [features, a_layer_and_its_input, givens_of_a_layer]


@pytest.mark.parametrize("n", [7, 1])
@pytest.mark.parametrize("program", PROGRAMS)
def test_values_are_the_serial_ones(session, program, n):
    inputs, outputs, givens, arguments = program()
    arguments = [values[:n] for values in arguments]
    expected = theano.function(inputs, outputs, givens=givens)(*arguments)
    exact = synk.function(inputs, outputs, givens=givens, exact=True)
    close(exact(*arguments), expected)
    close(exact.as_theano(*arguments), expected)
    with synk.parallelize():
        close(theano.function(inputs, outputs, givens=givens)(*arguments), expected)


@pytest.mark.parametrize("num_slices", [1, 2])
def test_plain_functions(session, num_slices):
    (h,), (y, *_), _, _ = features()
    f = synk.function([h], [(y, "gather"), (T.sqr(y).sum(), "sum")])
    expected = theano.function([h], [y, T.sqr(y).sum()])(H)
    close(f(H, num_slices=num_slices, check_against_theano=True), expected)


def test_a_scalar_that_is_computed_is_a_broadcast_input(session):
    x, s = T.dmatrix("x"), T.dscalar("s")
    scale = s * 2
    outputs = [(x * scale).sum(), x * scale]
    expected = theano.function([x, scale], outputs)(H, 5.0)
    close(synk.function([x], outputs, bcast_inputs=[scale], exact=True)(H, 5.0), expected)
    with synk.parallelize():
        close(theano.function([x, scale], outputs)(H, 5.0), expected)


def test_rows_along_another_axis(session):
    (h,), *_ = features()
    outputs = [h.sum(axis=1), (h - h.mean(axis=1, keepdims=True)).max(axis=0)]
    expected = theano.function([h], outputs)(H)
    close(synk.function([h], outputs, shard={h: 1}, exact=True)(H), expected)
    with synk.parallelize(shard={h: 1}):
        close(theano.function([h], outputs)(H), expected)


def test_ancestors_of_an_input_are_not_used(session):
    (w, v), x = weights(), T.dmatrix("x")
    h = T.tanh(T.dot(x, w))
    loss = T.dot(h, v).sum()
    with pytest.raises(theano.compile.UnusedInputError):
        synk.function([x, h], loss, exact=True)
    with synk.parallelize(shard=["x"]):
        f = theano.function([h], loss)  # shard names x, which the function does not use
    close([f(H)], [H.dot(v.get_value()).sum()])
    with pytest.raises(RuntimeError, match="an input of the function, which cannot be replaced"):
        synk.function([h], loss, givens={h: 2 * h}, exact=True)


MATRIX = scipy.sparse.csr_matrix([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])


def product_with_sparse(**default):
    """Build functions, with and without ``exact``, of a dense and a sparse input; return them and the dense value."""
    x, s = T.dmatrix("x"), theano.sparse.csr_matrix("s")
    product = theano.sparse.dot(s, x).sum()
    given = theano.In(s, **default) if default else s
    exact = synk.function([], product, bcast_inputs=[x, given], exact=True)
    plain = synk.function([], (product, "avg"), bcast_inputs=[x, given])
    return exact, plain, np.arange(6.0).reshape(3, 2)


@theano_only("default values of inputs")
def test_a_default_value_may_be_a_sparse_matrix(session):
    exact, plain, x = product_with_sparse(value=MATRIX)
    for function in (exact, plain):
        assert [function(x), function(x)] == [(MATRIX @ x).sum()] * 2
    assert exact.as_theano(x) == (MATRIX @ x).sum()


def test_a_value_for_a_sparse_input_is_checked_in_every_call(session):
    """The second call does not store an array in the memory of the first call's pickled matrix."""
    exact, plain, x = product_with_sparse()
    for function in (exact, plain):
        for _ in range(3):
            try:
                assert function(x, MATRIX.toarray()) == (MATRIX @ x).sum()
            except TypeError as error:  # the backend does not convert dense arrays
                assert "s" in str(error)
        assert function(x, MATRIX) == (MATRIX @ x).sum()
        with pytest.raises(TypeError, match="input s: got Data; expected a value of"):
            function(x, synk.data(MATRIX.toarray()))


def test_a_shared_variable_without_axes_is_indexed(session):
    scalar, x = theano.shared(np.float64(3), "scalar"), T.dvector("x")
    exact = synk.function([x], scalar[()] * x.mean(), exact=True)
    alone = synk.function([], scalar[...] + 1, exact=True)
    assert (exact(np.ones(5)), alone()) == (3, 4)


def test_the_serial_function_is_compiled_once_for_a_subset(two, caplog):
    x = T.dvector("x")
    function = synk.function([x], [x.sum(), x.max()], exact=True)
    with caplog.at_level("DEBUG", "synkhronos"):
        for _ in range(3):
            assert function.as_theano(np.arange(4.0), output_subset=[1]) == [3]
    assert len([message for message in caplog.messages if message.startswith("compiled ")]) <= 1
