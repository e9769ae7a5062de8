"""Train on MNIST in one process with plain Theano, for comparison with the other two scripts.

The script first measures whether the network is faster with one BLAS thread or with one for each core. It uses the
faster number, for a fair comparison.
"""

import os
import sys
import time
from pathlib import Path

import theano
from threadpoolctl import threadpool_limits

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a script

from demos.lasagne_mnist.cli import make_parser, parse_arguments
from demos.lasagne_mnist.data import load
from demos.lasagne_mnist.models import build
from demos.lasagne_mnist.training import evaluate_in_pieces, minibatches, run
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function_theano


def fastest_threads(function):
    """Return the number of BLAS threads, 1 or one for each core, with which a call is faster."""
    seconds = {}
    for threads in (1, len(os.sched_getaffinity(0))):
        with threadpool_limits(threads):
            function()
            start = time.perf_counter()
            for _ in range(3):
                function()
            seconds[threads] = time.perf_counter() - start
    return min(seconds, key=seconds.get)


def main(argv=None):
    args = parse_arguments(make_parser(__doc__, ranks=False), argv)
    sets = load(args.data)
    graph = build(args.model, args.dropout, args.seed)

    rule = getattr(updates, args.update_rule)
    train = make_train_function_theano(graph.loss, graph.params, graph.x, graph.y, rule, args.learning_rate)
    test = theano.function([graph.x, graph.y], [graph.test_loss, graph.test_accuracy])

    some = slice(args.batch_size)
    threads = fastest_threads(lambda: test(sets.x_train[some], sets.y_train[some]))
    threadpool_limits(threads)
    print(f"{threads} BLAS thread(s)")

    return run(
        args,
        "train_mnist_theano",
        1,
        sets,
        draw=lambda rng: minibatches(len(sets.y_train), args.batch_size, rng),
        step=lambda batch: train(sets.x_train, sets.y_train, batch=batch),
        evaluate=lambda x, y: evaluate_in_pieces(test, x, y),
        params=graph.params,
    )


if __name__ == "__main__":
    main()
