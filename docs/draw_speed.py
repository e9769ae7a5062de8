"""Draw docs/speed.svg, which compares training steps in docs/benchmarks.json: ``python docs/draw_speed.py``."""

import json
from pathlib import Path

from matplotlib import pyplot

DOCS = Path(__file__).parent
FIGURES = {"mlp": "MLP 784-800-800-10", "cnn": "CNN of the MNIST demo"}
BEGIN = "Theano, 1 thread"
CONTESTANTS = {
    BEGIN: "0.75",
    "Theano, 2 threads": "0.6",
    "PyTorch DDP, 2 processes": "tab:orange",
    "Synkhronos, 2 ranks": "tab:blue",
}


def newest(name):
    """Return the medians of the latest steps of 500 images of a figure, and the processor's name."""
    found = [one for one in json.loads((DOCS / "benchmarks.json").read_text()) if one["name"] == name]
    result = max(found, key=lambda one: one["environment"]["date"])
    steps = result["groups"]["Step of 500 images"]["contestants"]
    return {contestant: numbers[0] for contestant, numbers in steps.items()}, result["environment"]["processor"]


figure, axes = pyplot.subplots(len(FIGURES), figsize=(6.5, 3.8))
for one, (name, title) in zip(axes, FIGURES.items()):
    steps, processor = newest(name)
    speeds = [steps[BEGIN] / steps[contestant] for contestant in CONTESTANTS]
    bars = one.barh(list(CONTESTANTS), speeds, color=list(CONTESTANTS.values()), height=0.65)
    labels = [f"{speed:.2f}×  ({steps[key]:.0f} ms)" for key, speed in zip(CONTESTANTS, speeds)]
    one.bar_label(bars, labels, padding=4, fontsize=9)
    one.set_title(title, fontsize=10, loc="left")
    one.set_xlim(0, 3)
    one.set_xticks([])
    one.invert_yaxis()
    one.spines[["top", "right", "bottom"]].set_visible(False)
caption = f"Speed of a step of 500 images against Theano on one thread; two cores, {processor}"
figure.text(0.01, 0.01, caption, fontsize=7, color="0.35")
figure.tight_layout(rect=(0, 0.05, 1, 1))
pyplot.rcParams["svg.hashsalt"] = "synkhronos"  # so that equal results give an equal file
figure.savefig(DOCS / "speed.svg", metadata={"Date": None})
