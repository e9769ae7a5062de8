"""PyTorch's all_reduce over gloo; an untimed barrier precedes each call."""

import os

import numpy as np
import torch

from benchmarks.contestants._serve import compete, rank, size, timed


def make():
    """Join the process group."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group("gloo", os.environ["RENDEZVOUS"], rank=rank(), world_size=size())

    def run(n, steps):
        tensor = torch.from_numpy(np.random.RandomState(0).rand(n).astype("float32"))
        return timed(lambda: torch.distributed.all_reduce(tensor), steps, before=torch.distributed.barrier)

    return run, {}


if __name__ == "__main__":
    compete(make)
