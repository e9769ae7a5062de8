"""Small programs for exact functions, with their gradients and the values of their inputs.

Some of them are those that a less strict partitioning computes wrong without an error: numbers computed from shapes,
permutations of rows, axes of length 1, reshapes across rows.
"""

import contextlib
import functools

import numpy as np
import pytest
import scipy.sparse
from backend import T, pool_2d, pool_3d, theano, theano_only  # noqa: F401

constant = theano.gradient.disconnected_grad
_NO_GRADIENT = (theano.gradient.NullTypeGradError, theano.gradient.DisconnectedInputError)

N, D, K, L = 11, 4, 3, 5  # rows, features, classes, steps

_rng = np.random.RandomState(7)


def _shared(name, *shape, fixed=()):
    value = _rng.randn(*shape)
    return theano.shared(value, name, broadcastable=tuple(axis in fixed for axis in range(len(shape))))


x, z, v, m, y = T.dmatrix("x"), T.dmatrix("z"), T.dvector("v"), T.dvector("m"), T.ivector("y")
s, ids, images, f, c = T.dtensor3("s"), T.imatrix("ids"), T.dtensor4("images"), T.fmatrix("f"), T.dmatrix("c")
q, a = T.imatrix("q"), T.dscalar("a")

#: Inputs that are sharded, and all other inputs.
ROWS = {
    x: _rng.randn(N, D),
    z: _rng.randn(N, D),
    v: _rng.randn(N),
    m: (_rng.rand(N) < 0.5) * 1.0,
    y: _rng.randint(0, K, N).astype("int32"),
    s: _rng.randn(N, L, D),
    ids: _rng.randint(0, 7, (N, L)).astype("int32"),
    images: _rng.randn(N, 2, 6, 6),
    f: _rng.randn(N, D).astype("float32"),
    q: _rng.randint(-3, 4, (N, D)).astype("int32"),
}
WHOLE = {c: _rng.randn(N, D), a: np.asarray(0.3)}

W, U, b, B = _shared("W", D, K), _shared("U", D, D), _shared("b", K), _shared("B", D)
E, gain, filters = _shared("E", 7, D), _shared("gain", 1, D, fixed=(0,)), _shared("filters", 3, 2, 3, 3)
channel = _shared("channel", 1, 2, 1, 1, fixed=(0, 2, 3))
V = _shared("V", 3 * 4 * 4, K)
table = _shared("table", N, D)  # one row for each data point
each = _shared("each", N)
PARAMETERS = [W, U, b, B, E, gain, filters, channel, V, table, each]


steps = s.dimshuffle(1, 0, 2)
matrix = theano.shared(scipy.sparse.csc_matrix(_rng.binomial(1, 0.4, (D, K)) * 1.5), "matrix")
_h, _w = T.dmatrix(), T.dmatrix()
layer = theano.OpFromGraph([_h, _w], [T.tanh(_h.dot(_w)), _h.sum(0)], inline=True)


def norm(h, axes=(0,)):
    """Normalize over the minibatch."""
    return (h - h.mean(axes, keepdims=True)) / T.sqrt(h.var(axes, keepdims=True) + 1e-4)


def clipped(gradients, limit):
    """Clip gradients as Lasagne's total_norm_constraint does."""
    size = T.sqrt(sum(T.sum(one**2) for one in gradients))
    return [one * (T.clip(size, 0, limit) / (1e-7 + size)) for one in gradients]


def step(losses, *parameters):
    """Return new parameters after a gradient step with clipping."""
    return [p - 0.1 * g for p, g in zip(parameters, clipped(T.grad(losses, parameters), 0.5))]


def adam(loss, *parameters):
    """Return means, squares and parameters after one step of Adam."""
    new = []
    for p, g in zip(parameters, T.grad(loss, parameters)):
        mean, square = 0.1 * g, 0.001 * g**2
        new += [mean, square, p - 0.01 * mean / (T.sqrt(square) + 1e-8)]
    return new


def picked(h):
    """Return the element of each row at its label."""
    return h[T.arange(y.shape[0]), y]


def nll(h):
    """Return the negative log-likelihood of each row."""
    return -T.log(picked(T.nnet.softmax(h)))


