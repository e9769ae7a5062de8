"""Run the tests module by module while a busy loop occupies each core: `make busy`.

Three rounds run all modules, and seven more rounds those of `REPEATED`. Each result is a line of a file, so an
interrupted run continues with the next module:

    python tests/helpers/busy_rounds.py FOLDER [SECONDS [JOBS]]

The folder receives ``results.jsonl`` and the output of each failed module; remove it to start over. No module starts
after SECONDS. JOBS modules run at the same time. The exit status is 0 if all rounds passed, 1 if a test failed,
and 3 if modules remain.
"""

import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPEATED = ("faults", "nodes", "sessions")
ROUNDS, ROUNDS_OF_REPEATED = 3, 10
#: Seconds for one test, and for one module.
TEST_LIMIT, MODULE_LIMIT = 900, 7200
#: Exit statuses of pytest: no test failed; the module has no tests on this backend.
PASSED = (0, 5)

_OCCUPY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"


def planned():
    """Return the pairs of a round and a module, in the order in which they run."""
    modules = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/test_*.py"))
    again = [module for module in modules if module.split("/")[1] in REPEATED]
    rounds = range(1, 1 + ROUNDS_OF_REPEATED)
    return [(number, module) for number in rounds for module in (modules if number <= ROUNDS else again)]


@contextlib.contextmanager
def busy_cores():
    """Keep each core busy. The loops also end if this process ends."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", _OCCUPY]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(module):
    """Run one module; return pytest's exit status and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--timeout", str(TEST_LIMIT), module]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, timeout=MODULE_LIMIT
        )
    except subprocess.TimeoutExpired as error:
        return "no end", str(error.stdout)
    return done.returncode, done.stdout


def main(folder, seconds="inf", jobs="1"):
    end = time.monotonic() + float(seconds)
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    results = folder / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    finished = {(line["round"], line["module"]): line for line in lines}
    left = [pair for pair in planned() if pair not in finished]

    def record(number, module):
        if time.monotonic() > end:
            return
        began = time.monotonic()
        status, output = run(module)
        failed = status not in PASSED
        if failed:
            (folder / f"{number}-{Path(module).stem}.log").write_text(output)
        line = {"round": number, "module": module, "status": status, "seconds": round(time.monotonic() - began)}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        finished[number, module] = line
        print(f"round {number}: {module} {'FAILED' if failed else 'passed'} in {line['seconds']} s", flush=True)

    with busy_cores(), concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        list(pool.map(record, *zip(*left)))
    failures = [f"round {n}: {module}" for (n, module), line in finished.items() if line["status"] not in PASSED]
    left = [pair for pair in planned() if pair not in finished]
    print(f"{len(finished)} modules ran, {len(left)} are left, {len(failures)} failed", *failures, sep="\n")
    return 1 if failures else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
