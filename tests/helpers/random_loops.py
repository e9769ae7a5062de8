"""Loops of random programs over a first axis, whose state is recomputed, accumulated or both."""

from backend import T, theano


class Loops:
    """Loops among the steps of `random_programs.Program`."""

    def do_loop(self):
        pick = self.random.choice
        rows, other = self.one(2, 3), self.one(1, 2)
        before = pick([rows[0] * 0.5, rows[0], T.zeros_like(rows[0]), T.zeros_like(self.one(1, 2)), self.one(0, 1, 2)])
        kinds = [pick(range(9)) for _ in range(pick([1, 2, 3]))]
        axis, keepdims, carried = pick([0, 0, 1, None]), pick([True, False]), pick(["h", "sum", "sum", "both"])
        ends = self.random.random() < 0.2

        def changed(h, row, kind):
            made = [
                lambda: T.tanh(h + row),
                lambda: h - h.mean(axis, keepdims=True),
                lambda: h * 0.5 + other,
                lambda: T.switch(h > row, h, row),
                lambda: T.tanh(T.dot(h, other)),
                lambda: h * row,
                lambda: h + T.max(row, axis=axis, keepdims=True),
                lambda: T.dot(h, h.T),
                lambda: -h,
            ]
            return made[kind]()

        def step(row, state):
            h = row if carried == "sum" else state
            for kind in kinds:
                h = changed(h, row, kind)
            sums = h.sum(axis, keepdims=keepdims)
            new = {"h": h, "sum": state + sums, "both": state * 0.5 + sums}[carried]
            new = T.patternbroadcast(new, state.broadcastable)
            ending = [theano.scan_module.until((new**2).sum() > 9.25)] if ends else []
            return [new, sums], {}, *ending

        states, sums = theano.scan(step, rows, [before, None], go_backwards=pick([False, True]))[0]
        return pick([states, states[-1], states[-1], sums])

    do_loop_again = do_loop
