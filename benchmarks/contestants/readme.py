"""Programs of README.md, as they are there, or without Synkhronos; a turn repeats what they compute."""

import ast
import re
import time
from importlib.util import find_spec

from benchmarks.contestants._serve import PAUSE, compete
from benchmarks.processes import ROOT
from tests.helpers.page_programs import ON_BOTH, programs, serial_form

FOR_PYMC = "on PyTensor"


def without_synkhronos(code):
    """Return the serial form of README's program for PyMC."""
    code, n_imports = re.subn(r"^(import synkhronos|from synkhronos\.).*\n", "\n", code, flags=re.M)
    code, n_blocks = re.subn(r"^with synk\.session\(\), parallel\(model\):", "with model:", code, flags=re.M)
    assert (n_imports, n_blocks) == (2, 1)
    return code


def compiled_parts(code):
    """Return what prepares a program, and its last loop or block, which computes; lines after that are left out."""
    statements = ast.parse(code).body
    last = max(i for i, one in enumerate(statements) if isinstance(one, (ast.For, ast.With)))
    return [compile(ast.Module(part, []), "README.md", "exec") for part in (statements[:last], statements[last:][:1])]


def make(mark, serial, changes=()):
    """Prepare the program with a mark, with changes ``(old, new)`` of its text."""
    page = ROOT / "README.md"
    of_backend = programs(page, page.name, find_spec("theano") is not None).values()
    (code,) = [code for code, _, own in of_backend if own == mark]
    if serial:
        code = serial_form(code) if mark == ON_BOTH else without_synkhronos(code)
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    names = {"__name__": "__main__"}
    before, block = compiled_parts(code)
    exec(before, names)

    def run():
        time.sleep(PAUSE)
        start = time.perf_counter()
        exec(block, names)
        return [time.perf_counter() - start]

    return run, {}


if __name__ == "__main__":
    compete(make)
