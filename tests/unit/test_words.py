"""The C code by which ranks wait for each other, run by threads, so that sanitizers see all that the ranks share."""

import functools
import subprocess
import sysconfig

import pytest
from support import ROOT

CORE = ROOT / "synkhronos" / "_core"
COMPILER = sysconfig.get_config_var("CC").split()[0]


@functools.lru_cache(maxsize=None)
def build(folder, sanitizer):
    """Compile the program with a sanitizer, or skip the test where there is none."""
    program = folder / f"words_{sanitizer}"
    flags = ["-std=gnu11", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    trivial = folder / "trivial.c"
    trivial.write_text("int main(void) { return 0; }")
    probe = subprocess.run([COMPILER, *flags, trivial, "-o", program], capture_output=True, timeout=60, check=False)
    if probe.returncode or subprocess.run([program], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"{COMPILER} has no -fsanitize={sanitizer} that works here")
    sources = [ROOT / "tests" / "core" / "words_threads.c", CORE / "words.c"]
    subprocess.run([COMPILER, *flags, f"-I{CORE}", *sources, "-o", program], timeout=60, check=True)
    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("words")


@pytest.mark.parametrize("sanitizer", ["thread", "undefined"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_threads_in_place_of_ranks(folder, ranks, sanitizer):
    done = subprocess.run(
        [build(folder, sanitizer), str(ranks), "2000", "1"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
