"""Steps of the network of the module `one_copy` in PyTorch; several processes use DistributedDataParallel."""

import os
import time

import numpy as np
import torch
from torch import nn

from benchmarks.contestants._kernels import of_torch
from benchmarks.contestants._serve import compete, rank, size, timed


def make(width, kind):
    """Build the network, and the optimizer of a kind, in each process, and join the process group."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    layers = [nn.Linear(width, width) for _ in range(4)]
    network = nn.Sequential(*(one for layer in layers[:-1] for one in (layer, nn.ReLU())), layers[-1])
    if size() > 1:
        torch.distributed.init_process_group("gloo", os.environ["RENDEZVOUS"], rank=rank(), world_size=size())
        network = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), **{kind: True})

    def run(rows):
        rng = np.random.RandomState(0)
        share = slice(rank() * rows // size(), (rank() + 1) * rows // size())
        x, y = (torch.from_numpy(rng.randn(rows, width).astype("float32")[share]) for _ in range(2))

        def step():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(network(x), y)
            loss.backward()
            optimizer.step()
            loss.item()

        time.sleep(0.15)  # as `timed_turn`
        return timed(step, 5, untimed=2)

    return run, {"kernels": of_torch()}


if __name__ == "__main__":
    compete(make)
