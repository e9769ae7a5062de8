"""A training step of the MNIST demo's CNN.

Two convolutions of 32 filters of 5×5, each with max pooling, dense layers of 256 and 10 (160,362 parameters); 500
random images for each step in all, float32, drawn in random order from an array in memory; Nesterov momentum; the loss
is read after each step. The step of two ranks has the all-reduce of the gradients in it. Plain Theano uses Lasagne's
update rule, in one function; PyTorch uses DistributedDataParallel over gloo with one thread in each of two processes.
"""

from benchmarks import training
from benchmarks.cli import main
from benchmarks.harness import Contest
from benchmarks.results import Result
from benchmarks.samples import ratio


def measure(result: Result, rounds: int = 8, steps: int = 3) -> None:
    """Measure; `steps` are those of one round."""
    one, ranks, ddp = training.theano("cnn"), training.synkhronos("cnn"), training.ddp("cnn")
    more = training.theano_on_all_cores("cnn")
    with Contest([one, *more, ddp, ranks]) as contest:
        training.check_networks(contest.facts)
        samples = contest.run(rounds, contest.alike(batch=500, steps=steps))
    result.record("Step of 500 images", "ms", {n: s.scaled(1e3) for n, s in samples.items()}, contest.gaps)
    result.facts = contest.facts
    ours = samples[ranks.name]
    best = min((one, *more), key=lambda contestant: samples[contestant.name].median)
    result.add("theano", "Two ranks against Theano on one thread", ratio(samples[one.name], ours), at_least=1.9)
    what = f"… against Theano at its best number of threads ({best.name})"
    result.add("theano-best", what, ratio(samples[best.name], ours), at_least=1.0)
    found = contest.gaps.get(ddp.name) or ratio(samples[ddp.name], ours)
    result.add("ddp", "… against PyTorch DDP on two processes", found, at_least=1.0)


if __name__ == "__main__":
    main(__spec__.name)
