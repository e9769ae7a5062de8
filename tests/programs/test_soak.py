"""A short soak test: random programs with random faults."""

import subprocess
import sys

import pytest
from scripts import ROOT


@pytest.mark.timeout(150)
def test_half_a_minute_of_random_programs_with_random_faults():
    command = [sys.executable, str(ROOT / "tests" / "soak"), "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| wrong results, wrong errors, resources left behind | 0 |" in done.stdout
    assert "| faults injected | 0 |" not in done.stdout
