"""Run the three MNIST scripts, and compare them in a table and a plot."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a script

from demos.lasagne_mnist.cli import make_parser, parse_arguments
from demos.lasagne_mnist.data import locate

SCRIPTS = ("train_mnist_theano", "train_mnist_cpu_data", "train_mnist_gpu_data")
COLOURS = ("#4477aa", "#ee7733", "#228833")


def run_script(name, arguments):
    """Run a script in a new process, and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        script = Path(__file__).with_name(name + ".py")
        print(f"\n--- {name}", flush=True)
        code = subprocess.call([sys.executable, str(script), *arguments, "--json", str(path)])
        if code:
            sys.exit(f"{name} failed with exit status {code}")
        return json.loads(path.read_text())


def script_arguments(args):
    """Return the arguments that all scripts have; ``--ranks`` is not among them."""
    names = ["model", "dropout", "batch_size", "epochs", "update_rule", "learning_rate", "seed"]
    values = {name: getattr(args, name) for name in names}
    values["data"] = locate(args.data)  # download once, not in each script
    return [text for name, value in values.items() for text in ("--" + name.replace("_", "-"), str(value))]


def compare(reports):
    """Add its images per second, and its speed-up over the first report, to each report."""
    for report in reports:
        report["images_per_second"] = report["images"] / report["epoch_seconds"]
        report["speed_up"] = reports[0]["epoch_seconds"] / report["epoch_seconds"]


def print_table(reports):
    """Print a table with a row for each script."""
    print(f"\n{'script':22}{'ranks':>6}{'s/epoch':>10}{'images/s':>10}{'speed-up':>10}{'test accuracy':>15}")
    for report in reports:
        print(
            f"{report['name']:22}{report['ranks']:6d}{report['epoch_seconds']:10.3f}"
            f"{report['images_per_second']:10.0f}{report['speed_up']:10.2f}"
            f"{100 * report['test_accuracy']:13.2f} %"
        )


def save_plot(reports, path):
    """Plot the speed and the training loss of each script, side by side."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, progress = figure.subplots(1, 2)
    names = [f"{r['name'].replace('train_mnist_', '')} ({r['ranks']})" for r in reports]
    bars = speed.barh(names, [r["images_per_second"] for r in reports], color=COLOURS)
    speed.bar_label(bars, [f"{r['speed_up']:.2f}x" for r in reports], padding=3)
    speed.margins(x=0.15)
    speed.invert_yaxis()
    speed.set(xlabel="images per second", title="Speed (ranks in parentheses)")
    for report, name, colour, style in zip(reports, names, COLOURS, ("-", "--", ":")):
        losses = [epoch["train_loss"] for epoch in report["epochs"]]
        progress.plot(range(1, len(losses) + 1), losses, style, color=colour, marker=".", label=name)
    progress.set(xlabel="epoch", ylabel="training loss", yscale="log", title="Progress")
    progress.legend(frameon=False)
    for axes in (speed, progress):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{reports[0]['arguments']['model']} on {reports[0]['data']}", fontsize="medium")
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--plot", metavar="FILE", default="lasagne_mnist.png", help="where to save the plot")
    args = parse_arguments(parser, argv)
    arguments = script_arguments(args)
    reports = []
    for name in SCRIPTS:
        with_ranks = args.ranks and name != "train_mnist_theano"
        ranks = ["--ranks", str(args.ranks)] if with_ranks else []
        reports.append(run_script(name, arguments + ranks))
    compare(reports)
    print_table(reports)
    save_plot(reports, args.plot)
    print(f"plot: {args.plot}")
    if args.json:
        Path(args.json).write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