def lrn(h, half=1):
    """Normalize as Lasagne's LocalResponseNormalization2DLayer does."""
    n, channels, rows, columns = h.shape
    extra = T.alloc(0.0, n, channels + 2 * half, rows, columns)
    squares = T.set_subtensor(extra[:, half : half + channels], h**2)
    return h / (1 + sum(squares[:, i : i + channels] for i in range(2 * half + 1))) ** 0.75


def scan_rnn(before=None, **options):
    """Return the states of a recurrent net over time."""
    before = T.zeros((s.shape[0], D)) if before is None else before
    return theano.scan(lambda row, h: T.tanh(row.dot(U) + h.dot(U)), steps, before, **options)[0]


def scan_normed():
    """Return states that are normalized over the minibatch in each step."""
    return theano.scan(lambda row, h: T.tanh(norm(row.dot(U) + h.dot(U))), steps, T.zeros((s.shape[0], D)))[0]


def scan_until():
    """Return the states of a loop that ends when their mean square over all rows is large."""

    def step(row, h):
        return T.tanh(row.dot(U) + h), theano.scan_module.until((h**2).mean() > 0.55)

    return theano.scan(step, steps, T.zeros((s.shape[0], D)))[0]


def scan_nested():
    """Return the states of a loop with a loop in each step."""

    def step(row, h):
        return theano.scan(lambda h: T.tanh(h.dot(U)), outputs_info=row + h, n_steps=3)[0][-1]

    return theano.scan(step, steps, T.zeros((s.shape[0], D)))[0]


def scan_sums(follow, before):
    """Return a state computed from means over rows."""
    return theano.scan(lambda row, total: follow(total) + row.mean(0), steps, before)[0]


def scan_descent():
    """Return weights after three steps of gradient descent."""
    step = lambda i, w: w - 0.1 * T.grad((T.tanh(x.dot(w)) ** 2).mean(), w)  # noqa: E731
    return theano.scan(step, T.arange(3), W)[0][-1]


def scan_two_taps():
    """Return states of a loop in which each state depends on the previous two."""
    begin = {"initial": T.stack([s[:, 0] * 0.1, s[:, 1]]), "taps": [-2, -1]}
    return theano.scan(lambda row, second, first: T.tanh(row.dot(U) + second.dot(U) - first), steps, begin)[0]


def scan_masked():
    """Return states that a mask keeps unchanged in some rows and steps."""

    def step(row, mask, h):
        return T.switch(mask[:, None] > 0, T.tanh(row.dot(U) + h), h)

    return theano.scan(step, [steps, s[:, :, 0].T], T.zeros((s.shape[0], D)))[0]


_NAMES = {name: value for name, value in globals().items() if not name.startswith("__")}


#: Words in programs with operations that only Theano has.
_THEANOS = ["conv2d", "crossentropy_softmax", "h_softmax", "nnet.bn", "pool_", "softmax_graph", "softmax_op"]
_THEANOS += ["batched_tensordot", "confusion_matrix", "RepeatOp", "T.join(T.cast", "unbroadcast"]


def marked(programs):
    """Return programs as parameters of a test, with marks."""
    alone = theano_only("operations that PyTensor does not have: convolution, pooling, batch normalisation and others")
    return [pytest.param(one, marks=[alone] if any(word in one for word in _THEANOS) else []) for one in programs]


def evaluated(program):
    """Return the outputs of a program as a list."""
    outputs = eval(program, _NAMES)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


@functools.cache
def outputs_of(program):
    """Return the outputs of a program, and their gradients for all inputs that have gradients."""
    outputs = evaluated(program)
    losses = [one for one in outputs if str(one.dtype).startswith("float")]
    inputs = [one for one in theano.gof.graph.inputs(outputs) if one in ROWS or one in WHOLE or one in PARAMETERS]
    wanted = [one for one in inputs if str(one.dtype).startswith("float")]
    if losses and wanted:
        loss = sum((T.sin(one) * 0.5).sum() for one in losses)
        with contextlib.suppress(NotImplementedError, TypeError, *_NO_GRADIENT):
            outputs += T.grad(loss, wanted, disconnected_inputs="ignore")
    return outputs


def inputs_of(outputs):
    """Return the sharded inputs that outputs depend on, and the other inputs."""
    used = set(theano.gof.graph.inputs(outputs))
    return [one for one in ROWS if one in used], [one for one in WHOLE if one in used]
