"""Arrays of unusual layouts and types, and long lists of indices."""

import numpy as np
import pytest
from backend import T, theano
from faulty_function import built

import synkhronos as synk

RNG = np.random.RandomState(0)
BASE = RNG.randn(40, 6)


@pytest.mark.parametrize(
    "array",
    [
        BASE[::-1, ::2],
        np.asfortranarray(BASE),
        BASE.astype(">f8"),
        np.array(BASE, dtype=[("a", "f8")])["a"],
        np.ma.masked_array(BASE),
        BASE.tolist(),
        np.where(BASE > 1, np.nan, np.where(BASE < -1, np.inf, BASE)),
        BASE[:0],
        BASE[:2],
    ],
    ids=["strided", "Fortran", "big-endian", "field", "masked", "list", "nan", "empty", "fewer than ranks"],
)
def test_arrays_of_any_layout(synchronize, array):
    synchronize(3)
    if "m" not in built:
        m, w = T.dmatrix("m"), theano.shared(np.zeros((1, 1)), "matrix")
        built["m"] = synk.function([m], [(m * 1, "gather"), (m.sum(1), "gather")], givens=[], updates=[(w, w)])
        built["matrix"] = w
    plain = np.array(array, dtype="float64")
    for value in (array, synk.data(array, dtype="float64", force_cast=True)):
        same, sums = built["m"](value)
        np.testing.assert_array_equal(same, plain)
        np.testing.assert_allclose(sums, plain.sum(1))
    synk.distribute()
    synk.broadcast(built["matrix"], array)
    np.testing.assert_array_equal(synk.gather(built["matrix"]), [plain] * 3)
    synk.scatter(built["matrix"], array)
    np.testing.assert_array_equal(synk.gather(built["matrix"], nd_up=0), plain)
    synk.all_gather(built["matrix"])
    np.testing.assert_array_equal(synk.get_value(2, built["matrix"]), plain)


def test_structured_arrays_are_refused(three):
    records = np.zeros(6, dtype=[("a", "f8"), ("b", "i4")])
    with pytest.raises(TypeError):
        three[0](records)
    with pytest.raises(TypeError):
        synk.broadcast(built["big"], records)
    assert three[0](np.ones(6)) == 6


def test_a_huge_list_of_indices(three):
    indices = np.arange(3_000_000) % 7
    assert three[0](np.arange(7.0), batch=indices) == indices.sum()
    data = synk.data(np.arange(7.0))
    assert three[0](data, batch=indices) == indices.sum()
    assert three[0](data, batch=indices[:1000].tolist()) == indices[:1000].sum()
