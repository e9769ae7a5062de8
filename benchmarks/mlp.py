"""A training step of an MLP, 784-800-800-10.

The method is that of the CNN, with 1,276,810 parameters. A step has 500 images in all, or 500 for each rank. In the
second case, speeds are in images per second, relative to Theano with 500 images in a step, as in the paper's figures.
The old BLAS is that of SciPy's wheel, with the kernels that it uses on processors that it does not know.
"""

from benchmarks import limits, training
from benchmarks.harness import CORES, Contest
from benchmarks.results import Result
from benchmarks.samples import ratio


def measure(result: Result, rounds: int = 20, steps: int = 12) -> None:
    """Measure training steps; a round has `steps` of each contestant and size."""
    one, old, ranks = training.theano("mlp"), training.theano_with_old_blas("mlp"), training.synkhronos("mlp")
    torch, ddp, threads = training.torch("mlp", 1), training.torch("mlp", 2), training.torch("mlp", 1, CORES)
    more, exact = training.theano_on_all_cores("mlp"), training.exact("mlp")
    contestants = [one, old, *more, torch, threads, ddp, ranks, exact]
    with Contest(contestants, aside=[limits.LIMITS]) as contest:
        training.check_networks(contest.facts)
        large = {f"{who.name}, 1,000": (who, {"batch": 1000, "steps": steps}) for who in (one, ddp, ranks, exact)}
        samples = contest.run(rounds, {**contest.alike(batch=500, steps=steps), **large, **limits.turns("product")})
    bound = limits.products(samples.pop("product"), 500 * training.operations("mlp")).scaled(1e3)
    milliseconds = {label: sample.scaled(1e3) for label, sample in samples.items()}
    small = {label: sample for label, sample in milliseconds.items() if label not in large}
    result.record("Step of 500 images", "ms", small, contest.gaps, {"its products, 2 cores": bound})
    big = {large[label][0].name: sample for label, sample in milliseconds.items() if label in large}
    result.record("Step of 1,000 images", "ms", big, contest.gaps, {"its products, 2 cores": bound.scaled(2)})
    result.facts = contest.facts

    theano = samples[one.name]
    result.add("theano", "Two ranks against Theano on one thread", ratio(theano, samples[ranks.name]), at_least=1.65)
    found = contest.gaps.get(ddp.name) or ratio(samples[ddp.name], samples[ranks.name])
    result.add("ddp", "… against PyTorch DDP on two processes", found, at_least=1.3)
    alone = [who.name for who in (*more, threads) if who.name in samples]
    best = min(alone, key=lambda name: samples[name].median)
    what = f"An exact step on two ranks against the best of two threads ({best})"
    result.add("exact", what, ratio(samples[best], samples[exact.name]), at_least=0.97)
    ours = samples[f"{ranks.name}, 1,000"]
    what = "Two ranks with 500 each, against Theano on one thread with 500"
    result.add("theano-500-each", what, ratio(theano.scaled(2), ours), at_least=1.85)
    what = "… against Theano on one thread with 1,000"
    result.add("theano-1000", what, ratio(samples[f"{one.name}, 1,000"], ours))
    what = "Theano on one thread against the same with the old BLAS's kernels for unknown processors"
    result.add("old-blas", what, ratio(samples[old.name], theano), at_least=4.0)
    found = contest.gaps.get(torch.name) or ratio(samples[torch.name], theano)
    result.add("torch", "Theano on one thread against PyTorch on one thread", found)
