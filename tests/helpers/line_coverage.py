"""Print the coverage of lines and branches, and the modules left out; fail below 93 % of lines.

`make coverage` runs this program after it has combined the data of all processes.
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
