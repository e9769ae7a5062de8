"""Match the arguments of a function call to the function's inputs, and check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._backends import known_lengths
from synkhronos._graph import Graph
from synkhronos._utils.display import unknown_keyword

#: The arguments of a call other than the inputs.
CALL_OPTIONS = ("output_subset", "batch", "batch_s", "num_slices")


def arrange(
    graph: Any, args: Sequence[Any], kwargs: dict[str, Any], options: Sequence[str] = CALL_OPTIONS
) -> list[Any]:
    """Return the value for each input, in the order of the inputs; raise `TypeError` for missing or surplus values.

    ``graph`` has the attributes ``input_names`` and ``input_defaults``. ``options`` are the names of the call's other
    arguments: an error for an unknown keyword suggests similar ones.
    """
    names, defaults = graph.input_names, graph.input_defaults
    if len(args) == len(names) and not kwargs and all(value is not None for value in args):
        return list(args)
    if len(args) > len(names):
        raise TypeError(f"got {len(args)} inputs; the function takes {len(names)}: {names}")
    values = list(args) + [None] * (len(names) - len(args))
    for name, value in kwargs.items():
        if name not in names:
            raise unknown_keyword("the function", name, [one for one in (*names, *options) if one])
        position = names.index(name)
        if values[position] is not None:
            raise TypeError(f"input {name!r} was given twice, in order and by name")
        values[position] = value
    for i, value in enumerate(values):
        if value is None:
            values[i] = defaults[i]
    missing = [names[i] or f"number {i}" for i, value in enumerate(values) if value is None]
    if missing:
        raise TypeError(f"got no value for input {', '.join(missing)}; the function takes {len(names)}: {names}")
    return values


def check_subset(subset: Any, n_outputs: int) -> tuple[int, ...] | None:
    """Check ``output_subset``, and return it as a tuple of ints, or ``None``."""
    if subset is None:
        return None
    if not isinstance(subset, (list, tuple)) or not all(isinstance(i, (int, np.integer)) for i in subset):
        raise TypeError(f"output_subset is {subset!r}; expected a list of ints")
    for i in subset:
        if not 0 <= i < n_outputs:
            raise IndexError(f"output_subset has output {i}; expected numbers of the {n_outputs} outputs, from 0")
    return tuple(int(i) for i in subset)


def check_num_slices(num_slices: Any) -> int:
    """Check ``num_slices``, and return it as an int."""
    if isinstance(num_slices, bool) or not isinstance(num_slices, (int, np.integer)):
        raise TypeError(f"num_slices is {num_slices!r}; expected an int")
    if num_slices < 1:
        raise ValueError(f"num_slices is {num_slices}; expected at least 1")
    return int(num_slices)


class Input(NamedTuple):
    """Requirements that `Data` must meet to be passed as an input of a function."""

    name: str
    dtype: np.dtype
    ndim: int
    lengths: dict[int, int]  # by axis, for the axes whose length is part of the type
    axis: int  # the axis along which it is scattered; 0 for broadcast inputs


def inputs_of(graph: Graph) -> list[Input]:
    """Return the requirements of a function's inputs, in order."""
    axes = [*graph.axes, *[0] * (len(graph.input_variables) - graph.n_scattered)]
    return [
        Input(
            name or f"number {position}",
            np.dtype(var.dtype),
            var.ndim,
            {at: length for at, length in enumerate(known_lengths(var)) if length is not None},
            axis,
        )
        for position, (name, var, axis) in enumerate(zip(graph.input_names, graph.input_variables, axes))
    ]


def describe_inputs(graph: Graph) -> str:
    """Return the names of the inputs for ``repr``: scattered ones, a semicolon, broadcast ones."""
    names = [name or str(var) for name, var in zip(graph.input_names, graph.input_variables)]
    groups = names[: graph.n_scattered], names[graph.n_scattered :]
    return "; ".join([", ".join(groups[0]), *([", ".join(groups[1])] if groups[1] else [])])
