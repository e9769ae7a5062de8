"""Epochs over data that nobody writes to, on several machines: what memory of the master travels in each."""

from collections import Counter
from functools import wraps

import numpy as np
import theano.tensor as T

import synkhronos as synk
from benchmarks.contestants._batches import Batches
from benchmarks.contestants._serve import compete
from synkhronos._multinode.shipping import Shipping


def make(ranks, n):
    """Fork, and write `n` rows of 3 kB to shared memory; the function means little, but reads all of each row."""
    sent, sizes = count_bytes()
    synk.fork(ranks)
    x = T.fmatrix()
    function = synk.function([x], x.sum())
    synk.distribute()
    data = synk.data(np.random.RandomState(0).rand(n, 784).astype("float32"))
    batches = Batches(n)

    def run(epochs, batch, shuffle):
        """Give the bytes of rows for each epoch, and at last those of anything else in all of them."""
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
    """Count what is shipped from now on: two dicts, of the bytes that were sent and of the sizes, by memory."""
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
    """Name the largest memory, in which the rows are."""
    return max(sizes, key=sizes.get, default=None)


if __name__ == "__main__":
    compete(make)
