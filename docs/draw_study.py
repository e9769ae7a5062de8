"""Draw the pictures of docs/study.md, and print its table: ``python docs/draw_study.py``.

Networks are lists of layers, whose seconds follow from the roofline. A constant in capital letters is an assumption
about hardware, with its source, or a choice of the study.
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from synkhronos._costs.kernels import Roofline, RowTimes
from synkhronos._costs.predict import Cluster, Link, Rule, Workload, from_first, predict_step

DOCS = Path(__file__).parent

#: A node has one of these. NVIDIA, Tesla V100 (SXM2) datasheet: 15.7 TFLOP/s for float32, 900 GB/s.
GPU = Roofline(15.7e12, 900e9)
#: Seconds of a message without bytes: α of "1 Gbit/s" between two hosts of one machine, in
#: docs/benchmarks/intelr-xeonr-processor-family-6-model-167-avx512f.md.
LATENCY = 190e-6
#: Links of nodes, in Gbit/s: Ethernet of three generations. Their whole rate is taken.
GIGABITS = (1, 10, 100)
#: Times that an elementwise function of an output is read or written in a step: batch normalization reads its input
#: twice and writes once, the next activation reads and writes; the backward passes read four arrays and write two. The
#: forward pass has half of them, rounded down.
PASSES = 11
#: Arrays of the size of the weights that an update by momentum reads or writes: three, and two results.
UPDATE_PASSES = 5
#: Numbers in the exchange of PyMC's regression, with 20 covariates and 8 groups: a bound. Latency decides, not these.
REGRESSION = 64
#: Part of the MLP's step after which its first gradients exist: a choice of the study, not measured.
MLP_FIRST = 0.51
#: Bytes of gradients in the first message.
FIRST = 1 << 20
FLOAT = 4  # bytes
NODES = (1, 2, 4, 8, 16, 32, 64)
#: Averages of parameters in the background, as with ``rules.DiLoCo(every=50, delay=...)``.
RULE = Rule("delayed", 50)


class Layer(NamedTuple):
    """A layer with weights: multiplications and additions for one row, numbers in its input and output, and weights."""

    flops: float
    n_in: int
    n_out: int
    n_weights: int
    passes: int = PASSES


def convolution(n_in, n_out, length, size_in, size_out):
    """Return a square convolution without bias: channels, length of the filter, and lengths of the images."""
    n_weights = length * length * n_in * n_out
    return Layer(2 * n_weights * size_out**2, n_in * size_in**2, n_out * size_out**2, n_weights)


def dense(n_in, n_out, positions=1, passes=4):
    """Return a matrix product for each of some positions of a row, with an activation."""
    return Layer(2 * n_in * n_out * positions, n_in * positions, n_out * positions, n_in * n_out, passes)


def vgg16():
    """Return the layers of VGG-16 (K. Simonyan, A. Zisserman (2015), configuration D)."""
    layers, channels, size = [], 3, 224
    for n_layers, width in [(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]:
        for _ in range(n_layers):
            layers.append(convolution(channels, width, 3, size, size)._replace(passes=4))
            channels = width
        size //= 2
    return [*layers, dense(512 * 49, 4096), dense(4096, 4096), dense(4096, 1000)]


def resnet50():
    """Return the layers of ResNet-50 (K. He et al. (2016)), with the stride in the 3 × 3 convolutions."""
    layers, channels, size = [convolution(3, 64, 7, 224, 112)], 64, 56
    for n_blocks, width, stride in [(3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)]:
        for block in range(n_blocks):
            step = stride if block == 0 else 1
            layers.append(convolution(channels, width, 1, size, size))
            layers.append(convolution(width, width, 3, size, size // step))
            layers.append(convolution(width, 4 * width, 1, size // step, size // step))
            if block == 0:
                layers.append(convolution(channels, 4 * width, 1, size, size // step))
            channels, size = 4 * width, size // step
    return [*layers, dense(2048, 1000)]


def transformer_block(width=1024, inner=4096, length=512):
    """Return the products of one block of an encoder (A. Vaswani et al. (2017), "big"); a row is a sequence."""
    attention = Layer(4 * length**2 * width, 3 * length * width, length * width, 0, 11)
    projections = [dense(width, width, length) for _ in range(4)]
    return [*projections, attention, dense(width, inner, length), dense(inner, width, length)]


def parts_of(layer, rows, chip):
    """Return the seconds of the forward pass and the backward pass of a layer, and of the update of its weights."""
    product = chip.seconds(rows * layer.flops, FLOAT * (rows * (layer.n_in + layer.n_out) + layer.n_weights))
    one_pass = FLOAT * rows * layer.n_out / chip.memory
    forward = layer.passes // 2
    update = FLOAT * UPDATE_PASSES * layer.n_weights / chip.memory
    return product + forward * one_pass, 2 * product + (layer.passes - forward) * one_pass, update


def seconds_of(layer, rows, chip):
    """Return the seconds of a layer in a step."""
    return sum(parts_of(layer, rows, chip))


def workload_of(layers, chip, rows=64):
    """Return the workload of a network; the part after which the first gradients exist is that for a number of rows."""
    sizes = [2.0**i for i in range(14)]
    kernels = [
        RowTimes(tuple(sizes), tuple(seconds_of(layer, size, chip) for size in sizes), seconds_of(layer, 0, chip))
        for layer in layers
    ]
    seconds, n_bytes = sum(parts_of(layer, rows, chip)[0] for layer in layers), 0
    total = sum(seconds_of(layer, rows, chip) for layer in layers)
    for layer in reversed(layers):
        seconds += parts_of(layer, rows, chip)[1]
        n_bytes += FLOAT * layer.n_weights
        if n_bytes >= FIRST:
            break
    n_weights = sum(layer.n_weights for layer in layers)
    return Workload(tuple(kernels), FLOAT * n_weights, 1, from_first(seconds / total))


def measured(figure, group, contestant):
    """Return the median of a measurement in docs/benchmarks.json, in seconds."""
    for one in json.loads((DOCS / "benchmarks.json").read_text(encoding="utf-8")):
        if one["name"] == figure and group in one["groups"]:
            found = one["groups"][group]
            if contestant in found["contestants"]:
                return found["contestants"][contestant][0] / {"ms": 1e3, "µs": 1e6, "s": 1}[found["unit"]]
    raise SystemExit(f"docs/benchmarks.json has no {contestant} in {group} of {figure}")


class Study(NamedTuple):
    """A program. Its rows are those of all nodes, or of each. A point is a number of nodes and a measured speed-up."""

    name: str
    workload: Workload
    rows: int
    is_divided: bool
    point: tuple[float, float, str] | None = None
    layers: list[Layer] | None = None


def studies():
    """Return the five programs of the study."""
    step = "Step of the MLP, 500 images, 1 Gbit/s"
    each = measured("nodes", step, "Theano, 1 thread, 250 images")
    ours = measured("nodes", step, "Synkhronos, 2 hosts × 1 rank")
    mlp = RowTimes((250.0, 500.0), (each, 2 * each), 0.0)  # the measured machine needs as much for each image
    model = "{} rows: linear regression with groups, 20 covariates"
    regression = RowTimes(
        (1e5, 1e6),
        tuple(
            measured("pytensor_pymc", model.format(n), "nutpie's function, 1 rank") for n in ("100,000", "1,000,000")
        ),
        0.0,
    )
    return [
        # Synkhronos of 2017, on the 8 P100 GPUs of a DGX-1, with 64 rows on each: 395.1 s on one GPU, 52.6 s on all
        Study("ResNet-50", workload_of(resnet50(), GPU), 64, False, (8, 395.1 / 52.6, "a DGX-1"), resnet50()),
        Study("VGG-16", workload_of(vgg16(), GPU), 64, False, None, vgg16()),
        Study("transformer block", workload_of(transformer_block(), GPU), 64, False, None, transformer_block()),
        Study(
            "MLP 784-800-800-10",
            Workload((mlp,), FLOAT * 1_276_810, 1, from_first(MLP_FIRST)),
            500,
            True,
            (2, 2 * each / ours, "1 Gbit/s"),
        ),
        # a log-probability and its gradient: few numbers are exchanged
        Study("PyMC's regression", Workload((regression,), 8 * REGRESSION, 1, from_first(1.0)), 1_000_000, True),
    ]


def cluster_of(gigabits, **changes):
    """Return nodes with one device each."""
    link = Link(LATENCY, gigabits * 1e9 / 8)
    return dataclasses.replace(Cluster(link, link), **changes)


def speed_up(study, nodes, gigabits, rule=None):
    """Return the rows per second of some nodes, relative to one node."""
    step = predict_step(study.workload, cluster_of(gigabits), nodes, 1, rows_of(study, nodes), rule)
    one = predict_step(study.workload, cluster_of(gigabits), 1, 1, rows_of(study, 1))
    return step.rows_per_second / one.rows_per_second


def rows_of(study, nodes):
    """Return the rows of a step of all nodes."""
    return study.rows if study.is_divided else study.rows * nodes


def draw_speed_ups(programs):
    """Draw the speed-ups by numbers of nodes."""
    figure, axes = pyplot.subplots(1, len(programs), figsize=(15, 3.6), sharey=True)
    for axis, study in zip(axes, programs):
        axis.plot(NODES, NODES, color="0.8", label="perfect")
        for gigabits, color in zip(GIGABITS, ("tab:red", "tab:orange", "tab:blue")):
            axis.plot(NODES, [speed_up(study, n, gigabits) for n in NODES], color=color, label=f"{gigabits} Gbit/s")
        late = [speed_up(study, n, GIGABITS[0], RULE) for n in NODES]
        axis.plot(NODES, late, color="tab:red", linestyle="--", label="1 Gbit/s, averages every 50 steps")
        if study.point:
            nodes, value, label = study.point
            axis.plot(nodes, value, "k*", markersize=9)
            axis.annotate(f"measured,\n{label}", (nodes, value), (4, -18), textcoords="offset points", fontsize=7)
        axis.set(xscale="log", yscale="log", xticks=NODES, yticks=NODES, title=study.name, xlabel="nodes")
        axis.set_xticklabels(NODES)
        axis.set_yticklabels(NODES)
        axis.minorticks_off()
        axis.set_ylim(0.15, 80)
    axes[0].set_ylabel("rows per second, relative to one node")
    axes[1].legend(fontsize=7, frameon=False, loc="upper left")
    save(figure, "study_nodes")


def draw_sweeps(programs, nodes=16, gigabits=10):
    """Draw the parts of a step, by rows of a node, speed of arithmetic, bandwidth of memory and of the link."""
    factors = [2.0**i for i in range(-3, 4)]
    figure, axes = pyplot.subplots(len(programs), 4, figsize=(13, 2.6 * len(programs)), squeeze=False)
    for row, study in zip(axes, programs):
        chips = {
            "FLOP/s, relative to the GPU": [Roofline(GPU.flops * one, GPU.memory) for one in factors],
            "memory bandwidth, relative to the GPU": [Roofline(GPU.flops, GPU.memory * one) for one in factors],
        }
        batches, rates = [8, 16, 32, 64, 128, 256], [1, 2.5, 10, 25, 100, 400]
        columns = [("rows of each node", batches, [(study.workload, one, gigabits) for one in batches])]
        for title, found in chips.items():
            steps = [(workload_of(study.layers, chip), study.rows, gigabits) for chip in found]
            columns.append((title, factors, steps))
        columns.append(("link, Gbit/s", rates, [(study.workload, study.rows, one) for one in rates]))
        for axis, (title, values, steps) in zip(row, columns):
            found = [predict_step(load, cluster_of(rate), nodes, 1, n * nodes) for load, n, rate in steps]
            compute = [1e3 * (one.compute - one.undivided) for one in found]
            undivided = [1e3 * one.undivided for one in found]
            exposed = [1e3 * one.exposed for one in found]
            colors = ("tab:blue", "tab:cyan", "tab:red")
            labels = ("computing rows", "work that is not divided", "exchange that is not hidden")
            axis.stackplot(values, compute, undivided, exposed, colors=colors, labels=labels, alpha=0.8)
            axis.set(xscale="log", xlabel=title, xlim=(values[0], values[-1]), xticks=values)
            axis.set_xticklabels([f"{one:g}" for one in values], fontsize=8)
            axis.minorticks_off()
        row[0].set_ylabel(f"{study.name}\nms of a step")
    axes[0][0].legend(fontsize=7, frameon=False)
    save(figure, "study_sweeps")


def draw_limits(programs):
    """Draw what takes the longest part of a step, by numbers of nodes and speeds of the link."""
    rates = [2.0**i for i in range(-3, 10)]
    kinds = {"compute": "tab:blue", "work that is not divided": "tab:cyan", "the link": "tab:red"}
    figure, axes = pyplot.subplots(1, len(programs), figsize=(15, 3.4), sharey=True)
    for axis, study in zip(axes, programs):
        cells = [
            [
                list(kinds).index(predict_step(study.workload, cluster_of(rate), n, 1, rows_of(study, n)).limit)
                for n in NODES
            ]
            for rate in rates
        ]
        colors = ListedColormap(list(kinds.values()))
        axis.pcolormesh(range(len(NODES)), range(len(rates)), cells, cmap=colors, vmin=0, vmax=2, alpha=0.8)
        axis.set(title=study.name, xlabel="nodes", xticks=range(len(NODES)))
        axis.set_xticklabels(NODES)
        axis.set_yticks(range(len(rates)))
        axis.set_yticklabels([f"{rate:g}" for rate in rates], fontsize=7)
    axes[0].set_ylabel("link, Gbit/s")
    axes[-1].legend(handles=[Patch(color=color, label=kind, alpha=0.8) for kind, color in kinds.items()], fontsize=7)
    save(figure, "study_limits")


def save(figure, name):
    """Write a picture to docs/."""
    figure.tight_layout()
    figure.savefig(DOCS / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def table(programs):
    """Return the table of the page: for each program, its step, its weights, and where the link becomes the limit."""
    lines = [
        "| program | rows of a step | weights, MB | step of one node, ms | first gradient after | "
        "at 1, 10, 100 Gbit/s, the link is the limit from | speed-up on 64 nodes | "
        "… at 1 Gbit/s with averages every 50 steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for study in programs:
        one = predict_step(study.workload, cluster_of(10), 1, 1, rows_of(study, 1))
        limits = []
        for rate in GIGABITS:
            steps = [predict_step(study.workload, cluster_of(rate), n, 1, rows_of(study, n)) for n in NODES]
            first = next((step.nodes for step in steps if step.limit == "the link"), None)
            limits.append(f"{first}" if first else "–")
        speeds = ", ".join(f"{speed_up(study, 64, rate):.1f}" for rate in GIGABITS)
        late = speed_up(study, 64, GIGABITS[0], RULE)
        rows = f"{study.rows:,}" + (" in all" if study.is_divided else " on each node")
        lines.append(
            f"| {study.name} | {rows} | {study.workload.n_bytes / 1e6:.4g} | {1e3 * one.seconds:.3g} | "
            f"{study.workload.operands[0].until[0]:.0%} | {', '.join(limits)} nodes | {speeds} | {late:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    pyplot.rcParams.update({"svg.hashsalt": "synkhronos", "svg.fonttype": "none", "font.size": 9})
    everything = studies()
    draw_speed_ups(everything)
    draw_sweeps([study for study in everything if study.layers])
    draw_limits(everything)
    print(table(everything))
