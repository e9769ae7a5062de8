"""Train a network, or a regression, with each training rule, and compare scores, exchanges and time.

Each rank makes steps of its own; the rule combines the parameters from time to time (docs/howto/local_training.md). The
script fails if a score is too low. With ``--json``, it stores the scores in a file, of which ``docs/draw_rules.py``
makes a table and a plot.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np

import synkhronos as synk
from synkhronos.extensions.train import make_train_function

sys.path.append(str(Path(__file__).resolve().parents[1]))  # when run as a script

from demos.digits import Dense, T, load, log_softmax, network, theano

LEARNING_RATE, MOMENTUM = 0.05, 0.9


def make_rules(every):
    """Return the rules to compare, with this number of steps between exchanges."""
    rules, delay = synk.rules, every // 2
    return [
        rules.BSP(),
        rules.LocalSGD(every=every),
        rules.LocalSGD(every=every, start=10 * every),
        rules.SlowMo(every=every, learning_rate=LEARNING_RATE),
        rules.BMUF(every=every),
        rules.DiLoCo(every=every, lr=0.5, momentum=0.5),
        rules.DiLoCo(every=every, delay=delay, lr=0.5, momentum=0.5),
        rules.Outer(every=every, delay=delay, merge="delta"),
        rules.Outer(every=every, delay=every - 1, merge="pull"),
        rules.DASO(),
        rules.Hierarchical(periods={every: "node", 4 * every: "all"}),
        rules.ASGD(every=every),
        rules.EASGD(every=every),
        rules.EAMSGD(every=every, momentum=MOMENTUM),
        rules.GoSGD(probability=1 / every),
    ]


def short_name(rule):
    """Return a rule as a program writes it, without the settings that are defaults."""
    fields = [field for field in dataclasses.fields(rule) if field.init]
    given = [(field.name, getattr(rule, field.name)) for field in fields if getattr(rule, field.name) != field.default]
    return f"{type(rule).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


class Convolution(Dense):
    """A convolution with 3 x 3 pixels: a dense layer for the pixels around each pixel, of all channels."""

    def __init__(self, n_channels, n_filters, rng):
        super().__init__(9 * n_channels, n_filters, rng)

    def __call__(self, x):
        """Return outputs of shape ``(n, height - 2, width - 2, n_filters)`` for images of ``(n, ..., n_channels)``."""
        height, width = x.shape[1] - 2, x.shape[2] - 2
        shifted = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        return super().__call__(T.concatenate(shifted, axis=3))


def classifier(x, y, out, params):
    """Return the symbolic variables of a problem from the logarithms of the class probabilities."""
    right = T.cast(T.eq(T.argmax(out, axis=1), y), "float32").mean()
    return x, y, params, -out[T.arange(y.shape[0]), y].mean(), right


def cnn():
    """Build a network of two convolutions, of 8 and 16 filters, maxima of 2 x 2 pixels, and a dense layer."""
    rng = np.random.RandomState(0)
    x, y = T.fmatrix("x"), T.ivector("y")
    layers = [Convolution(1, 8, rng), Convolution(8, 16, rng), Dense(64, 10, rng)]
    image = x.reshape((x.shape[0], 8, 8, 1))
    for layer in layers[:2]:
        image = T.maximum(layer(image), 0)
    columns = T.maximum(image[:, :, ::2], image[:, :, 1::2])
    pooled = T.maximum(columns[:, ::2], columns[:, 1::2])
    out = log_softmax(layers[2](pooled.reshape((x.shape[0], 64))))
    return classifier(x, y, out, [param for layer in layers for param in layer.params])


def regression():
    """Build a linear regression of 20 covariates, whose loss is the mean squared error."""
    x, y = T.fmatrix("x"), T.fvector("y")
    layer = Dense(20, 1, np.random.RandomState(0))
    error = T.sqr(layer(x)[:, 0] - y).mean()
    return x, y, layer.params, error, error


def draw_regression(seed):
    """Draw 1,500 rows and 297 to test; covariates have scales from 1 to 0.1, and noise is a fifth of the variance."""
    rng = np.random.RandomState(seed)
    x = rng.randn(1797, 20) * np.logspace(0, -1, 20)
    y = x @ (rng.randn(20) / np.logspace(0, -1, 20))
    y = y / y.std() * np.sqrt(0.8) + rng.randn(len(y)) * np.sqrt(0.2) + 1
    x, y = x.astype("float32"), y.astype("float32")
    return x[297:], y[297:], x[:297], y[:297]


#: How to build each problem, how to load its data for a seed, and how to make a score of what its test returns.
PROBLEMS = {
    "cnn": (cnn, load, lambda right, y: right),
    "dense": (lambda: classifier(*network([64, 128, 64, 10], 0)), load, lambda right, y: right),
    "regression": (regression, draw_regression, lambda error, y: 1 - error / np.var(y)),
}


def compare(problem, args):
    """Train with each rule, print the results and return them: scores and means over the seeds, by rule."""
    build, load_data, score_of = PROBLEMS[problem]
    x, y, params, loss, tested = build()
    test = synk.function([x, y], tested)
    start, results = [param.get_value() for param in params], {}
    print(f"{problem + ': rule':45} {'score':>15} {'steps':>6} {'exchanges':>9} {'seconds':>7}")
    for rule in make_rules(args.every):
        step = make_train_function(loss, params, x, y, "nesterov_momentum", LEARNING_RATE, MOMENTUM, rule=rule)
        scores, exchanges, seconds = [], [], []
        for seed in range(args.seeds):
            x_train, y_train, x_test, y_test = load_data(seed)
            synk.distribute()
            synk.broadcast(params, start)
            began = time.perf_counter()
            run = step.loop(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, seed=seed)
            seconds.append(time.perf_counter() - began)
            exchanges.append(max(run.exchanges))
            scores.append(round(float(score_of(test(x_test, y_test), y_test)), 5))
        results[short_name(rule)] = {
            "scores": scores,
            "exchanges": float(np.mean(exchanges)),
            "seconds": round(float(np.mean(seconds)), 3),
        }
        print(
            f"{short_name(rule):45} {np.mean(scores):7.3f} ± {np.std(scores):.3f} {max(run.steps):6} "
            f"{np.mean(exchanges):9.0f} {np.mean(seconds):7.2f}",
            flush=True,
        )
    return results


def store(path, entry):
    """Add the results to a file, in place of earlier ones of the same problem and number of ranks."""
    others = json.loads(path.read_text()) if path.exists() else []
    kept = [one for one in others if (one["problem"], one["ranks"]) != (entry["problem"], entry["ranks"])]
    path.write_text(json.dumps([*kept, entry], indent=1) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["cnn"], help="what to train (cnn)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=25, help="rows of a step of one rank (%(default)s)")
    parser.add_argument("--every", type=int, default=8, help="steps between two exchanges (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="number of repetitions with other data (%(default)s)")
    parser.add_argument(
        "--accuracy", type=float, default=0.7, help="minimum score: accuracy, or share of the variance (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file in which to store the results")
    args = parser.parse_args(argv)

    ranks = synk.fork(args.ranks)
    backend = f"{theano.__name__} {theano.__version__}"
    print(f"{backend}, {ranks} rank(s), {args.epochs} epochs")
    means = []
    for problem in args.problems:
        results = compare(problem, args)
        if args.json:
            settings = {name: getattr(args, name) for name in ("epochs", "batch_size", "every", "seeds")}
            store(args.json, {"problem": problem, "ranks": ranks, "backend": backend, **settings, "rules": results})
        means += [np.mean(one["scores"]) for one in results.values()]
    synk.close()
    worst = np.min(means)  # NaN, if there is one
    if args.accuracy > -np.inf and not worst >= args.accuracy:
        sys.exit(f"a score is {worst:.3f}; expected at least {args.accuracy}")
    print(f"all scores are at least {args.accuracy}")
    return worst


if __name__ == "__main__":
    main()
