"""Hierarchical regression in PyMC, divided by its rows or by PyMC alone: evaluations, and draws by NUTS."""

import os

import numpy as np
import pymc as pm

import synkhronos as synk
from benchmarks.contestants._serve import compete, timed
from synkhronos.extensions.pymc import parallel

COVARIATES, GROUPS = 20, 8


def build(rows):
    """Return the model, on generated data."""
    rng = np.random.default_rng(0)
    x, group = rng.normal(size=(rows, COVARIATES)), rng.integers(0, GROUPS, rows)
    y = x @ np.linspace(-1, 1, COVARIATES) + rng.normal(size=rows)
    with pm.Model() as model:
        level = pm.Normal("level", pm.Normal("mean"), pm.HalfNormal("spread"), shape=GROUPS)
        slope = pm.Normal("slope", shape=COVARIATES)
        pm.Normal("y", level[group] + x @ slope, pm.HalfNormal("noise"), observed=y)
    return model


def make(rows, kind, ranks=0):
    """Build the model; `kind` is ``"evaluation"`` or ``"nuts"``, and 0 ranks is PyMC alone."""
    if ranks:
        synk.fork(ranks)
    model = build(rows)
    context = (lambda: parallel(model)) if ranks else (lambda: model)
    if kind == "evaluation":
        with context():
            function = model.logp_dlogp_function(ravel_inputs=True)._pytensor_function
        point = np.full(sum(value.size for value in model.initial_point().values()), 0.1)
        return lambda times: timed(lambda: function(point), times), {"threads": os.environ["OMP_NUM_THREADS"]}

    def run(draws):
        with context():
            drawn = pm.sample(
                draws,
                tune=draws,
                chains=1,
                cores=1,
                blas_cores=None,
                random_seed=1,
                nuts_sampler="pymc",
                discard_tuned_samples=False,
                progressbar=False,
                quiet=True,
                compute_convergence_checks=False,
            )
        steps = drawn.sample_stats["n_steps"].sum() + drawn.warmup_sample_stats["n_steps"].sum()
        return [drawn.posterior.attrs["sampling_time"] / int(steps)]

    return run, {"threads": os.environ["OMP_NUM_THREADS"]}


if __name__ == "__main__":
    compete(make)
