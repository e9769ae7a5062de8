"""Four chains of a hierarchical regression in PyMC, by several samplers. The result is seconds per gradient."""

import contextlib
import os
import time

import numpy as np
import pymc as pm

import synkhronos as synk
from benchmarks.contestants._pymc_models import build
from benchmarks.contestants._serve import compete

CHAINS, DEPTH = 4, 6
WARM_UP = 20  # draws of numpyro and blackjax, which are not timed
QUIET = {"progressbar": False, "quiet": True, "compute_convergence_checks": False, "discard_tuned_samples": False}


def with_nutpie(model, cores):
    """Return a function that samples with nutpie, and returns the number of gradients."""
    import nutpie

    compiled = nutpie.compile_pymc_model(model)
    settings = {"chains": CHAINS, "cores": cores, "progress_bar": False, "save_warmup": True, "maxdepth": DEPTH}

    def sample(draws):
        drawn = nutpie.sample(compiled, draws=draws, tune=draws, seed=1, **settings)
        return int(drawn.sample_stats.n_steps.sum() + drawn.warmup_sample_stats.n_steps.sum())

    return sample


def with_pymc(model, cores):
    """Return a function that samples with PyMC's NUTS, and returns the number of gradients."""
    depths = {"max_treedepth": DEPTH, "early_max_treedepth": DEPTH}
    options = {"model": model, "step": pm.NUTS(model=model, **depths)}

    def sample(draws):
        drawn = pm.sample(
            draws, tune=draws, chains=CHAINS, cores=cores, random_seed=1, blas_cores=None, **QUIET, **options
        )
        return int(drawn.sample_stats["n_steps"].sum() + drawn.warmup_sample_stats["n_steps"].sum())

    return sample


def potential_of(model):
    """Return minus the log-probability as a function of JAX, and values of all chains near the initial point."""
    import jax
    from pymc.sampling.jax import get_jaxified_logp

    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(1)
    values = [
        jax.numpy.asarray(value + 0.1 * rng.normal(size=(CHAINS, *np.shape(value))))
        for value in model.initial_point().values()
    ]
    function = get_jaxified_logp(model)
    return (lambda point: -function(point)), values


def in_one_program(draw, states):
    """Return a function that makes draws of all chains, and returns the number of gradients and the seconds."""
    import jax

    key = jax.random.PRNGKey(2)
    run = jax.jit(lambda states, keys: jax.lax.scan(draw, states, keys))
    compiled = None

    def sample(draws):
        nonlocal compiled, states, key
        key, used = jax.random.split(key)
        keys = jax.random.split(used, draws)
        compiled = compiled or run.lower(states, keys).compile()
        start = time.perf_counter()
        states, n_steps = jax.block_until_ready(compiled(states, keys))
        return int(n_steps.sum()), time.perf_counter() - start

    return sample


def with_numpyro(model, cores):
    """Return a function that samples with numpyro, all chains in one vectorized program."""
    import jax
    from numpyro.infer import NUTS

    potential, values = potential_of(model)
    kernel = NUTS(potential_fn=potential, max_tree_depth=DEPTH)
    states = kernel.init(jax.random.split(jax.random.PRNGKey(1), CHAINS), WARM_UP, values, (), {})

    def draw(states, key):
        states = kernel.sample(states, (), {})
        return states, states.num_steps

    tune = jax.jit(lambda states: jax.lax.scan(draw, states, None, length=WARM_UP)[0])
    return in_one_program(draw, tune(states))


def with_blackjax(model, cores):
    """Return a function that samples with blackjax, all chains in one vectorized program."""
    import blackjax
    import jax

    potential, values = potential_of(model)
    density = lambda point: -potential(point)  # noqa: E731
    adaptation = blackjax.window_adaptation(blackjax.nuts, density, max_num_doublings=DEPTH)
    (state, parameters), _ = adaptation.run(jax.random.PRNGKey(1), [value[0] for value in values], WARM_UP)
    step = blackjax.nuts(density, **parameters).step

    def draw(states, key):
        states, found = jax.vmap(step)(jax.random.split(key, CHAINS), states)
        return states, found.num_integration_steps

    return in_one_program(draw, jax.tree.map(lambda value: jax.numpy.stack([value] * CHAINS), state))


def make(rows, sampler, ranks=0, cores=1):
    """Prepare chains: `sampler` is ``"nutpie"``, ``"pymc"``, ``"numpyro"`` or ``"blackjax"``."""
    if ranks:
        from synkhronos.extensions.pymc import parallel

        synk.fork(ranks)
    model = build("hierarchical", rows)
    context = (lambda: parallel(model)) if ranks else contextlib.nullcontext
    with context():
        sample = globals()[f"with_{sampler}"](model, cores)

    def run(draws):
        with context():
            start = time.perf_counter()
            found = sample(draws)
        n_steps, seconds = found if isinstance(found, tuple) else (found, time.perf_counter() - start)
        return [seconds / n_steps]

    return run, {"threads": os.environ["OMP_NUM_THREADS"]}


if __name__ == "__main__":
    compete(make)
