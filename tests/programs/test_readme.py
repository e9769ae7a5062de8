"""The programs in README.md and docs/ run, and print the output that the pages show (see helpers/page_programs.py)."""

import os
import subprocess
import sys

import pytest
from backend import on_theano
from page_programs import ON_BOTH, programs, serial_form
from scripts import ROOT

SECONDS = 280  # for one program with its compilation, which takes 10 s on an idle machine and 100 s on a busy one

pytestmark = pytest.mark.timeout(2 * SECONDS + 20)

# Runs the start-up code of an installed synkhronos, which patches Theano.
START = "import sys, runpy, _synkhronos_start; runpy.run_path(sys.argv[1], run_name='__main__')"

#: What makes README's PyMC program shorter.
SHORTER = {"200_000": "2_000", "pm.sample()": "pm.sample(50, tune=50)"}
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts)]
PROGRAMS = {
    name: program for path in PAGES for name, program in programs(path, path.relative_to(ROOT), on_theano).items()
}
TWINS = sorted(name for name, (*_, mark) in PROGRAMS.items() if mark == ON_BOTH)


def run(code, folder):
    """Run a program in a new process, and return its output."""
    script = folder / "program.py"
    script.write_text(code, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-c", START, str(script)], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TWINS)
def test_the_serial_form_prints_the_same(name, tmp_path):
    code, *_ = PROGRAMS[name]
    expected, got = run(serial_form(code), tmp_path), run(code, tmp_path)
    assert expected and got == expected


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(TWINS)))
def test_program(name, tmp_path):
    code, output, _ = PROGRAMS[name]
    if name.startswith("README.md"):
        for old, new in SHORTER.items():
            assert old in code
            code = code.replace(old, new)
    printed = run(code, tmp_path)
    assert not output or printed == output
