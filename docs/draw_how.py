"""Draw the pictures of docs/explanation/how_it_works.md: ``python docs/draw_how.py``."""

from pathlib import Path

from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).parent / "explanation"
CONTROLLER, WORKER, MEMORY = "#cfe2f3", "#e8eef4", "#fde9c9"
pyplot.rcParams["svg.hashsalt"] = "synkhronos"  # so that each run writes the same files


def canvas(width, height):
    """Return a figure of a size in inches, and its axes, whose coordinates are inches."""
    figure, axes = pyplot.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def box(axes, x, y, width, height, text, color):
    """Draw a box with a centred text."""
    shape = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.08", fc=color, ec="0.45")
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def arrow(axes, begin, end, text="", dx=0.08, **style):
    """Draw an arrow with a text next to its middle."""
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": "0.3", **style})
    axes.text((begin[0] + end[0]) / 2 + dx, (begin[1] + end[1]) / 2, text, fontsize=8, color="0.3", va="center")


def save(figure, name):
    """Write a figure to an SVG file."""
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def processes():
    """Draw the controller and its workers."""
    figure, axes = canvas(7, 3.6)
    box(axes, 2, 2.9, 3, 0.55, "your program, one serial script", "white")
    box(axes, 2, 1.75, 3, 0.7, "controller, rank 0\nits replica, its core", CONTROLLER)
    arrow(axes, (3.5, 2.9), (3.5, 2.45), "f(x, y), all_reduce(w)")
    for number, x in enumerate((0.4, 2.6, 4.8)):
        name = f"worker, rank {number + 1}" if number < 2 else "worker, …"
        box(axes, x, 0.25, 1.8, 0.7, f"{name}\nits replica, its core", WORKER)
        arrow(axes, (2.6 + 0.9 * number, 1.75), (x + 0.9, 0.95), "command" if number == 1 else "")
    save(figure, "processes")


def memory():
    """Draw the memory that each rank maps."""
    figure, axes = canvas(7, 3.6)
    for number, (name, color) in enumerate((("controller", CONTROLLER), ("rank 1", WORKER), ("rank 2", WORKER))):
        x = 0.25 + 2.25 * number
        box(axes, x, 2.55, 2, 0.85, f"{name}\nPython, compiled code,\nsmall arrays: private", color)
        box(axes, x, 1.35, 2, 0.65, f"shared heap, {name}\nvariables, results", MEMORY)
        arrow(axes, (x + 1, 2.55), (x + 1, 2.0), "computes in")
        arrow(axes, (x + 1, 1.35), (x + 1, 0.9), "reads its rows", arrowstyle="<-")
    box(
        axes,
        0.25,
        0.3,
        6.5,
        0.6,
        "data and staged inputs: written once, every rank reads its rows in place",
        MEMORY,
    )
    axes.text(0.25, 0.1, "orange: shared memory, without names", fontsize=8, color="0.3", va="center")
    save(figure, "memory")


def call():
    """Draw the steps of one call along the time axis."""
    figure, axes = canvas(7, 2.6)
    steps = [
        ("check\narguments,\nstage", 0.9, True),
        ("take\nits rows", 0.8, False),
        ("compiled\nfunction", 1.5, False),
        ("combine", 1.0, False),
        ("make the\nresult", 0.8, True),
    ]
    for name, y, color in (("controller", 1.55, CONTROLLER), ("worker", 0.45, WORKER)):
        axes.text(0.1, y + 0.35, name, fontsize=9, va="center")
        x = 0.85
        for text, width, is_controllers in steps:
            if name == "controller" or not is_controllers:
                box(axes, x, y, width, 0.7, text, color)
            x += width + 0.18
    arrow(axes, (1.75, 1.55), (1.95, 1.15), "command", dx=0.06)
    arrow(axes, (4.9, 1.15), (4.9, 1.55), "values", arrowstyle="<->")
    arrow(axes, (5.67, 1.15), (5.85, 1.55), "done", dx=0.1)
    axes.annotate("", (6.9, 0.2), (0.85, 0.2), arrowprops={"arrowstyle": "->", "color": "0.6"})
    axes.text(6.55, 0.3, "time", fontsize=8, color="0.4")
    save(figure, "call")


processes()
memory()
call()
