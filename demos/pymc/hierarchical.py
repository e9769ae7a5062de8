"""Sample a hierarchical regression with PyMC; all ranks compute the density and its gradient.

The model is plain PyMC, and `parallel` divides its rows among the ranks. The script compares the density and the
gradient with PyMC's own, and the sampled coefficients with those that generated the data.
"""

import argparse
import time

import numpy as np
import pymc as pm

import synkhronos as synk
from synkhronos.extensions.pymc import parallel


def make_model(n_rows, n_covariates, n_groups, seed):
    """Return a hierarchical regression on generated data, and the coefficients that generated the data."""
    rng = np.random.default_rng(seed)
    coefficients = np.linspace(-1, 1, n_covariates)
    x, group = rng.normal(size=(n_rows, n_covariates)), rng.integers(0, n_groups, n_rows)
    y = x @ coefficients + rng.normal(size=n_groups)[group] + rng.normal(size=n_rows)
    with pm.Model() as model:
        level = pm.Normal("level", pm.Normal("mean"), pm.HalfNormal("spread"), shape=n_groups)
        slope = pm.Normal("slope", shape=n_covariates)
        pm.Normal("y", level[group] + x @ slope, pm.HalfNormal("noise"), observed=y)
    return model, coefficients


def main():
    """Sample, and check the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=None, help="processes (default: one for each core)")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--draws", type=int, default=200, help="draws, after as many for tuning (%(default)s)")
    arguments = parser.parse_args()

    n_ranks = synk.fork(arguments.ranks)
    model, coefficients = make_model(arguments.rows, n_covariates=5, n_groups=8, seed=1)
    alone = model.logp_dlogp_function(ravel_inputs=True)
    with parallel(model):
        together = model.logp_dlogp_function(ravel_inputs=True)
        start = time.perf_counter()
        options = {"tune": arguments.draws, "chains": 1, "random_seed": 2, "progressbar": False}
        drawn = pm.sample(arguments.draws, nuts_sampler="pymc", **options)
        seconds = time.perf_counter() - start
    print(together._pytensor_function.partition)

    point = pm.blocking.DictToArrayBijection.map(model.initial_point())
    for one, other in zip(together(point), alone(point)):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9 * np.abs(other).max())
    found = drawn.posterior["slope"].mean(("chain", "draw"))
    np.testing.assert_allclose(found, coefficients, rtol=0, atol=10 / arguments.rows**0.5)
    steps = int(drawn.sample_stats["n_steps"].sum())
    print(f"{n_ranks} ranks: {arguments.draws} draws of {steps} leapfrog steps, with tuning {seconds:.1f} s")
    print("density, gradient and coefficients agree")
    synk.close()


if __name__ == "__main__":
    main()
