"""Synkhronos's all-reduce of a shared variable over all ranks: a sum or an average."""

import numpy as np
import theano

import synkhronos as synk
from benchmarks.contestants._serve import compete, timed


def make(ranks, **options):
    """Fork with options of `synk.fork`; the first round of each size makes its variable."""
    synk.fork(ranks, **options)
    variables, functions = {}, []

    def run(n, steps, op="sum"):
        if n not in variables:
            variables[n] = theano.shared(np.zeros(n, "float32"))
            functions.append(synk.function([], variables[n][0]))  # makes `distribute` copy it
            synk.distribute()
        synk.broadcast(variables[n], np.random.RandomState(0).rand(n).astype("float32"))
        return timed(lambda: synk.all_reduce(variables[n], op=op), steps)

    return run, {}


if __name__ == "__main__":
    compete(make)
