"""Training steps with large gradients by PyTorch's DistributedDataParallel over gloo, with its buckets of 25 MiB."""

import os

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from benchmarks.contestants._kernels import of_torch
from benchmarks.contestants._serve import compete, rank, size, timed
from benchmarks.contestants._wide import CHANNELS, LEARNING_RATE, WIDTHS, make_rows


def build(model):
    """Return a network."""
    layers, channels = [], CHANNELS.get(model, ())
    for one, other in zip(channels, channels[1:]):
        layers += [nn.Conv2d(one, other, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten()]
    for one, other in zip(WIDTHS[model], WIDTHS[model][1:]):
        layers += [nn.Linear(one, other, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def compress(group, bucket):
    """Average a bucket in bfloat16; DDP refuses the hook itself on CPUs, by its name."""
    return bf16_compress_hook(group, bucket)


def make(model, rows, bfloat16=False):
    """Build the network in each process, with its share of `rows` rows."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group("gloo", os.environ["RENDEZVOUS"], rank=rank(), world_size=size())
    network = nn.parallel.DistributedDataParallel(build(model))
    if bfloat16:
        network.register_comm_hook(None, compress)
    optimizer, loss_of = torch.optim.SGD(network.parameters(), LEARNING_RATE), nn.CrossEntropyLoss()
    share = slice(rank() * rows // size(), (rank() + 1) * rows // size())
    x, y = (torch.from_numpy(array[share]) for array in make_rows(model, rows))
    y = y.long()

    def step():
        optimizer.zero_grad()
        loss = loss_of(network(x), y)
        loss.backward()
        optimizer.step()
        loss.item()

    facts = {"parameters": sum(param.numel() for param in network.parameters()), "kernels": of_torch()}
    return lambda steps: timed(step, steps), facts


if __name__ == "__main__":
    compete(make)
