"""Checkpoints of a training run, from which a killed run resumes with bitwise equal results.

A checkpoint contains every rank's parameters, the state of the update rule, and random states. The order of images in
an epoch depends only on the seed and the epoch, and the all-reduce gives the same bits each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import theano

import synkhronos as synk
from synkhronos.extensions import checkpoint

FOLDER = Path("~/.cache/synkhronos/checkpoints")
OPTIONS = ("model", "dropout", "batch_size", "update_rule", "learning_rate", "seed")


class Checkpoints:
    """Save a run after each epoch, and resume it if the arguments request it.

    Parameters
    ----------
    args : argparse.Namespace
        Result of `cli.parse_arguments`.
    name : str
        Name of the script, and of its default checkpoint file.
    source : str
        Name of the data. A run with other data is not resumed.
    functions : list of synkhronos.Function
        The functions that train. A checkpoint contains their shared variables.
    data : list of shared variables
        Shared variables to leave out, because the script loads their data again.
    """

    def __init__(
        self, args: Any, name: str, source: str, functions: Sequence[synk.Function], data: Sequence[Any] = ()
    ) -> None:
        settings = repr([getattr(args, option) for option in OPTIONS] + [source])
        digest = hashlib.sha256(settings.encode()).digest()
        self._settings = theano.shared(np.int64(int.from_bytes(digest[:7], "big")), "settings")
        self._done = theano.shared(np.int64(0), "epochs_done")
        self._advance = synk.function([], self._settings, updates=[(self._done, self._done + 1)])
        self._path = Path(args.checkpoint) if args.checkpoint else FOLDER.expanduser() / f"{name}.npz"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._state = [self._settings, self._done]
        for var in (var for function in functions for var in function.get_shared()):
            if not any(var is other for other in (*self._state, *data)):
                self._state.append(var)
        if args.resume and self._path.exists():
            self._load()

    @property
    def epochs_done(self) -> int:
        """Number of completed epochs."""
        return int(self._done.get_value())

    def _load(self) -> None:
        settings = self._settings.get_value()
        try:
            checkpoint.load(self._path, self._state)
        except ValueError as error:
            raise SystemExit(f"--resume: {error}") from None
        if self._settings.get_value() != settings:
            raise SystemExit(f"--resume: {self._path} was saved by a run with other arguments or other data")
        print(f"going on after epoch {self.epochs_done}, from {self._path}")

    def save(self) -> None:
        """Increase the number of completed epochs by one, and save."""
        self._advance()
        checkpoint.save(self._path, self._state)
