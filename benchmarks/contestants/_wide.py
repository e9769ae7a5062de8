"""Networks with large gradients, as lists of layers that contestants in Theano and in PyTorch build."""

import numpy as np

#: Dense layers by their widths; for the CNN, two convolutions of 5 × 5 with pooling precede them.
WIDTHS = {"mlp": (784, 800, 800, 10), "dense": (2500,) * 5, "cnn": (64 * 4 * 4, 4096, 512, 10)}
CHANNELS = {"cnn": (1, 32, 64)}
LEARNING_RATE = 0.01


def make_rows(model, n):
    """Return `n` random rows of inputs, float32, and their classes, int32."""
    random = np.random.RandomState(0)
    shape = (1, 28, 28) if model in CHANNELS else (WIDTHS[model][0],)
    return random.rand(n, *shape).astype("float32"), random.randint(WIDTHS[model][-1], size=n).astype("int32")


def count_parameters(model):
    """Return the number of weights, which the gradients have, too; there are no biases."""
    channels, widths = CHANNELS.get(model, ()), WIDTHS[model]
    convolutions = sum(25 * one * other for one, other in zip(channels, channels[1:]))
    return convolutions + sum(one * other for one, other in zip(widths, widths[1:]))
