"""The memory of all ranks together (PSS: pages that processes share are counted once), for data and for collectives."""

import numpy as np
import psutil
import theano
import theano.tensor as T

import synkhronos as synk
from benchmarks.contestants._peak import total_memory, watched
from benchmarks.contestants._serve import compete


def ranks_processes():
    """Give the processes of this session."""
    this = psutil.Process()
    return [this, *this.children()]


def data_set(n_bytes):
    """Give the memory that a data set takes which every rank has read, as a multiple of its size."""
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
    """Give what a collective needs beyond variables and results, all ranks together, in copies of the variable.

    An all-gather makes a new value next to the old one on each rank, of as many copies as there are ranks.
    """
    variable = theano.shared(np.ones((1, n_bytes // 4), "float32"), "variable")
    first = synk.function([], variable[0, 0])
    first()  # what was needed to distribute the variable is given back
    grown = {"gather": ranks, "all_gather": ranks * ranks}.get(name, 0)
    processes = ranks_processes()
    before = total_memory(processes)
    with watched(processes) as peaks:
        result = getattr(synk, name)(variable)
    del result
    return (peaks[0] - before) / n_bytes - grown


def make(ranks):
    """Nothing is needed before the first round: each has a session of its own."""

    def run(what, n_bytes):
        synk.fork(ranks)
        try:
            return [data_set(n_bytes) if what == "data" else collective(what, n_bytes, ranks)]
        finally:
            synk.close()

    return run, {}


if __name__ == "__main__":
    compete(make)
