"""PyTensor under Theano's names, as far as tests use them."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytensor
import pytensor.link.c.cvm  # a later import, after a test sets cxx="", would fail
import pytensor.raise_op
import pytensor.sparse
import pytensor.tensor as pt
from pytensor.compile.debug.monitormode import MonitorMode  # noqa: F401
from pytensor.compile.debug.nanguardmode import NanGuardMode  # noqa: F401
from pytensor.conditional.op import ifelse
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import graph_inputs
from pytensor.link.c import cmodule
from pytensor.scan import views
from pytensor.scan.basic import scan
from pytensor.scan.utils import until
from pytensor.tensor.random.utils import RandomStream

from synkhronos._theano_compat.compile_cache import precompile_headers

precompile_headers(cmodule)  # as on Theano: this saves a third of the time of a first run


class Names:
    """A namespace of its own names, and the current names of a module."""

    def __init__(self, module, **own):
        self.__dict__.update(own)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


class Op(pytensor.graph.Op):
    """An operation with Theano's method ``grad``."""

    def pullback(self, inputs, outputs, gradients):
        return self.grad(inputs, gradients)


def shared(value, name=None, broadcastable=None, **options):
    if broadcastable is not None:
        options["shape"] = tuple(1 if is_one else None for is_one in broadcastable)
    return pytensor.shared(value, name=name, **options)


def clone(output, replace=None, share_inputs=True):
    return clone_replace(output, replace, copy_inputs_over=share_inputs)


