"""From the start of a process to the first result of an MLP on PyTensor, compiled now or before, by either linker."""

import os
import subprocess
import sys
import tempfile

from benchmarks.contestants._serve import compete

PROGRAM = "from benchmarks.contestants.pytensor_mlp import print_first_result; print_first_result({}, {})"


def make(ranks, linker, batch):
    """Nothing is prepared: each turn starts processes."""

    def run():
        """Seconds of a first process with an empty cache, and of a second one after it."""
        with tempfile.TemporaryDirectory() as cache:
            flags = {"PYTENSOR_FLAGS": f"linker={linker},base_compiledir={cache}"}
            command = [sys.executable, "-c", PROGRAM.format(ranks, batch)]
            return [
                float(subprocess.run(command, env={**os.environ, **flags}, stdout=subprocess.PIPE, check=True).stdout)
                for _ in range(2)
            ]

    return run, {}


if __name__ == "__main__":
    compete(make)
