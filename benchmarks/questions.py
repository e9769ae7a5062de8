"""Questions of users, which the first page of the benchmarks answers with figures of the results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.results import Result, number


class Times(NamedTuple):
    r"""Times of several contestants, one column for each.

    Parameters
    ----------
    figures : list of (name, pattern, label)
        Figures, a regular expression that the titles of their groups match in full, and the first entry of the row, in
        which ``\1`` is a part of the title.
    columns : list of str
        Titles of the columns, which are names of contestants; `NAMES` has further ones.
    """

    figures: Sequence[tuple[str, str, str]]
    columns: Sequence[str]


class Ratios(NamedTuple):
    """Ratios for several programs and numbers of rows, one column for each number.

    Parameters
    ----------
    figure : str
    pattern : str
        Regular expression for the keys of the figure's rows; its groups are the program and the number of rows.
    """

    figure: str
    pattern: str


class Question(NamedTuple):
    """A question, what was measured, and the figures that answer it."""

    title: str
    method: str
    answer: Times | Ratios


OURS = "Synkhronos, 2 ranks"
#: Names of contestants that are shown in a column, the first of which takes part.
NAMES = {OURS: ("Synkhronos, 2 ranks, exact", "Exact, 2 ranks", OURS)}
NAMES |= {name: (f"nutpie's function, {name}", name) for name in ("PyMC alone", "1 rank", "2 ranks")}
QUESTIONS = (
    Question(
        "Is it faster than threads, and than PyTorch?",
        "Milliseconds of a training step on two cores: one process with threads, two processes of DDP, exact functions "
        "on two ranks.",
        Times(
            [
                ("cnn", "Step of 500 images", "CNN of the MNIST demo, 500 images"),
                ("mlp", "Step of (500|1,000) images", r"MLP 784-800-800-10, \1 images"),
                ("lstm", "Step of 64 rows", "LSTM, 64 rows"),
            ],
            ["Theano, 1 thread", "Theano, 2 threads", "PyTorch, 2 threads", "PyTorch DDP, 2 processes", OURS],
        ),
    ),
    Question(
        "Does it become slower with few rows?",
        "The time of a call of an exact function on two ranks, whose plan is chosen by cost, divided by that of Theano "
        "with two threads of BLAS. `mlp` is a step with 784-800-800-10 units, `tiny` a function of a few numbers.",
        Ratios("plans", r"plans/([a-z-]+)-(\d+)"),
    ),
    Question(
        "What does a PyMC model gain?",
        "Milliseconds of an evaluation of the log-probability and its gradient, in the function that nutpie uses, if "
        "its rows are divided. (By default they are not, where one process is faster.) PyMC has one thread of BLAS. "
        "JAX, whose functions numpyro and blackjax use, has two.",
        Times(
            [("pytensor_pymc", "([0-9,]+ rows): (.*)", r"\2, \1")],
            ["PyMC alone", "1 rank", "2 ranks", "JAX"],
        ),
    ),
    Question(
        "How fast do four chains sample?",
        "Milliseconds for a gradient, of all chains together, on two cores. The model is a regression with 20 "
        "covariates and 8 groups.",
        Times(
            [("pytensor_pymc_chains", "([0-9,]+ rows): a gradient", r"\1")],
            ["nutpie, alone", "nutpie, 2 ranks", "PyMC's NUTS, 2 ranks", "numpyro", "blackjax"],
        ),
    ),
    Question(
        "What does a second node bring?",
        "Milliseconds of a training step of 500 images on two hosts (network namespaces of one computer) with one core "
        "each, whose link has 1 Gbit/s. In "
        "the first two columns, one host computes half of the images, or all, without an exchange.",
        Times(
            [("nodes", "Step of the (MLP|CNN), 500 images, 1 Gbit/s", r"\1")],
            [
                "Theano, 1 thread, 250 images",
                "Theano, 1 thread, 500 images",
                "PyTorch DDP, 2 hosts × 1 process",
                "Synkhronos, 2 hosts × 1 rank",
                "Synkhronos, 2 hosts × 1 rank, bfloat16",
            ],
        ),
    ),
    Question(
        "What does a large network take?",
        "Milliseconds of a step of a network of 25 million parameters with Adam. The parameters and Adam's state exist "
        "once, whatever the number of ranks.",
        Times(
            [("one_copy", "Step of 64 rows", "64 rows")],
            ["Theano", "1 rank", "2 ranks", "4 ranks", "PyTorch, fused", "DDP, fused"],
        ),
    ),
    Question(
        "What does a collective cost?",
        "Milliseconds of an all-reduce of so many numbers of float32 over two processes.",
        Times([("all_reduce", "(.*)", r"\1")], ["MPICH", "gloo", "DeepSpeed", "Synkhronos, 2 ranks"]),
    ),
    Question(
        "What does a call cost?",
        "Microseconds of a call of a function that does nearly nothing. Eight ranks share two cores.",
        Times([("call", "(.*)", r"\1")], ["Theano", "Synkhronos, 2 ranks", "Synkhronos, 8 ranks"]),
    ),
)


def newest(results: Iterable[Result]) -> dict[str, Result]:
    """Return the latest result of each figure that was measured."""
    dated = sorted((one for one in results if not one.failure), key=lambda one: str(one.environment.get("date", "")))
    return {one.name: one for one in dated}


def table(answer: Times | Ratios, results: dict[str, Result]) -> tuple[list[list[str]], list[Result]]:
    """Return the rows of a table, the first of which is its head, and the results that it shows."""
    rows = _times(answer, results) if isinstance(answer, Times) else _ratios(answer, results)
    names = [name for name, *_ in answer.figures] if isinstance(answer, Times) else [answer.figure]
    return rows, [results[name] for name in dict.fromkeys(names) if name in results]


def _times(answer: Times, results: dict[str, Result]) -> list[list[str]]:
    rows = [["", *answer.columns]]
    for name, pattern, label in answer.figures:
        for title, panel in results[name].groups.items() if name in results else ():
            found = re.fullmatch(pattern, title)
            if found:
                medians = {who: measured[0] for who, measured in panel["contestants"].items()}
                named = [[who for who in NAMES.get(column, (column,)) if who in medians] for column in answer.columns]
                rows.append([found.expand(label), *(number(medians[who[0]]) if who else "" for who in named)])
    return rows


def _ratios(answer: Ratios, results: dict[str, Result]) -> list[list[str]]:
    found: dict[str, dict[int, float]] = {}
    for row in results[answer.figure].rows if answer.figure in results else ():
        key = re.fullmatch(answer.pattern, row.key)
        if key and row.value is not None:
            found.setdefault(key[1], {})[int(key[2])] = row.value
    columns = sorted({n_rows for values in found.values() for n_rows in values})
    rows = [["", *(f"{n_rows:,} rows" for n_rows in columns)]]
    for program, values in found.items():
        rows.append([program, *(number(values[n_rows]) if n_rows in values else "" for n_rows in columns)])
    return rows
