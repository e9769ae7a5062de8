"""Scaling with the number of ranks.

The figure repeats the paper's figures 2 and 3 for another model. Speeds are in images per second, relative to plain
Theano on one thread, which draws its minibatches in the same way. The minibatch is either fixed in all, or fixed for
each rank, so that it grows with the number of ranks. Steps run with and without shuffling, and with and without the
all-reduce of the gradients. In the panel relative to two ranks, two ranks count as 2. The dotted line is the maximum
that the cores allow.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import training
from benchmarks.harness import AVAILABLE, Contest
from benchmarks.peers import missing
from benchmarks.results import Result
from benchmarks.samples import Sample, ratio

ALL_CORES = True
BATCH = {"cnn": 500, "mlp": 500, "resnet": 16}
STEPS = {"cnn": 2, "mlp": 12, "resnet": 1}
UNIT = "images/s"


def measure(result: Result, model: str = "cnn", ranks: tuple[int, ...] = (), batch: int = 0, rounds: int = 3) -> None:
    """Measure training steps on 1, 2, 4, … ranks, up to twice the cores, or on `ranks`; `batch` is Theano's."""
    result.name += f"-{model}"
    result.title += f": {model}"
    gap = missing(training.needs(model))
    if gap:
        result.add("speed-up", result.title, gap)
        return
    batch, cores = batch or BATCH[model], len(AVAILABLE)
    ranks = tuple(ranks) or tuple(2**k for k in range((2 * cores).bit_length()))
    rows = max(training.ROWS[model], batch * max(ranks))
    base = training.theano(model, rows=rows)
    sessions = {n: training.synkhronos(model, n, rows) for n in ranks}
    turns = {}
    for shuffle in (True, False):
        parameters = {"batch": batch, "shuffle": shuffle, "steps": STEPS[model]}
        turns[label("Theano", shuffle)] = (base, parameters)
        for n, session in sessions.items():
            for grow in (True, False):
                for all_reduce in (True, False):
                    own = {**parameters, "batch": batch * (n if grow else 1), "all_reduce": all_reduce}
                    turns[label(n, shuffle, grow, all_reduce)] = (session, own)
    with Contest([base, *sessions.values()]) as contest:
        samples = contest.run(rounds, turns, warm_up=0)
    speeds = {name: speed(sample, turns[name][1]["batch"]) for name, sample in samples.items()}
    result.record("Speed", UNIT, speeds)
    result.facts = contest.facts
    result.parameters = {"ranks": list(ranks), "cores": cores, "batch": batch}
    for n in ranks:
        for grow, how in ((False, f"{batch} images in all"), (True, f"{batch} images for each")):
            if n > 1 or not grow:
                found = ratio(speeds[label(n, True, grow, True)], speeds[label("Theano", True)])
                result.add(f"{n}-{'grow' if grow else 'fixed'}", f"{model}, ranks: {n}, {how}, against Theano", found)


def label(who: int | str, shuffle: bool, grow: bool = False, all_reduce: bool = True) -> str:
    """Return the label of a turn; Theano and one rank have only one size of the minibatch."""
    if who in ("Theano", 1):
        return f"{'1 rank' if who == 1 else who}, {drawn(shuffle, all_reduce)}"
    return f"{who} ranks, {variant(shuffle, grow, all_reduce)}"


def variant(shuffle: bool, grow: bool, all_reduce: bool) -> str:
    """Return the name of an ablation."""
    return f"batch {'for each rank' if grow else 'in all'}, {drawn(shuffle, all_reduce)}"


def drawn(shuffle: bool, all_reduce: bool) -> str:
    """Return the name of an ablation without the size of the minibatch."""
    return f"{'shuffled' if shuffle else 'in order'}{'' if all_reduce else ', no all-reduce'}"


def speed(seconds: Sample, batch: int) -> Sample:
    """Convert seconds for a batch to images per second."""
    return Sample([[batch / number for number in numbers] for numbers in seconds.rounds])


def draw(result: Result, path: Path) -> None:
    """Draw figure 2, relative to Theano and to two ranks, and figure 3."""
    if not result.groups:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks, cores = result.parameters["ranks"], result.parameters["cores"]
    median = {name: one[0] for name, one in result.groups["Speed"]["contestants"].items()}
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 5.2), sharey=True)
    for grow, marker in ((True, "o"), (False, "s")):
        for shuffle, color in ((True, "tab:blue"), (False, "tab:orange")):
            for all_reduce, style in ((True, "-"), (False, "--")):
                base = median[label("Theano", shuffle)]
                ours = [median[label(n, shuffle, grow, all_reduce)] for n in ranks]
                name = variant(shuffle, grow, all_reduce)
                look = {"marker": marker, "color": color, "linestyle": style, "label": name, "fillstyle": "none"}
                left.plot(ranks, [speed / base for speed in ours], **look)
                if 2 in ranks:
                    middle.plot(ranks, [2 * speed / ours[ranks.index(2)] for speed in ours], **look)
                if grow and shuffle and all_reduce:
                    right.plot(ranks, [speed / base for speed in ours], **look)
    titles = ("Figure 2: relative to Theano", "Figure 2: relative to two ranks", "Figure 3: batch for each rank")
    for axes, title in zip((left, middle, right), titles):
        linear = [n for n in ranks if n <= cores]
        axes.plot(linear, linear, color="gray", linewidth=0.8, label="linear")
        axes.axhline(cores, color="gray", linestyle=":", label=f"{cores} cores")
        axes.set(title=title, xlabel="ranks", xticks=ranks, ylim=(0, None))
    left.set_ylabel("speed-up")
    left.legend(fontsize=7)
    figure.suptitle(f"{result.title}, {result.parameters['batch']} images")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
