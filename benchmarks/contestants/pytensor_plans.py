"""Calls of two programs, in plain PyTensor and PyMC, or as exact functions with one of the plans."""

import os

import numpy as np
import pytensor

import synkhronos as synk
from benchmarks.contestants._serve import compete, timed_turn
from benchmarks.contestants.pymc import build
from benchmarks.contestants.pytensor_mlp import SIZES, network
from synkhronos.extensions.pymc import parallel


def mlp(ranks):
    """Return a step of stochastic gradient descent."""
    x, y, loss, params = network()
    updates = [(var, var - np.float32(0.01) * grad) for var, grad in zip(params, pytensor.grad(loss, params))]
    function, options = (synk.function, {"exact": True}) if ranks else (pytensor.function, {})
    return function([x, y], loss, updates=updates, **options)


def make(plan="", ranks=0):
    """Fork, if `ranks` is not 0; functions are built when they are first needed.

    With ``which_plan``, a round returns whether the controller computed the last call, which had as many rows.
    """
    if ranks:
        synk.fork(ranks, plan=plan)
    calls = {}

    def prepare(program, rows):
        if program == "mlp":
            rng = np.random.RandomState(0)
            x = rng.random_sample((rows, SIZES[0])).astype("float32")
            y = rng.randint(0, SIZES[-1], rows).astype("int32")
            function = calls["mlp", None] = calls.get(("mlp", None)) or mlp(ranks)
            return function, (x, y)
        model = build(rows)
        with parallel(model) if ranks else model:
            function = model.logp_dlogp_function(ravel_inputs=True)._pytensor_function
        return function, (np.full(sum(value.size for value in model.initial_point().values()), 0.1),)

    def run(program, rows, which_plan=False):
        if (program, rows) not in calls:
            calls[program, rows] = prepare(program, rows)
        function, inputs = calls[program, rows]
        if which_plan:
            return [float(function.counts[0] == rows)]
        return timed_turn(lambda: function(*inputs))

    return run, {"threads": os.environ["OMP_NUM_THREADS"]}


if __name__ == "__main__":
    compete(make)
