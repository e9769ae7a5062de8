"""Train a residual network with SGD on all ranks: the paper's experiment.

The images are in shared memory, and a step sends only indices. Each rank copies its own shard of the minibatch and
computes the shard's gradient. One all-reduce averages the gradients, and every rank makes the same step.
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
    """Add the options for several ranks."""
    parser.add_argument("--ranks", "--n-parallel", type=positive, help="processes (one for each device)")
    parser.add_argument("--devices", help="names of devices: one, or one for each rank, such as cuda0,cuda1")
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--use-gpu", action="store_true", default=None, help="require GPUs (default: if available)")
    gpu.add_argument("--cpu", action="store_false", dest="use_gpu", help="use CPU cores")
    parser.add_argument("--fixed-batch", action="store_true", help="--batch-size is that of all ranks together")
    parser.add_argument(
        "--all-reduce",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="combine the gradients; without it, each rank trains its own network",
    )
    parser.add_argument(
        "--num-slices", type=positive, help="slices in which a rank validates its shard (of at most --batch-size)"
    )


def make_images(args, n, which):
    """Draw images ``(n, 3, size, size)`` and labels ``(n,)`` in shared memory."""
    images = synk.data(shape=(n, 3, args.image_size, args.image_size), dtype=args.dtype)
    labels = synk.data(shape=n, dtype="int32")
    data.fill(images.data, labels.data, args.classes, args.seed, which)
    return images, labels


def equal_on_all_ranks(variables, ranks):
    """Return whether the shared variables equal the controller's on every rank, without a tolerance."""
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

    # SGD in two functions: the first writes the gradients to one flat vector, and the second makes the step with it.
    # The first also updates the running averages of batch normalisation, on each rank from the rank's own shard.
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
            # Weight each rank's gradient by its number of images, to average over all images of the minibatch.
            synk.all_reduce(grad_shared, weights=gradient.counts)
        update()
        return loss

    def evaluate():
        if args.all_reduce:
            # The running averages differ between ranks, because each rank has its own images: validate with their mean.
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
