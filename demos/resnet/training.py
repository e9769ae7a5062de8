"""Training loop, report and checks of the ResNet scripts.

A script passes two callables: the first trains on a minibatch, and the second evaluates the network. The minibatches
depend only on the seed and the epoch, so that scripts can be compared step by step.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
from tqdm import tqdm

from demos.lasagne_mnist.training import digest_of
from demos.lasagne_mnist.training import minibatches as shuffled_minibatches


def minibatches(n: int, size: int, rng: np.random.RandomState, shuffle: bool) -> Iterator[Any]:
    """Yield an epoch's minibatches: index arrays if `shuffle`, else slices. The last one may be smaller.

    Rows that a slice selects are used in place; rows that an index array selects are copied.
    """
    if shuffle:
        yield from shuffled_minibatches(n, size, rng)
    else:
        for start in range(0, n, size):
            yield slice(start, min(start + size, n))


def run(
    args: Any,
    name: str,
    ranks: int,
    batch_size: int,
    step: Callable[[Any], Any],
    evaluate: Callable[[], Sequence[Any]],
    params: Sequence[Any],
    equal: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Train, and validate after each epoch.

    Parameters
    ----------
    args : argparse.Namespace
        Result of `cli.parse_arguments`.
    name, ranks : str, int
        Name of the script and number of ranks, for the report.
    batch_size : int
        Images in a minibatch, over all ranks.
    step : callable
        Trains on one minibatch of the training set and returns the loss.
    evaluate : callable
        Returns the loss and the accuracy on the validation set.
    params : list of shared variables
        The parameters, of whose values the report contains a digest.
    equal : callable
        Called after training. Returns whether the ranks' values are as equal as they should be.

    Returns
    -------
    dict
        The report. It is printed, and written to the file ``args.json`` if given.

    Raises
    ------
    SystemExit
        If a loss is not finite, the mean loss of the last epoch is not below that of the first, or `equal` returns
        False.
    """
    weights = sum(param.get_value(borrow=True).size for param in params)
    print(f"{name}: ResNet-{args.depth} of {weights:,} parameters, {args.classes} classes, {ranks} rank(s)")
    print(f"{args.n_images} images of {args.image_size}x{args.image_size} pixels, {args.dtype}", end=", ")
    print(f"minibatches of {batch_size}, {'shuffled' if args.shuffle else 'in order'}")
    report: dict[str, Any] = {"name": name, "ranks": ranks, "batch_size": batch_size, "parameters": weights}
    report.update(arguments=vars(args), epochs=[])
    for epoch, steps in enumerate(steps_of_epochs(args, batch_size)):
        batches = minibatches(args.n_images, batch_size, np.random.RandomState([args.seed, epoch]), args.shuffle)
        entry = train_epoch(epoch, args.n_images, itertools.islice(batches, steps), step)
        entry["valid_loss"], entry["valid_accuracy"] = map(float, evaluate())
        report["epochs"].append(entry)
        print(
            f"epoch {epoch + 1:3d}: {sum(entry['seconds']):7.2f} s {speed(entry):7.1f} images/s  "
            f"training loss {np.mean(entry['losses']):.4f}  validation loss {entry['valid_loss']:.4f}  "
            f"accuracy {100 * entry['valid_accuracy']:.2f} %",
            flush=True,
        )
    # Leave out the first epoch, if there are others: memory is allocated and processors raise their clock rates in it.
    report["images_per_second"] = float(np.median([speed(entry) for entry in report["epochs"][1:] or report["epochs"]]))
    report["digest"] = digest_of(params)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    check_losses([entry["losses"] for entry in report["epochs"]])
    if not equal():
        raise SystemExit("the ranks ended with different parameters")
    print(f"speed: {report['images_per_second']:.1f} images/s")
    print(f"parameters: {report['digest']}")
    print(f"validation accuracy: {100 * report['epochs'][-1]['valid_accuracy']:.2f} %", flush=True)
    return report


def steps_of_epochs(args: Any, batch_size: int) -> list[int]:
    """Return the number of steps in each epoch; ``--steps`` may shorten the last epoch and leave out later ones."""
    full = -(-args.n_images // batch_size)
    total = min(args.steps or full * args.epochs, full * args.epochs)
    return [full] * (total // full) + [total % full] * (total % full > 0)


def train_epoch(epoch: int, n: int, batches: Iterator[Any], step: Callable[[Any], Any]) -> dict[str, Any]:
    """Train on minibatches of `n` images in all; return the seconds, the loss and the number of images of each step."""
    entry: dict[str, Any] = {"seconds": [], "losses": [], "images": []}
    # disable=None: show a bar only if the output is a terminal
    with tqdm(total=n, desc=f"epoch {epoch + 1}", unit="img", leave=False, disable=None) as bar:
        for batch in batches:
            start = time.perf_counter()
            entry["losses"].append(float(step(batch)))
            entry["seconds"].append(time.perf_counter() - start)
            entry["images"].append(batch.stop - batch.start if isinstance(batch, slice) else len(batch))
            bar.update(entry["images"][-1])
    return entry


def speed(entry: dict[str, Any]) -> float:
    """Return the images per second in an epoch."""
    return sum(entry["images"]) / sum(entry["seconds"])


def check_losses(epochs: Sequence[Sequence[float]]) -> None:
    """Exit with an error unless all losses are finite and the last epoch's mean loss is below the first's."""
    if not np.all(np.isfinite(np.concatenate(epochs))):
        raise SystemExit("a loss is not a finite number; try a smaller --learning-rate")
    if len(epochs) > 1 and np.mean(epochs[-1]) >= np.mean(epochs[0]):
        raise SystemExit("the loss of the last epoch is not below that of the first")
