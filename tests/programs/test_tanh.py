"""The branch-free hyperbolic tangent: its error, and its values for extreme arguments."""

import pickle
import subprocess

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import cpp_codes, theano_only
from scripts import run_script

pytestmark = [theano_only("Theano's tanh, in vector code"), pytest.mark.usefixtures("optimized")]

SWITCH = "vector_tanh"

LARGEST = {"float32": 0.51, "float64": 3.0}  # largest errors, in units in the last place


def all_magnitudes(dtype):
    """Draw numbers of all magnitudes, and many in the range where tanh is neither its argument nor 1."""
    rng = np.random.RandomState(0)
    lowest = np.finfo(dtype).minexp
    spread = np.ldexp(1 + rng.rand(100_000), rng.randint(lowest - 10, 6, 100_000))
    values = np.concatenate([spread, 10 * rng.rand(300_000), 1e-2 * rng.rand(100_000)])
    return (values * rng.choice([-1, 1], values.size)).astype(dtype)


@pytest.mark.parametrize("dtype", LARGEST)
def test_it_is_the_tangent_to_the_last_place(dtype):
    x = T.vector("x", dtype)
    f = theano.function([x], T.tanh(x))
    values = all_magnitudes(dtype)
    expected = np.tanh(values.astype(np.longdouble))
    got = f(values)
    assert got.dtype == dtype
    errors = np.abs(got - expected) / np.spacing(np.abs(expected).astype(dtype)).astype(np.longdouble)
    assert errors.max() <= LARGEST[dtype]
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, np.finfo(dtype).tiny / 4], dtype)
    assert np.array_equal(f(ends), np.tanh(ends), equal_nan=True)
    assert np.array_equal(np.signbit(f(ends[:4])), [False, True, False, True])


def test_in_larger_expressions_of_other_types_and_strides():
    x, n = T.matrix("x", "float32"), T.ivector("n")
    y = T.tanh(x[:, ::2]) * T.tanh(2 * x[:, 1::2]) + T.tanh(x[:, ::2] + 1)
    function = theano.function([x, n], [y, T.tanh(n), T.grad(y.sum(), x)])
    values = np.random.RandomState(0).randn(50, 24).astype("float32")
    even, odd = values[:, ::2].astype("float64"), values[:, 1::2].astype("float64")
    got, of_integers, gradient = function(values, np.arange(-4, 4, dtype="int32"))
    assert np.allclose(got, np.tanh(even) * np.tanh(2 * odd) + np.tanh(even + 1), rtol=1e-5, atol=1e-6)
    assert np.allclose(of_integers, np.tanh(np.arange(-4, 4)), rtol=1e-14)
    slopes = (1 - np.tanh(even) ** 2) * np.tanh(2 * odd) + 1 - np.tanh(even + 1) ** 2
    assert np.allclose(gradient[:, ::2], slopes, rtol=1e-4, atol=1e-5)


def test_what_takes_it(switch):
    def code(dtype):
        x = T.vector("x", dtype)
        (code,) = cpp_codes(theano.function([x], T.tanh(x)), lambda node: True).values()
        return code

    assert all("synkhronos_tanh((npy_" in code(dtype) for dtype in ("float32", "float64", "int64"))
    switch(False)
    assert "synkhronos_tanh((npy_" not in code("float32")


@pytest.mark.parametrize("flags", ["-O3 -ffast-math", "-O2 -fassociative-math -fno-signed-zeros -fno-trapping-math"])
def test_where_the_compiler_may_reorder_sums_it_is_the_librarys(flags):
    source = """
        import numpy as np, theano, theano.tensor as T
        x = T.dvector()
        values = np.linspace(-5, 5, 1001)
        print(np.abs(theano.function([x], T.tanh(x))(values) - np.tanh(values)).max() < 1e-15)
    """
    assert run_script(source, environment={"THEANO_FLAGS": f"gcc.cxxflags={flags}"})[0] == "True\n"


def test_functions_are_copied_and_pickled_after_the_flag_has_changed(switch):
    x, values = T.dvector("x"), np.linspace(-3, 3, 50)
    for is_on in (True, False):
        switch(is_on)
        f = theano.function([x], T.tanh(x + 1.37) * 2.5)
        switch(not is_on)
        for g in (f.copy(), pickle.loads(pickle.dumps(f))):
            assert np.allclose(g(values), np.tanh(values + 1.37) * 2.5, rtol=1e-13)


def test_several_in_one_module():
    x = T.dvector("x")
    outputs = [T.tanh(x), T.tanh(T.dot(x, x.T) + 1) * 2]
    f = theano.function([x], outputs, mode=theano.Mode(linker="c", optimizer="fast_run"))
    assert np.allclose(f(np.ones(3))[1], np.tanh(4.0) * 2)


def test_a_gpus_compiler_gets_its_own():
    """Theano passes the support code to the GPU's compiler without Python's headers."""
    code = T.tanh(T.fscalar()).owner.op.scalar_op.c_support_code()
    assert "struct" not in code  # Theano refuses support code with structs on GPUs
    given = subprocess.run(["g++", "-E", "-P", "-xc++", "-"], input=f"{code}\nsynkhronos_tanh(1)", text=True, stdout=-1)
    assert given.stdout.split() == ["tanh(1)"]
