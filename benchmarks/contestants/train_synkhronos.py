"""Training steps on all ranks as in the demos: `synkhronos.extensions.train`, with data in shared memory."""

import contextlib
import os
import resource

import psutil

import synkhronos as synk

import lasagne  # isort: skip - after synkhronos, which patches it
from benchmarks.contestants._batches import LEARNING_RATE, MOMENTUM, Batches, make_data
from benchmarks.contestants._networks import build_network, describe
from benchmarks.contestants._serve import compete, timed
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function

ROOM = 128 << 20  # bytes of address space that remain; a quarter of this is too little for a shared heap
INSTRUMENTS = {"neither": contextlib.nullcontext, "profile": synk.profile, "trace": lambda: synk.trace(os.devnull)}


def make(model, n, ranks, heap=True, exact=False, **options):
    """Fork with options of `synk.fork`, build the network, and write `n` rows of data to shared memory.

    Without `heap`, the address space is limited during `fork`, so that no shared heap can be mapped. With `exact`, a
    step is an exact function with Lasagne's update rule.
    """
    addresses = resource.getrlimit(resource.RLIMIT_AS)
    if not heap:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, addresses[1]))
    synk.fork(ranks, **options)
    resource.setrlimit(resource.RLIMIT_AS, addresses)
    graph = build_network(model)
    if exact:
        rule = lasagne.updates.nesterov_momentum(graph.loss, graph.params, LEARNING_RATE, MOMENTUM)
        train = synk.function([graph.x, graph.y], graph.loss, updates=rule, exact=True)
    else:
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
            else:  # each rank trains its own network
                float(train.gradient(x, y, batch=rows))
                train.update()

        with INSTRUMENTS[instrument]():
            return timed(step, steps)

    return run, describe(graph)


if __name__ == "__main__":
    compete(make)
