"""Writes docs/engines.md, the table engine × feature, from what runs of the tests have told.

Usage: ``python docs/tabulate_engines.py REPORT ...``, with files that the tests write where ``SYNKHRONOS_TEST_REPORT``
says. A feature is a module of tests, by the first line of its docstring; the reports of an engine are joined.
"""

import ast
import collections
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TITLES = {"theano": "Theano", "pytensor": "PyTensor"}
HEAD = """# Theano and PyTensor

On Python 3.9 to 3.11 the graph engine is Theano 1.0.5, from 3.12 on PyTensor 3.3. What works on which, by the tests
that ran: how many pass, and what is left out. `python docs/tabulate_engines.py` writes this page.

"""


def read(files):
    """Of each engine and module, how its tests ended: a list of outcomes and reasons."""
    found = {name: collections.defaultdict(list) for name in TITLES}
    for file in files:
        report = json.loads(Path(file).read_text())
        for test, (outcome, reason) in report["tests"].items():
            found[report["engine"]][test.split("::")[0]].append((outcome, reason.removeprefix("Skipped: ")))
    return found


def cell(outcomes):
    """What a table says of the tests of a module."""
    counts = collections.Counter(outcome for outcome, _ in outcomes)
    reasons = sorted({reason for outcome, reason in outcomes if outcome == "skipped" and reason})
    parts = [f"{counts['passed']} pass"] if counts["passed"] else []
    parts += [f"**{counts['failed']} fail**"] if counts["failed"] else []
    parts += [f"not: {'; '.join(reasons)}"] if reasons else []
    return ", ".join(parts) or "not run"


def main(files):
    """Write the page."""
    found = read(files)
    engines = [name for name in TITLES if found[name]]  # those that a report is of
    lines = [f"| what | {' | '.join(TITLES[name] for name in engines)} |\n", "| --- " * (1 + len(engines)) + "|\n"]
    for module in sorted({module for modules in found.values() for module in modules}):
        feature = ast.get_docstring(ast.parse((ROOT / module).read_text())).split("\n")[0].rstrip(".")
        cells = [cell(found[name][module]) for name in engines]
        lines.append(f"| {' | '.join([feature, *cells])} |\n")
    (ROOT / "docs" / "engines.md").write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
