"""PyTorch's all_reduce over gloo; each call starts after a barrier that is not timed."""

import os
import time

import numpy as np
import torch

from benchmarks.contestants._serve import compete, rank, size


def make():
    """Join the process group."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group("gloo", os.environ["RENDEZVOUS"], rank=rank(), world_size=size())

    def run(n, steps):
        tensor = torch.from_numpy(np.random.RandomState(0).rand(n).astype("float32"))
        seconds = []
        for _ in range(1 + steps):
            torch.distributed.barrier()
            start = time.perf_counter()
            torch.distributed.all_reduce(tensor)
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    return run, {}


if __name__ == "__main__":
    compete(make)
