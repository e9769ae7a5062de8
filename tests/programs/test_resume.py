"""A training demo that is killed and started again with ``--resume`` ends with the same parameters."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from backend import theano_only

pytestmark = theano_only("Lasagne")

FOLDER = Path(__file__).parents[2] / "demos" / "lasagne_mnist"
OPTIONS = [
    *("--model", "custom_mlp:1,20,0.2,0.5", "--data", "digits"),
    *("--epochs", "5", "--batch-size", "150", "--ranks", "2"),
]


def command(script, path, *more):
    return [sys.executable, str(FOLDER / script), *OPTIONS, "--checkpoint", str(path), *more]


def parameters(output):
    """Return the digest of the trained parameters that a script printed."""
    return re.search(r"^parameters: (\w+)$", output, re.M).group(1)


def train(script, path, *more):
    done = subprocess.run(command(script, path, *more), capture_output=True, text=True, timeout=200, check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ["train_mnist_cpu_data.py", "train_mnist_gpu_data.py"])
def test_a_killed_run_goes_on_to_the_same_parameters(script, tmp_path):
    whole = parameters(train(script, tmp_path / "whole.npz"))
    path = tmp_path / "killed.npz"
    for delay in (0.0, 0.03):
        resumed = command(script, path, "--resume")
        killed = subprocess.Popen(resumed, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            while not killed.stdout.readline().startswith("epoch"):
                assert killed.poll() is None
            time.sleep(delay)
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate()
    output = train(script, path, "--resume")
    assert re.search(r"^going on after epoch \d", output, re.M)
    assert parameters(output) == whole


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    train("train_mnist_cpu_data.py", tmp_path / "one.npz", "--epochs", "1")
    other = command("train_mnist_cpu_data.py", tmp_path / "one.npz", "--resume", "--seed", "7")
    other = subprocess.run(other, capture_output=True, text=True, timeout=200)
    assert other.returncode != 0
    assert "with other arguments or other data" in other.stderr
