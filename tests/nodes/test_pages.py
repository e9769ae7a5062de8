"""Programs in the documentation of several nodes print the output that the documentation shows."""

import re
import subprocess
import sys

from backend import theano_only
from mpi_jobs import needs_mpi
from namespace_hosts import MPIEXEC
from scripts import ROOT

pytestmark = [needs_mpi, theano_only("the programs of the pages import Theano")]


def test_the_tutorial_prints_what_it_shows(tmp_path):
    page = (ROOT / "docs" / "tutorial" / "machines.md").read_text(encoding="utf-8")
    code, shown = ("".join(re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S)) for kind in ("python", "text"))
    script = tmp_path / "train.py"
    script.write_text(code, encoding="utf-8")
    command = [MPIEXEC, "-n", "2", sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, shown), done.stdout + done.stderr
