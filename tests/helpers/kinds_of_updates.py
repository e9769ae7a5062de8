"""Updates of every kind, of variables that are large in some tests, for a function of a matrix x of some rows."""

import types

import numpy as np
from backend import T, theano

SIDE = 60  # large variables are squares: 28,800 bytes
ROWS = 13
x = T.dmatrix("x")
DATA = np.random.RandomState(0).randn(ROWS, SIDE) / SIDE


def square(name, seed=1):
    return theano.shared(np.random.RandomState(seed).randn(SIDE, SIDE), name)


def gradient(w):
    return T.grad(T.sqr(x.dot(w)).sum(), w)


def sgd():
    w = square("w")
    return [w], [(w, w - 0.1 * gradient(w))], []


def adam():
    w, m, v, t = square("w"), square("m"), abs(square("v").get_value()), theano.shared(0.0, "t")
    v = theano.shared(v, "v")
    g, step = gradient(w), t + 1
    m_new, v_new = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    rate = 0.1 * T.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    return [w, m, v, t], [(m, m_new), (v, v_new), (w, w - rate * m_new / (T.sqrt(v_new) + 1e-8)), (t, step)], []


def momentum_of_the_new_value():
    w, m = square("w"), square("m", 2)
    m_new = 0.9 * m - 0.1 * gradient(w)
    return [w, m], [(m, m_new), (w, w + 0.9 * m_new)], []


def swap():
    a, b = square("a"), square("b", 2)
    return [a, b], [(a, b * 0.9), (b, a * 1.1)], []


def copy():
    a, b = square("a"), square("b", 2)
    return [a, b], [(a, b), (b, b - 0.1 * gradient(b))], []


def rotation():
    a, b, c = square("a"), square("b", 2), square("c", 3)
    return [a, b, c], [(a, b), (b, c + 0), (c, a - 0.1 * gradient(c))], []


def concatenation():
    w = square("w")
    return [w], [(w, T.concatenate([w[1:], w[:1]]) - 0.1 * gradient(w))], []


def only_concatenation():
    w = square("w")
    return [w], [(w, T.concatenate([w[1:], w[:1]]))], []


def product():
    w = square("w")
    return [w], [(w, w.dot(w) / SIDE)], []


def transposed():
    w = square("w")
    return [w], [(w, w.T - 0.1 * gradient(w).T)], []


def with_old_value():
    w = square("w")
    return [w], [(w, w - 0.1 * gradient(w))], [T.sqr(w).sum(), w]


def with_new_value():
    w = square("w")
    new = w - 0.1 * gradient(w)
    return [w], [(w, new)], [new, T.sqr(new).sum()]


def with_gradient():
    w = square("w")
    g = gradient(w)
    return [w], [(w, w - 0.1 * g)], [g]


def average():
    w, e = square("w"), square("e", 2)
    new = w - 0.1 * gradient(w)
    return [w, e], [(w, new), (e, 0.9 * e + 0.1 * new)], []


def clipped():
    w = square("w")
    return [w], [(w, T.clip(w - 0.1 * gradient(w), -1, 1))], []


def norm_of_columns():
    w = square("w")
    new = w - 0.1 * gradient(w)
    return [w], [(w, new * T.minimum(1, 1 / T.sqrt(T.sqr(new).sum(axis=0))))], []


def norm_of_gradients():
    w, b = square("w"), theano.shared(np.zeros(SIDE), "b")
    loss = T.sqr(x.dot(w) + b).sum()
    grads = T.grad(loss, [w, b])
    norm = T.sqrt(sum(T.sqr(one).sum() for one in grads))
    return [w, b], [(one, one - 0.1 * g * T.minimum(1, 0.5 / norm)) for one, g in zip([w, b], grads)], [loss]


def increment():
    w = square("w")
    return [w], [(w, T.inc_subtensor(w[:10], 0.1))], []


def same_value():
    w, z = square("w"), square("z", 2)
    new = w - 0.1 * gradient(w)
    return [w, z], [(w, new), (z, new)], []


def without_data():
    w = square("w")
    return [w], [(w, 0.5 * w)], [x.sum()]


def of_another_variable():
    w, large, row = square("w"), square("large", 2), theano.shared(np.arange(SIDE) / SIDE, "row")
    return [w, large, row], [(w, w - 0.1 * gradient(w) * large + row)], [large.sum()]


def two_dtypes():
    w, n = square("w"), theano.shared(np.ones((SIDE, SIDE), "float32"), "n")
    g = gradient(w)
    return [w, n], [(w, w - 0.1 * g), (n, T.cast(n + g, "float32"))], []


def growing():
    w = theano.shared(np.ones((SIDE, SIDE)), "w")
    return [w], [(w, T.concatenate([w, w[:1]]))], [x.sum()]


def row_vector():
    w = theano.shared(np.ones((1, SIDE**2)), "w", broadcastable=(True, False))
    loss = T.sqr(x.sum(1).dimshuffle(0, "x") * w).mean()
    return [w], [(w, w - 0.1 * T.grad(loss, w))], [loss]


def integers():
    n = theano.shared(np.arange(SIDE**2).reshape(SIDE, SIDE), "n")
    return [n], [(n, n + T.cast(10 * x.sum(0), "int64").sum() * (n % 3))], []


def no_update_of_a_large_variable():
    w, b = square("w"), theano.shared(np.zeros(SIDE), "b")
    return [w, b], [(b, b - x.dot(w).sum(0))], []


KINDS = [one for one in list(globals().values()) if getattr(one, "__module__", "") == __name__]
KINDS = [make for make in KINDS if isinstance(make, types.FunctionType) and not make.__code__.co_argcount]
