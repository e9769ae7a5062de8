"""Trace a few training steps on two ranks, and draw docs/trace.png from the trace: ``python docs/draw_trace.py``."""

import json
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np

import synkhronos as synk

import theano  # isort: skip
import theano.tensor as T  # isort: skip

mpl.use("agg")
from matplotlib import pyplot as plt

RANKS, STEPS, WARM_UP = 2, 2, 5
COLOURS = {
    "function": "#4c78a8",
    "shuffle": "#72b7b2",
    "straggling": "#e45756",
    "collectives": "#f2a541",
    "transfers": "#b279a2",
    "control": "#bab0ac",
}


def trace(path):
    """Train a small network on random data, and write a trace of the last steps."""
    synk.fork(RANKS, use_gpu=False)
    rng = np.random.default_rng(0)
    x, y = T.fmatrix("x"), T.lvector("y")
    hidden, params = x, []
    for i, shape in enumerate([(784, 500), (500, 500), (500, 10)]):
        weights = theano.shared((rng.standard_normal(shape) / 28).astype("float32"), f"W{i}")
        hidden = T.dot(T.nnet.relu(hidden) if i else hidden, weights)
        params.append(weights)
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(hidden), y).mean()
    updates = [(param, param - np.float32(0.1) * gradient) for param, gradient in zip(params, T.grad(loss, params))]
    step = synk.function([x, y], loss, updates=updates, name="train_step")
    images = synk.data(rng.random((10000, 784), np.float32))
    labels = synk.data(rng.integers(0, 10, 10000))

    def train():
        step(images, labels, batch=rng.permutation(10000)[:2000])
        synk.all_reduce(params)

    for _ in range(WARM_UP):
        train()
    with synk.trace(path):
        for _ in range(STEPS):
            train()
    synk.close()


def draw(path, picture):
    """Draw the events of a trace: two training steps, and below them the first all-reduce, enlarged."""
    events = [event for event in json.loads(Path(path).read_text())["traceEvents"] if event["ph"] == "X"]
    calls = [event for event in events if event["name"] in ("train_step", "all_reduce")]
    ends = [event["ts"] + event["dur"] for event in calls if event["name"] == "all_reduce"]
    zero = calls[0]["ts"]
    figure, both = plt.subplots(2, figsize=(11, 2 + 1.6 * RANKS), layout="constrained")
    draw_events(both[0], events, zero, 0.0, ends[-1] - zero)
    margin = 0.3 * calls[1]["dur"]
    draw_events(both[1], events, zero, calls[1]["ts"] - margin - zero, ends[0] + margin - zero)
    both[1].set_xlabel("milliseconds")
    handles = [mpl.patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(picture, dpi=110)


def draw_events(axes, events, zero, start, stop):
    """Draw the events between two times: for each rank, one line of commands and one line of their phases."""
    for event in events:
        left, right = max(start, event["ts"] - zero) / 1e3, min(stop, event["ts"] + event["dur"] - zero) / 1e3
        row, width = 2 * event["pid"], right - left
        if width <= 0:
            continue
        if event["cat"] == "phase":
            axes.barh(row + 1, width, left=left, height=0.9, color=COLOURS[event["name"]])
        elif event["name"] not in ("train_step", "all_reduce"):  # on the controller, these contain the commands
            axes.barh(row, width, left=left, height=0.8, color="white", edgecolor="black", linewidth=0.8)
            if width > (stop - start) / 10e3:
                axes.text(left + width / 2, row, event["name"], ha="center", va="center", fontsize=8)
    axes.set_yticks(range(2 * RANKS), [line for rank in range(RANKS) for line in (f"rank {rank}: commands", "phases")])
    axes.invert_yaxis()
    axes.set_xlim(start / 1e3, stop / 1e3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trace(f"{folder}/trace.json")
        draw(f"{folder}/trace.json", Path(__file__).with_name("trace.png"))
