"""Training loop and report of the MNIST scripts.

A script passes three callables: the first draws the minibatches of an epoch, the second trains on a minibatch, and the
third evaluates the network. The minibatches depend only on the seed and the epoch. Scripts can therefore be compared,
and a run can resume at any epoch. With a training rule, `synkhronos.loop` draws the minibatches, and trains.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable

import numpy as np
from tqdm import tqdm

from demos.lasagne_mnist.data import DigitSets

EVALUATION_SIZE = 500  # images in a slice


def minibatches(n: int, size: int, rng: np.random.RandomState) -> Iterator[np.ndarray]:
    """Yield minibatches of shuffled indices, each index once; the last one may be smaller."""
    order = rng.permutation(n)
    for start in range(0, n, size):
        yield order[start : start + size]


def rank_minibatches(lengths: Sequence[int], size: int, rng: np.random.RandomState) -> Iterator[list[np.ndarray]]:
    """Yield shuffled minibatches of data that is already scattered.

    Parameters
    ----------
    lengths : list of int
        Number of data points on each rank.
    size : int
        Data points in a minibatch, over all ranks. If it is less than the number of ranks, each rank has one.
    rng : numpy.random.RandomState
        Shuffles the indices of each rank.

    Yields
    ------
    list of numpy.ndarray
        The indices for each rank. In the last minibatches, some ranks have fewer than others, or none.
    """
    shares = [(size + rank) // len(lengths) for rank in range(len(lengths))]
    shares = [max(1, share) for share in shares]
    orders = [rng.permutation(length) for length in lengths]
    steps = max(-(-length // share) for length, share in zip(lengths, shares))
    for step in range(steps):
        yield [order[step * n : (step + 1) * n] for order, n in zip(orders, shares)]


def count(batch: Any) -> int:
    """Count the data points of a minibatch: an index array, or a list with an index array for each rank."""
    return sum(map(len, batch)) if isinstance(batch, list) else len(batch)


def slices_for(n: int, ranks: int) -> int:
    """Return the number of slices in which the ranks evaluate `n` images."""
    return max(1, -(-n // (ranks * EVALUATION_SIZE)))


def evaluate_in_pieces(function: Callable[..., Sequence[Any]], x: Any, y: Any) -> np.ndarray:
    """Average the outputs of a plain Theano function over pieces of the data, weighted by their lengths."""
    pieces = slices_for(len(y), 1)
    parts = list(zip(np.array_split(x, pieces), np.array_split(y, pieces)))
    return np.average([function(*part) for part in parts], axis=0, weights=[len(b) for _, b in parts])


def run(
    args: Any,
    name: str,
    ranks: int,
    sets: DigitSets,
    draw: Callable[[np.random.RandomState], Iterable[Any]],
    step: Callable[[Any], Any],
    evaluate: Callable[[Any, Any], Sequence[Any]],
    params: Sequence[Any],
    checkpoints: Any = None,
) -> dict[str, Any]:
    """Train, validate after each epoch, and test at the end.

    Parameters
    ----------
    args : argparse.Namespace
        Result of `cli.parse_arguments`.
    name, ranks : str, int
        Name of the script and number of ranks, for the report.
    sets : DigitSets
        The data. Of the training set, only the length is used.
    draw : callable
        Returns the minibatches of an epoch for a random state.
    step : callable
        Trains on one minibatch and returns the loss.
    evaluate : callable
        Returns the loss and the accuracy for images and labels.
    params : list of shared variables
        The parameters, of whose values the report contains a digest.
    checkpoints : resume.Checkpoints, optional
        Checkpoint to resume from, and to save after each epoch.

    Returns
    -------
    dict
        The report. It is printed, and written to the file ``args.json`` if given.
    """
    report = Report(args, name, ranks, sets)
    for epoch in range(checkpoints.epochs_done if checkpoints else 0, args.epochs):
        entry = train_epoch(epoch, args, len(sets.y_train), draw, step)
        validation = evaluate(sets.x_valid, sets.y_valid)
        if checkpoints:
            checkpoints.save()
        report.add(epoch + 1, entry, validation)
    return report.finish(evaluate(sets.x_test, sets.y_test), params)


def run_with_rule(
    args: Any,
    name: str,
    ranks: int,
    sets: DigitSets,
    loop: Callable[..., Any],
    evaluate: Callable[[Any, Any, Any], Sequence[Any]],
    params: Sequence[Any],
) -> dict[str, Any]:
    """Train with a training rule in one loop on all ranks, validate after each epoch, and test at the end.

    Parameters
    ----------
    args, name, ranks, sets, params
        As in `run`.
    loop : callable
        The ``loop`` of a training step, with the training data given.
    evaluate : callable
        Returns the loss and the accuracy for images, labels and values of the parameters. After an epoch, these are the
        mean over the ranks, or the centre.

    Returns
    -------
    dict
        As `run`.
    """
    report = Report(args, name, ranks, sets)
    start, n_before = time.perf_counter(), 0

    def on_epoch(records: Any) -> None:
        nonlocal start, n_before
        losses = records.losses
        entry = {"seconds": time.perf_counter() - start, "train_loss": float(np.mean(losses[n_before:]))}
        report.add(records.epoch, entry, evaluate(sets.x_valid, sets.y_valid, records.params))
        start, n_before = time.perf_counter(), len(losses)

    share = max(1, args.batch_size // ranks)
    records = loop(batch_size=share, epochs=args.epochs, seed=args.seed, on_epoch=on_epoch)
    print(f"{args.rule.name}: steps {records.steps}, exchanges {records.exchanges} of the ranks")
    report.content.update(steps=records.steps, exchanges=records.exchanges)
    return report.finish(evaluate(sets.x_test, sets.y_test, records.params), params)


class Report:
    """Report of a training, which prints its epochs.

    Attributes
    ----------
    content : dict
        The report.
    """

    def __init__(self, args: Any, name: str, ranks: int, sets: DigitSets) -> None:
        self._args, self._n_images = args, len(sets.y_train)
        print(f"{name}: {args.model} on {sets.source}; {self._n_images} training images, {ranks} rank(s)")
        print(f"{args.update_rule}, learning rate {args.learning_rate}, batch size {args.batch_size}")
        arguments = {key: value if key != "rule" else value and value.name for key, value in vars(args).items()}
        self.content: dict[str, Any] = {"name": name, "ranks": ranks, "data": sets.source, "images": self._n_images}
        self.content.update(arguments=arguments, epochs=[])

    def add(self, number: int, entry: dict[str, float], validation: Sequence[Any]) -> None:
        """Add an epoch with its validation loss and accuracy, and print it; epochs count from 1."""
        valid_loss, valid_accuracy = map(float, validation)
        entry.update(valid_loss=valid_loss, valid_accuracy=valid_accuracy)
        self.content["epochs"].append(entry)
        print(
            f"epoch {number:3d}: {entry['seconds']:7.2f} s "
            f"{self._n_images / entry['seconds']:7.0f} images/s  "
            f"training loss {entry['train_loss']:.4f}  validation loss {valid_loss:.4f}  "
            f"accuracy {100 * valid_accuracy:.2f} %",
            flush=True,
        )

    def finish(self, test: Sequence[Any], params: Sequence[Any]) -> dict[str, Any]:
        """Add the test accuracy, print the end of the report, write it to the file if there is one, and return it."""
        content = self.content
        content["test_accuracy"] = float(test[1])
        content["parameters"] = digest_of(params)
        seconds = [entry["seconds"] for entry in content["epochs"]]
        if seconds:
            # Leave out the first epoch if there are others, because some functions are compiled in it.
            content["epoch_seconds"] = np.median(seconds[1:] or seconds)
            print(f"time per epoch: {content['epoch_seconds']:.3f} s")
        print(f"parameters: {content['parameters']}")
        print(f"test accuracy: {100 * content['test_accuracy']:.2f} %", flush=True)
        if self._args.json:
            with open(self._args.json, "w") as file:
                json.dump(content, file, indent=1)
        return content


def train_epoch(
    epoch: int,
    args: Any,
    n: int,
    draw: Callable[[np.random.RandomState], Iterable[Any]],
    step: Callable[[Any], Any],
) -> dict[str, float]:
    """Train for one epoch; return the seconds that it took, and the mean loss over its images."""
    total, start = 0.0, time.perf_counter()
    # disable=None: show a bar only if the output is a terminal
    with tqdm(total=n, desc=f"epoch {epoch + 1}", unit="img", leave=False, disable=None) as bar:
        for batch in draw(np.random.RandomState([args.seed, epoch])):
            total += float(step(batch)) * count(batch)
            bar.update(count(batch))
    return {"seconds": time.perf_counter() - start, "train_loss": total / n}


def digest_of(variables: Sequence[Any]) -> str:
    """Return a digest of the values of shared variables, for comparing runs."""
    digest = hashlib.sha256()
    for var in variables:
        digest.update(np.ascontiguousarray(var.get_value(borrow=True)).tobytes())
    return digest.hexdigest()[:16]
