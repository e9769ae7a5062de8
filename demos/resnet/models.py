"""Residual networks in plain Lasagne and Theano; Synkhronos requires no changes to them.

The networks are those of K. He, X. Zhang, S. Ren, J. Sun (2015), Deep residual learning for image recognition,
arXiv:1512.03385, table 1. They begin with a 7x7 convolution and a 3x3 max pooling, each with stride 2. Up to four
*stages* of bottleneck blocks follow, then the mean over rows and columns, and a dense layer with a softmax. Each stage
but the first halves height and width, and doubles the channels.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.layers import DenseLayer, ElemwiseSumLayer, GlobalPoolLayer, InputLayer, MaxPool2DLayer, NonlinearityLayer
from lasagne.nonlinearities import rectify, softmax

from demos.resnet import layers

# Lasagne 0.2 has its own layer, which sets the running averages by Theano's default updates.
BatchNormLayer = getattr(lasagne.layers, "BatchNormLayer", layers.BatchNormLayer)

# Depth -> number of blocks in each stage. A block has three convolutions. With the first convolution and the dense
# layer, the depth is 3 * blocks + 2.
BLOCKS = {
    5: (1,),
    8: (1, 1),
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


class Graph(NamedTuple):
    """Symbolic variables of a network."""

    x: Any  # images (n, 3, size, size), floatX
    y: Any  # labels (n,), int32
    params: list[Any]  # the shared variables to train
    statistics: list[Any]  # shared variables with the running averages of batch normalisation
    running_updates: list[Any]  # updates of `statistics`, for the training function
    loss: Any  # mean cross entropy, normalised by the minibatch's statistics
    test_loss: Any  # mean cross entropy, normalised by the running averages
    test_accuracy: Any  # fraction classified correctly, normalised by the running averages


def build(depth: int = 50, image_size: int = 224, classes: int = 1000, width: int = 64, seed: int = 0) -> Graph:
    """Build a network and its losses.

    Parameters
    ----------
    depth : int
        Number of layers with weights between the images and the classes; a key of `BLOCKS`.
    image_size : int
        Height and width of the images in pixels.
    classes : int
        Number of outputs.
    width : int
        Channels of the first convolution. Those of the other convolutions are multiples of it.
    seed : int
        Seed of the initial weights.
    """
    # Theano differentiates by recursion, 20 to 30 calls deep for each layer; Python's default limit is 1,000.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + 50 * depth))
    lasagne.random.set_rng(np.random.RandomState(seed))
    x, y = T.tensor4("x"), T.ivector("y")
    network = build_network(x, depth, image_size, classes, width)
    output = lasagne.layers.get_output(network)
    test_output = lasagne.layers.get_output(network, deterministic=True)
    correct = T.eq(T.argmax(test_output, axis=1), y)
    return Graph(
        x,
        y,
        lasagne.layers.get_all_params(network, trainable=True),
        lasagne.layers.get_all_params(network, trainable=False),
        [pair for layer in lasagne.layers.get_all_layers(network) for pair in getattr(layer, "running_updates", ())],
        lasagne.objectives.categorical_crossentropy(output, y).mean(),
        lasagne.objectives.categorical_crossentropy(test_output, y).mean(),
        T.mean(correct, dtype=theano.config.floatX),
    )


def build_network(x: Any, depth: int, image_size: int, classes: int, width: int) -> Any:
    """Build the layers and return the last one; the last layers of the stages are named ``stage1``, ``stage2``, ..."""
    layer = InputLayer((None, 3, image_size, image_size), x)
    layer = MaxPool2DLayer(normalised(layer, width, 7, stride=2), 3, stride=2, pad=1)
    for stage, blocks in enumerate(BLOCKS[depth]):
        for block in range(blocks):
            layer = bottleneck(layer, width * 2**stage, stride=2 if stage and not block else 1)
        layer.name = f"stage{stage + 1}"
    # a mean over rows and columns accepts images of any size
    return DenseLayer(GlobalPoolLayer(layer, T.mean), classes, nonlinearity=softmax)


def bottleneck(incoming: Any, channels: int, stride: int) -> Any:
    """Build a residual block: 1x1, 3x3 and 1x1 convolutions, whose output is added to the block's input.

    If their output has another shape than the input, a 1x1 convolution of the input is added instead.
    """
    layer = normalised(incoming, channels, 1, stride)
    layer = normalised(layer, channels, 3)
    layer = normalised(layer, 4 * channels, 1, nonlinearity=None)
    if incoming.output_shape != layer.output_shape:
        incoming = normalised(incoming, 4 * channels, 1, stride, nonlinearity=None)
    return NonlinearityLayer(ElemwiseSumLayer([layer, incoming]), rectify)


def normalised(incoming: Any, channels: int, size: int, stride: int = 1, nonlinearity: Any = rectify) -> Any:
    """Convolve with filters of odd size, apply batch normalisation, and the nonlinearity if there is one.

    The convolution has no bias, because batch normalisation would subtract it.
    """
    weights = lasagne.init.HeNormal("relu")
    layer = layers.PaddedConv2DLayer(
        incoming, channels, size, stride, pad=size // 2, W=weights, b=None, nonlinearity=None
    )
    layer = BatchNormLayer(layer)
    return NonlinearityLayer(layer, nonlinearity) if nonlinearity else layer
