"""Training steps of the MLP of the module `plans` in PyTorch, on all threads."""

import os

import numpy as np
import torch
from torch import nn

from benchmarks.contestants._batches import CLASSES
from benchmarks.contestants._kernels import of_torch
from benchmarks.contestants._serve import compete, timed_turn


def make():
    """Build the network and its optimizer."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    layers = nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, CLASSES)
    network, loss_of = nn.Sequential(*layers), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), 0.01)

    def run(program, rows):
        assert program == "mlp"
        rng = np.random.RandomState(0)
        x = torch.from_numpy(rng.random_sample((rows, 784)).astype("float32"))
        y = torch.from_numpy(rng.randint(0, CLASSES, rows))

        def step():
            optimizer.zero_grad()
            loss = loss_of(network(x), y)
            loss.backward()
            optimizer.step()
            loss.item()

        return timed_turn(step)

    return run, {"kernels": of_torch()}


if __name__ == "__main__":
    compete(make)
