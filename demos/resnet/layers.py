"""Convolution with padding and batch normalisation, which Lasagne 0.1 implements inefficiently or not at all."""

from __future__ import annotations

from typing import Any

import lasagne
import theano.tensor as T
from lasagne.layers import Conv2DLayer, Layer


class PaddedConv2DLayer(Conv2DLayer):
    """Convolution that lets Theano pad the images with zeros; Lasagne 0.1 copies each image into a larger one.

    The arguments are those of `lasagne.layers.Conv2DLayer`. `pad` is a number of pixels.
    """

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        """Convolve images ``(n, channels, height, width)``, add the bias if any, and apply the nonlinearity."""
        conved = T.nnet.conv2d(
            input,
            self.W,
            input_shape=self.input_shape,
            filter_shape=self.get_W_shape(),
            border_mode=self.pad,
            subsample=self.stride,
        )
        if self.b is not None:
            conved = conved + self.b.dimshuffle("x", 0, "x", "x")
        return self.nonlinearity(conved)


class BatchNormLayer(Layer):
    """Batch normalisation: normalise each channel to mean 0 and variance 1, then scale and shift it.

    The output is ``gamma * (x - mean) / sqrt(variance + epsilon) + beta`` for each channel. In training, mean and
    variance are those of the rows that the function computes on; with several ranks, those of each rank's own shard.
    ``get_output(..., deterministic=True)`` uses running averages over past minibatches instead. Source: S. Ioffe,
    C. Szegedy (2015), Batch normalization, arXiv:1502.03167.

    Names, defaults and numbers are those of the layer in Lasagne 0.2 and later. Like that layer, it keeps a running
    average of ``1 / sqrt(variance + epsilon)`` instead of the variance.

    Parameters
    ----------
    incoming : Layer
        Layer with output shape ``(n, channels, ...)``.
    epsilon : float
        Added to the variance, to avoid division by zero.
    alpha : float
        Weight of the newest minibatch in the running averages.

    Attributes
    ----------
    beta, gamma : shared variables, shape ``(channels,)``
        Trainable parameters.
    mean, inv_std : shared variables, shape ``(channels,)``
        Running averages; parameters that are not trainable.
    running_updates : list of (shared variable, expression)
        Updates of the running averages, which must be passed to the training function. Empty until
        `lasagne.layers.get_output` is called for training.
    """

    def __init__(self, incoming: Any, epsilon: float = 1e-4, alpha: float = 0.1, **kwargs: Any) -> None:
        super().__init__(incoming, **kwargs)
        self.epsilon, self.alpha = epsilon, alpha
        shape = (self.input_shape[1],)
        zeros, ones = lasagne.init.Constant(0), lasagne.init.Constant(1)
        self.beta = self.add_param(zeros, shape, "beta", regularizable=False)
        self.gamma = self.add_param(ones, shape, "gamma")
        self.mean = self.add_param(zeros, shape, "mean", trainable=False, regularizable=False)
        self.inv_std = self.add_param(ones, shape, "inv_std", trainable=False, regularizable=False)
        self.running_updates: list[tuple[Any, Any]] = []

    def get_output_for(self, input: Any, deterministic: bool = False, **kwargs: Any) -> Any:
        """Normalise by mean and variance of the input, or by the running averages if `deterministic`."""
        if deterministic:
            mean, inv_std = self.mean, self.inv_std
        else:
            axes = (0, *range(2, input.ndim))  # all axes but that of the channels
            mean = input.mean(axes)
            inv_std = T.inv(T.sqrt(input.var(axes) + self.epsilon))
            self.running_updates = [
                (old, (1 - self.alpha) * old + self.alpha * new)
                for old, new in ((self.mean, mean), (self.inv_std, inv_std))
            ]
        pattern = ["x", 0, *["x"] * (input.ndim - 2)]
        mean, scale, shift = (v.dimshuffle(pattern) for v in (mean, self.gamma * inv_std, self.beta))
        return (input - mean) * scale + shift
