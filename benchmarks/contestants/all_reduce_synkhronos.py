"""Sums, or averages, of a shared variable over all ranks."""

import numpy as np
import theano

import synkhronos as synk
from benchmarks.contestants._serve import compete, timed


def make(ranks, **options):
    """Fork, with options of `synk.fork`; variables are made when a size is first asked for."""
    synk.fork(ranks, **options)
    variables, functions = {}, []

    def run(n, steps, op="sum"):
        if n not in variables:
            variables[n] = theano.shared(np.zeros(n, "float32"))
            functions.append(synk.function([], variables[n][0]))  # one that uses it
            synk.distribute()
        synk.broadcast(variables[n], np.random.RandomState(0).rand(n).astype("float32"))
        return timed(lambda: synk.all_reduce(variables[n], op=op), steps)

    return run, {}


if __name__ == "__main__":
    compete(make)
