"""The C code by which ranks wait for each other, run by threads, so that sanitizers see all that the ranks share."""

import random
import subprocess
import sysconfig

import pytest
from support import ROOT

CORE = ROOT / "synkhronos" / "_core"
COMPILER = sysconfig.get_config_var("CC").split()[0]


@pytest.fixture(scope="module", params=["thread", "undefined"])
def program(request, tmp_path_factory):
    """The program, compiled with a sanitizer; where there is none, the test is skipped."""
    sanitizer, folder = request.param, tmp_path_factory.mktemp("words")
    program = folder / "words_threads"
    flags = ["-std=gnu11", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    trivial = folder / "trivial.c"
    trivial.write_text("int main(void) { return 0; }")
    probe = subprocess.run([COMPILER, *flags, trivial, "-o", program], capture_output=True, timeout=60, check=False)
    if probe.returncode or subprocess.run([program], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"{COMPILER} has no -fsanitize={sanitizer} that works here")
    source = ROOT / "tests" / "core" / "words_threads.c"
    subprocess.run([COMPILER, *flags, "-Wall", "-Werror", f"-I{CORE}", source, "-o", program], timeout=60, check=True)
    return program


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_threads_in_place_of_ranks(program, ranks):
    command = [program, str(ranks), "2000", str(random.randrange(2**20))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), command
