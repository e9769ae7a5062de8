"""Train on MNIST on all ranks, with the data in shared memory and index lists as minibatches.

The training set is copied to shared memory once. A step sends only indices, and each rank copies its own shard of the
minibatch. Without dropout, each step equals that of the plain Theano script, and so do the losses, up to rounding.
"""

import sys
from pathlib import Path

import synkhronos as synk

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a script

from demos.lasagne_mnist.cli import make_parser, parse_arguments
from demos.lasagne_mnist.data import load
from demos.lasagne_mnist.models import build
from demos.lasagne_mnist.resume import Checkpoints
from demos.lasagne_mnist.training import minibatches, run, slices_for
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function


def main(argv=None):
    args = parse_arguments(make_parser(__doc__), argv)
    sets = load(args.data)
    ranks = synk.fork(args.ranks)
    graph = build(args.model, args.dropout, args.seed)

    rule = getattr(updates, args.update_rule)
    train = make_train_function(graph.loss, graph.params, graph.x, graph.y, rule, args.learning_rate)
    test = synk.function([graph.x, graph.y], [graph.test_loss, graph.test_accuracy])
    checkpoints = Checkpoints(args, "train_mnist_cpu_data", sets.source, [train.gradient, train.update])
    synk.distribute()
    x_train, y_train = synk.data(sets.x_train), synk.data(sets.y_train)

    return run(
        args,
        "train_mnist_cpu_data",
        ranks,
        sets,
        draw=lambda rng: minibatches(len(y_train), args.batch_size, rng),
        step=lambda batch: train(x_train, y_train, batch=batch),
        evaluate=lambda x, y: test(x, y, num_slices=slices_for(len(y), ranks)),
        params=graph.params,
        checkpoints=checkpoints,
    )


if __name__ == "__main__":
    main()
