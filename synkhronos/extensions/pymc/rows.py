"""The data of a model: which arrays have rows, and the shared variables by which ranks have their rows of them."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

import synkhronos
from synkhronos._engine import SharedVariable, TensorConstant, TensorType, ancestors, known_lengths, retyped, shared

__all__ = ["ModelData", "Scattered"]


class Scattered:
    """An array of a model's data, as a shared variable of whose value each rank has its rows.

    Parameters
    ----------
    source : constant or shared variable
        Where the model has it.
    axis : int
        Along which its rows lie.

    Attributes
    ----------
    expression : variable
        What stands for the source in a divided graph.
    variable : shared variable
        Rows lie along its axis 0.
    """

    def __init__(self, source: Any, axis: int) -> None:
        self.source, self._axis = source, axis
        lengths = list(retyped(source, free=(axis,)).shape)
        lengths.insert(0, lengths.pop(axis))
        empty = np.empty([length or 0 for length in lengths], source.dtype)
        self.variable = shared(empty, name=source.name or "data of the model", shape=tuple(lengths))
        order = [*range(1, axis + 1), 0, *range(axis + 1, source.ndim)]
        self.expression = self.variable.dimshuffle(order) if axis else self.variable
        self._sent: Any = None

    def send(self) -> None:
        """Give each rank its rows of the value, unless they are there."""
        value = _value_of(self.source)
        if value is not self._sent:
            synkhronos.scatter(self.variable, np.moveaxis(value, self._axis, 0))  # a view, from which it is restored
            self._sent = value


class ModelData:
    """Which arrays of a model are divided, and their shared variables, made and sent once for all functions.

    Parameters
    ----------
    model : pymc.Model
    rows : int or None

    Raises
    ------
    TypeError, ValueError
        See `parallel`.
    """

    def __init__(self, model: Any, rows: int | None) -> None:
        import pymc

        if not isinstance(model, pymc.Model):
            raise TypeError(
                f"synkhronos.extensions.pymc.parallel takes a pymc.Model; got {model!r}. A frozen model keeps compiled "
                "functions: give the model that it was made of"
            )
        self._mutable = set(model.data_vars)
        self.n_rows = _rows_of(model) if rows is None else rows
        self._made: dict[Any, Scattered] = {}
        if not self.used_by([model.logp()]):
            raise ValueError(f"no array of the model's data has {self.n_rows} rows: give parallel() the right rows=")

    def used_by(self, expressions: list[Any]) -> list[Scattered]:
        """What of the data some expressions use."""
        return [self._scattered(one, axis) for one, axis in self._with_rows(expressions)]

    def has_rows(self, expression: Any) -> bool:
        """Whether an expression is known to have as many rows as the data, along some axis."""
        return isinstance(expression.type, TensorType) and self.n_rows in known_lengths(expression)

    def _with_rows(self, expressions: list[Any]) -> list[tuple[Any, int]]:
        found = []
        for one in ancestors(expressions):
            if isinstance(one.type, TensorType) and (isinstance(one, TensorConstant) or one in self._mutable):
                shape = _value_of(one).shape
                if self.n_rows in shape:
                    found.append((one, shape.index(self.n_rows)))
        return found

    def _scattered(self, source: Any, axis: int) -> Scattered:
        key = source if source in self._mutable else id(source.data)  # a constant is kept by what is made of it
        if key not in self._made:
            self._made[key] = Scattered(source, axis)
        return self._made[key]


def _value_of(source: Any) -> Any:
    return source.container.storage[0] if isinstance(source, SharedVariable) else source.data


def _rows_of(model: Any) -> int:
    """The length that most observed values have, or else most of the data that potentials use."""
    observed = [model.rvs_to_values[one] for one in model.observed_RVs]
    for expressions in (observed, [model.logp()]):
        sizes: collections.Counter[int] = collections.Counter()
        for one in ancestors(expressions):
            if isinstance(one, TensorConstant) or one in model.data_vars:
                value = _value_of(one)
                sizes.update({value.shape[0]: value.size} if value.ndim else {})
        if sizes:
            return sizes.most_common(1)[0][0]
    raise ValueError("the model has no data, by whose rows it might be divided")
