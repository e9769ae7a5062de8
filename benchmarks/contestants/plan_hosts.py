"""Training steps on several nodes, and the link between these, for `benchmarks.plan_validation`."""

import synkhronos as synk
from benchmarks.contestants._serve import compete, timed
from benchmarks.plan_validation import build
from synkhronos._api.step_measurements import measure_link
from synkhronos._session import current


def make(model):
    """Build the step of a model. A round without rows measures the link: its latency, bandwidth and deviation."""
    synk.fork(1, use_gpu=False)
    step, given = build(model)
    data = list(map(synk.data, given))

    def run(batch=0, steps=0):
        if batch:
            return timed(lambda: step(*data, batch=batch), steps)
        link = measure_link(current("measure_link"))
        return link.latency, link.bandwidth, link.deviation

    return run, {}


if __name__ == "__main__":
    compete(make)
