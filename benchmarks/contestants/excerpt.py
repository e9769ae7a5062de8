"""Selection of rows of a large array in random order, by NumPy in one process, or by ranks in a function call."""

import numpy as np
import theano.tensor as T

import synkhronos as synk
from benchmarks.contestants._serve import compete, timed


def make(ranks, rows, width):
    """Fill a float32 array of shape ``(rows, width)``; 0 ranks is NumPy alone."""
    if ranks:
        synk.fork(ranks)
        data = synk.data(shape=(rows, width), dtype="float32")
        x = T.fmatrix()
        function = synk.function([x], x[0, 0])
        synk.distribute()
    else:
        data = np.empty((rows, width), "float32")
    for start in range(0, rows, 1000):
        data[start : start + 1000] = start
    rng = np.random.RandomState(0)

    def run(batch, steps):
        orders = iter([rng.permutation(rows)[:batch] for _ in range(1 + steps)])

        def step():
            if ranks:
                function(data, batch=next(orders))
            else:
                data[next(orders)]

        return timed(step, steps)

    return run, {}


if __name__ == "__main__":
    compete(make)
