"""Print tables for docs/pymc.md: how many of the tested PyMC models are divided, and why others are not.

The models, with how they are divided, are in ``pymc_models.py`` and ``pymc_gallery.py`` of ``tests/helpers``. The tests
assert it from the partition report (`make test-pymc`); they need not run before:

    .venv-pytensor/bin/python docs/tabulate_models.py

A model is counted once for each way in which its rows get their parameters.
"""

import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import pymc_gallery  # noqa: F401
from pymc_models import CASES, DIVISIONS, FULL, GATHERED, PYMC, ROWS

KINDS = {
    "univariate": "each univariate distribution",
    "modified": "`Censored`, `Truncated`, `Mixture`, `CustomDist`, `Potential`",
    "further modified": "the same, of all other distributions",
    "multivariate": "vectors in rows",
    "time series": "time series",
    "Gaussian process": "Gaussian processes",
    "gallery": "well-known models",
}
TITLES = {
    ROWS: "by rows",
    GATHERED: "by rows, the gradient is gathered",
    FULL: "in full on every rank",
    PYMC: "by PyMC alone",
}


def size(case):
    """Return how often a model counts."""
    return len(case.ways) or 1


def table_of_counts():
    """Return the lines of a table of the numbers of models, by kind and division."""
    counts = collections.Counter()
    for case in CASES:
        counts[case.kind, case.division] += size(case)
        counts["all", case.division] += size(case)
    lines = [f"| models | {' | '.join(TITLES.values())} |", "| --- " * (1 + len(DIVISIONS)) + "|"]
    for kind, title in {**KINDS, "all": "all"}.items():
        numbers = [counts[kind, division] for division in DIVISIONS]
        lines.append(f"| {title} | {' | '.join(map(str, numbers))} |")
    return lines


def share():
    """Return a sentence about the models whose likelihood is a product over rows."""
    products = [case for case in CASES if case.is_product]
    n = sum(map(size, products))
    n_divided = sum(size(case) for case in products if case.division in (ROWS, GATHERED))
    divided = f"{n_divided} ({n_divided / n:.0%}) are divided by rows"
    return f"Of {n} models whose likelihood is a product over rows, {divided}."


def table_of_reasons():
    """Return the lines of a table of the models that are not divided by rows alone, with the reasons."""
    models = collections.defaultdict(list)
    for case in CASES:
        if case.division != ROWS:
            models[case.division, case.reason].append(case.name)
    lines = ["| how | why | models |", "| --- | --- | --- |"]
    for division, reason in sorted(models, key=lambda one: (DIVISIONS.index(one[0]), one[1])):
        lines.append(f"| {TITLES[division]} | {reason} | {', '.join(models[division, reason])} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*table_of_counts(), "", share(), "", *table_of_reasons()]))
