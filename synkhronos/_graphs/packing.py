"""Values that are no dense arrays, as bytes: how they reach other ranks, which get arrays alone.

A sparse matrix that is an input, say, enters a function as bytes, of which `Unpacked` makes it on each rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np

from synkhronos._backends import Apply, Op, T

__all__ = ["Unpacked", "bytes_variable", "pack"]


def pack(values: Sequence[Any]) -> np.ndarray:
    """Pickle values: a vector of uint8."""
    return np.frombuffer(cloudpickle.dumps(list(values), protocol=5), np.uint8)


def bytes_variable(name: str | None = None) -> Any:
    """Return a variable for what `pack` makes."""
    return T.vector(name, dtype="uint8")


class Unpacked(Op):
    """The values that `pack` has packed.

    Parameters
    ----------
    types : tuple of Type
        Of the values.
    """

    __props__ = ("types",)

    def __init__(self, types: tuple[Any, ...]) -> None:
        self.types = types

    def __str__(self) -> str:
        return "Unpacked"

    def make_node(self, packed: Any) -> Any:
        """Apply it to bytes."""
        return Apply(self, [packed], [type_() for type_ in self.types])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Unpickle the values."""
        for storage, value in zip(output_storage, pickle.loads(inputs[0].tobytes())):
            storage[0] = value
