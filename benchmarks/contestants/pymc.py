"""Evaluations of the log-probability and its gradient of PyMC models: divided by rows, by PyMC alone, and by JAX."""

import ctypes
import gc
import os

import numpy as np

import synkhronos as synk
from benchmarks.contestants._pymc_models import build
from benchmarks.contestants._serve import compete, timed

_SECONDS, _LEAST, _MOST = 0.1, 3, 300  # of the calls of a turn
_DOUBLES = ctypes.POINTER(ctypes.c_double)


def of_pymc(model, point):
    """Return a call of the function that PyMC's own samplers evaluate."""
    function = model.logp_dlogp_function(ravel_inputs=True)._pytensor_function
    return lambda: function(point)


def of_nutpie(model, point):
    """Return a call of the function that nutpie evaluates; of a divided model, that which one chain is given."""
    import nutpie

    compiled = nutpie.compile_pymc_model(model)
    if hasattr(compiled, "own"):
        faster = compiled.own.if_faster(compiled.logp_func, point, 1)
        if faster is None:
            return lambda: compiled.logp_func(point[None])
        compiled, _ = faster
    code, data = compiled.compiled_logp_func.ctypes, compiled.user_data.ctypes.data
    arrays = [array.ctypes.data_as(_DOUBLES) for array in (point, np.empty_like(point), np.empty(1))]
    return lambda: (code(len(point), *arrays, data), arrays, compiled)


def of_jax(model, point):
    """Return a call of the function that numpyro and blackjax evaluate."""
    import jax
    from pymc.sampling.jax import get_jaxified_logp

    jax.config.update("jax_enable_x64", True)
    function = jax.jit(jax.value_and_grad(get_jaxified_logp(model)))
    values = [jax.numpy.full(np.shape(value), 0.1) for value in model.initial_point().values()]
    return lambda: jax.block_until_ready(function(values))


def make(ranks=0, graph="pymc"):
    """Fork the ranks, if there are some; `graph` is ``"pymc"``, ``"nutpie"`` or ``"jax"``."""
    prepare = {"pymc": of_pymc, "nutpie": of_nutpie, "jax": of_jax}[graph]
    if ranks:
        from synkhronos.extensions.pymc import parallel

        synk.fork(ranks)
    current = {}

    def run(name, rows):
        if (name, rows) not in current:
            current.clear()
            gc.collect()
            model = build(name, rows)
            point = np.full(sum(value.size for value in model.initial_point().values()), 0.1)
            with parallel(model) if ranks else model:
                current[name, rows] = prepare(model, point)
        step = current[name, rows]
        seconds = min(timed(step, 2))
        return timed(step, int(np.clip(_SECONDS / seconds, _LEAST, _MOST)), untimed=0)

    return run, {"threads": os.environ["OMP_NUM_THREADS"]}


if __name__ == "__main__":
    compete(make)
