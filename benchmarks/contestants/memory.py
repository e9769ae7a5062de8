"""Memory of all ranks together for data and for collectives (PSS: pages that processes share count once)."""

import numpy as np
import psutil
import theano
import theano.tensor as T

import synkhronos as synk
from benchmarks.contestants._peak import total_memory, watched
from benchmarks.contestants._serve import compete


def ranks_processes():
    """Return the processes of this session."""
    this = psutil.Process()
    return [this, *this.children()]


def data_set(n_bytes):
    """Return the memory of a data set that every rank has read, as a multiple of its size."""
    x = T.fmatrix()
    total = synk.function([x], [(x.max(), "max")], bcast_inputs=[])
    synk.distribute()
    total(np.zeros((8, 1024), "float32"))
    before = total_memory(ranks_processes())
    data = synk.data(shape=(n_bytes // 4096, 1024), dtype="float32")
    for start in range(0, len(data), 1024):
        data[start : start + 1024] = start
    everywhere = synk.function([], [(x.max(), "max")], bcast_inputs=[x])
    everywhere(data)
    total(data)
    return (total_memory(ranks_processes()) - before) / data.data.nbytes


def collective(name, n_bytes, ranks):
    """Return the memory that a collective needs beyond variables and results, on all ranks, in copies of the variable.

    An all-gather makes a new value on each rank, of as many copies as there are ranks, next to the old value.
    """
    variable = theano.shared(np.ones((1, n_bytes // 4), "float32"), "variable")
    first = synk.function([], variable[0, 0])
    first()  # frees the memory that distributing the variable needed
    grown = {"gather": ranks, "all_gather": ranks * ranks}.get(name, 0)
    processes = ranks_processes()
    before = total_memory(processes)
    with watched(processes) as peaks:
        result = getattr(synk, name)(variable)
    del result
    return (peaks[0] - before) / n_bytes - grown


def make(ranks):
    """Return ``run``; nothing is prepared, because each round has its own session."""

    def run(what, n_bytes):
        synk.fork(ranks)
        try:
            return [data_set(n_bytes) if what == "data" else collective(what, n_bytes, ranks)]
        finally:
            synk.close()

    return run, {}


if __name__ == "__main__":
    compete(make)
