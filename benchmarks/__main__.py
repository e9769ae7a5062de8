"""Measure all figures of this engine, or those that are named, and write docs/benchmarks.md."""

import argparse
import sys
import time
from pathlib import Path

from benchmarks import figures, report


def main() -> None:
    """Measure one figure after the other; one that fails does not keep the others from being measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(figures.FIGURES))
    parser.add_argument("--page", type=Path, default=figures.PAGE, help="the page to write; results lie next to it")
    parser.add_argument("--rounds", type=int, help="how many rounds count, instead of each figure's own number")
    arguments = parser.parse_args()
    unknown = set(arguments.figures) - set(figures.FIGURES)
    if unknown:
        parser.error(f"there are no figures {', '.join(sorted(unknown))}; there are {', '.join(figures.FIGURES)}")
    start, failed = time.monotonic(), []
    for name in arguments.figures or figures.of_this_engine():
        module, options = figures.FIGURES[name]
        if arguments.rounds:
            options = {**options, "rounds": arguments.rounds}
        print(f"== {name}, after {time.monotonic() - start:.0f} s", flush=True)
        if figures.measure(f"benchmarks.{module}", arguments.page, **options).failure:
            failed.append(name)
    report.write_page(arguments.page, list(figures.FIGURES))
    print(f"{arguments.page} is written, after {time.monotonic() - start:.0f} s")
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
