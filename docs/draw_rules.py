"""Draw the pictures of training rules, and write their table: ``python docs/draw_rules.py``.

docs/slow_rank.svg shows the figure ``rules`` of docs/benchmarks.json. docs/convergence.svg and the table show
docs/convergence.json, which ``make convergence`` writes. In docs/howto/local_training.md, the script replaces what is
between the comments that begin and end each part. Without results, a part remains as it is.
"""

import json
import re
import textwrap
from pathlib import Path

import numpy as np
from matplotlib import pyplot

DOCS = Path(__file__).parent
PAGE = DOCS / "howto" / "local_training.md"
TITLES = {"cnn": "Digits, CNN", "dense": "Digits, dense network", "regression": "Regression"}
COLORS = {2: "tab:blue", 4: "tab:orange"}
CASES = {"two equal ranks": "0.65", "the second rank is slow": "tab:blue"}


def newest_figure(name):
    """Return the latest result of a benchmark, or None."""
    results = json.loads((DOCS / "benchmarks.json").read_text())
    found = [one for one in results if one["name"] == name and not one.get("failure")]
    return max(found, key=lambda one: one["environment"]["date"], default=None)


def put(part, *paragraphs):
    """Replace a part of the page."""
    filled = [one if one[0] in "|!" else textwrap.fill(" ".join(one.split()), 125) for one in paragraphs]
    text = "\n\n".join(filled) + "\n"
    begin, end = f"<!-- {part}: docs/draw_rules.py -->\n", f"<!-- end of {part} -->\n"
    page = PAGE.read_text()
    assert page.count(begin) == page.count(end) == 1, f"{PAGE} has no {part}"
    before, _, rest = page.partition(begin)
    PAGE.write_text(before + begin + text + end + rest.partition(end)[2])


def draw_slow_rank(result):
    """Draw the steps per second of both ranks, next to an equal and to a slow one."""
    groups = [result["groups"][f"Speed of the {rank} rank"]["contestants"] for rank in ("first", "second")]
    names = [re.sub(", two equal ranks$", "", label) for label in groups[0] if label.endswith("two equal ranks")]
    figure, panels = pyplot.subplots(1, 2, figsize=(7.5, 3), sharey=True)
    for axes, group, title in zip(panels, groups, ("First rank", "Second rank")):
        for number, (case, color) in enumerate(CASES.items()):
            found = np.array([group[f"{name}, {case}"][:3] for name in names])
            whiskers = np.abs(found[:, 1:] - found[:, :1]).T
            places = np.arange(len(names)) + 0.38 * number
            bars = axes.barh(places, found[:, 0], 0.36, xerr=whiskers, color=color, label=case, error_kw={"capsize": 2})
            axes.bar_label(bars, [f"{speed:.0f}" for speed in found[:, 0]], padding=6, fontsize=7)
        axes.set(title=title, xlabel="steps per second", yticks=np.arange(len(names)) + 0.19, yticklabels=names)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, ncol=2, loc="lower left")
    save(figure, "slow_rank.svg")
    before = """
        Two ranks train a convolutional network, and the second one has six times as many rows in each step. With
        rules that make ranks wait for each other, the first rank becomes as slow as the second. With a centre and
        with gossip, it does not wait:
    """
    picture = "![Steps per second of two ranks, of which one is slow](../slow_rank.svg)"
    after = """
        The picture shows medians and quartiles. The [benchmarks](../benchmarks.md) have the numbers, the bytes that
        rules send, and the time of a step over a link of 100 Mbit/s.
    """
    put("slow rank", before, picture, after)


def draw_convergence(entries):
    """Draw the score of each seed and the means, by rule."""
    problems = [problem for problem in TITLES if any(one["problem"] == problem for one in entries)]
    figure, panels = pyplot.subplots(
        1, len(problems), figsize=(3 + 2.2 * len(problems), 4.6), sharey=True, squeeze=False
    )
    for axes, problem in zip(panels[0], problems):
        for number, entry in enumerate([one for one in entries if one["problem"] == problem]):
            color, label = COLORS.get(entry["ranks"], "tab:green"), f"{entry['ranks']} ranks"
            for row, rule in enumerate(entry["rules"].values()):
                scores = 100 * np.array([score for score in rule["scores"] if score > 0])
                place = row + 0.25 * number
                axes.plot(scores, np.full(len(scores), place), ".", color=color, alpha=0.4, markersize=4)
                mean = scores.mean() if len(scores) == len(rule["scores"]) else np.nan  # some have diverged
                axes.plot(mean, place, "|", color=color, markersize=9, label=None if row else label)
            axes.set_yticks(range(len(entry["rules"])), entry["rules"], fontsize=7)
        axes.set_title(TITLES[problem], fontsize=9)
        axes.set_xlabel("% of the variance" if problem == "regression" else "accuracy in %", fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].invert_yaxis()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), fontsize=7, loc="lower left")
    save(figure, "convergence.svg")


def description(entry):
    """Return the sentences before the table, from the settings of one entry."""
    backend = entry["backend"].capitalize()
    return f"""
        There are 1,500 rows, {entry["epochs"]} epochs, {entry["batch_size"]} rows in each step of a rank, Nesterov
        momentum of 0.9 and {entry["seeds"]} seeds, on {backend}. The table has means and standard deviations over
        the seeds, on 297 other rows: accuracies, and for the regression the share of the variance that it explains.
        Exchanges are those of the rank that made most, with the convolutional network. With the same number of
        epochs, four ranks make half as many steps as two. Where a score is not above 0, the training diverges.
    """


def table(entries):
    """Return the table of means and standard deviations over the seeds, and of the exchanges with the CNN."""
    entries = sorted(entries, key=lambda one: (one["ranks"], list(TITLES).index(one["problem"])))
    titles = [f"{TITLES[one['problem']]}, {one['ranks']} ranks" for one in entries]
    exchanges = [one for one in entries if one["problem"] == "cnn"]
    titles += [f"exchanges, {one['ranks']} ranks" for one in exchanges]
    lines = [f"| rule | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    for name in entries[0]["rules"]:
        cells = [100 * np.array(one["rules"][name]["scores"]) for one in entries]
        cells = [f"{one.mean():.1f} ± {one.std():.1f} %" if np.all(one > 0) else "diverges" for one in cells]
        cells += [f"{one['rules'][name]['exchanges']:.0f}" for one in exchanges]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def save(figure, name):
    """Write a picture to the folder of the documentation."""
    figure.tight_layout()
    pyplot.rcParams["svg.hashsalt"] = "synkhronos"  # so that equal results give an equal file
    figure.savefig(DOCS / name, metadata={"Date": None})
    pyplot.close(figure)


def main():
    """Draw what there are results of."""
    result, scores = newest_figure("rules"), DOCS / "convergence.json"
    if result is not None:
        draw_slow_rank(result)
    if scores.exists():
        entries = json.loads(scores.read_text())
        draw_convergence(entries)
        picture = "![The scores of each rule and seed](../convergence.svg)"
        put("convergence", description(entries[0]), table(entries), picture)


if __name__ == "__main__":
    main()
