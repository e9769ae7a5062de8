"""PyMC models with each distribution as a likelihood of many rows: values of PyMC alone, and division by rows.

The models, and how they are divided, are in ``pymc_models.py`` and ``pymc_gallery.py`` of ``tests/helpers``. By
default, a sample of them is tested; ``make test-pymc`` tests all, on 1, 2 and 3 ranks.
"""

import functools
import os
import subprocess
import sys
import zlib

import numpy as np
import pytest
from backend import theano
from scripts import ROOT

pm = pytest.importorskip("pymc", reason="PyMC is not installed")

import pymc.distributions  # noqa: E402
import pymc_gallery  # noqa: E402, F401
from pymc_models import CASES, EXCEPTIONS, GATHERED, PYMC, ROWS  # noqa: E402

from synkhronos.extensions.pymc import parallel  # noqa: E402

#: Fully optimized and not compiled, unless the tests run with numba.
FLAGS = {} if theano.config.linker == "numba" else {"linker": "py", "cxx": ""}
ALL = bool(os.environ.get("SYNKHRONOS_PYMC_MODELS"))

#: One of how many models of a kind is tested by default, in one of the ways in which the rows get their parameters.
SAMPLED = {"univariate": 3, "modified": 3, "further modified": 48}
OTHERS_SAMPLED = 4

#: Operations that combine the gradient from its parts.
GRADIENT = ("Join{", "AdvancedIncSubtensor", "IncSubtensor")

#: Relative tolerances where rounding is amplified.
SERIES = "the gradient of the distribution function of beta variables is a series"
FACTORS = "the covariance matrix is nearly singular"
SINGLE = "without a compiler, PyTensor combines Python's numbers with constants of single precision in that precision"
LOOSE = {
    "HurdleNegativeBinomial": (1e-8, SERIES),
    **dict.fromkeys(("MarginalApprox VFE", "MarginalApprox DTC"), (1e-8, SINGLE)),
    **dict.fromkeys(("Latent", "TP", "counts of a gaussian process"), (1e-10, FACTORS)),
}


def selected():
    """Return the models to test, and for each a way in which its rows get their parameters, if there are several."""
    found = []
    for case in CASES:
        number = zlib.crc32(case.name.encode())
        if ALL or number // 3 % SAMPLED.get(case.kind, OTHERS_SAMPLED) == 0:
            ways = case.ways or (None,)
            for way in ways if ALL else [ways[number % len(ways)]]:
                name = case.name if way is None else f"{case.name}, {way}"
                found.append(pytest.param(case, way, id=f"{case.kind}: {name}"))
    return found


@pytest.fixture(autouse=True, scope="module")
def exact_reciprocals():
    """Have PyTensor, which computes reciprocals of Python's numbers in single precision, use double precision."""
    from pytensor.scalar.basic import Reciprocal

    plain = Reciprocal.impl
    Reciprocal.impl = lambda self, x: np.float64(1) / x
    Reciprocal.impl.__module__ = plain.__module__  # ranks do not run operations of the program
    yield
    Reciprocal.impl = plain


def density(model):
    """Return the function that PyMC builds for the log-probability and its gradient."""
    made = model.logp_dlogp_function(ravel_inputs=True)
    made.set_extra_values(model.initial_point())  # of discrete parameters
    return made._pytensor_function


@functools.lru_cache(maxsize=1)
def alone(case, way):
    """Build a model, and compute values, gradients, and sums of the absolute values of terms with PyMC alone."""
    with pm.Model() as model:
        case.build(*([] if way is None else [way]))
    function = density(model)
    terms = model.compile_fn(model.logp(sum=False), inputs=model.value_vars, mode="FAST_COMPILE")
    start = model.initial_point()
    continuous = {one.name: start[one.name] for one in model.continuous_value_vars}
    raveled = pm.blocking.DictToArrayBijection.map(continuous)
    found = []
    for seed in range(2):
        point = 0.3 * np.random.default_rng(seed).normal(size=raveled.data.size)
        values = pm.blocking.DictToArrayBijection.rmap(pm.blocking.RaveledVars(point, raveled.point_map_info))
        size = sum([abs(one).sum() for one in terms({**start, **values})])
        assert np.isfinite(size)
        found.append((point, *function(point), size))
    return model, found


def gathers(function):
    """Return the lines of a function's partition about gathered variables."""
    return [one for one in function.partition if "gather" in one.collective]


@pytest.mark.parametrize("n_ranks", [1, 2, 3] if ALL else [2])
@pytest.mark.parametrize(("case", "way"), selected())
def test_values_of_pymc_and_division_by_rows(synchronize, n_ranks, case, way):
    synchronize(n_ranks)
    with theano.config.change_flags(**FLAGS):
        model, expected = alone(case, way)
        with parallel(model):
            divided = density(model)
    relative, _ = LOOSE.get(case.name, (1e-12, ""))
    for point, expected_value, expected_gradient, size in expected:
        value, gradient = divided(point)
        assert abs(value - expected_value) <= relative * size
        tolerance = relative * (size + abs(expected_gradient).max())
        np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=tolerance)
    if case.division == PYMC:
        assert type(divided) is theano.compile.Function
    elif case.division == ROWS:
        assert divided.partition and not gathers(divided), divided.partition
    else:
        reasons = [one.reason for one in gathers(divided)]
        assert reasons, divided.partition
        assert all(reason.startswith(GRADIENT) for reason in reasons) == (case.division == GATHERED), reasons


def test_each_distribution_is_the_likelihood_of_a_model():
    tested = {name for case in CASES if case.kind != "gallery" for name in case.name.split()}
    exported = set(pymc.distributions.__all__)
    assert exported - tested - set(EXCEPTIONS) == set()
    assert not tested & set(EXCEPTIONS) and set(EXCEPTIONS) <= exported


def test_each_model_has_a_name_and_a_reason():
    assert len({(case.kind, case.name) for case in CASES}) == len(CASES)
    assert all(bool(case.reason) == (case.division != ROWS) for case in CASES)
    assert sum(case.kind == "gallery" for case in CASES) >= 40


def test_the_page_has_the_present_tables():
    printed = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "tabulate_models.py")], capture_output=True, text=True, check=True
    )
    page = (ROOT / "docs" / "pymc.md").read_text()
    assert printed.stdout in page
