"""The overhead of a call.

The function is trivial: the mean of the products of two vectors of 64 numbers. Both vectors are scattered, and the
output is averaged over the ranks. The overhead is the time of a call minus that of the same function in plain Theano.
The inputs are `synk.data`. Calls are either 3 ms apart, while the controller sleeps, or in quick succession, 1,000 in a
row. The first hundred of these take up to twice as long as the rest. Eight ranks share two cores: each core runs four
ranks in turn, so their overhead is divided by four. The bound of two ranks is a flag in shared memory that is passed
back and forth.
"""

from benchmarks import limits
from benchmarks.harness import CORES, Contest
from benchmarks.processes import Contestant
from benchmarks.results import Result
from benchmarks.samples import difference

MANY = 8
PAUSE = 0.003  # seconds
CASES = {"apart": ("calls 3 ms apart", PAUSE, 100), "succession": ("calls in quick succession", 0.0, 25)}


def measure(result: Result, rounds: int = 12, apart: int = 150, succession: int = 1000) -> None:
    """Measure calls; a round has `apart` calls 3 ms apart, and `succession` calls in quick succession."""
    calls = {"apart": apart, "succession": succession}
    alone = Contestant("Theano", "benchmarks.contestants.call", {"ranks": 0, "kind": "numpy"})
    two = Contestant("Synkhronos, 2 ranks", "benchmarks.contestants.call", {"ranks": CORES, "kind": "data"})
    arrays = Contestant(
        "Synkhronos, 2 ranks, NumPy inputs", "benchmarks.contestants.call", {"ranks": CORES, "kind": "numpy"}
    )
    many = Contestant("Synkhronos, 8 ranks", "benchmarks.contestants.call", {"ranks": MANY, "kind": "data"})
    samples = {}
    with Contest([alone, two, arrays, many], aside=[limits.LIMITS]) as contest:
        for case, (title, pause, _) in CASES.items():
            turns = {**contest.alike(calls=calls[case], pause=pause), **limits.turns("flag")}
            microseconds = {label: sample.scaled(1e6) for label, sample in contest.run(rounds, turns).items()}
            bound = limits.round_trip(microseconds.pop("flag"))
            samples[case] = microseconds
            result.record(title.capitalize(), "µs", microseconds, bounds={"a flag there and back": bound})

    for case, (title, _, limit) in CASES.items():
        theano = samples[case][alone.name]
        result.add(case, f"Two ranks, {title}", difference(samples[case][two.name], theano), "µs", at_most=limit)
        result.add(f"{case}-numpy", "… with NumPy inputs", difference(samples[case][arrays.name], theano), "µs")
        turns = MANY / CORES
        turn = difference(samples[case][many.name].scaled(1 / turns), theano.scaled(1 / turns))
        result.add(f"{case}-many", f"Eight ranks, {title}, each turn", turn, "µs", at_most=2 * limit)
