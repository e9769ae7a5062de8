"""Check sync.pml with spin for two and three ranks; the protocol must pass, and each broken variant must fail."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = Path(__file__).with_name("sync.pml")

#: Options of spin and pan: no rank waits for ever, and under weak fairness, no rank loops for ever.
STUCK = (["-DSAFETY"], [])
ENDLESS = (["-DNP"], ["-l", "-f"])
NOTHING, FAILURE, DEATH = range(3)

CHECKS = [
    *[({"N": 2, "MESSAGES": 2, "BARRIERS": 2, "FAULT": fault}, STUCK) for fault in (NOTHING, FAILURE, DEATH)],
    *[({"N": 2, "MESSAGES": 2, "BARRIERS": 2, "FAULT": fault}, ENDLESS) for fault in (NOTHING, FAILURE, DEATH)],
    ({"N": 3, "MESSAGES": 1, "BARRIERS": 2, "FAULT": NOTHING}, STUCK),
    *[({"N": 3, "MESSAGES": 1, "BARRIERS": 1, "FAULT": fault}, STUCK) for fault in (FAILURE, DEATH)],
]
BROKEN = [
    ({"N": 2, "MESSAGES": 2, "BARRIERS": 2, "FAULT": fault, "BROKEN": number}, kind)
    for number, fault, kind in [
        (1, NOTHING, STUCK),
        (2, FAILURE, STUCK),
        (3, NOTHING, STUCK),
        (4, NOTHING, STUCK),
        (5, FAILURE, STUCK),
        (6, DEATH, ENDLESS),
    ]
]


def finds_an_error(settings, kind):
    """Return whether an exhaustive search of spin finds an error."""
    defines, options = kind
    with tempfile.TemporaryDirectory() as folder:

        def run(*command):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
            return done.stdout

        run("spin", "-a", *[f"-D{name}={value}" for name, value in settings.items()], str(MODEL))
        run("gcc", "-O2", "-w", "-DCOLLAPSE", *defines, "-o", "pan", "pan.c")
        report = run("./pan", "-m1000000", "-w24", *options)
    found = "errors: 0" not in report
    if not found and ("max search depth too small" in report or "Search not completed" in report):
        sys.exit(f"the search was not complete:\n{report}")
    print(re.search(r"\d+ states, stored", report).group(), end=", ")
    return found


def main():
    """Print the result of each check; exit with status 1 if one is not as expected."""
    wrong = 0
    for settings, kind in CHECKS + BROKEN:
        print(" ".join(f"{name}={value}" for name, value in settings.items()), *kind[0], end=": ")
        found = finds_an_error(settings, kind)
        is_wrong = found != ("BROKEN" in settings)
        print("an error" if found else "no error", "(WRONG)" if is_wrong else "", flush=True)
        wrong += is_wrong
    sys.exit(f"{wrong} of {len(CHECKS + BROKEN)} checks have a wrong result" if wrong else 0)


main()
