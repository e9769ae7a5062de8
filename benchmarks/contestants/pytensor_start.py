"""Time from the start of a process to its first result of an MLP on PyTensor, with an empty or a full compile cache."""

import os
import subprocess
import sys
import tempfile

from benchmarks.contestants._serve import compete

PROGRAM = "from benchmarks.contestants.pytensor_mlp import print_first_result; print_first_result({}, {})"


def make(ranks, linker, batch):
    """Return ``run``; nothing is prepared, because each turn starts new processes."""

    def run():
        """Return the seconds of a process with an empty cache, and of a second process with the cache of the first."""
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
