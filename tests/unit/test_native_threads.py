"""The C core without Python: ranks are threads, so that sanitizers can check accesses to shared memory."""

import os
import random
import subprocess
import sysconfig

import pytest
from backend import theano_only
from scripts import ROOT

pytestmark = theano_only("C code without Python or a backend")

CORE = ROOT / "synkhronos" / "_native"
COMPILER = sysconfig.get_config_var("CC").split()[0]
REDUCTIONS = ["reductions.c", "reductions_avx2.c", "reductions_avx512.c"]
HEAP = ["heap.c", "heap_mapping.c"]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return a function that compiles a program of tests/native with sanitizers, or skips the test without them."""

    def compiled(name, sources, sanitizers):
        program = tmp_path_factory.mktemp("native") / name
        flags = ["-std=gnu11", "-O1", "-g", "-pthread", "-ffp-contract=off"]
        flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else ["-O3"]
        trivial = program.with_suffix(".c")
        trivial.write_text("int main(void) { return 0; }")
        probe = subprocess.run([COMPILER, *flags, trivial, "-o", program], capture_output=True, timeout=60, check=False)
        if probe.returncode or subprocess.run([program], capture_output=True, timeout=60, check=False).returncode:
            pytest.skip(f"{COMPILER} has no -fsanitize={sanitizers} that works here")
        # A poll interval long enough that a thread which waits for a core misses no poll.
        flags += ["-DPOLL_NS=900000000", "-DHEAP_IDLE_NS=20000000", "-Wall", "-Werror", f"-I{CORE}"]
        files = [ROOT / "tests" / "native" / f"{name}.c", *(CORE / source for source in sources)]
        subprocess.run([COMPILER, *flags, *files, "-o", program], timeout=150, check=True)
        return program

    return compiled


def check(program, *arguments, **environment):
    command, environment = [program, *map(str, arguments)], {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, ""), (command, done.stdout)


@pytest.mark.parametrize("sanitizers", ["thread", "undefined"])
def test_sync(build, sanitizers):
    program = build("sync_threads", [], sanitizers)
    for ranks in (2, 3, 5):
        check(program, ranks, 2000, random.randrange(2**20))


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_collectives(build, sanitizers):
    program = build("collectives_threads", ["sync.c", "collectives.c", *REDUCTIONS], sanitizers)
    for ranks in (1, 2, 3, 5):
        check(program, ranks, 30, random.randrange(2**20))


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("kind", ["shared", "private"])
def test_heap(build, sanitizers, kind):
    check(build("heap_threads", HEAP, sanitizers), kind, TSAN_OPTIONS="die_after_fork=0")


@pytest.mark.parametrize("sanitizers", ["", "address,undefined"])
def test_instruction_sets_give_the_same_bits_and_nothing_is_accessed_out_of_bounds(build, sanitizers):
    check(build("reductions", REDUCTIONS, sanitizers))
