"""Draw docs/speed.svg, which compares speeds in docs/benchmarks.json: ``python docs/draw_speed.py``."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot

DOCS = Path(__file__).parent
OURS, PEER, ENGINE = "tab:blue", "tab:orange", "0.65"


class Panel(NamedTuple):
    """A comparison: its title, the figure and group in the file, and bars, each a label, a contestant and a color."""

    title: str
    figure: str
    group: str
    bars: list[tuple[str, str, str]]


PANELS = [
    Panel(
        "PyMC, 1 million rows: an evaluation",
        "pytensor_pymc",
        "1,000,000 rows: linear regression.*",
        [
            ("PyMC (nutpie's function)", "nutpie's function, PyMC alone", ENGINE),
            ("JAX (numpyro, blackjax)", "JAX", PEER),
            ("Synkhronos", "nutpie's function, 2 ranks", OURS),
        ],
    ),
    Panel(
        "PyMC, 200 thousand rows: four chains",
        "pytensor_pymc_chains",
        "200,000 rows: a gradient",
        [
            ("PyMC with nutpie", "nutpie, alone", ENGINE),
            ("numpyro", "numpyro", PEER),
            ("blackjax", "blackjax", PEER),
            ("Synkhronos with nutpie", "nutpie, 2 ranks", OURS),
        ],
    ),
    Panel(
        "CNN, 500 images: a training step",
        "cnn",
        "Step of 500 images",
        [
            ("Theano, 2 threads", "Theano, 2 threads", ENGINE),
            ("PyTorch, 2 threads", "PyTorch, 2 threads", PEER),
            ("PyTorch DDP, 2 processes", "PyTorch DDP, 2 processes", PEER),
            ("Synkhronos", "Synkhronos, 2 ranks, exact", OURS),
        ],
    ),
    Panel(
        "MLP with 25 million parameters, Adam, 64 rows: a training step",
        "one_copy",
        "Step of 64 rows",
        [
            ("Theano, 2 threads", "Theano", ENGINE),
            ("PyTorch, 2 threads", "PyTorch, fused", PEER),
            ("PyTorch DDP, 2 processes", "DDP, fused", PEER),
            ("Synkhronos", "2 ranks", OURS),
        ],
    ),
]


def newest(name):
    """Return the latest result of a figure."""
    found = [one for one in json.loads((DOCS / "benchmarks.json").read_text()) if one["name"] == name]
    return max(found, key=lambda one: one["environment"]["date"])


figure, rows = pyplot.subplots(
    len(PANELS), figsize=(6.5, 5.6), gridspec_kw={"height_ratios": [len(panel.bars) + 1 for panel in PANELS]}
)
processors = {}
for axes, panel in zip(rows, PANELS):
    result = newest(panel.figure)
    (group,) = [one for title, one in result["groups"].items() if re.fullmatch(panel.group, title)]
    times = [group["contestants"][contestant][0] for _, contestant, _ in panel.bars]
    speeds = [times[0] / one for one in times]
    processors[result["environment"]["processor"]] = None
    bars = axes.barh([label for label, *_ in panel.bars], speeds, color=[bar[2] for bar in panel.bars], height=0.7)
    axes.bar_label(bars, [f"{speed:.2f}×  ({one:.3g} ms)" for speed, one in zip(speeds, times)], padding=4, fontsize=8)
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.set_xlim(0, 1.35 * max(speeds))
    axes.set_xticks([])
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
caption = f"Speed relative to the first bar, and medians of times; two cores of {'; '.join(processors)}"
figure.text(0.01, 0.01, caption, fontsize=6, color="0.35")
figure.tight_layout(rect=(0, 0.03, 1, 1))
pyplot.rcParams["svg.hashsalt"] = "synkhronos"  # so that equal results give an equal file
figure.savefig(DOCS / "speed.svg", metadata={"Date": None})
