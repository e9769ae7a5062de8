"""Compare `synk.plan` with measured steps: ``python -m benchmarks.plan_validation mlp cnn hosts``, or other parts.

``published`` predicts published steps, and ``kernels`` those of `benchmarks.plan_kernels`. The other parts are models
and ``hosts``; each part can run alone, except that ``hosts`` needs ``mlp`` or ``cnn``.

Each model is measured on one rank, and contention, exchange and the cost of a command on two. Then steps of two ranks
are predicted and measured. Errors count where the rows of a rank are not among those that were measured, except for
``regression``, whose number of rows cannot be changed. Next to them is the error of half the time of one rank.
``regression`` needs PyMC, the others Theano and Lasagne. Run it while no other program uses the cores.

With ``hosts``, steps of ``mlp`` and ``cnn`` on two hosts with one rank each follow, which are predicted from the
measurements on one host and messages between all. Hosts are network namespaces of this machine, so that they share its
memory: the measured contention of two ranks counts for them. Next to the errors are those of the same without overlap.
Three and four hosts share two cores, so that each computes for a part of the time only; their errors do not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from published_steps import DGX1, IMAGES, K80, K80_BUS, K80_SOCKET, dgx1, published

import synkhronos as synk
from benchmarks import plan_kernels
from benchmarks.harness import CORES, Contest
from benchmarks.nodes import on
from benchmarks.processes import Contestant
from synkhronos._api.plans import sizes_between
from synkhronos._costs import Link, predict_step
from synkhronos._utils.display import text_table
from synkhronos.extensions.train import make_train_function
from tests.helpers.namespace_hosts import Hosts, reason_to_skip

MODELS = ("mlp", "cnn", "lstm", "regression")
PARTS = ("published", "kernels", *MODELS, "hosts")
BATCHES = [100, 320, 640, 1100, 1500]
ROWS = {"mlp": 1500, "cnn": 1500, "lstm": 1500, "regression": 100_000}
MEDIAN, LARGEST = 0.07, 0.20  # targets
MEDIAN_ON_HOSTS = 0.10
ABOVE, LEAST_ABOVE = 0.30, 0.05  # error of the published time above T₁ / P, if it is this part of a step
SECONDS = {"cnn": 60}  # in which a model is measured
ON_HOSTS = ("mlp", "cnn")
#: Rates of the link between two hosts, and steps of a round.
RATES = {"100mbit": 3, "1gbit": 6, "10gbit": 6}
MORE_HOSTS = {"1gbit": 3}  # for three and four hosts
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
    hosts = {"nodes": [1, 2], "line": "1Gbit"}  # so that it is measured when gradients exist
    return synk.plan(step, *map(synk.data, given), batch=BATCHES, **hosts)


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


def seconds_on_hosts(plan: Any, link: Link, batch: int, n_hosts: int = 2) -> tuple[float, float]:
    """Predict a step of hosts on one machine, and the same if exchange did not overlap."""
    workload, cluster = plan._workload, replace(plan._cluster, link=link)
    contention = cluster.contention.at(min(n_hosts, CORES)) * max(1.0, n_hosts / CORES)
    kernels = tuple(one.scaled(contention) for one in workload.kernels)
    slowed = replace(workload, kernels=kernels, divided=contention * workload.divided)
    late = replace(slowed, operands=())
    found = [predict_step(one, cluster, nodes=n_hosts, ranks=1, batch=batch).seconds for one in (slowed, late)]
    return found[0], found[1]


def validate_on_hosts(
    plans: Mapping[str, Any],
    rates: Mapping[str, int] = RATES,
    batches: Sequence[int] = tuple(BATCHES[1:]),
    rounds: int = 3,
    n_hosts: int = 2,
) -> list[float]:
    """Print predicted and measured steps of some hosts; return the errors."""
    begin = time.perf_counter()
    reason = reason_to_skip()
    if reason is not None or not plans:
        print(f"\n{n_hosts} hosts: not validated, because {reason or 'no network was measured'}")
        return []
    lines, errors = [TITLES], []
    with Hosts(n_hosts) as hosts:
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
                        (predicted, late), measured = (
                            seconds_on_hosts(plan, link, batch, n_hosts),
                            found[str(batch)].median,
                        )
                        errors.append(abs(predicted / measured - 1))
                        seconds = (f"{1e3 * one:.1f}" for one in (predicted, measured))
                        parts = (f"{one / measured - 1:+.1%}" for one in (predicted, late))
                        speed = f"{8e-9 * link.bandwidth:.3g} Gbit/s, {1e6 * link.latency:.0f} µs"
                        lines.append((model, rate, f"{batch:,}", *seconds, *parts, speed))
                    hosts.limit(None)
    print(f"\n{n_hosts} hosts, in {time.perf_counter() - begin:.0f} s\n{text_table([list(line) for line in lines])}")
    return errors


def validate_published() -> None:
    """Print published steps and their predictions, which need no measuring."""
    titles = (
        "network, GPUs",
        "1 GPU s",
        "measured s",
        "predicted s",
        "error",
        "perfect",
        "above T₁/P",
        "predicted",
        "error",
    )
    cases = [
        (f"{name}, {n}", alone, sum(seconds[n]), n, *published(name, n, K80_BUS if n == 8 else K80_SOCKET))
        for n in (8, 4, 2)
        for name, (_, alone, seconds) in K80.items()
    ]
    cases.append(("ResNet-50 on a DGX-1, 8", DGX1["alone"], DGX1["eight"], 8, *dgx1()))
    lines = [list(titles)]
    for name, alone, measured, n, seconds, exchange in cases:
        above = measured - alone / n
        counts = above > LEAST_ABOVE * measured
        errors = [f"{one / measured - 1:+.1%}" for one in (seconds, alone / n)]
        of_above = f"{exchange / above - 1:+.0%}" if counts else "-"
        lines.append(
            [
                name,
                f"{alone:.2f}",
                f"{measured:.2f}",
                f"{seconds:.2f}",
                *errors,
                f"{above:.2f}",
                f"{exchange:.2f}",
                of_above,
            ]
        )
    print(f"\nK80: seconds per {IMAGES:,} images; DGX-1: of a run. Target of the last column: {ABOVE:.0%}")
    print(
        f"rates of the bus: {1e-9 * K80_BUS} GB/s for 8 K80s, {1e-9 * K80_SOCKET} GB/s for up to 4\n{text_table(lines)}"
    )


def main(parts: list[str]) -> None:
    """Print predicted and measured steps, and the errors."""
    parts = parts or list(PARTS)
    if not {*parts} <= {*PARTS}:
        raise SystemExit(f"got {' '.join(parts)}; expected some of {' '.join(PARTS)}")
    if "published" in parts:
        validate_published()
    if "kernels" in parts:
        plan_kernels.validate()
    models = [one for one in MODELS if one in parts]
    if models:
        validate_models(models, on_hosts="hosts" in parts)


def validate_models(models: Sequence[str], on_hosts: bool) -> None:
    """Print predicted and measured steps of two ranks, and of several hosts."""
    errors, plans = [], {}
    for model in models:
        with synk.session(2, use_gpu=False):
            begin = time.perf_counter()
            table = plan(model)
            target = f" (target {SECONDS[model]} s)" if model in SECONDS else ""
            print(f"\n{model}: measured in {time.perf_counter() - begin:.0f} s{target}\n{table}", flush=True)
            measured = sizes_between(BATCHES[0] // 4, BATCHES[-1])  # as `plan` does
            counted = [one for one in table.checks if model == "regression" or one.batch // 2 not in measured]
            print(f"counted: batches of {', '.join(str(one.batch) for one in counted)}")
            errors += [abs(one.error) for one in counted]
            plans[model] = table
    print(f"\nmedian error {statistics.median(errors):.1%} (target {MEDIAN:.0%}), ", end="")
    print(f"largest {max(errors):.1%} (target {LARGEST:.0%})")
    plans = {model: table for model, table in plans.items() if model in ON_HOSTS and on_hosts}
    for n_hosts, rates in ((2, RATES), (3, MORE_HOSTS), (4, MORE_HOSTS)) if on_hosts else ():
        errors = validate_on_hosts(plans, rates, n_hosts=n_hosts)
        if errors:
            target = (
                f" (target {MEDIAN_ON_HOSTS:.0%})" if n_hosts <= CORES else f", as {n_hosts} hosts share {CORES} cores"
            )
            median, largest = statistics.median(errors), max(errors)
            print(f"median error {median:.1%}{target}, largest {largest:.1%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
