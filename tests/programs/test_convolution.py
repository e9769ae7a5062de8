"""Convolutions by vector code: results equal Theano's up to rounding, and other cases use Theano's own code."""

import itertools

import numpy as np
import pytest
import theano
import theano.tensor as T
from backend import cpp_codes, theano_only
from scripts import run_script
from theano.tensor.nnet import corr

pytestmark = [theano_only("Theano's convolution, in vector code"), pytest.mark.usefixtures("optimized")]

SWITCH = "vector_convolution"

BORDERS = ("valid", "full", "half", (1, 2), ((0, 1), (2, 3)))
STEPS = ((1, 1), (2, 1), (3, 2))
TOLERANCE = {"float32": 1e-4, "float64": 1e-12}


def all_directions(dtype, cases):
    """Return a function that computes the convolution and both gradients in each case."""
    kind = T.TensorType(dtype, (False,) * 4)
    images, filters, results = inputs = [kind("images"), kind("filters"), kind("to")]
    outputs = []
    for case in cases:
        correlation = corr.CorrMM(**case)(images, filters)
        chosen = results[:, :, : correlation.shape[2], : correlation.shape[3]]
        outputs += [
            correlation,
            corr.CorrMM_gradWeights(**case)(images, chosen, filters.shape[2:]),
            corr.CorrMM_gradInputs(**case)(filters, chosen, images.shape[2:]),
        ]
    return theano.function(inputs, outputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_results_are_those_of_theanos_own_code(dtype, on_and_off):
    names = ("border_mode", "subsample", "filter_dilation")
    every = 5 if dtype == "float64" else 2
    cases = [dict(zip(names, case)) for case in itertools.product(BORDERS, STEPS, STEPS)][::every]
    ours, theanos = on_and_off(lambda: all_directions(dtype, cases))
    rng = np.random.RandomState(0)
    for turn in range(25):
        n, channels, filters = rng.randint(1, 4), rng.randint(1, 36), rng.randint(1, 36)
        height, width, kernel = rng.randint(13, 24), rng.randint(13, 24), rng.randint(1, 5, 2)
        images, weights = rng.randn(n, channels, height, width), rng.randn(filters, channels, *kernel)
        given = [one.astype(dtype) for one in (images, weights, rng.randn(n, filters, 60, 60))]
        if turn % 3 == 1:  # other strides
            given = [np.asfortranarray(one) for one in given]
        for got, expected in zip(ours(*given), theanos(*given)):
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert np.allclose(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * abs(expected).max())


def test_values_that_are_not_finite_stay_where_they_are():
    ours = all_directions("float32", [{"border_mode": "half"}])
    images, filters, to = (np.ones(shape, "float32") for shape in ((1, 3, 9, 9), (5, 3, 3, 3), (1, 5, 9, 9)))
    images[0, 0, 4, 4] = np.nan
    to[0, 1, 0, 0] = np.inf
    results, for_filters, for_images = ours(images, filters, to)
    assert np.isnan(results).sum() == 5 * 9 and np.isnan(results[0, 2, 3:6, 3:6]).all()
    assert np.isinf(for_images).sum() == 3 * 4 and np.isinf(for_images[0, :, :2, :2]).all()
    assert np.isfinite(for_images).sum() == for_images.size - 12
    assert np.isnan(for_filters[:, 0]).all() and np.isfinite(np.delete(for_filters, 1, axis=0)[:, 1:]).all()


def code_of(function):
    """Return the C++ code of each correlation of a function."""
    return list(cpp_codes(function, lambda node: isinstance(node.op, corr.BaseCorrMM)).values())


def convolution(groups=1, unshared=False):
    """Return a function of a convolution and its gradients, as users write it."""
    images, filters = T.ftensor4("images"), T.TensorType("float32", (False,) * (6 if unshared else 4))("filters")
    results = T.nnet.conv2d(images, filters, num_groups=groups, unshared=unshared)
    return theano.function([images, filters], [results, *T.grad((results**2).sum(), [images, filters])])


def test_convolutions_use_the_vector_code():
    codes = code_of(convolution())
    assert len(codes) == 3 and all("synkhronos::correlate_arrays<npy_float>" in code for code in codes)


@pytest.mark.parametrize("what", ["groups", "unshared", "off", "OpenMP"])
def test_unsupported_cases_use_theanos_code(what, switch, monkeypatch):
    switch(what != "off")
    monkeypatch.setattr(theano.config, "openmp", what == "OpenMP")
    function = convolution(2 if what == "groups" else 1, what == "unshared")
    if what in ("off", "OpenMP"):
        assert not any("synkhronos::" in code for code in code_of(function))
    filters = np.ones((4, 5, 5, 4, 2, 2) if what == "unshared" else (4, 2 if what == "groups" else 4, 2, 2), "float32")
    results, _, _ = function(np.ones((3, 4, 6, 6), "float32"), filters)
    assert results.shape == (3, 4, 5, 5) and (results == (8 if what == "groups" else 16)).all()


def test_sizes_that_do_not_belong_together_and_empty_ones(switch):
    messages = []
    for is_on in (True, False):
        switch(is_on)
        function = convolution()
        for shapes in (((2, 3, 8, 8), (4, 2, 3, 3)), ((2, 3, 2, 2), (4, 3, 3, 3))):
            with pytest.raises(ValueError) as caught:
                function(*(np.ones(shape, "float32") for shape in shapes))
            messages.append(str(caught.value).split("\nApply node")[0])
        for shapes in (((0, 3, 8, 8), (4, 3, 3, 3)), ((2, 0, 8, 8), (4, 0, 3, 3)), ((2, 3, 8, 8), (0, 3, 3, 3))):
            results, for_images, for_filters = function(*(np.ones(shape, "float32") for shape in shapes))
            assert results.shape == (shapes[0][0], shapes[1][0], 6, 6) and not results.any()
            assert (for_images.shape, for_filters.shape) == shapes and not for_images.any() and not for_filters.any()
    assert messages[:2] == messages[2:]


def test_several_in_one_module():
    images, filters, half = T.ftensor4(), T.ftensor4(), T.ftensor4()
    outputs = [corr.CorrMM()(images, filters), corr.CorrMM(num_groups=2)(images, half)]
    function = theano.function([images, filters, half], outputs, mode=theano.Mode(linker="c", optimizer=None))
    whole, parts = function(*(np.ones(shape, "float32") for shape in ((1, 4, 3, 3), (2, 4, 2, 2), (2, 2, 2, 2))))
    assert (whole == 16).all() and (parts == 8).all()


def test_padding_that_would_take_much_memory_uses_theanos_code():
    source = """
        import os, resource
        import numpy as np, synkhronos, theano, theano.tensor as T
        x, w = T.ftensor4(), T.ftensor4()
        y = T.nnet.conv2d(x, w, border_mode=(3000, 3000), subsample=(4000, 4000))
        f = theano.function([theano.In(x, borrow=True), w], y)
        given = np.ones((1, 1, 20, 20), "float32"), np.ones((2, 1, 3, 3), "float32")
        assert f(*given).shape == (1, 2, 2, 2)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, -1))
        print(f(*given).shape)
    """
    assert run_script(source)[0] == "(1, 2, 2, 2)\n"
