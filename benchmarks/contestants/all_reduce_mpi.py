"""MPI's Allreduce in place, through mpi4py; each call starts after a barrier that is not timed."""

import time

import numpy as np
from mpi4py import MPI

from benchmarks.contestants._serve import compete


def make():
    """Nothing is needed before the first round."""
    world = MPI.COMM_WORLD

    def run(n, steps):
        array = np.random.RandomState(0).rand(n).astype("float32")
        seconds = []
        for _ in range(1 + steps):
            world.Barrier()
            start = time.perf_counter()
            world.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    return run, {"library": MPI.Get_library_version().splitlines()[0]}


if __name__ == "__main__":
    compete(make)
