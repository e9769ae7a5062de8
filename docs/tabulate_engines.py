"""Write docs/engines.md, the table of backends and features, from reports of test runs.

The tests write a report to the path in ``SYNKHRONOS_TEST_REPORT``; reports of one backend are merged:

    SYNKHRONOS_TEST_REPORT=theano.json make test
    SYNKHRONOS_TEST_REPORT=pytensor.json make test PYTHON=python3.13 VENV=.venv-pytensor
    python docs/tabulate_engines.py theano.json pytensor.json

A feature is a test module, shown by the first line of its docstring.
"""

import ast
import collections
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TITLES = {"theano": "Theano", "pytensor": "PyTensor"}
HEAD = """# Theano and PyTensor

The backend is Theano 1.0.5 on Python 3.9 to 3.11, and PyTensor 3.3 from Python 3.12 on. The table lists, for each group
of tests, how many pass on each backend, and which features are skipped there ("not"). It is generated:
`python docs/tabulate_engines.py`.

"""


def read(files):
    """Return the outcomes and reasons of each backend's tests, by module."""
    found = {name: collections.defaultdict(list) for name in TITLES}
    for file in files:
        report = json.loads(Path(file).read_text())
        for test, (outcome, reason) in report["tests"].items():
            found[report["engine"]][test.split("::")[0]].append((outcome, reason.removeprefix("Skipped: ")))
    return found


def cell(outcomes):
    """Format the outcomes of a module's tests as a cell of the table."""
    counts = collections.Counter(outcome for outcome, _ in outcomes)
    reasons = sorted({reason for outcome, reason in outcomes if outcome == "skipped" and reason})
    parts = [f"{counts['passed']} pass"] if counts["passed"] else []
    parts += [f"**{counts['failed']} fail**"] if counts["failed"] else []
    parts += [f"not: {'; '.join(reasons)}"] if reasons else []
    return ", ".join(parts) or "not run"


def main(files):
    """Write docs/engines.md from the reports in `files`."""
    found = read(files)
    backends = [name for name in TITLES if found[name]]  # those with a report
    lines = [f"| tests | {' | '.join(TITLES[name] for name in backends)} |\n", "| --- " * (1 + len(backends)) + "|\n"]
    for module in sorted({module for modules in found.values() for module in modules}):
        feature = ast.get_docstring(ast.parse((ROOT / module).read_text())).split("\n")[0].rstrip(".")
        cells = [cell(found[name][module]) for name in backends]
        lines.append(f"| {' | '.join([feature, *cells])} |\n")
    (ROOT / "docs" / "engines.md").write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
