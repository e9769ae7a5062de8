"""The programs in README.md and docs/ run, and print the output that the pages show.

Each ``python`` block is a program. A comment in the line before it can change this: ``continues`` appends the block to
the previous program; ``not run: REASON`` and ``run by test_….py`` leave it out. Programs are for Theano, except those
marked ``on PyTensor``, and ``on both``, whose serial form must print the same. After ``<!-- output -->``, a ``text``
block is the program's output up to the next such block.
"""

import os
import re
import subprocess
import sys

import pytest
from backend import on_theano
from scripts import ROOT

SECONDS = 280  # for one program with its compilation, which takes 10 s on an idle machine and 100 s on a busy one

pytestmark = pytest.mark.timeout(2 * SECONDS + 20)

# Runs the start-up code of an installed synkhronos, which patches Theano.
START = "import sys, runpy, _synkhronos_start; runpy.run_path(sys.argv[1], run_name='__main__')"

ON_BOTH = "on both"
#: What makes README's PyMC program shorter.
SHORTER = {"200_000": "2_000", "pm.sample()": "pm.sample(50, tune=50)"}
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n+)?^```(?P<kind>python|text)\n(?P<code>.*?)^```$", re.M | re.S)
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts)]


def programs(path):
    """Collect the programs of a document, as ``[code, output]`` by path and first line."""
    text = path.read_text(encoding="utf-8")
    found = {}
    program = None
    for block in BLOCK.finditer(text):
        mark, code = block["mark"] or "", block["code"]
        line = text.count("\n", 0, block.start("code"))
        is_new = block["kind"] != "text" and mark not in ("continues", ON_BOTH)
        if is_new and (mark == "on PyTensor") == on_theano:
            program = None  # for the other backend
        elif block["kind"] == "text":
            if mark == "output" and program:
                program[1] += code
        elif mark == "continues":
            if program:
                program[0] += "\n" * (line - program[0].count("\n")) + code
        elif mark not in ("", "on PyTensor", ON_BOTH):
            assert mark.startswith(("not run: ", "run by ")), f"{path}: {mark}"
            program = None
        else:
            # tracebacks show the document's line numbers
            name = f"{path.relative_to(ROOT)}:{line}"
            if path.name == "README.md":
                for old, new in SHORTER.items():
                    code = code.replace(old, new)
            program = found[name] = ["\n" * line + code, ""]
            if mark == ON_BOTH:
                TWINS.append(name)
    return found


TWINS = []  # names of programs with a serial form
PROGRAMS = {name: program for path in PAGES for name, program in programs(path).items()}


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
    code, _ = PROGRAMS[name]
    serial, n_forks = re.subn(r"^synk\.fork\(\).*\n", "\n", code, flags=re.M)
    serial, n_functions = re.subn(r"synk\.function\((.*), exact=True\)", r"theano.function(\1)", serial)
    assert n_forks and n_functions
    expected, got = run(serial, tmp_path), run(code, tmp_path)
    assert expected and got == expected


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(TWINS)))
def test_program(name, tmp_path):
    code, output = PROGRAMS[name]
    printed = run(code, tmp_path)
    assert not output or printed == output
