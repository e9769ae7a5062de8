"""Calls of a trivial function with two inputs and one output, in plain Theano or on ranks."""

import time

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from benchmarks.contestants._serve import compete


def make(ranks, kind):
    """Build the function.

    Parameters
    ----------
    ranks : int
        Number of ranks; 0 is plain Theano.
    kind : str
        Type of the inputs: ``"data"`` is `synk.Data`, ``"numpy"`` is NumPy arrays, which every call copies.
    """
    x, y = T.fvector(), T.fvector()
    values = [np.random.RandomState(seed).rand(64).astype("float32") for seed in range(2)]
    if ranks:
        synk.fork(ranks)
        function = synk.function([x, y], (x * y).mean())
        synk.distribute()
        values = [synk.data(value) for value in values] if kind == "data" else values
    else:
        function = theano.function([x, y], (x * y).mean())

    def run(calls, pause):
        seconds = []
        for _ in range(2 + calls):
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            function(*values)
            seconds.append(time.perf_counter() - start)
        return seconds[2:]

    return run, {}


if __name__ == "__main__":
    compete(make)
