"""Compare `synk.plan` with measured steps of two ranks: ``python -m benchmarks.plan_validation mlp cnn``.

Each model is measured on one rank, and contention, exchange and the cost of a command on two. Then steps of two ranks
are predicted and measured. Errors count where the rows of a rank are not among those that were measured, except for
``regression``, whose number of rows cannot be changed. Next to them is the error of half the time of one rank.
``regression`` needs PyMC, the others Theano and Lasagne. Run it while no other program uses the cores.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

import synkhronos as synk
from synkhronos._api.step_measurements import sizes_between
from synkhronos.extensions.train import make_train_function

MODELS = ("mlp", "cnn", "lstm", "regression")
BATCHES = [100, 320, 640, 1100, 1500]
ROWS = {"mlp": 1500, "cnn": 1500, "lstm": 1500, "regression": 100_000}
MEDIAN, LARGEST = 0.07, 0.20  # targets


def plan(model: str) -> Any:
    """Measure a model, and return its `Plan`."""
    n = ROWS[model]
    if model == "regression":
        import pymc as pm

        from benchmarks.contestants._pymc_models import crossed
        from synkhronos.extensions.pymc import parallel

        with pm.Model() as made:
            crossed(n, np.random.default_rng(0))
        with parallel(made) as made:
            f = made.compile_fn(made.logp(), inputs=made.value_vars, point_fn=False)
            start = made.initial_point()
            return synk.plan(f, *(start[var.name] for var in made.value_vars))
    if model == "lstm":
        import lasagne
        import theano
        from lasagne import layers

        from benchmarks.contestants._batches import CLASSES
        from benchmarks.contestants.lstm import FEATURES, TIME, UNITS

        theano.config.floatX = "float32"
        x, y = theano.tensor.ftensor3("x"), theano.tensor.ivector("y")
        net = layers.LSTMLayer(layers.InputLayer((None, TIME, FEATURES), x), UNITS)
        net = layers.DenseLayer(layers.SliceLayer(net, -1, 1), CLASSES, nonlinearity=lasagne.nonlinearities.softmax)
        params = layers.get_all_params(net, trainable=True)
        loss = lasagne.objectives.categorical_crossentropy(layers.get_output(net), y).mean()
        rng = np.random.RandomState(0)
        given = rng.randn(n, TIME, FEATURES).astype("float32"), rng.randint(0, CLASSES, n).astype("int32")
    else:
        from benchmarks.contestants._batches import make_data
        from benchmarks.contestants._networks import build_network

        graph = build_network(model)
        x, y, loss, params, given = graph.x, graph.y, graph.loss, graph.params, make_data(model, n)
    step = make_train_function(loss, params, x, y, "nesterov_momentum", np.float32(0.01), np.float32(0.9), exact=True)
    return synk.plan(step, *map(synk.data, given), batch=BATCHES)


def main(models: list[str]) -> None:
    """Print predicted and measured steps, and the errors."""
    errors = []
    for model in models or MODELS:
        with synk.session(2, use_gpu=False):
            begin = time.perf_counter()
            table = plan(model)
            print(f"\n{model}: measured in {time.perf_counter() - begin:.0f} s\n{table}", flush=True)
            measured = sizes_between(BATCHES[0] // 2, BATCHES[-1])
            counted = [one for one in table.checks if model == "regression" or one.batch // 2 not in measured]
            print(f"counted: batches of {', '.join(str(one.batch) for one in counted)}")
            errors += [abs(one.error) for one in counted]
    print(f"\nmedian error {statistics.median(errors):.1%} (target {MEDIAN:.0%}), ", end="")
    print(f"largest {max(errors):.1%} (target {LARGEST:.0%})")


if __name__ == "__main__":
    main(sys.argv[1:])
