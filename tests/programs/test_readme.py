"""The programs in README.md and docs/ run, and print the output that the pages show.

Each ``python`` block is a program. A comment in the line before it can change this: ``continues`` appends the block to
the previous program; ``not run: REASON`` and ``run by test_….py`` leave it out. Programs are for Theano, except those
marked ``on PyTensor``. After ``<!-- output -->``, a ``text`` block is the program's output up to the next such block.
A ``diff`` block is two programs that print the same.
"""

import os
import re
import subprocess
import sys

import pytest
from backend import on_theano, theano_only
from scripts import ROOT

SECONDS = 280  # for one program with its compilation, which takes 10 s on an idle machine and 100 s on a busy one

pytestmark = pytest.mark.timeout(2 * SECONDS + 20)

# Runs the start-up code of an installed synkhronos, which patches Theano.
START = "import sys, runpy, _synkhronos_start; runpy.run_path(sys.argv[1], run_name='__main__')"

BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n+)?^```(?P<kind>python|diff|text)\n(?P<code>.*?)^```$", re.M | re.S)
PAGES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts)]


def programs(path):
    """Collect the programs of a document, as ``[code, output]`` by path and first line."""
    text = path.read_text(encoding="utf-8")
    found = {}
    program = None
    for block in BLOCK.finditer(text):
        mark, code = block["mark"] or "", block["code"]
        line = text.count("\n", 0, block.start("code"))
        if block["kind"] != "text" and mark != "continues" and (mark == "on PyTensor") == on_theano:
            program = None  # for the other backend
        elif block["kind"] == "diff":
            for sign, name in (("-", "before"), ("+", "after")):
                lines = [row[1:] for row in code.splitlines() if row[:1] in ("", " ", sign)]
                found[f"{path.name}:{line}:{name}"] = ["\n".join(lines), ""]
        elif block["kind"] == "text":
            if mark == "output" and program:
                program[1] += code
        elif mark == "continues":
            if program:
                program[0] += "\n" * (line - program[0].count("\n")) + code
        elif mark not in ("", "on PyTensor"):
            assert mark.startswith(("not run: ", "run by ")), f"{path}: {mark}"
            program = None
        else:
            # tracebacks show the document's line numbers
            program = found[f"{path.relative_to(ROOT)}:{line}"] = ["\n" * line + code, ""]
    return found


PROGRAMS = {name: program for path in PAGES for name, program in programs(path).items()}
TWINS = sorted(name[: -len(":before")] for name in PROGRAMS if name.endswith(":before"))
NO_TWINS = [pytest.param("", marks=theano_only("programs of pages that do not say that they are PyTensor's"))]


def run(code, folder):
    """Run a program in a new process, and return its output."""
    script = folder / "program.py"
    script.write_text(code, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-c", START, str(script)], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TWINS or NO_TWINS)
def test_twins_print_the_same(name, tmp_path):
    expected, got = (run(PROGRAMS[f"{name}:{which}"][0], tmp_path) for which in ("before", "after"))
    assert expected and got == expected


@pytest.mark.parametrize("name", sorted(name for name in PROGRAMS if not name.endswith((":before", ":after"))))
def test_program(name, tmp_path):
    code, output = PROGRAMS[name]
    printed = run(code, tmp_path)
    assert not output or printed == output
