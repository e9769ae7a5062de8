"""The first result on PyTensor.

Time from the start of a Python process to the result of its first training step, of the MLP 784-800-800-10 on 500
images. It is measured with an empty cache ("cold") and with the cache of that run ("warm"), with numba, PyTensor's
default linker, and with its C linker. The controller compiles, and the workers load the compiled code.
"""

from benchmarks.harness import Contest
from benchmarks.pytensor_mlp import contestants
from benchmarks.results import Result
from benchmarks.samples import Sample, ratio


def measure(result: Result, rounds: int = 3) -> None:
    """Measure both linkers; a round starts one process with an empty cache, and one with a full one."""
    for linker, title in (("numba", "numba"), ("cvm", "C")):
        alone, together = contestants("pytensor_start", linker=linker, batch=500)
        with Contest([alone, together]) as contest:
            samples = contest.run(rounds, contest.alike(), warm_up=0)
        for turn, way in enumerate(("cold", "warm")):
            found = {label: Sample([[numbers[turn]] for numbers in sample.rounds]) for label, sample in samples.items()}
            result.record(f"First result, {title}, {way}", "s", found)
            compared = ratio(found[together.name], found[alone.name])
            what = f"First result on two ranks against PyTensor alone, {title}, {way}"
            result.add(f"{linker}-{way}", what, compared, at_most=1.15 if way == "cold" else None)
