"""Train a network on scikit-learn's digits with each training rule, and compare accuracy, exchanges and time.

Each rank makes steps of its own; the rule combines the parameters from time to time (docs/howto/local_training.md). The
script fails if an accuracy is too low.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import synkhronos as synk
from synkhronos.extensions.train import make_train_function

sys.path.append(str(Path(__file__).resolve().parents[1]))  # when run as a script

from demos.digits import T, load, network, theano

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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=25, help="rows of a step of one rank (%(default)s)")
    parser.add_argument("--every", type=int, default=8, help="steps between two exchanges (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="number of repetitions with other data (%(default)s)")
    parser.add_argument("--accuracy", type=float, default=0.9, help="minimum test accuracy (%(default)s)")
    args = parser.parse_args(argv)

    ranks = synk.fork(args.ranks)
    print(f"{theano.__name__} {theano.__version__}, {ranks} rank(s), {args.epochs} epochs")
    x, y, out, params = network([64, 128, 64, 10], 0)
    loss = -out[T.arange(y.shape[0]), y].mean()
    right = T.cast(T.eq(T.argmax(out, axis=1), y), "float32").mean()
    test = synk.function([x, y], right)
    start = [param.get_value() for param in params]
    print(f"{'rule':60} {'accuracy':>16} {'steps':>6} {'exchanges':>9} {'seconds':>7}")
    worst = 1.0
    for rule in make_rules(args.every):
        step = make_train_function(loss, params, x, y, "nesterov_momentum", LEARNING_RATE, MOMENTUM, rule=rule)
        accuracies, seconds = [], 0.0
        for seed in range(args.seeds):
            x_train, y_train, x_test, y_test = load(seed)
            synk.distribute()
            synk.broadcast(params, start)
            began = time.perf_counter()
            run = step.loop(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, seed=seed)
            seconds += time.perf_counter() - began
            accuracies.append(float(test(x_test, y_test)))
        mean, spread = np.mean(accuracies), np.std(accuracies)
        print(
            f"{rule.name[:60]:60} {mean:8.3f} ± {spread:.3f} {max(run.steps):6} {max(run.exchanges):9} "
            f"{seconds / args.seeds:7.2f}"
        )
        worst = min(worst, mean)
    synk.close()
    if worst < args.accuracy:
        sys.exit(f"an accuracy is {worst:.3f}; expected at least {args.accuracy}")
    print(f"all accuracies are at least {args.accuracy}")
    return worst


if __name__ == "__main__":
    main()
