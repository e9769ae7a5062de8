"""The overhead of a call.

A function of trivial cost, the mean of the products of two vectors of 64 numbers, both scattered, its output averaged
over the ranks: the time of a call above that of the same function in Theano alone. The inputs are `synk.data`. Calls
either come 3 ms apart, in which the master sleeps, or follow one another at once, 1,000 in a row; of these the first
hundred take up to twice as long as the rest. Eight ranks share two cores: each core gives four ranks their turns, so
the overhead is divided by four. What bounds two ranks is a flag in shared memory that goes there and back.
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
    """Measure so many calls of each kind in a round."""
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
