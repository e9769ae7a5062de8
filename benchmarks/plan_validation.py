"""Compare `synk.plan` with measured steps of ranks and hosts: ``python -m benchmarks.plan_validation mlp cnn``.

Each model is measured on one rank, and contention, exchange and the cost of a command on two. Then steps of two ranks
are predicted and measured. Errors count where the rows of a rank are not among those that were measured, except for
``regression``, whose number of rows cannot be changed. Next to them is the error of half the time of one rank.
``regression`` needs PyMC, the others Theano and Lasagne. Run it while no other program uses the cores.

For ``mlp`` and ``cnn``, steps of two hosts with one rank each follow, which are predicted from the measurements on one
host and a ping-pong between both. Hosts are network namespaces of this machine, so that they share its memory: the
measured contention of two ranks counts for them. Next to the errors are those of the same without overlap.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import synkhronos as synk
from benchmarks.harness import Contest
from benchmarks.nodes import on
from benchmarks.processes import Contestant
from synkhronos._api.step_measurements import sizes_between
from synkhronos._costs import Link, predict_step
from synkhronos._utils.display import text_table
from synkhronos.extensions.train import make_train_function
from tests.helpers.namespace_hosts import Hosts, reason_to_skip

MODELS = ("mlp", "cnn", "lstm", "regression")
BATCHES = [100, 320, 640, 1100, 1500]
ROWS = {"mlp": 1500, "cnn": 1500, "lstm": 1500, "regression": 100_000}
MEDIAN, LARGEST = 0.07, 0.20  # targets
MEDIAN_ON_HOSTS = 0.10
ON_HOSTS = ("mlp", "cnn")
#: Rates of the link between two hosts, and steps of a round.
RATES = {"100mbit": 3, "1gbit": 6, "10gbit": 6}
TITLES = ("model", "link", "rows", "predicted ms", "measured ms", "error", "without overlap", "link as measured")


def plan(model: str) -> Any:
    """Measure a model, and return its `Plan`."""
    if model == "regression":
        n = ROWS[model]
        import pymc as pm

        from benchmarks.contestants._pymc_models import crossed
        from synkhronos.extensions.pymc import parallel

        with pm.Model() as made:
            crossed(n, np.random.default_rng(0))
        with parallel(made) as made:
            f = made.compile_fn(made.logp(), inputs=made.value_vars, point_fn=False)
            start = made.initial_point()
            return synk.plan(f, *(start[var.name] for var in made.value_vars))
    step, given = build(model)
    return synk.plan(step, *map(synk.data, given), batch=BATCHES)


def build(model: str) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return the step of a network, and its data."""
    n = ROWS[model]
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
    rates = np.float32(0.01), np.float32(0.9)
    return make_train_function(loss, params, x, y, "nesterov_momentum", *rates, exact=True), given


def seconds_on_hosts(plan: Any, link: Link, batch: int) -> tuple[float, float]:
    """Predict a step of two hosts on one machine, and the same if exchange did not overlap."""
    workload, cluster = plan._workload, replace(plan._cluster, link=link)
    contention = cluster.contention.at(2)
    kernels = tuple(one.scaled(contention) for one in workload.kernels)
    slowed = replace(workload, kernels=kernels, divided=contention * workload.divided)
    late = replace(slowed, operands=())
    found = [predict_step(one, cluster, nodes=2, ranks=1, batch=batch).seconds for one in (slowed, late)]
    return found[0], found[1]


def validate_on_hosts(
    plans: Mapping[str, Any],
    rates: Mapping[str, int] = RATES,
    batches: Sequence[int] = tuple(BATCHES[1:]),
    rounds: int = 3,
) -> list[float]:
    """Print predicted and measured steps of two hosts; return the errors."""
    reason = reason_to_skip()
    if reason is not None or not plans:
        print(f"\ntwo hosts: not validated, because {reason or 'no network was measured'}")
        return []
    lines, errors = [TITLES], []
    with Hosts(2) as hosts:
        for model, plan in plans.items():
            plain = Contestant(model, "benchmarks.contestants.plan_hosts", {"model": model})
            ours = on(hosts, replace(plain, environment={"SYNKHRONOS_PLAN": "rows"}))
            with Contest([ours]) as contest:
                once = {str(batch): (ours, {"batch": batch, "steps": 1}) for batch in batches}
                contest.run(1, once, warm_up=0)  # every host receives its rows
                for rate, steps in rates.items():
                    hosts.limit(rate)
                    link = Link(*contest.run(1, {"link": (ours, {})}, warm_up=0)["link"].rounds[0])
                    turns = {str(batch): (ours, {"batch": batch, "steps": steps}) for batch in batches}
                    found = contest.run(rounds, turns)
                    for batch in batches:
                        (predicted, late), measured = seconds_on_hosts(plan, link, batch), found[str(batch)].median
                        errors.append(abs(predicted / measured - 1))
                        seconds = (f"{1e3 * one:.1f}" for one in (predicted, measured))
                        parts = (f"{one / measured - 1:+.1%}" for one in (predicted, late))
                        speed = f"{8e-9 * link.bandwidth:.3g} Gbit/s, {1e6 * link.latency:.0f} µs"
                        lines.append((model, rate, f"{batch:,}", *seconds, *parts, speed))
                    hosts.limit(None)
    print(f"\ntwo hosts\n{text_table([list(line) for line in lines])}")
    return errors


def main(models: list[str]) -> None:
    """Print predicted and measured steps, and the errors."""
    errors, plans = [], {}
    for model in models or MODELS:
        with synk.session(2, use_gpu=False):
            begin = time.perf_counter()
            table = plan(model)
            print(f"\n{model}: measured in {time.perf_counter() - begin:.0f} s\n{table}", flush=True)
            measured = sizes_between(BATCHES[0] // 2, BATCHES[-1])
            counted = [one for one in table.checks if model == "regression" or one.batch // 2 not in measured]
            print(f"counted: batches of {', '.join(str(one.batch) for one in counted)}")
            errors += [abs(one.error) for one in counted]
            plans[model] = table
    print(f"\nmedian error {statistics.median(errors):.1%} (target {MEDIAN:.0%}), ", end="")
    print(f"largest {max(errors):.1%} (target {LARGEST:.0%})")
    errors = validate_on_hosts({model: table for model, table in plans.items() if model in ON_HOSTS})
    if errors:
        median, largest = statistics.median(errors), max(errors)
        print(f"median error {median:.1%} (target {MEDIAN_ON_HOSTS:.0%}), largest {largest:.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
