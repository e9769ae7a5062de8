"""Training steps on all ranks, as the demos make them: `synkhronos.extensions.train`, data in shared memory."""

import contextlib
import os
import resource

import psutil

import synkhronos as synk
from benchmarks.contestants._batches import LEARNING_RATE, MOMENTUM, Batches, make_data
from benchmarks.contestants._networks import build_network, describe
from benchmarks.contestants._serve import compete, timed
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function

ROOM = 128 << 20  # bytes of addresses that are left; a quarter of this is too little for a region
INSTRUMENTS = {"neither": contextlib.nullcontext, "profile": synk.profile, "trace": lambda: synk.trace(os.devnull)}


def make(model, n, ranks, regions=True, **options):
    """Fork, with options of `synk.fork`, build the network and write `n` rows of data to shared memory.

    Without regions: a limit on addresses, while they would be mapped, leaves too few for them.
    """
    addresses = resource.getrlimit(resource.RLIMIT_AS)
    if not regions:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, addresses[1]))
    synk.fork(ranks, **options)
    resource.setrlimit(resource.RLIMIT_AS, addresses)
    graph = build_network(model)
    rule = updates.nesterov_momentum
    train = make_train_function(graph.loss, graph.params, graph.x, graph.y, rule, LEARNING_RATE, MOMENTUM)
    synk.distribute()
    x, y = (synk.data(array) for array in make_data(model, n))
    batches = Batches(n)

    def run(batch, steps, shuffle=True, all_reduce=True, instrument="neither"):
        def step():
            rows = batches.next(batch, shuffle)
            if all_reduce:
                float(train(x, y, batch=rows))
            else:  # each rank goes its own way
                float(train.gradient(x, y, batch=rows))
                train.update()

        with INSTRUMENTS[instrument]():
            return timed(step, steps)

    return run, describe(graph)


if __name__ == "__main__":
    compete(make)
