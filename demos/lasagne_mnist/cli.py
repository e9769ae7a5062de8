"""Command-line arguments of the MNIST scripts."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Sequence
from pathlib import Path

import synkhronos as synk
from demos.lasagne_mnist.data import DIGITS
from synkhronos.extensions import updates

RULES = [name for name in updates.__all__ if not name.startswith("apply_")]

# Learning rates for the rules whose defaults do not suit these networks.
LEARNING_RATES = {
    "sgd": 0.1,
    "sgd_nonflat": 0.1,
    "momentum": 0.02,
    "nesterov_momentum": 0.02,
    "adagrad": 0.01,
    "rmsprop": 0.001,
    "adam": 0.0015,
}


def make_parser(description: str, ranks: bool = True) -> argparse.ArgumentParser:
    """Make the parser; ``ranks=False`` omits ``--ranks`` and the options for checkpoints."""
    description = description.splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--model", type=model, default="cnn", help="cnn, mlp or custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID (%(default)s)"
    )
    parser.add_argument(
        "--dropout",
        type=probability,
        default=0.0,
        help="drop probability of cnn's and mlp's dense layers (%(default)s)",
    )
    parser.add_argument(
        "--data", type=place, help="folder of MNIST's IDX files, or 'digits' (~/.cache/synkhronos/mnist)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="images in a minibatch, all ranks together (%(default)s)"
    )
    parser.add_argument("--epochs", type=positive, default=10, help="passes over the training set (%(default)s)")
    parser.add_argument("--update-rule", default="adam", choices=RULES, help="name of the rule (%(default)s)")
    parser.add_argument("--learning-rate", type=float, help="(depends on the update rule)")
    parser.add_argument("--seed", type=int, default=1, help="for weights, order of images, dropout (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    if ranks:
        parser.add_argument(
            "--checkpoint", metavar="FILE", help="file to save to after each epoch (in ~/.cache/synkhronos/checkpoints)"
        )
        parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if it exists")
        parser.add_argument("--ranks", type=positive, help="processes (one for each device)")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None):
    """Parse the arguments; the default learning rate depends on the update rule."""
    args = parser.parse_args(argv)
    if args.learning_rate is None:
        rule = inspect.signature(getattr(updates, args.update_rule))
        args.learning_rate = LEARNING_RATES.get(args.update_rule, rule.parameters["learning_rate"].default)
    return args


def training_rule(text: str) -> synk.rules.Rule:
    """Make a training rule from its name in any case and its settings, such as ``localsgd:every=8``."""
    name, _, settings = text.partition(":")
    names = [one for one in synk.rules.__all__ if one not in ("Average", "Centre", "Gossip", "Rule")]  # base classes
    found = [getattr(synk.rules, one) for one in names if one.lower() == name.lower()]
    if not found:
        raise argparse.ArgumentTypeError(f"there is no rule {name!r}: expected one of {', '.join(names)}")
    try:
        call = ast.parse(f"rule({settings})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("the settings are not of the form NAME=VALUE,NAME=VALUE")
        return found[0](**{str(one.arg): ast.literal_eval(one.value) for one in call.keywords})
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def model(text: str) -> str:
    """Check and return the name of a network."""
    kind, _, settings = text.partition(":")
    if kind == "custom_mlp" and settings.count(",") == 3:
        depth, width, drop_input, drop_hidden = settings.split(",")
        positive(depth), positive(width), probability(drop_input), probability(drop_hidden)
    elif text not in ("cnn", "mlp"):
        raise argparse.ArgumentTypeError(
            f"there is no model {text!r}: expected cnn, mlp or custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID"
        )
    return text


def place(text: str) -> str:
    """Check and return the source of the digits; a folder must exist, because a new name may be a typing error."""
    if text != DIGITS and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}: expected one that exists, or {DIGITS!r}")
    return text


def probability(text: str) -> float:
    """Parse a probability from 0 to below 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no probability from 0 to below 1")
    return number


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
