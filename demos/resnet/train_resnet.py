"""Train a residual network with SGD on all ranks: the experiment of the paper.

The images lie in shared memory, and a step hands out indexes. Each rank excerpts its own share of the minibatch and
computes the gradient over that share; one all-reduce combines the gradients; each rank makes the same step with them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import theano

import synkhronos as synk

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a script

from demos.lasagne_mnist.cli import positive
from demos.resnet import data, models
from demos.resnet.cli import make_parser, parse_arguments
from demos.resnet.training import run
from synkhronos.extensions import updates


def add_options(parser):
    """Add the options that only ranks have."""
    parser.add_argument("--ranks", "--n-parallel", type=positive, help="processes (one for each device)")
    parser.add_argument("--devices", help="their names: one, or one for each rank, as in cuda0,cuda1")
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--use-gpu", action="store_true", default=None, help="GPUs, or fail (GPUs if there are any)")
    gpu.add_argument("--cpu", action="store_false", dest="use_gpu", help="CPU cores")
    parser.add_argument("--fixed-batch", action="store_true", help="--batch-size is of all ranks together, not of each")
    parser.add_argument(
        "--all-reduce",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="combine the gradients; without it, each rank trains a network of its own",
    )
    parser.add_argument(
        "--num-slices", type=positive, help="pieces in which a rank validates its share (of at most --batch-size)"
    )


def make_images(args, n, which):
    """Draw a set of images ``(n, 3, size, size)`` and their labels ``(n,)``, right into shared memory."""
    images = synk.data(shape=(n, 3, args.image_size, args.image_size), dtype=args.dtype)
    labels = synk.data(shape=n, dtype="int32")
    data.fill(images.data, labels.data, args.classes, args.seed, which)
    return images, labels


def equal_on_all_ranks(variables, ranks):
    """Return whether every rank has the master's values of the shared variables, to the bit."""
    values = [var.get_value(borrow=True) for var in variables]
    return all(
        np.array_equal(value, other)
        for rank in range(1, ranks)
        for value, other in zip(values, synk.get_value(rank, variables))
    )


def main(argv=None):
    parser = make_parser(__doc__)
    add_options(parser)
    args = parse_arguments(parser, argv)
    devices = args.devices.split(",") if args.devices and "," in args.devices else args.devices
    ranks = synk.fork(args.ranks, args.use_gpu, devices=devices)
    theano.config.floatX = args.dtype
    graph = models.build(args.depth, args.image_size, args.classes, args.width, args.seed)

    # SGD in two functions: the first writes the gradients to one flat vector, the second makes the step with it.
    # The running averages of batch normalisation change in the first: on each rank, by what that rank has seen.
    grad_updates, param_updates, grad_shared = updates.sgd(graph.loss, graph.params, args.learning_rate)
    gradient = synk.function([graph.x, graph.y], graph.loss, updates=[*grad_updates.items(), *graph.running_updates])
    update = synk.function([], updates=param_updates)
    test = synk.function([graph.x, graph.y], [graph.test_loss, graph.test_accuracy])
    synk.distribute()

    x_train, y_train = make_images(args, args.n_images, data.TRAINING)
    x_valid, y_valid = make_images(args, args.n_validation, data.VALIDATION)
    num_slices = args.num_slices or -(-args.n_validation // (ranks * args.batch_size))

    def step(batch):
        loss = gradient(x_train, y_train, batch=batch)
        if args.all_reduce:
            # Weighted by images, the average of the ranks' gradients is that over the whole minibatch.
            synk.all_reduce(grad_shared, weights=gradient.counts)
        update()
        return loss

    def evaluate():
        if args.all_reduce:
            # The ranks have seen different images: validate with the average of their running averages.
            synk.all_reduce(graph.statistics)
        return test(x_valid, y_valid, num_slices=num_slices)

    return run(
        args,
        "train_resnet",
        ranks,
        batch_size=args.batch_size * (1 if args.fixed_batch else ranks),
        step=step,
        evaluate=evaluate,
        params=graph.params,
        equal=lambda: not args.all_reduce or equal_on_all_ranks(graph.params + graph.statistics, ranks),
    )


if __name__ == "__main__":
    main()
