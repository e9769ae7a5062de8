"""The programs in README.md and docs/ run.

All ``python`` blocks of README.md are run, and those of docs/ that follow a line ``<!-- run -->``. A block after
``<!-- continues -->`` is appended to the program before it; ``<!-- name: … -->`` names a program for the tests here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100  # for one program, compilation included

# Has an environment in which the project is not installed import Theano as an installed one does.
START = "import sys, runpy, _synkhronos_start; runpy.run_path(sys.argv[1], run_name='__main__')"

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>run|continues|name: (?P<name>\w+)) -->\n+)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)


def programs(path, every):
    """Collect a document's programs, by name or by the line at which they start."""
    text = path.read_text(encoding="utf-8")
    found = {}
    key = None
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code")) + 1
        padding = "\n" * (line - 1)  # so that a traceback names the document's lines
        if block["mark"] == "continues":
            if key is not None:
                found[key] += "\n" * (line - 1 - found[key].count("\n")) + block["code"]
        elif every or block["mark"]:
            key = block["name"] or f"{path.name}:{line}"
            found[key] = padding + block["code"]
        else:
            key = None
    return found


README = programs(ROOT / "README.md", every=True)
DOCS = {key: code for path in sorted(ROOT.glob("docs/*.md")) for key, code in programs(path, every=False).items()}


def run(code, folder):
    """Run a program in a process of its own; returns what it printed."""
    script = folder / "program.py"
    script.write_text(code, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", START, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quick_start(tmp_path):
    """The two programs print the same losses."""
    expected = run(README["theano"], tmp_path)
    assert expected.count("loss of the last minibatch") == 5
    assert run(README["synkhronos"], tmp_path) == expected


def test_quick_start_marks_what_differs():
    serial, parallel = (README[name].strip().splitlines() for name in ("theano", "synkhronos"))
    same = [line for line in parallel if line and not line.endswith(("# new", "# changed"))]
    changed = [line for line in parallel if line.endswith("# changed")]
    kept = [line for line in serial if line]
    assert len(changed) == 3
    assert [line for line in kept if line in same] == same
    assert len(kept) - len(same) == len(changed)


@pytest.mark.parametrize("name", sorted({*README, *DOCS} - {"theano", "synkhronos"}))
def test_program(name, tmp_path):
    run({**README, **DOCS}[name], tmp_path)
