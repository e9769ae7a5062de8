"""Soak test: a long run of random programs with random faults, and counts of failures with the seed that repeats each.

    python tests/soak [SECONDS] [--seed N] [--episode SEED] [--calls] [--output docs/soak.md]

Sessions of 1, 2, 3 and 5 ranks, with and without ``restart_workers``, work while workers are killed and stopped, ranks
raise, signal handlers raise, and the kernel refuses memory and files. The exit code is 1 after a wrong result, a wrong
error, or a process, segment or descriptor that is left behind. Other load on the node makes the test slower, but does
not make it fail.
"""

import argparse
import logging
import os
import platform
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import numpy as np  # noqa: E402
from episodes import Episode, Tally, close, held, hundred_thousand_calls  # noqa: E402

import synkhronos as synk  # noqa: E402

_MOST_GROWTH = 2_000_000  # bytes, in 100,000 calls


def run_episode(seed, tally):
    """Run one episode, and record failures and resources that it leaves behind in `tally`."""
    before = held()
    try:
        episode = Episode(seed, tally)
        try:
            episode.run()
        finally:
            episode.end()
    except Exception as error:
        tally.lost.append(f"episode {seed}: {type(error).__name__}: {error}")
        logging.getLogger("soak").exception("lost something in episode %d", seed)
        close()
        return
    del episode
    after = held()
    for what, count in after.items():
        if count > before.get(what, 0):
            tally.lost.append(f"episode {seed}: left behind: {count - before.get(what, 0)} {what}")
            logging.getLogger("soak").error(tally.lost[-1])


def table(tally, seconds, growth):
    """Return the page of results in Markdown."""
    counted = (("operations, each checked", tally.operations), ("faults injected", tally.faults))
    rows = []
    for name, counter in (*counted, ("outcomes for the user", tally.outcomes)):
        rows.append((name, f"{sum(counter.values()):,}"))
        rows += [(f"&nbsp;&nbsp;{one}", f"{count:,}") for one, count in sorted(counter.items())]
    rows.append(("longest recovery", f"{tally.recovery:.2f} s"))
    if growth is not None:
        rows.append(("growth of a process in 100,000 calls", f"{growth / 1e3:,.0f} kB"))
    rows.append(("wrong results, wrong errors, resources left behind", f"{len(tally.lost)}"))
    lines = [
        "# Soak test",
        "",
        "`make soak` (`tests/soak/`) runs random programs with random faults, compares each result with NumPy, and",
        "writes this page. `Raised` is the exception of a signal handler that raises.",
        "",
        f"The last run took {seconds:.0f} seconds on {os.cpu_count()} cores, with Python {platform.python_version()} "
        f"and NumPy {np.__version__}.",
        "",
        "| | |",
        "| --- | ---: |",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    if tally.lost:
        lines += ["", "Lost:", "", *(f"- {' '.join(one.split())[:300]}" for one in tally.lost)]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", nargs="?", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode (default: %(default)s)")
    parser.add_argument("--episode", type=int, metavar="SEED", help="run only the episode with this seed")
    parser.add_argument("--calls", action="store_true", help="also measure the growth of memory in 100,000 calls")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    logging.getLogger("synkhronos").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "synkhronos.fork", RuntimeWarning)
    tally, began, growth = Tally(), time.monotonic(), None
    synk.fork(2)  # load everything that stays loaded after the first session
    close()
    seed = arguments.seed if arguments.episode is None else arguments.episode
    last = began
    while True:
        run_episode(seed, tally)
        seed += 1
        if arguments.episode is not None or time.monotonic() - began > arguments.seconds:
            break
        if time.monotonic() - last > 30:
            last = time.monotonic()
            counts = sum(tally.operations.values()), sum(tally.faults.values()), len(tally.lost)
            print("episode {}: {:,} operations, {:,} faults, {} lost".format(seed, *counts), file=sys.stderr)
    if arguments.calls:
        growth = hundred_thousand_calls(tally, np.random.RandomState(arguments.seed))
        if growth > _MOST_GROWTH:
            tally.lost.append(f"memory: a process grew by {growth:,} bytes in 100,000 calls")
    text = table(tally, time.monotonic() - began, growth)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    return int(bool(tally.lost))


if __name__ == "__main__":
    sys.exit(main())