def with_updates(function):
    """Wrap a function that builds a loop, without PyTensor's warning about the updates that it returns."""

    def loop(*arguments, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return function(*arguments, **options)

    return loop


class RandomStreams:
    """Random streams whose methods have Theano's arguments: the size first, and dtypes."""

    def __init__(self, seed=None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self._streams = RandomStream(seed)

    def seed(self, seed=None):
        self._streams.seed(seed)

    def uniform(self, size=None, low=0.0, high=1.0, dtype=None):
        return self._streams.uniform(low, high, size=size, dtype=dtype)

    def normal(self, size=None, avg=0.0, std=1.0, dtype=None):
        return self._streams.normal(avg, std, size=size, dtype=dtype)

    def binomial(self, size=None, n=1, p=0.5, dtype="int64"):
        return self._streams.binomial(n, p, size=size).astype(dtype)


#: PyTensor has one kind of random streams.
MRG_RandomStreams = RandomStreams


random_state = np.random.default_rng


def uniform(state, size, ndim=None):
    """Return the next state, and random numbers."""
    return pt.random.uniform(size=size, rng=state).owner.outputs


def pool_2d(*arguments, **options):
    raise AttributeError("PyTensor has no pooling")


pool_3d = pool_2d


def relu(x, alpha=0):
    return pt.switch(x > 0, x, alpha * x)


def categorical_crossentropy(guess, truth):
    if truth.ndim == guess.ndim:
        return -(truth * pt.log(guess)).sum(axis=-1)
    return -pt.log(guess[pt.arange(truth.shape[0]), truth])


def binary_crossentropy(guess, truth):
    return -(truth * pt.log(guess) + (1 - truth) * pt.log(1 - guess))


def patternbroadcast(x, pattern):
    return addbroadcast(x, *[axis for axis, is_one in enumerate(pattern) if is_one])


def addbroadcast(x, *axes):
    return pt.specify_broadcastable(x, *axes) if axes else x


def gradients_of(loss, params):
    return loss if isinstance(loss, list) else pytensor.grad(loss, params)


def adam(loss, params, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
    """Return Adam's updates (Kingma and Ba, algorithm 1), with the bias correction in the step size."""
    count = pytensor.shared(pt.as_tensor(0, dtype=pytensor.config.floatX).data)
    updates = {count: count + 1}
    step = learning_rate * pt.sqrt(1 - beta2 ** (count + 1)) / (1 - beta1 ** (count + 1))
    for param, gradient in zip(params, gradients_of(loss, params)):
        mean, square = (shared(np.zeros_like(param.get_value()), broadcastable=param.broadcastable) for _ in range(2))
        updates[mean] = beta1 * mean + (1 - beta1) * gradient
        updates[square] = beta2 * square + (1 - beta2) * gradient**2
        updates[param] = param - step * updates[mean] / (pt.sqrt(updates[square]) + epsilon)
    return updates


def momentum(loss, params, learning_rate, kept=0.9):
    updates = {}
    for param, gradient in zip(params, gradients_of(loss, params)):
        velocity = shared(np.zeros_like(param.get_value()), broadcastable=param.broadcastable)
        updates[velocity] = kept * velocity - learning_rate * gradient
        updates[param] = param + updates[velocity]
    return updates


def total_norm_constraint(tensors, limit, epsilon=1e-7):
    norm = pt.sqrt(sum((tensor**2).sum() for tensor in tensors))
    return [tensor * (pt.clip(norm, 0, limit) / (norm + epsilon)) for tensor in tensors]


#: The part of Lasagne that tests use, without layers.
lasagne = SimpleNamespace(
    updates=SimpleNamespace(adam=adam, momentum=momentum, total_norm_constraint=total_norm_constraint)
)


def batched_dot(a, b):
    if a.ndim == b.ndim == 2:
        return (a * b).sum(1)
    return (a @ b[:, :, None])[:, :, 0] if b.ndim == 2 else a @ b


def typed(name):
    """Return a constructor of variables, such as ``matrix``, that takes the name and the dtype by position."""
    return lambda label=None, dtype=None: getattr(pt, name)(label, dtype=dtype)


nnet = SimpleNamespace(
    binary_crossentropy=binary_crossentropy,
    categorical_crossentropy=categorical_crossentropy,
    elu=lambda x, alpha=1: pt.switch(x > 0, x, alpha * pt.expm1(x)),
    hard_sigmoid=lambda x: pt.clip(x * 0.2 + 0.5, 0, 1),
    logsoftmax=lambda x: pt.special.log_softmax(x, axis=-1),
    relu=relu,
    sigmoid=pt.sigmoid,
    softmax=lambda x: pt.special.softmax(x, axis=-1),
    softplus=pt.softplus,
)

T = Names(
    pt,
    AllocEmpty=pt.basic.AllocEmpty,
    AsTensorError=TypeError,
    Elemwise=pt.elemwise.Elemwise,
    Rop=pytensor.gradient.Rop,
    addbroadcast=addbroadcast,
    batched_dot=batched_dot,
    copy=pt.tensor_copy,
    nlinalg=SimpleNamespace(matrix_inverse=pt.linalg.inv, trace=pt.linalg.trace),
    nnet=nnet,
    opt=SimpleNamespace(Assert=pytensor.raise_op.Assert),
    patternbroadcast=patternbroadcast,
    **{name: typed(name) for name in ("scalar", "vector", "matrix", "row", "col", "tensor3", "tensor4")},
    split=lambda x, sizes, n, axis=0: pt.split(x, sizes, axis=axis),
)

theano = Names(
    pytensor,
    Apply=pytensor.graph.Apply,
    Op=Op,
    change_flags=pytensor.config.change_flags,
    clone=clone,
    foldl=with_updates(views.foldl),
    gof=SimpleNamespace(
        Constant=pytensor.graph.Constant,
        generic=pytensor.link.c.type.generic,
        fg=SimpleNamespace(MissingInputError=pytensor.graph.utils.MissingInputError),
        graph=SimpleNamespace(inputs=lambda outputs: list(graph_inputs(outputs))),
        utils=SimpleNamespace(MethodNotDefined=pytensor.graph.utils.MethodNotDefined),
    ),
    ifelse=SimpleNamespace(ifelse=ifelse),
    map=with_updates(views.map),
    reduce=with_updates(views.reduce),
    scan=with_updates(scan),
    scan_module=SimpleNamespace(until=until),
    shared=shared,
    tensor=T,
)
