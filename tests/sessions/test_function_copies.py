"""Copies of exact functions (`Function.copy`), compared with copies of the backend's functions."""

import numpy as np
import pytest
from backend import T, theano
from comparison import assert_close

import synkhronos as synk

V = np.arange(14.0).reshape(7, 2)


def program():
    x, w, s = T.dmatrix("x"), theano.shared(np.array([1.0, 2.0]), "w"), theano.shared(np.float64(0), "s")
    y = T.dot(x, w)
    others = {
        "w": (w, theano.shared(np.array([3.0, 4.0]), "other w")),
        "s": (s, theano.shared(np.float64(9), "other s")),
    }
    return [x], [y, y.sum()], [(s, s + y.sum())], others


@pytest.mark.parametrize(
    "options",
    [{}, {"share_memory": True}, {"swap": "w"}, {"swap": "s", "name": "g"}, {"delete_updates": True}],
    ids=str,
)
def test_copies(session, options):
    found = []
    for build, more in ((theano.function, {}), (synk.function, {"exact": True})):
        inputs, outputs, updates, others = program()
        asked = {**options, "swap": dict([others[options["swap"]]])} if "swap" in options else options
        function = build(inputs, outputs, updates=updates, name="f", **more)
        copy = function.copy(**asked)
        values = [*copy(V), *function(V), *copy(V)]
        del function
        values += [*copy(V), *(one.get_value() for pair in others.values() for one in pair)]
        found.append([copy.name, *values])
    assert found[0][0] == found[1][0]
    for expected, got in zip(found[0][1:], found[1][1:]):
        assert_close(got, expected, rtol=1e-12, atol=0)


def test_variables_that_givens_use_are_swapped(session):
    found = []
    for build, more in ((theano.function, {}), (synk.function, {"exact": True})):
        x, z = T.dmatrices("xz")
        w, v, other = (
            theano.shared(np.full(2, value), name) for value, name in ((1.0, "w"), (2.0, "v"), (5.0, "other"))
        )
        function = build([x], [T.dot(z, w)], updates=[(v, v + w)], givens={z: x * w * v}, **more)
        copy = function.copy(swap={w: other})
        found.append([*copy(V), *function(V), *copy(V), *copy.copy(swap={other: w})(V), v.get_value()])
    for expected, got in zip(*found):
        assert_close(got, expected, rtol=1e-12, atol=0)


def test_copies_under_parallelize(session):
    inputs, outputs, _, others = program()
    with synk.parallelize():
        function = theano.function(inputs, outputs)
        copy = function.copy(swap=dict([others["w"]]))
    assert_close(copy(V)[0], V.dot([3, 4]))
    assert_close(function(V)[0], V.dot([1, 2]))


def test_invalid_swaps_are_refused(session):
    inputs, outputs, _, others = program()
    function = synk.function(inputs, outputs, exact=True)
    with pytest.raises(ValueError, match="swap has s, which the function does not use"):
        function.copy(swap=dict([others["s"]]))
    with pytest.raises(TypeError, match="in place of w; expected a shared variable of"):
        function.copy(swap={others["w"][0]: others["s"][0]})
