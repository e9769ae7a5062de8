"""A training step of an LSTM as an exact function.

Lasagne's LSTM layer of 128 units reads 100 steps of 64 features, and its last state is classified. Minibatches have 64
rows, the dtype is float32, and the update rule is Lasagne's Adam. Theano computes the program serially, and two ranks
compute it as an exact function.
"""

from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import ratio

MODULE, NEEDS = "benchmarks.contestants.lstm", ("lasagne",)


def measure(result: Result, rounds: int = 10, steps: int = 5) -> None:
    """Measure training steps; a round has `steps` of each contestant."""
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
