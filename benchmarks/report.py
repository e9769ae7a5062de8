"""Pages and pictures of the benchmarks in docs/, made from docs/benchmarks.json and `remarks.json` alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import BUSY
from benchmarks.questions import QUESTIONS, newest, table
from benchmarks.results import Result, Row, load, number

REMARKS = Path(__file__).with_name("remarks.json")
HEAD = """# Benchmarks

Written by `make bench`; do not edit. Each row was measured in one run on one machine, its contestants in turns, each
in processes of its own. The numbers are medians. Below each table, a link leads to the method, the machine, quartiles,
targets, and what falls short. Empty cells were not measured.
"""
TAIL = """
## All measurements

Each kind of processor has a page, because kernels of BLAS libraries, caches and memory differ:
"""
DETAILS = """
Written by `make bench`; do not edit. Each figure was taken in one run on one machine, its contestants in turns, each in
processes of its own. Numbers are medians, ratios are ratios of medians; in brackets are the quartiles: of ratios and
differences over the rounds, of all others over the single measurements. Targets are for two cores. A bound is what two
processes that do nothing else reached in the same run. `python -m benchmarks NAME` takes one figure alone. Those on
PyTensor are written by `make bench-pytensor`. Those of several machines need root: hosts are network namespaces.

From PyPI, PyTorch for Linux brings CUDA along, several GB; with
`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` before `make bench`, pip takes the build for CPUs alone.
"""
MARKS = {"reached": "reached", "missed": "**missed**", "gap": "*gap*", "": ""}


def folder_of(page: Path, processor: str) -> Path:
    """Return the folder of a page's pictures for a kind of processor."""
    return page.with_suffix("") / anchor(processor)


def target(row: Row) -> str:
    """Format a row's target."""
    return "" if row.limit is None else f"{'≥' if row.at_least else '≤'} {number(row.limit)} {row.unit}"


def reached(row: Row) -> str:
    """Format a row's value with its spread, or return the reason why it was not measured."""
    if row.value is None or row.low is None or row.high is None:
        return row.gap or ""
    return f"{number(row.value)} {row.unit} ({number(row.low)}–{number(row.high)})"


def write_page(page: Path, order: Sequence[str] = ()) -> None:
    """Write the page, and one for each kind of processor, from the JSON file next to it.

    Figures named in `order` come first, in that order.
    """
    ranks = {name: rank for rank, name in enumerate(order)}
    results: dict[str, list[Result]] = {}
    for result in sorted(load(page.with_suffix(".json")), key=lambda one: ranks.get(one.name, len(ranks))):
        results.setdefault(result.processor, []).append(result)
    remarks = json.loads(REMARKS.read_text())
    page.write_text(make_page(results, page.stem))
    for processor, figures in results.items():
        folder = folder_of(page, processor)
        folder.parent.mkdir(exist_ok=True)
        folder.with_suffix(".md").write_text(make_details(figures, folder.name, remarks))


