"""Steps of random programs: arithmetic, reductions, products, layers."""

from backend import RandomStreams, T, ifelse, pool_2d, theano


def positive(x):
    """Return whether numbers are positive, beyond rounding errors, which depend on the order of sums."""
    return T.gt(x, 0.1)


class Arithmetic:
    """Steps of `random_programs.Program`; each computes a variable from those of the ``pool``, or returns None."""

    def do_unary(self):
        return self.pick(UNARY)(self.one())

    def alike(self, a):
        """Pick a variable that can be combined with ``a`` element by element."""

        def fits(b):
            axes = zip(self.values[a].shape, self.values[b].shape, a.broadcastable, b.broadcastable)
            return a.ndim == b.ndim and all(m == n or (fa and m == 1) or (fb and n == 1) for m, n, fa, fb in axes)

        return self.pick(list(filter(fits, self.pool)))

    def do_binary(self):
        a = self.one()
        return self.pick(BINARY)(a, self.alike(a))

    def do_switch(self):
        a = self.one()
        return T.switch(positive(self.alike(a)), a, self.alike(a))

    def do_condition(self):
        a = self.one()
        return ifelse(positive(self.one().sum()), a, -a)

    def do_scale(self):
        x = self.one()
        return self.pick([x * 2.5, x / 3.0, x * T.cast(self.number(), "float64"), 1 - x, x / 4 + 1])

    def do_reduce(self):
        x = self.one(1, 2, 3, 4)
        axis = self.pick([None, *range(x.ndim), *range(x.ndim)])
        keepdims = self.random.random() < 0.4
        how = self.pick([T.sum, T.sum, T.mean, T.max, T.min, T.prod, T.std, T.var, T.any, T.all])
        return how(x, axis=axis, keepdims=keepdims)

    def do_argmax(self):
        x = self.one(1, 2, 3)
        axis = self.pick([None, *range(x.ndim)])
        return self.pick([T.argmax, T.argmin])(x, axis=axis)

    def do_normalise(self):
        x = self.one(1, 2, 3)
        axis = self.pick([*range(x.ndim), tuple(range(x.ndim - 1)) or 0])
        return (x - x.mean(axis, keepdims=True)) / T.sqrt(x.var(axis, keepdims=True) + 1)

    def do_clip_by_norm(self):
        x = self.one(1, 2)
        norm = T.sqrt((x**2).sum()) + 1
        return x * (T.clip(norm, 0, 2) / norm)

    def do_loss(self):
        x, kind = self.one(2), self.random.randrange(4)
        if kind == 0:
            return T.nnet.binary_crossentropy(T.nnet.sigmoid(x), T.clip(self.alike(x), 0, 1))
        out = T.nnet.softmax(x)
        if kind == 1:
            return T.nnet.categorical_crossentropy(out, self.labels)
        if kind == 2:
            return -T.log(out)[T.arange(self.labels.shape[0]), self.labels]
        return T.nnet.categorical_crossentropy(out, T.nnet.softmax(self.alike(x)))

    def do_convolution(self):
        x = self.one(3)
        filters = T.ones((2, 1, self.pick([1, 2]), self.pick([1, 2])))
        order = self.pick([(0, "x", 1, 2), (0, "x", 1, 2), (1, "x", 0, 2)])
        mode = self.pick(["valid", "half", "full"])
        return T.nnet.conv2d(x.dimshuffle(order), filters, border_mode=mode)

    def do_pool(self):
        x = self.one(3, 4)
        mode = self.pick(["max", "sum", "average_inc_pad", "average_exc_pad"])
        return pool_2d(x, self.pick([(1, 2), (2, 2), (2, 1)]), ignore_border=True, mode=mode)

    def do_matrix(self):
        x = self.one(2)
        return self.pick(MATRIX)(x)

    def do_tensordot(self):
        a, b = self.one(2, 3), self.one(2, 3)
        return T.tensordot(a, b, [[self.random.randrange(a.ndim)], [self.random.randrange(b.ndim)]])

    def do_one_hot(self):
        return self.pick([T.extra_ops.to_one_hot(self.labels, 3), T.extra_ops.bincount(self.labels, minlength=4)])

    def do_draw(self):
        x, streams = self.one(1, 2), RandomStreams(3)
        return self.pick([streams.binomial(x.shape, p=0.5), streams.uniform(x.shape)]) * x

    def do_dot(self):
        a = self.one(1, 2, 3)
        last = self.values[a].shape[-1]
        fits = [one for one in self.floats(1, 2) if self.values[one].shape[0] == last]
        return T.dot(a, self.pick(fits)) if fits else None

    def do_batched_dot(self):
        a = self.one(3)
        return T.batched_dot(a, a.dimshuffle(0, 2, 1)) if a is not None else None

    def do_softmax(self):
        return self.pick([T.nnet.softmax, T.nnet.logsoftmax])(self.one(2))

    do_binary_again = do_binary_too = do_binary


UNARY = (
    T.tanh,
    abs,
    T.neg,
    T.sqr,
    lambda x: T.exp(-(x**2)),
    T.zeros_like,
    T.ones_like,
    T.sgn,
    T.nnet.sigmoid,
    T.nnet.relu,
    T.nnet.softplus,
    T.nnet.hard_sigmoid,
    lambda x: T.clip(x, -1, 1),
    lambda x: T.floor(x / 2),
    lambda x: T.sqrt(abs(x) + 1),
    lambda x: T.log1p(abs(x)),
    lambda x: T.cast(x, "int32") // 2,
    lambda x: T.cast(x, "float32") * 2,
    lambda x: T.invert(positive(x)),
    theano.gradient.disconnected_grad,
    lambda x: theano.gradient.grad_clip(x, -0.5, 0.5),
    lambda x: T.unbroadcast(x),
    T.squeeze,
    lambda x: x.T,
    lambda x: x.flatten(),
)
BINARY = (
    T.add,
    T.sub,
    T.mul,
    T.maximum,
    T.minimum,
    T.second,
    T.eq,
    T.neq,
    T.ge,
    T.lt,
    lambda a, b: a / (1 + b * b),
    lambda a, b: T.int_div(a, 1 + b * b),
    lambda a, b: T.mod(a, 1 + b * b),
    lambda a, b: T.pow(abs(a) + 1, T.clip(b, -2, 2)),
    lambda a, b: T.and_(positive(a), positive(b)),
)
MATRIX = (
    T.diag,
    T.tril,
    T.triu,
    T.nlinalg.trace,
    lambda x: T.fill_diagonal(x, 1.0),
    lambda x: x.dot(x.T),
    lambda x: x.T.dot(x),
    lambda x: T.eye(x.shape[0]),
    lambda x: T.eye(x.shape[0], x.shape[1]) * x,
    lambda x: x.norm(2, axis=0),
    lambda x: x.swapaxes(0, 1),
    lambda x: T.argsort(x, axis=0),
    lambda x: T.extra_ops.diff(x, axis=0),
)
