"""Random programs, divided by their rows: every value on every rank is the serial program's.

Lengths are few and alike (as many rows as features, say), so that what is laid out wrongly has a right shape.
"""

import contextlib
import random

import numpy as np
import theano
import theano.tensor as T
from divided import check, evaluate
from hypothesis import given, settings
from hypothesis import strategies as st


class Program:
    """A random program of some steps, each of what was computed before."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        pick = self.random.choice
        self.n_rows = pick([4, 4, 6])
        rng = np.random.RandomState(seed % 2**32)
        length = lambda: pick([1, 2, 2, 3, self.n_rows])  # noqa: E731
        axis = pick([0, 0, 0, 1])
        x, v, y = T.dmatrix("x"), T.dvector("v"), T.lvector("y")
        s = T.dtensor3("s")
        shape, steps = [self.n_rows, length()], [self.n_rows, length(), length()]
        if axis:
            shape, steps = shape[::-1], [steps[1], steps[0], steps[2]]
        c = T.dmatrix("c")
        self.given = {
            x: rng.randn(*shape),
            v: rng.randn(self.n_rows),
            y: rng.randint(0, min(2, *shape, *steps), self.n_rows),
            s: rng.randn(*steps),
            c: rng.randn(*shape),
        }
        self.sharded = {x: axis, v: 0, y: 0, s: axis}
        weights = [rng.randn(length(), length()), rng.randn(length()), rng.randn(self.n_rows, length())]
        weights = [theano.shared(value, "w") for value in weights]
        self.labels, self.inputs = y, [x, v, s, c]
        self.numbers = [x.shape[axis], v.shape[0], x.shape[1 - axis], s.shape[2]]
        self.values = {}
        self.pool = []
        for variable in [x, v, s, c, *weights]:
            self.keep(variable)

    def keep(self, variable):
        """Enter a variable that the serial program can compute; others are forgotten."""
        known = {one: [value] for one, value in {**self.given, **self.values}.items()}
        try:
            with np.errstate(all="ignore"):
                value = evaluate([variable], known, in_step=True)[variable][0]
        except (ValueError, IndexError, AssertionError, TypeError, MemoryError):
            return
        value = np.asarray(value)
        if value.size > 2000 or not np.isfinite(value).all() or np.abs(value).max(initial=0) > 1e6:
            return
        fits = all(length == 1 or not fixed for length, fixed in zip(value.shape, variable.broadcastable))
        assert fits
        self.values[variable] = value
        self.pool.append(variable)

    def one(self, *ndims):
        found = [one for one in self.pool if one.dtype == "float64" and (not ndims or one.ndim in ndims)]
        return self.random.choice(found[-8:] + found[:3] if self.random.random() < 0.8 else found) if found else None

    def number(self):
        """A number made of shapes, or a constant."""
        pick, n = self.random.choice, self.random.choice(self.numbers)
        return pick(
            [
                n,
                n,
                n,
                n * 2,
                n + 1,
                n // 2,
                n - 1,
                1,
                2,
                3,
                self.n_rows,
                n * pick(self.numbers),
                T.as_tensor_variable(n),
            ]
        )

    def step(self):
        name = self.random.choice([name for name in dir(self) if name.startswith("do_")])
        try:
            made = getattr(self, name)()
        except (ValueError, TypeError, IndexError, NotImplementedError):
            return
        if made is not None:
            self.keep(made)

    # -- steps

    def do_unary(self):
        x = self.one()
        return self.random.choice([T.tanh, abs, T.neg, T.sqr, lambda x: T.exp(-(x**2)), T.zeros_like, T.ones_like])(x)

    def do_binary(self):
        a, b = self.one(), self.one()
        alike = [
            one
            for one in self.pool
            if one.ndim == a.ndim
            and one.dtype == "float64"
            and all(
                m == n or (bm and m == 1) or (bn and n == 1)
                for m, n, bm, bn in zip(
                    self.values[one].shape, self.values[a].shape, one.broadcastable, a.broadcastable
                )
            )
        ]
        b = self.random.choice(alike)
        return self.random.choice([T.add, T.sub, T.mul, T.maximum, lambda a, b: T.switch(a > 0, a, b), T.second])(a, b)

    def do_scale(self):
        x = self.one()
        return self.random.choice([x * 2.5, x / 3.0, x * T.cast(self.number(), "float64"), 1 - x, x / 4 + 1])

    do_binary_again = do_binary_too = do_binary

    def do_dimshuffle(self):
        x = self.one()
        order = list(range(x.ndim))
        self.random.shuffle(order)
        if self.random.random() < 0.4 and x.ndim < 4:
            order.insert(self.random.randint(0, x.ndim), "x")
        return x.dimshuffle(order)

    def do_reduce(self):
        x = self.one(1, 2, 3, 4)
        axis = self.random.choice([None, *range(x.ndim), *range(x.ndim)])
        keepdims = self.random.random() < 0.4
        how = self.random.choice([T.sum, T.sum, T.mean, T.max, T.min, T.prod, T.std])
        return how(x, axis=axis, keepdims=keepdims)

    def do_argmax(self):
        x = self.one(1, 2, 3)
        return T.cast(T.argmax(x, axis=self.random.choice(range(x.ndim))), "float64")

    def do_dot(self):
        a = self.one(1, 2, 3)
        last = self.values[a].shape[-1]
        fits = [
            one
            for one in self.pool
            if one.ndim in (1, 2) and one.dtype == "float64" and self.values[one].shape[0] == last
        ]
        return T.dot(a, self.random.choice(fits)) if fits else None

    def do_batched_dot(self):
        a = self.one(3)
        return T.batched_dot(a, a.dimshuffle(0, 2, 1)) if a is not None else None

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
            i, n = self.random.randrange(x.ndim), self.random.choice([2, 2, 3])
            parts = [n, shape[i] // n] if self.random.random() < 0.5 else [shape[i] // n, n]
            return x.reshape([*shape[:i], *parts, *shape[i + 1 :]], x.ndim + 1)
        if kind == 3:
            i = self.random.randrange(x.ndim)
            shape[i] = -1
            if self.random.random() < 0.5:
                shape.insert(i, self.random.choice([1, 2]))
            return x.reshape(shape, len(shape))
        if kind == 4:
            self.random.shuffle(shape)
            return x.reshape(shape, len(shape))
        if kind == 5:
            return x.reshape(self.random.choice([(self.number(), -1), (-1, self.number()), (2, -1), (-1, 2)]))
        split = [y.shape[i] for y in [self.random.choice(self.pool)] for i in range(y.ndim)]
        return x.reshape(split, len(split)) if split else None

    do_reshape_again = do_reshape

    def index(self):
        number = lambda: self.random.choice([None, None, 1, -1, 2, self.number()])  # noqa: E731
        return self.random.choice(
            [
                slice(None),
                slice(None),
                slice(None),
                slice(number(), number()),
                slice(None, None, -1),
                slice(None, None, 2),
                0,
                -1,
                self.number() - 1,
            ]
        )

    def do_subtensor(self):
        x = self.one(1, 2, 3, 4)
        return x[tuple(self.index() for _ in range(self.random.randint(1, x.ndim)))]

    def do_put(self):
        x = self.one(1, 2, 3)
        where = x[tuple(self.index() for _ in range(self.random.randint(1, x.ndim)))]
        how = self.random.choice([T.set_subtensor, T.inc_subtensor])
        fits = [one for one in self.pool if one.dtype == "float64" and one.ndim == where.ndim]
        return how(where, self.random.choice([*fits, T.constant(1.5)]))

    def do_take(self):
        x, y = self.one(1, 2, 3), self.labels
        n = T.arange(self.random.choice([y, x]).shape[0])
        indices = self.random.choice([y, y[::-1], n, n[::-1], n // 2, T.concatenate([y, y]), T.stack([y, y]), n % 2])
        if self.random.random() < 0.7 or x.ndim == 1:
            return x[indices]
        return x[:, indices]

    def do_pick(self):
        x, y = self.one(2, 3), self.labels
        rows = T.arange(self.random.choice([y, y, x]).shape[0])
        rows = self.random.choice([rows, rows, rows, rows[::-1], rows // 2, y])
        picked = x[rows, y]
        if self.random.random() < 0.6:
            return picked
        how = self.random.choice([T.set_subtensor, T.inc_subtensor])
        fits = [one for one in self.pool if one.dtype == "float64" and one.ndim == picked.ndim]
        return how(picked, self.random.choice([*fits, T.constant(0.5)]))

    def do_add_to_rows(self):
        x, y = self.one(1, 2), self.labels
        how = self.random.choice([T.inc_subtensor, T.inc_subtensor, T.set_subtensor])
        fits = [one for one in self.pool if one.dtype == "float64" and one.ndim == x.ndim]
        return how(x[y], self.random.choice([*fits, T.constant(0.5)]))

    def do_join(self):
        x = self.one(1, 2, 3)
        fits = [one for one in self.pool if one.ndim == x.ndim and one.dtype == "float64"]
        parts = [x, self.random.choice(fits)]
        return (
            T.concatenate(parts, axis=self.random.randrange(x.ndim)) if self.random.random() < 0.7 else T.stack(parts)
        )

    def do_make(self):
        shape = tuple(self.number() for _ in range(self.random.randint(1, 2)))
        return self.random.choice(
            [lambda: T.zeros(shape), lambda: T.ones(shape), lambda: T.alloc(self.one(0, 1, 2), *shape)]
        )()

    def do_range(self):
        start, step = self.random.choice([(0, 1), (0, 1), (1, 1), (0, 2)])
        return T.cast(T.arange(start, self.number(), step), "float64")

    def do_softmax(self):
        return T.nnet.softmax(self.one(2))

    def do_order(self):
        x = self.one(1, 2, 3)
        axis = self.random.choice([*range(x.ndim), -1])
        return self.random.choice([T.sort, T.cumsum, T.extra_ops.cumprod])(x, axis=axis)

    def do_repeat(self):
        x = self.one(1, 2)
        return T.repeat(x, 2, axis=self.random.randrange(x.ndim))

    def do_loop(self):
        pick = self.random.choice
        rows, other = self.one(2, 3), self.one(1, 2)
        before = pick([rows[0] * 0.5, rows[0], T.zeros_like(rows[0]), T.zeros_like(self.one(1, 2)), self.one(0, 1, 2)])
        choices = [pick(range(8)) for _ in range(pick([1, 2, 3]))]
        axis, keepdims, carried = pick([0, 0, 1, None]), pick([True, False]), pick(["h", "sum", "sum", "both"])
        ends = self.random.random() < 0.2

        def changed(h, row, kind):
            if kind == 7 and h.ndim == 2:
                return T.dot(h, h.T)
            made = [
                lambda: T.tanh(h + row),
                lambda: h - h.mean(axis, keepdims=True),
                lambda: h * 0.5 + other,
                lambda: T.switch(h > row, h, row),
                lambda: T.tanh(T.dot(h, other)),
                lambda: h * row,
                lambda: h + T.max(row, axis=axis, keepdims=True),
                lambda: -h,
            ]
            return made[kind]()

        def step(row, state):
            h = row if carried == "sum" else state
            for kind in choices:
                h = changed(h, row, kind)
            sums = h.sum(axis, keepdims=keepdims)
            new = {"h": h, "sum": state + sums, "both": state * 0.5 + sums}[carried]
            new = T.patternbroadcast(new, state.broadcastable)
            more = {"condition": theano.scan_module.until((new**2).sum() > 9.0)} if ends else {}
            return [new, sums], {}, *(more.values())

        states, sums = theano.scan(step, rows, [before, None], go_backwards=pick([False, True]))[0]
        return pick([states, states[-1], states[-1], sums])

    do_loop_again = do_loop

    # -- the whole

    def outputs(self, n_steps):
        for _ in range(n_steps):
            self.step()
        outputs = self.pool[-4:]
        loss = sum(T.sin(one).sum() for one in outputs)
        wanted = list(self.pool[:7])
        with contextlib.suppress(NotImplementedError, theano.gradient.NullTypeGradError, TypeError, ValueError):
            outputs = [*outputs, *T.grad(loss, wanted, disconnected_inputs="ignore")]
        return outputs


def run(seed, n_steps, ranks=(2, 3)):
    program = Program(seed)
    outputs = program.outputs(n_steps)
    with np.errstate(all="ignore"):
        try:
            evaluate(outputs, {variable: [value] for variable, value in program.given.items()}, in_step=True)
        except (ValueError, IndexError, AssertionError, TypeError):
            return None  # a gradient that the serial program cannot compute
        return check(outputs, program.given, program.sharded, ranks, in_step=True)


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(3, 15))
def test_random_programs(seed, n_steps):
    run(seed, n_steps)
