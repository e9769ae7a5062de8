"""A training step of the MNIST demo's CNN.

The network has two convolutions of 32 filters of 5×5, each with max pooling, and dense layers of 256 and 10 units
(160,362 parameters). A step has 500 random images in all, float32, drawn in random order from an array in memory. The
update rule is Nesterov momentum, and the loss is read after each step. The step of two ranks includes the all-reduce of
the gradients. Plain Theano uses Lasagne's update rule, in one function. PyTorch uses DistributedDataParallel over gloo,
with one thread in each of two processes. A step that is an exact function has Lasagne's update rule, too. One rank is
timed with arrays in the shared heap, and with arrays from the C library's allocator. Ranks use the latter if no shared
heap can be mapped. The bound of two ranks is the step's matrix products.
"""

from benchmarks import limits, training
from benchmarks.harness import CORES, Contest
from benchmarks.results import Result
from benchmarks.samples import ratio


def measure(result: Result, rounds: int = 20, steps: int = 3) -> None:
    """Measure training steps; a round has `steps` of each contestant."""
    one, ranks = training.theano("cnn"), training.synkhronos("cnn")
    torch, ddp, threads = training.torch("cnn", 1), training.torch("cnn", 2), training.torch("cnn", 1, CORES)
    more, exact = training.theano_on_all_cores("cnn"), training.exact("cnn")
    single, without = training.synkhronos("cnn", 1), training.synkhronos("cnn", 1, heap=False)
    with Contest([one, *more, torch, threads, ddp, single, without, ranks, exact], aside=[limits.LIMITS]) as contest:
        training.check_networks(contest.facts)
        samples = contest.run(rounds, {**contest.alike(batch=500, steps=steps), **limits.turns("product")})
    bound = limits.products(samples.pop("product"), 500 * training.operations("cnn"))
    milliseconds = {name: sample.scaled(1e3) for name, sample in samples.items()}
    bounds = {"its products, 2 cores": bound.scaled(1e3)}
    result.record("Step of 500 images", "ms", milliseconds, contest.gaps, bounds)
    result.facts = contest.facts
    ours = samples[ranks.name]
    best = min((one, *more), key=lambda contestant: samples[contestant.name].median)
    result.add("theano", "Two ranks against Theano on one thread", ratio(samples[one.name], ours), at_least=1.85)
    what = f"… against Theano at its best number of threads ({best.name})"
    result.add("theano-best", what, ratio(samples[best.name], ours), at_least=1.0)
    found = contest.gaps.get(ddp.name) or ratio(samples[ddp.name], ours)
    result.add("ddp", "… against PyTorch DDP on two processes", found, at_least=1.2)
    found = contest.gaps.get(threads.name) or ratio(samples[threads.name], samples[exact.name])
    result.add("exact", "An exact step on two ranks against PyTorch on two threads", found, at_least=1.0)
    found = ratio(samples[without.name], samples[single.name])
    result.add("regions", "One rank, against the same without regions", found, at_least=1.08)
    found = contest.gaps.get(torch.name) or ratio(samples[torch.name], samples[one.name])
    result.add("torch", "Theano on one thread against PyTorch on one thread", found, at_least=1.3)
