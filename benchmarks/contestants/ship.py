"""Epochs over constant data on several nodes: bytes of the controller's memory that are sent in each."""

from collections import Counter
from functools import wraps

import numpy as np
import theano.tensor as T

import synkhronos as synk
from benchmarks.contestants._batches import Batches
from benchmarks.contestants._serve import compete
from synkhronos._multinode.shipping import Shipping


def make(ranks, n):
    """Fork, and write `n` rows of 3 kB to shared memory; the function reads all of each row."""
    sent, sizes = count_bytes()
    synk.fork(ranks)
    x = T.fmatrix()
    function = synk.function([x], x.sum())
    synk.distribute()
    data = synk.data(np.random.RandomState(0).rand(n, 784).astype("float32"))
    batches = Batches(n)

    def run(epochs, batch, shuffle):
        """Return the bytes of rows sent in each epoch, and last, the bytes of other memory sent in all of them."""
        rows = []
        sent.clear()
        for _ in range(epochs):
            before = sent[largest(sizes)]
            for _ in range(n // batch):
                function(data, batch=batches.next(batch, shuffle))
            rows.append(sent[largest(sizes)] - before)
        return [*rows, sum(sent.values()) - sum(rows)]

    return run, {"bytes": data[:].nbytes}


def count_bytes():
    """Start to count shipments; return two dicts with the bytes sent, and the size, of each memory key."""
    sent, sizes, load = Counter(), {}, Shipping.load

    @wraps(load)
    def counted(self, command, node):
        for shipment in load(self, command, node):
            sizes.update(shipment.make)
            for key, *_, values in shipment.fill:
                sent[key] += values.nbytes
            yield shipment

    Shipping.load = counted
    return sent, sizes


def largest(sizes):
    """Return the key of the largest memory, which contains the rows."""
    return max(sizes, key=sizes.get, default=None)


if __name__ == "__main__":
    compete(make)
