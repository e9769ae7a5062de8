"""Many small all-reduces, one by one in a sequence, or in one call with a list."""

import numpy as np
import theano

import synkhronos as synk
from benchmarks.contestants._serve import compete, timed


def make(n, length):
    """Make `n` variables of `length` float32."""
    synk.fork(1)
    variables = [theano.shared(np.ones(length, "float32")) for _ in range(n)]
    synk.distribute()
    synk.broadcast(variables)

    def in_sequence():
        with synk.sequence():
            for var in variables:
                synk.all_reduce(var)

    kinds = {"a sequence": in_sequence, "one list": lambda: synk.all_reduce(variables)}
    return lambda kind, steps: timed(kinds[kind], steps), {}


if __name__ == "__main__":
    compete(make)
