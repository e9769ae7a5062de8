"""Starting up.

`fork` and `distribute` are timed for the functions of the MNIST demo's CNN (a training step and a test function) on two
ranks. Each measurement uses a new process and a warm compile cache. Theano builds the functions in between, which does
not count. For ResNet-50, `distribute` is compared with unpickling a plain pickle of the same Theano functions once.
"""

from benchmarks.harness import CORES, Contest
from benchmarks.peers import missing
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import Sample, absolute, ratio
from benchmarks.training import needs

PARTS = ("fork", "build", "distribute")


def measure(result: Result, rounds: int = 5) -> None:
    """Measure both networks; the larger one only once, because it takes long to build."""
    cnn = start("cnn", rounds)
    result.record("CNN", "s", {part: cnn[part] for part in PARTS})
    both = [[a + b for a, b in zip(*parts)] for parts in zip(cnn["fork"].rounds, cnn["distribute"].rounds)]
    what = "`fork` and `distribute` of the MNIST CNN, warm compile cache"
    result.add("cnn", what, absolute(Sample(both)), "s", at_most=3)

    what = "`distribute` of ResNet-50 against one unpickling"
    gap = missing(needs("resnet"))
    if gap:
        result.add("resnet", what, gap, at_most=2)
        return
    resnet = start("resnet", 1, unpickle=True)
    result.record("ResNet-50", "s", resnet)
    result.add("resnet", what, ratio(resnet["distribute"], resnet["unpickle"]), at_most=2)


def start(model: str, rounds: int, unpickle: bool = False) -> dict[str, Sample]:
    """Measure new processes one by one; an earlier process, which does not count, warms the compile cache."""
    arguments = {"model": model, "ranks": CORES, "unpickle": unpickle}
    contestant = Contestant(f"Synkhronos, {CORES} ranks", "benchmarks.contestants.start", arguments, needs=needs(model))
    parts = PARTS + ("unpickle",) * unpickle
    numbers: dict[str, list[list[float]]] = {part: [] for part in parts}
    for number in range(-1, rounds):
        with Contest([contestant]) as contest:
            samples = contest.run(1, {part: (contestant, {"part": part}) for part in parts}, warm_up=0)
        if number >= 0:
            for part, sample in samples.items():
                numbers[part] += sample.rounds
    return {part: Sample(rounds) for part, rounds in numbers.items()}
