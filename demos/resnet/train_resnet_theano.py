"""Train a residual network in one process with plain Theano, for comparison with `train_resnet.py`."""

import sys
from pathlib import Path

import numpy as np
import theano
from theano import gpuarray
from threadpoolctl import threadpool_limits

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a script

from demos.lasagne_mnist.train_mnist_theano import fastest_threads
from demos.resnet import data, models
from demos.resnet.cli import make_parser, parse_arguments
from demos.resnet.training import run


def make_images(args, n, which):
    """Draw images ``(n, 3, size, size)`` and labels ``(n,)``."""
    images = np.empty((n, 3, args.image_size, args.image_size), args.dtype)
    labels = np.empty(n, "int32")
    data.fill(images, labels, args.classes, args.seed, which)
    return images, labels


def evaluate_in_pieces(function, x, y, size):
    """Average the outputs of a function over pieces of `size` images, weighted by length: the last may be smaller."""
    pieces = [slice(start, start + size) for start in range(0, len(y), size)]
    return np.average([function(x[p], y[p]) for p in pieces], axis=0, weights=[len(y[p]) for p in pieces])


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda0 (%(default)s)")
    args = parse_arguments(parser, argv)
    if args.device != "cpu":
        if gpuarray.pygpu is None:
            sys.exit(f"--device {args.device}: pygpu is not installed")
        gpuarray.use(args.device)  # Theano then creates shared variables and computes on this device
    theano.config.floatX = args.dtype
    graph = models.build(args.depth, args.image_size, args.classes, args.width, args.seed)

    # A step of SGD, which also updates the running averages of batch normalisation.
    gradients = theano.grad(graph.loss, graph.params)
    descent = [(param, param - args.learning_rate * gradient) for param, gradient in zip(graph.params, gradients)]
    train = theano.function([graph.x, graph.y], graph.loss, updates=descent + graph.running_updates)
    test = theano.function([graph.x, graph.y], [graph.test_loss, graph.test_accuracy])

    x_train, y_train = make_images(args, args.n_images, data.TRAINING)
    x_valid, y_valid = make_images(args, args.n_validation, data.VALIDATION)

    if args.device == "cpu":
        some = slice(args.batch_size)
        threads = fastest_threads(lambda: test(x_train[some], y_train[some]))
        threadpool_limits(threads)
        print(f"{threads} BLAS thread(s)")

    return run(
        args,
        "train_resnet_theano",
        ranks=1,
        batch_size=args.batch_size,
        step=lambda batch: train(x_train[batch], y_train[batch]),
        evaluate=lambda: evaluate_in_pieces(test, x_valid, y_valid, args.batch_size),
        params=graph.params,
    )


if __name__ == "__main__":
    main()
