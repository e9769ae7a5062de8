"""Steps of random programs: reshapes, permutations and indices."""

from backend import T
from random_arithmetic import positive


class Moves:
    """Steps of `random_programs.Program`; each computes a variable from those of the ``pool``, or returns None."""

    def do_dimshuffle(self):
        x = self.one()
        order = list(range(x.ndim))
        self.random.shuffle(order)
        if self.random.random() < 0.4 and x.ndim < 4:
            order.insert(self.random.randint(0, x.ndim), "x")
        return x.dimshuffle(order)

    def do_vector(self):
        a, b = self.one(1), self.one(1)
        return self.pick([T.outer(a, b), T.diag(a), T.dot(a, a), a[a.argsort()], T.extra_ops.diff(a)])

    def do_mask(self):
        x, v = self.one(1, 2, 3), self.one(1)
        return self.pick([x[positive(v).nonzero()], x[T.arange(x.shape[0]) * positive(x.sum())]])

    def do_copies(self):
        x, axis = self.one(1, 2, 3), self.pick([0, -1])
        return self.pick(
            [T.tile(x, (2,) * x.ndim), T.roll(x, 1, axis), T.concatenate([x, x], axis), T.stack([x, x], axis)]
        )

    def do_split(self):
        x = self.one(2, 3)
        axis = self.random.randrange(x.ndim)
        return self.pick(T.split(x, [1, x.shape[axis] - 1], 2, axis))

    def do_reshape(self):
        x = self.one(1, 2, 3, 4)
        shape = [x.shape[i] for i in range(x.ndim)]
        kind = self.random.randrange(7)
        if kind == 0:
            return x.flatten(self.random.randint(1, x.ndim))
        if kind == 1 and x.ndim > 1:  # two axes become one
            i = self.random.randrange(x.ndim - 1)
            return x.reshape([*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]], x.ndim - 1)
        if kind == 2:  # one becomes two
            i, n = self.random.randrange(x.ndim), self.pick([2, 2, 3])
            parts = [n, shape[i] // n] if self.random.random() < 0.5 else [shape[i] // n, n]
            return x.reshape([*shape[:i], *parts, *shape[i + 1 :]], x.ndim + 1)
        if kind == 3:
            i = self.random.randrange(x.ndim)
            shape[i] = -1
            if self.random.random() < 0.5:
                shape.insert(i, self.pick([1, 2]))
            return x.reshape(shape, len(shape))
        if kind == 4:
            self.random.shuffle(shape)
            return x.reshape(shape, len(shape))
        if kind == 5:
            return x.reshape(self.pick([(self.number(), -1), (-1, self.number()), (2, -1), (-1, 2)]))
        split = [y.shape[i] for y in [self.pick(self.pool)] for i in range(y.ndim)]
        return x.reshape(split, len(split)) if split else None

    def index(self):
        number = lambda: self.pick([None, None, 1, -1, 2, self.number()])  # noqa: E731
        slices = [*[slice(None)] * 3, slice(number(), number()), slice(None, None, -1), slice(None, None, 2)]
        return self.pick([*slices, 0, -1, self.number() - 1])

    def do_subtensor(self):
        x = self.one(1, 2, 3, 4)
        return x[tuple(self.index() for _ in range(self.random.randint(1, x.ndim)))]

    def do_put(self):
        x = self.one(1, 2, 3)
        where = x[tuple(self.index() for _ in range(self.random.randint(1, x.ndim)))]
        how = self.pick([T.set_subtensor, T.inc_subtensor])
        return how(where, self.pick([*self.floats(where.ndim), T.constant(1.5)]))

    def do_take(self):
        x, y = self.one(1, 2, 3), self.labels
        n = T.arange(self.pick([y, x]).shape[0])
        indices = self.pick([y, y[::-1], n, n[::-1], n // 2, T.concatenate([y, y]), T.stack([y, y]), n % 2])
        if self.random.random() < 0.7 or x.ndim == 1:
            return x[indices]
        return x[:, indices]

    def do_pick(self):
        x, y = self.one(2, 3), self.labels
        rows = T.arange(self.pick([y, y, x]).shape[0])
        rows = self.pick([rows, rows, rows, rows[::-1], rows // 2, y])
        picked = x[rows, y]
        if self.random.random() < 0.6:
            return picked
        how = self.pick([T.set_subtensor, T.inc_subtensor])
        return how(picked, self.pick([*self.floats(picked.ndim), T.constant(0.5)]))

    def do_add_to_rows(self):
        x, y = self.one(1, 2), self.labels
        how = self.pick([T.inc_subtensor, T.inc_subtensor, T.set_subtensor])
        return how(x[y], self.pick([*self.floats(x.ndim), T.constant(0.5)]))

    def do_join(self):
        x = self.one(1, 2, 3)
        parts = [x, self.pick(self.floats(x.ndim))]
        joins = self.random.random() < 0.7
        return T.concatenate(parts, axis=self.random.randrange(x.ndim)) if joins else T.stack(parts)

    def do_make(self):
        shape = tuple(self.number() for _ in range(self.random.randint(1, 2)))
        return self.pick([lambda: T.zeros(shape), lambda: T.ones(shape), lambda: T.alloc(self.one(0, 1, 2), *shape)])()

    def do_range(self):
        start, step = self.pick([(0, 1), (0, 1), (1, 1), (0, 2)])
        return T.cast(T.arange(start, self.number(), step), "float64")

    def do_order(self):
        x = self.one(1, 2, 3)
        axis = self.pick([*range(x.ndim), -1])
        return self.pick([T.sort, T.cumsum, T.extra_ops.cumprod])(x, axis=axis)

    def do_repeat(self):
        x = self.one(1, 2)
        return T.repeat(x, 2, axis=self.random.randrange(x.ndim))

    do_reshape_again = do_reshape
