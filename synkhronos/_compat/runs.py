"""Loops over arrays, some of them broadcast, as runs of neighbours: gcc makes vector code of the loop over a run.

A run goes over the last axes, as far as the types tell that each array has all its elements over them, or one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

__all__ = ["Operand", "elements", "first_axis", "given", "length", "loops"]


class Operand(NamedTuple):
    """An array in C++ code.

    Parameters
    ----------
    name : str
        Of its pointer to the run, ``NAME_run``, and of its element, ``NAME_i``.
    array : str
        The expression of the array.
    type : str
        Of its elements.
    broadcastable : tuple of bool
    """

    name: str
    array: str
    type: str
    broadcastable: tuple[bool, ...]


def first_axis(patterns: Sequence[tuple[bool, ...]]) -> int:
    """Where runs begin.

    Parameters
    ----------
    patterns : list of tuple of bool
        ``broadcastable`` of each array that is read.
    """
    run, first = None, 0
    for axis, pattern in reversed(list(enumerate(zip(*patterns)))):
        if all(pattern):  # of length 1
            continue
        if run not in (None, pattern):
            return first
        run, first = pattern, axis
    return 0


def loops(operands: Sequence[Operand], first: int, sizes: str, body: str) -> str:
    """C++ code that goes over the axes before ``first``, and does ``body`` for each run.

    ``sizes`` is the name of the lengths of all axes.
    """
    heads = [f"for (npy_intp at_{axis} = 0; at_{axis} < {sizes}[{axis}]; at_{axis}++)\n" for axis in range(first)]
    pointers = ""
    for one in operands:
        steps = [f" + at_{i} * PyArray_STRIDE({one.array}, {i})" for i in range(first) if not one.broadcastable[i]]
        pointers += f"{one.type} *{one.name}_run = ({one.type} *)(PyArray_BYTES({one.array}){''.join(steps)});\n"
    return f"{''.join(heads)}{{\n{pointers}{body}\n}}\n"


def length(sizes: str, axes: range) -> str:
    """C++ code of the length of a run over some axes."""
    return "".join(f"{sizes}[{axis}] * " for axis in axes) + "1"


def elements(operands: Sequence[Operand], first: int, n: str, task: str) -> str:
    """C++ code that does ``task`` for the first ``n`` elements of a run."""
    numbers = places = ""
    for one in operands:
        if all(one.broadcastable[first:]):
            numbers += f"{one.type} {one.name}_i = *{one.name}_run;\n"
        else:
            places += f"{one.type} &{one.name}_i = {one.name}_run[i];\n"
    return f"{numbers}for (npy_intp i = 0; i < {n}; i++) {{\n{places}{task}\n}}\n"


def given(code: Callable[..., str], *arguments: Any) -> str:
    """The code that a method of an Op gives; none where the Op has no such method."""
    from theano.gof.utils import MethodNotDefined

    try:
        return code(*arguments)
    except MethodNotDefined:
        return ""
