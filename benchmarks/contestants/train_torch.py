"""Training steps of the demos' networks in PyTorch; several processes use DistributedDataParallel."""

import os

import torch
from torch import nn

from benchmarks.contestants._batches import CLASSES, LEARNING_RATE, MOMENTUM, Batches, make_data
from benchmarks.contestants._kernels import of_torch
from benchmarks.contestants._serve import compete, rank, size, timed

NETWORKS = {
    "cnn": lambda: nn.Sequential(
        *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 256), nn.ReLU()),
        nn.Linear(256, CLASSES),
    ),
    "mlp": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(28 * 28, 800), nn.ReLU()),
        *(nn.Linear(800, 800), nn.ReLU()),
        nn.Linear(800, CLASSES),
    ),
}


def make(model, n):
    """Build the network and `n` rows of data in each process, and join the process group."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    network = NETWORKS[model]()
    if size() > 1:
        torch.distributed.init_process_group("gloo", os.environ["RENDEZVOUS"], rank=rank(), world_size=size())
        network = nn.parallel.DistributedDataParallel(network)
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE, MOMENTUM, nesterov=True)
    x, y = map(torch.from_numpy, make_data(model, n))
    y = y.long()
    batches = Batches(n)

    def run(batch, steps):
        share = slice(rank() * batch // size(), (rank() + 1) * batch // size())

        def step():
            rows = torch.from_numpy(batches.next(batch, shuffle=True)[share])
            optimizer.zero_grad()
            loss = loss_of(network(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            loss.item()

        return timed(step, steps)

    return run, {"parameters": sum(param.numel() for param in network.parameters()), "kernels": of_torch()}


if __name__ == "__main__":
    compete(make)
