"""The training loop that the ResNet scripts share, its report, and what it checks.

A script brings two callables: one makes a training step on a minibatch, one evaluates. An epoch's order depends on the
seed and the epoch alone, so that scripts can be compared step by step.
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
    """Draw an epoch's minibatches: index arrays, or slices if they are taken in order. The last may be smaller.

    Rows that a slice names are used where they lie; those that an index array names are copied.
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
    """Train, with a validation after each epoch.

    Parameters
    ----------
    args : argparse.Namespace
        What `cli.parse_arguments` gave.
    name, ranks : str, int
        What runs, on how many ranks: for the report.
    batch_size : int
        Images in a minibatch, all ranks together.
    step : callable
        Trains on one minibatch of the training set and returns the loss.
    evaluate : callable
        Gives the loss and the accuracy on the validation set.
    params : list of shared variables
        What is trained: a digest of their values is reported.
    equal : callable
        Returns, after the training, whether all ranks have the values that they should have.

    Returns
    -------
    dict
        The results; they are printed, and written as JSON where the arguments say so.

    Raises
    ------
    SystemExit
        If a loss is not finite, the last epoch's losses are not below those of the first, or ranks differ.
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
    # The first epoch warms up: memory is allocated, and the processors find their speed.
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
    """Give the number of steps in each epoch; ``--steps`` may cut the last one short, and save others."""
    whole = -(-args.n_images // batch_size)
    left = min(args.steps or whole * args.epochs, whole * args.epochs)
    return [whole] * (left // whole) + [left % whole] * (left % whole > 0)


def train_epoch(epoch: int, n: int, batches: Iterator[Any], step: Callable[[Any], Any]) -> dict[str, Any]:
    """Train on minibatches of `n` images; the seconds and the loss of each step, and its number of images."""
    entry: dict[str, Any] = {"seconds": [], "losses": [], "images": []}
    # disable=None: no bar where the output is no terminal
    with tqdm(total=n, desc=f"epoch {epoch + 1}", unit="img", leave=False, disable=None) as bar:
        for batch in batches:
            start = time.perf_counter()
            entry["losses"].append(float(step(batch)))
            entry["seconds"].append(time.perf_counter() - start)
            entry["images"].append(batch.stop - batch.start if isinstance(batch, slice) else len(batch))
            bar.update(entry["images"][-1])
    return entry


def speed(entry: dict[str, Any]) -> float:
    """Give an epoch's images per second."""
    return sum(entry["images"]) / sum(entry["seconds"])


def check_losses(epochs: Sequence[Sequence[float]]) -> None:
    """Check each epoch's losses: training must have led somewhere."""
    if not np.all(np.isfinite(np.concatenate(epochs))):
        raise SystemExit("a loss is not a finite number; try a smaller --learning-rate")
    if len(epochs) > 1 and np.mean(epochs[-1]) >= np.mean(epochs[0]):
        raise SystemExit("the loss of the last epoch is not below that of the first")
