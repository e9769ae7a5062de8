"""Measure the figures of the installed backend, or the named ones, and write docs/benchmarks.md."""

import argparse
import sys
import time
from pathlib import Path

from benchmarks import figures, report


def main() -> None:
    """Measure the figures one by one and write the page; exit with an error at the end if any figure failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(figures.FIGURES))
    parser.add_argument("--page", type=Path, default=figures.PAGE, help="page to write; results are stored next to it")
    parser.add_argument("--rounds", type=int, help="number of measured rounds (default: each figure's own)")
    arguments = parser.parse_args()
    unknown = set(arguments.figures) - set(figures.FIGURES)
    if unknown:
        parser.error(f"unknown figures: {', '.join(sorted(unknown))}; expected {', '.join(figures.FIGURES)}")
    start, failed = time.monotonic(), []
    for name in arguments.figures or figures.of_this_backend():
        module, options = figures.FIGURES[name]
        if arguments.rounds:
            options = {**options, "rounds": arguments.rounds}
        print(f"== {name}, after {time.monotonic() - start:.0f} s", flush=True)
        if figures.measure(f"benchmarks.{module}", arguments.page, **options).failure:
            failed.append(name)
    report.write_page(arguments.page, list(figures.FIGURES))
    print(f"wrote {arguments.page} after {time.monotonic() - start:.0f} s")
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
