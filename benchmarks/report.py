"""The page docs/benchmarks.md and the pictures, made of the results' JSON and of `remarks.json` alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import BUSY
from benchmarks.results import Result, Row, load

REMARKS = Path(__file__).with_name("remarks.json")
HEAD = """# Benchmarks

Written by `make bench`; do not edit. Each figure was taken in one run on one machine, its contestants in turns, each in
processes of its own. Numbers are medians, ratios are ratios of medians; in brackets are the quartiles: of ratios and
differences over the rounds, of all others over the single measurements. Targets are for two cores. `python -m
benchmarks.NAME` takes one figure alone.

From PyPI, PyTorch for Linux brings CUDA along, several GB; with
`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` before `make bench`, pip takes the build for CPUs alone.
"""
MARKS = {"reached": "reached", "missed": "**missed**", "gap": "*gap*", "": ""}


def folder_of(page: Path) -> Path:
    """Give the folder of results and pictures that belongs to a page."""
    return page.with_suffix("")


def number(value: float) -> str:
    """Give a number with three digits or so."""
    if value == 0 or 0.01 <= abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if 10 <= abs(value) < 100 else f"{value:,.3g}" if abs(value) < 1 else f"{value:,.0f}"


def target(row: Row) -> str:
    """Give a row's target in words."""
    return "" if row.limit is None else f"{'≥' if row.at_least else '≤'} {number(row.limit)} {row.unit}"


def reached(row: Row) -> str:
    """Give what a row reached, with its spread, or why it was not measured."""
    if row.value is None or row.low is None or row.high is None:
        return row.gap or ""
    return f"{number(row.value)} {row.unit} ({number(row.low)}–{number(row.high)})"


def write_page(page: Path, order: Sequence[str] = ()) -> None:
    """Write the page from all results in its folder; figures named in `order` come first, in that order."""
    results = {path.stem: load(path) for path in sorted(folder_of(page).glob("*.json"))}
    names = [name for name in order if name in results] + [name for name in results if name not in order]
    page.write_text(make_page([results[name] for name in names], json.loads(REMARKS.read_text()), page.stem))


def make_page(results: Sequence[Result], remarks: dict[str, str], folder: str) -> str:
    """Give the page's text.

    Parameters
    ----------
    results : list of Result
    remarks : dict of str
        Causes of missed targets by the rows' keys. Those of targets that are not missed are left out.
    folder : str
        Where the pictures lie, relative to the page.
    """
    lines = [HEAD, "| what | target | reached | |", "| --- | --- | --- | --- |"]
    for result in results:
        lines.append(f"| **[{result.title}](#{anchor(result.title)})** | | | |")
        lines += [f"| {r.what} | {target(r)} | {reached(r)} | {MARKS[r.verdict]} |" for r in result.rows]
        if result.failure:
            lines.append(f"| not measured | | {result.failure} | *failed* |")
    missed = [row for result in results for row in result.rows if row.verdict == "missed"]
    if missed:
        lines += ["", "## What falls short, and why", ""]
        lines += [f"- {row.what} ({reached(row)}): {remarks.get(row.key, 'not yet explained.')}" for row in missed]
    for result in results:
        lines += section(result, folder)
    return "\n".join(lines) + "\n"


def section(result: Result, folder: str) -> list[str]:
    """Give a figure's part of the page: the method, the machine, the numbers and the picture."""
    lines = ["", f"## {result.title}", "", result.method, "", machine(result)]
    for title, panel in result.groups.items():
        lines += ["", f"| {title} ({panel['unit']}) | median | quartiles | measured |", "| --- | ---: | ---: | ---: |"]
        for name, one in panel["contestants"].items():
            low, high = one["quartiles"]
            spread = f"{number(low)}–{number(high)}"
            lines.append(f"| {name} | {number(one['median'])} | {spread} | {one['numbers']} |")
        lines += [f"| {name} | *gap* | {gap} | |" for name, gap in panel["gaps"].items()]
    if result.groups:
        lines += ["", f"![{result.title}]({folder}/{result.name}.png)"]
    return lines


def machine(result: Result) -> str:
    """Tell where and when a figure was taken, and whether the machine had other work."""
    record = dict(result.environment)
    busy = record.pop("busy", 0)
    text = f"{record.pop('date', '')}: " + ", ".join(f"{name} {value}" for name, value in record.items())
    warning = f" **The machine was {busy} % busy with other work before the start.**" if busy > BUSY else ""
    return f"Measured {text}.{warning}"


def anchor(title: str) -> str:
    """Give a heading's anchor as forges and MyST make it."""
    kept = "".join(char for char in title.lower() if char.isalnum() or char in " -_")
    return kept.replace(" ", "-")


def draw(result: Result, path: Path) -> None:
    """Draw the medians of each group as bars, with the quartiles as whiskers."""
    if not result.groups:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1 + len(panel["contestants"]) for panel in result.groups.values()]
    figure, rows = pyplot.subplots(
        len(heights), figsize=(8, 0.6 + 0.36 * sum(heights) + 0.5 * len(heights)), squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for (axes,), (title, panel) in zip(rows, result.groups.items()):
        names = list(panel["contestants"])
        medians = [panel["contestants"][name]["median"] for name in names]
        quartiles = [panel["contestants"][name]["quartiles"] for name in names]
        whiskers = [
            [median - low for median, (low, _) in zip(medians, quartiles)],
            [high - median for median, (_, high) in zip(medians, quartiles)],
        ]
        ours = [name.startswith("Synkhronos") for name in names]
        colors = ["tab:blue" if own or not any(ours) else "tab:gray" for own in ours]
        bars = axes.barh(names, medians, xerr=whiskers, color=colors, height=0.6, error_kw={"capsize": 3})
        axes.bar_label(bars, [number(median) for median in medians], padding=8, fontsize=8)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(panel["unit"], fontsize=8)
    figure.suptitle(result.title)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
