"""MPI's Allreduce in place, through mpi4py; an untimed barrier precedes each call."""

import numpy as np
from mpi4py import MPI

from benchmarks.contestants._serve import compete, timed


def make():
    """Return ``run`` and the version of the library; nothing else is prepared."""
    world = MPI.COMM_WORLD

    def run(n, steps):
        array = np.random.RandomState(0).rand(n).astype("float32")
        return timed(lambda: world.Allreduce(MPI.IN_PLACE, array, MPI.SUM), steps, before=world.Barrier)

    return run, {"library": MPI.Get_library_version().splitlines()[0]}


if __name__ == "__main__":
    compete(make)