def make_page(results: dict[str, list[Result]], folder: str) -> str:
    """Return the text of the first page, which answers questions.

    Parameters
    ----------
    results : dict of list of Result
        Results for each kind of processor.
    folder : str
        The folder of the processors' pages, next to the page.
    """
    lines = [HEAD]
    latest = newest(one for figures in results.values() for one in figures)
    for question in QUESTIONS:
        rows, shown = table(question.answer, latest)
        if len(rows) > 1:
            lines += [f"## {question.title}", "", question.method, "", *_lines(rows), ""]
            links = [f"[{one.title}]({folder}/{anchor(one.processor)}.md#{anchor(one.title)})" for one in shown]
            processors = " and ".join(dict.fromkeys(one.processor for one in shown))
            busy = max(one.environment.get("busy", 0) for one in shown)
            warning = f" The machine was {busy} % busy with other work before the start." if busy > BUSY else ""
            lines += [f"{', '.join(links)}. Measured on {processors}.{warning}", ""]
    lines.append(TAIL)
    lines += [f"- [{processor}]({folder}/{anchor(processor)}.md)" for processor in sorted(results)]
    toctree = [f"{folder}/{anchor(processor)}" for processor in sorted(results)]
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", *toctree, "```", ""])


def make_details(figures: Sequence[Result], folder: str, remarks: dict[str, str]) -> str:
    """Return the text of the page of a kind of processor.

    Parameters
    ----------
    figures : list of Result
    folder : str
        The folder of the pictures, next to the page.
    remarks : dict of str
        Causes of missed targets by the rows' keys. Those of targets that are not missed are left out.
    """
    lines = [f"# {figures[0].processor}", DETAILS, *overview(figures, remarks)]
    for result in figures:
        lines += section(result, folder)
    return "\n".join([*lines, ""])


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"| --- |{' ---: |' * (len(rows[0]) - 1)}", *others]


def overview(results: Sequence[Result], remarks: dict[str, str]) -> list[str]:
    """Return the table of a kind of processor, and the causes of missed targets."""
    lines = ["| what | target | reached | |", "| --- | --- | --- | --- |"]
    for result in results:
        lines.append(f"| **{result.title}** | | | |")
        lines += [f"| {r.what} | {target(r)} | {reached(r)} | {MARKS[r.verdict]} |" for r in result.rows]
        if result.failure:
            lines.append(f"| not measured | | {result.failure} | *failed* |")
    missed = [row for result in results for row in result.rows if row.verdict == "missed"]
    if missed:
        lines += ["", "What falls short, and why:", ""]
        lines += [f"- {row.what} ({reached(row)}): {remarks.get(row.key, 'not yet explained.')}" for row in missed]
    return lines


def section(result: Result, folder: str) -> list[str]:
    """Return a figure's section of the page: the method, the machine, the numbers and the picture."""
    lines = ["", f"## {result.title}", "", result.method, "", machine(result)]
    for title, panel in result.groups.items():
        lines += ["", f"| {title} ({panel['unit']}) | median | quartiles | measured |", "| --- | ---: | ---: | ---: |"]
        bounds = {f"*bound: {name}*": one for name, one in panel["bounds"].items()}
        for name, one in {**panel["contestants"], **bounds}.items():
            median, low, high, count = one
            lines.append(f"| {name} | {number(median)} | {number(low)}–{number(high)} | {count} |")
        lines += [f"| {name} | *gap* | {gap} | |" for name, gap in panel["gaps"].items()]
    for title, one in result.tables.items():
        lines += ["", f"{title}:", "", f"| {' | '.join(one['columns'])} |", "| ---: " * len(one["columns"]) + "|"]
        lines += [
            f"| {' | '.join(number(n) if isinstance(n, float) else str(n) for n in row)} |" for row in one["rows"]
        ]
    if result.groups:
        lines += ["", f"![{result.title}]({folder}/{result.name}.png)"]
    return lines


def machine(result: Result) -> str:
    """Describe when and on which machine a figure was measured, the BLAS kernels, and other load if there was any."""
    record = dict(result.environment)
    busy = record.pop("busy", 0)
    text = f"{record.pop('date', '')}: " + ", ".join(f"{name} {value}" for name, value in record.items())
    kernels = "; ".join(f"{kernels} ({', '.join(names)})" for kernels, names in result.kernels.items())
    warning = f" **The machine was {busy} % busy with other work before the start.**" if busy > BUSY else ""
    return f"Measured {text}.{f' Matrices are multiplied by {kernels}.' if kernels else ''}{warning}"


def anchor(title: str) -> str:
    """Return the anchor that forges and MyST give a heading."""
    kept = "".join(char for char in title.lower() if char.isalnum() or char in " -_")
    return kept.replace(" ", "-")


def draw(result: Result, path: Path) -> None:
    """Draw the medians of each group as bars, with the quartiles as whiskers."""
    if not result.groups:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1 + len(panel["contestants"]) + len(panel["bounds"]) for panel in result.groups.values()]
    figure, rows = pyplot.subplots(
        len(heights), figsize=(8, 0.6 + 0.36 * sum(heights) + 0.5 * len(heights)), squeeze=False,
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for (axes,), (title, panel) in zip(rows, result.groups.items()):
        bounds = {f"bound: {name}": one for name, one in panel["bounds"].items()}
        measured = {**panel["contestants"], **bounds}
        names = list(measured)
        medians = [median for median, *_ in measured.values()]
        whiskers = [
            [median - low for median, low, _, _ in measured.values()],
            [high - median for median, _, high, _ in measured.values()],
        ]
        ours = [name.startswith("Synkhronos") for name in names]
        colors = ["tab:blue" if own or not any(ours) else "tab:gray" for own in ours]
        colors[len(panel["contestants"]) :] = ["tab:green"] * len(bounds)
        bars = axes.barh(names, medians, xerr=whiskers, color=colors, height=0.6, error_kw={"capsize": 3})
        axes.bar_label(bars, [number(median) for median in medians], padding=8, fontsize=8)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(panel["unit"], fontsize=8)
    figure.suptitle(result.title)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
