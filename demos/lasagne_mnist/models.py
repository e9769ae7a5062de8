"""Networks for MNIST in plain Lasagne; Synkhronos requires no changes to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.layers import Conv2DLayer, DenseLayer, DropoutLayer, InputLayer, MaxPool2DLayer
from lasagne.nonlinearities import rectify, softmax

CLASSES = 10


class Graph(NamedTuple):
    """Symbolic variables of a network."""

    x: Any  # images (n, 1, 28, 28)
    y: Any  # labels (n,), int32
    params: list[Any]  # the shared variables to train
    loss: Any  # mean cross entropy, with dropout
    test_loss: Any  # mean cross entropy, without dropout
    test_accuracy: Any  # fraction of images classified correctly, without dropout


def build(model: str, dropout: float = 0.0, seed: int = 0) -> Graph:
    """Build a network and its losses.

    Theano's ``floatX`` is set to float32, the dtype of the images, which is fast on GPUs.

    Parameters
    ----------
    model : str
        ``"cnn"``, ``"mlp"`` or ``"custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID"``.
    dropout : float
        Drop probability of the dense hidden layers of cnn and mlp.
    seed : int
        Seed of the initial weights and of dropout.

    Raises
    ------
    ValueError
        If `model` is none of these.
    """
    theano.config.floatX = "float32"
    lasagne.random.set_rng(np.random.RandomState(seed))
    x, y = T.tensor4("x"), T.ivector("y")
    network = build_network(model, x, dropout)
    output = lasagne.layers.get_output(network)
    test_output = lasagne.layers.get_output(network, deterministic=True)
    correct = T.eq(T.argmax(test_output, axis=1), y)
    return Graph(
        x,
        y,
        lasagne.layers.get_all_params(network, trainable=True),
        lasagne.objectives.categorical_crossentropy(output, y).mean(),
        lasagne.objectives.categorical_crossentropy(test_output, y).mean(),
        T.mean(correct, dtype=theano.config.floatX),
    )


def build_network(model: str, x: Any, dropout: float) -> Any:
    """Build the layers of a network, and return the last one."""
    kind, _, settings = model.partition(":")
    if kind == "cnn" and not settings:
        return build_cnn(x, dropout)
    if kind == "mlp" and not settings:
        return build_mlp(x, 2, 800, 0.0, dropout)
    if kind == "custom_mlp" and settings.count(",") == 3:
        depth, width, drop_input, drop_hidden = settings.split(",")
        return build_mlp(x, int(depth), int(width), float(drop_input), float(drop_hidden))
    raise ValueError(f"got the model {model!r}: expected cnn, mlp or custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID")


def build_cnn(x: Any, dropout: float) -> Any:
    """Build two convolutions, each with max pooling, and two dense layers."""
    layer = InputLayer((None, 1, 28, 28), x)
    for _ in range(2):
        layer = MaxPool2DLayer(Conv2DLayer(layer, 32, 5, nonlinearity=rectify), 2)
    return classify(DenseLayer(drop(layer, dropout), 256, nonlinearity=rectify), dropout)


def build_mlp(x: Any, depth: int, width: int, drop_input: float, drop_hidden: float) -> Any:
    """Build `depth` dense layers of `width` units, and the classifier."""
    layer = drop(InputLayer((None, 1, 28, 28), x), drop_input)
    for index in range(depth):
        layer = drop(layer, drop_hidden) if index else layer
        layer = DenseLayer(layer, width, nonlinearity=rectify)
    return classify(layer, drop_hidden)


def classify(layer: Any, dropout: float) -> Any:
    """Add dropout, and a dense layer with a softmax over the classes."""
    return DenseLayer(drop(layer, dropout), CLASSES, nonlinearity=softmax)


def drop(layer: Any, probability: float) -> Any:
    """Add dropout if `probability` is not 0."""
    return DropoutLayer(layer, probability) if probability else layer
