"""A training step of an LSTM as an exact function.

Lasagne's LSTM layer of 128 units over 100 steps of 64 features, the last state classified, Lasagne's Adam, float32;
minibatches of 64 rows. Theano computes it serially, and the same program is an exact function on two ranks.
"""

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio

MODULE, NEEDS = "benchmarks.contestants.lstm", ("lasagne",)


def measure(result: Result, rounds: int = 10, steps: int = 5) -> None:
    """Measure; `steps` are those of one round."""
    serial = Contestant("Theano, 1 thread", MODULE, {"ranks": 0}, threads=1, needs=NEEDS)
    threaded = Contestant(f"Theano, {CORES} threads", MODULE, {"ranks": 0}, threads=CORES, needs=NEEDS)
    exact = Contestant(f"Exact, {CORES} ranks", MODULE, {"ranks": CORES}, needs=NEEDS)
    with Contest([serial, threaded, exact]) as contest:
        samples = contest.run(rounds, contest.alike(batch=64, steps=steps))
        result.facts = contest.facts
    result.record("Step of 64 rows", "ms", {name: sample.scaled(1e3) for name, sample in samples.items()})
    found = ratio(samples[serial.name], samples[exact.name])
    result.add("theano", "Two ranks against Theano on one thread", found, at_least=1.6)
    result.add("threads", "… against Theano on two threads", ratio(samples[threaded.name], samples[exact.name]))
