"""Train a network on scikit-learn's digits on all ranks, with Theano or PyTensor.

The script defines its own layers. Apart from the imports, it is the same for both backends. It fails if the test
accuracy is too low.
"""

import argparse
import sys
import time

import numpy as np
from sklearn.datasets import load_digits

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function

try:
    import theano
    import theano.tensor as T
except ImportError:  # Python 3.12 and later
    import pytensor as theano
    import pytensor.tensor as T


class Dense:
    """A dense layer: multiply by a matrix, and add an offset."""

    def __init__(self, n_inputs, n_units, rng):
        scale = np.sqrt(2 / n_inputs)
        self.weights = theano.shared((scale * rng.randn(n_inputs, n_units)).astype("float32"), "weights")
        self.offset = theano.shared(np.zeros(n_units, "float32"), "offset")
        self.params = [self.weights, self.offset]

    def __call__(self, x):
        """Return the outputs of the units, shape ``(n, n_units)``, for inputs of shape ``(n, n_inputs)``."""
        return T.dot(x, self.weights) + self.offset


def log_softmax(x):
    """Return the logarithms of the class probabilities, one row for each data point."""
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - T.log(T.exp(shifted).sum(axis=1, keepdims=True))


def network(sizes, seed):
    """Build a network of dense layers; return its inputs, labels, log probabilities and parameters."""
    rng = np.random.RandomState(seed)
    x, y = T.fmatrix("x"), T.ivector("y")
    layers = [Dense(n_inputs, n_units, rng) for n_inputs, n_units in zip(sizes, sizes[1:])]
    out = x
    for layer in layers[:-1]:
        out = T.maximum(layer(out), 0)
    return x, y, log_softmax(layers[-1](out)), [param for layer in layers for param in layer.params]


def load(seed):
    """Return training images and labels, and 297 test images and labels; pixels are float32 from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(seed).permutation(len(labels))
    images, labels = (images[order] / 16).astype("float32"), labels[order].astype("int32")
    return images[297:], labels[297:], images[:297], labels[:297]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes (default: one for each device)")
    parser.add_argument("--epochs", type=int, help="default: 15")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accuracy", type=float, help="minimum test accuracy (0.95; with --epochs, none)")
    args = parser.parse_args(argv)
    if args.accuracy is None:
        args.accuracy = 0.95 if args.epochs is None else 0.0

    x_train, y_train, x_test, y_test = load(args.seed)
    ranks = synk.fork(args.ranks)
    print(f"{theano.__name__} {theano.__version__}, {ranks} rank(s)")
    x, y, out, params = network([64, 128, 64, 10], args.seed)
    loss = -out[T.arange(y.shape[0]), y].mean()
    train = make_train_function(loss, params, x, y, updates.adam, 0.002)
    right = T.cast(T.eq(T.argmax(out, axis=1), y), "float32").mean()
    test = synk.function([x, y], [loss, right])
    synk.distribute()
    x_shared, y_shared = synk.data(x_train), synk.data(y_train)

    rng = np.random.RandomState(args.seed)
    for epoch in range(15 if args.epochs is None else args.epochs):
        begin = time.perf_counter()
        order = rng.permutation(len(y_train))
        losses = [
            float(train(x_shared, y_shared, batch=order[start : start + args.batch_size]))
            for start in range(0, len(order), args.batch_size)
        ]
        test_loss, accuracy = map(float, test(x_test, y_test))
        print(
            f"epoch {epoch + 1:3}  {time.perf_counter() - begin:6.2f} s  loss {np.mean(losses):.4f}"
            f"  test loss {test_loss:.4f}  test accuracy {accuracy:.4f}"
        )
    synk.close()
    if accuracy < args.accuracy:
        sys.exit(f"the accuracy is {accuracy:.4f}, expected at least {args.accuracy}")


if __name__ == "__main__":
    main()
