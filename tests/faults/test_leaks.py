"""Run `leaks.py` in its own process, because the size of the malloc heap varies in a long test run."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_grows():
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", str(here / "leaks.py")]
    for _ in range(2):  # the size of the heap varies, so only a leak that is found twice counts
        done = subprocess.run(
            command, cwd=here.parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
        )
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
