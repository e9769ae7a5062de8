"""Two layers that Lasagne 0.1 lacks, or has in a form that costs too much for a network of this size."""

from __future__ import annotations

from typing import Any

import lasagne
import theano.tensor as T
from lasagne.layers import Conv2DLayer, Layer


class PaddedConv2DLayer(Conv2DLayer):
    """A convolution that leaves the zeros around the image to Theano; Lasagne 0.1 copies each image into a larger one.

    The arguments are those of `lasagne.layers.Conv2DLayer`; `pad` is a number of pixels.
    """

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        """Convolve images ``(n, channels, height, width)``, add the bias if there is one, apply the nonlinearity."""
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
    """Batch normalisation: bring each channel to mean 0 and variance 1, then scale and shift it.

    For each channel ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``. In training, mean and variance are those
    of the data that the function computes on: on several ranks, of each rank's own share of the minibatch. With
    ``get_output(..., deterministic=True)``, running averages over past minibatches take their place. Source: S. Ioffe,
    C. Szegedy (2015), Batch normalization, arXiv:1502.03167.

    Names, defaults and numbers are those of the layer that Lasagne has from 0.2 on. Like that one, it keeps a running
    average of ``1 / sqrt(variance + epsilon)``, and not of the variance.

    Parameters
    ----------
    incoming : Layer
        Of output shape ``(n, channels, ...)``.
    epsilon : float
        Keeps the quotient finite.
    alpha : float
        The part of a running average that each minibatch replaces.

    Attributes
    ----------
    beta, gamma : shared variables, shape ``(channels,)``
        Trained like weights.
    mean, inv_std : shared variables, shape ``(channels,)``
        The running averages. They are parameters that are not trainable.
    running_updates : list of (shared variable, expression)
        What brings the running averages up to date: the function that trains has to be given these as updates. Empty
        before `lasagne.layers.get_output` is called for training.
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
        """Normalise by the input's own mean and variance, or by the running averages if `deterministic`."""
        if deterministic:
            mean, inv_std = self.mean, self.inv_std
        else:
            axes = (0, *range(2, input.ndim))  # all but that of the channels
            mean = input.mean(axes)
            inv_std = T.inv(T.sqrt(input.var(axes) + self.epsilon))
            self.running_updates = [
                (old, (1 - self.alpha) * old + self.alpha * new)
                for old, new in ((self.mean, mean), (self.inv_std, inv_std))
            ]
        pattern = ["x", 0, *["x"] * (input.ndim - 2)]
        mean, scale, shift = (v.dimshuffle(pattern) for v in (mean, self.gamma * inv_std, self.beta))
        return (input - mean) * scale + shift
