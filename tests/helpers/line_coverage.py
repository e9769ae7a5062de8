"""Print how much of the lines and branches tests have run, and which modules are left out; fail under 93 % of lines.

`make coverage` combines the data of all processes first.
"""

import contextlib
import io
import json
import sys

import coverage

LEAST = 93

measured = coverage.Coverage()
measured.load()
measured.report()
with contextlib.redirect_stdout(io.StringIO()) as printed:
    measured.json_report(outfile="-")
totals = json.loads(printed.getvalue())["totals"]
lines = 100 * totals["covered_lines"] / totals["num_statements"]
branches = 100 * totals["covered_branches"] / totals["num_branches"]
print("left out, because they need CUDA:", *measured.get_option("run:omit"))
print(f"lines: {lines:.1f} % (at least {LEAST}); branches: {branches:.1f} %")
sys.exit(lines < LEAST)
