"""PyMC models with each distribution as a likelihood of many rows: values of PyMC alone, and division by rows.

By default, each distribution has its parameters in one way; ``make test-pymc`` tests all ways, on 1, 2 and 3 ranks.
"""

import os
import zlib

import numpy as np
import pytest
from backend import theano

pm = pytest.importorskip("pymc", reason="PyMC is not installed")

import pymc_models  # noqa: E402

from synkhronos.extensions.pymc import parallel  # noqa: E402

#: Fully optimized and not compiled, unless the tests run with numba.
FLAGS = {} if theano.config.linker == "numba" else {"linker": "py", "cxx": ""}
ALL = bool(os.environ.get("SYNKHRONOS_PYMC_MODELS"))

#: The gradient of the distribution function of beta variables is a series, which amplifies rounding.
LOOSE = {"HurdleNegativeBinomial": 1e-8}

KINDS = [
    *((name, pymc_models.univariate, (name,)) for name in pymc_models.UNIVARIATE),
    *((f"{kind} {name}", pymc_models.modified, (kind, name)) for kind, name in pymc_models.MODIFIED),
]
CASES = [
    pytest.param(build, (*arguments, way), id=f"{name}, {way}")
    for name, build, arguments in KINDS
    for i, way in enumerate(pymc_models.WAYS)
    if ALL or i == zlib.crc32(name.encode()) % len(pymc_models.WAYS)
]


@pytest.mark.parametrize("n_ranks", [1, 2, 3] if ALL else [2])
@pytest.mark.parametrize(("build", "arguments"), CASES)
def test_values_of_pymc_and_division_by_rows(synchronize, n_ranks, build, arguments):
    synchronize(n_ranks)
    with theano.config.change_flags(**FLAGS), pm.Model() as model:
        build(*arguments)
        alone = model.logp_dlogp_function(ravel_inputs=True)
        terms = model.compile_fn(model.logp(sum=False), inputs=model.value_vars)
        with parallel(model):
            divided = model.logp_dlogp_function(ravel_inputs=True)._pytensor_function
    start = pm.blocking.DictToArrayBijection.map(model.initial_point())
    for seed in range(2):
        point = 0.3 * np.random.default_rng(seed).normal(size=start.data.size)
        value, gradient = divided(point)
        expected = alone._pytensor_function(point)
        raveled = pm.blocking.RaveledVars(point, start.point_map_info)
        size = sum([abs(one).sum() for one in terms(pm.blocking.DictToArrayBijection.rmap(raveled))])
        assert abs(value - expected[0]) <= 1e-12 * size
        tolerance = LOOSE.get(arguments[0], 1e-12) * (size + abs(expected[1]).max())
        np.testing.assert_allclose(gradient, expected[1], rtol=0, atol=tolerance)
    if build is pymc_models.univariate and not pymc_models.UNIVARIATE[arguments[0]][0]:
        assert type(divided) is theano.compile.Function  # PyMC has computed the likelihood when it was compiled
        return
    kinds = [one.collective for one in divided.partition]
    assert kinds and not any("gather" in kind for kind in kinds), kinds
