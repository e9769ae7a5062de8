"""Steps with almost no arithmetic: a gradient, its all-reduce and an update, in one message or in three."""

import contextlib

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from benchmarks.contestants._serve import compete, timed


def make(ranks, at_once):
    """Fork; the first round of each number of parameters builds its functions.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    at_once : bool
        Whether a step is sent in one message.
    """
    synk.fork(ranks)
    x, steps_of = T.fvector("x"), {}
    data = synk.data(np.ones(64, "float32"))
    together = synk.sequence if at_once else contextlib.nullcontext

    def build(n):
        params, grad = (theano.shared(np.zeros(n, "float32"), name) for name in ("params", "grad"))
        gradient = synk.function([x], x.mean(), updates=[(grad, params + x[0])], name="gradient")
        update = synk.function([], updates=[(params, params - np.float32(0.5) * grad)], name="update")
        synk.distribute()

        def step():
            with together():
                gradient(data)
                synk.all_reduce(grad, weights=gradient.counts)
                update()

        return step

    def run(n, steps):
        if n not in steps_of:
            steps_of.clear()  # free the memory of the previous size
            steps_of[n] = build(n)
        return timed(steps_of[n], steps, untimed=3)

    return run, {}


if __name__ == "__main__":
    compete(make)
