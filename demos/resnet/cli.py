"""Command-line arguments of the ResNet scripts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from demos.lasagne_mnist.cli import positive
from demos.resnet.models import BLOCKS

# Defaults: a network that trains on CPU cores in seconds, and the paper's experiment (``--full``).
SMALL = {
    "depth": 8,
    "image_size": 32,
    "width": 16,
    "classes": 10,
    "n_images": 1024,
    "batch_size": 32,
    "learning_rate": 0.1,
}
FULL = {
    "depth": 50,
    "image_size": 224,
    "width": 64,
    "classes": 1000,
    "n_images": 4096,
    "batch_size": 64,
    "learning_rate": 0.025,
}


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make the parser, with the options that both scripts have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="train the paper's ResNet-50 instead of a small network")
    parser.add_argument("--depth", type=int, choices=sorted(BLOCKS), help="layers (8; full: 50)")
    parser.add_argument("--width", type=positive, help="channels of the first layer (16; full: 64)")
    parser.add_argument("--image-size", type=positive, help="pixels (32; full: 224)")
    parser.add_argument("--classes", type=positive, help="number of classes (10; full: 1000)")
    parser.add_argument("--n-images", type=positive, help="images in an epoch (1024; full: 4096)")
    parser.add_argument("--n-validation", type=positive, help="images to validate on (an eighth of --n-images)")
    parser.add_argument("--batch-size", type=positive, help="images that a rank computes on in a step (32; full: 64)")
    parser.add_argument("--epochs", type=positive, default=3, help="passes over the training set (%(default)s)")
    parser.add_argument("--steps", type=positive, help="maximum number of steps, which may end within an epoch")
    parser.add_argument("--learning-rate", type=float, help="learning rate of plain SGD (0.1; full: 0.025)")
    parser.add_argument(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw minibatches at random, or take them in order",
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"], help="floatX (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="for weights, images, and their order (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None):
    """Parse the arguments, and set the defaults that depend on other arguments."""
    args = parser.parse_args(argv)
    for name, value in (FULL if args.full else SMALL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.n_validation is None:
        args.n_validation = max(1, args.n_images // 8)
    return args
