"""Find the data of a PyMC model that can be sharded by rows, and scatter them over the ranks."""

from __future__ import annotations

import collections
import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import synkhronos
from synkhronos._backends import (
    FOLDER,
    LIBRARIES,
    DenseType,
    SharedVariable,
    TensorConstant,
    Variable,
    ancestors,
    known_lengths,
    ops,
    retyped,
    shared,
)

__all__ = ["LARGE", "NOT_SHOWN", "ModelData", "Scattered"]

#: Constants of at least this many numbers count as data. They are no shapes: NumPy arrays have at most 64 dimensions.
LARGE = 65
_INDEXING = (ops.AdvancedSubtensor, ops.AdvancedIncSubtensor)
#: Folders of which warnings and reports show no lines.
NOT_SHOWN = (*LIBRARIES, *(os.path.join(folder, "") for folder in (FOLDER, synkhronos.__path__[0])))


class Scattered:
    """An array of a model's data, as a shared variable of which each rank has its own rows.

    Parameters
    ----------
    source : constant or shared variable
        The array in the model.
    axis : int
        The axis of its rows.

    Attributes
    ----------
    expression, whole : variable
        Replaces ``source`` in a sharded graph; the same rows of ``source`` as those of ``variable`` on all ranks.
    variable : shared variable
        Holds the rows along axis 0.
    n_ranks, n_rows : int
        The numbers of ranks and rows when the value was last sent.
    is_divided : bool
        Whether every rank has at least one row.
    is_variable : bool
        Whether the program can change the value. A constant is only used if it is divided, and sent once a session.
    """

    def __init__(self, source: Any, axis: int) -> None:
        self.source, self._axis = source, axis
        self.is_variable = isinstance(source, SharedVariable)
        self.n_ranks, self.n_rows, self.is_divided = 0, 0, False
        lengths = list(retyped(source, free=(axis,)).shape)
        lengths.insert(0, lengths.pop(axis))
        empty = np.empty([length or 0 for length in lengths], source.dtype)
        self.variable = shared(empty, name=source.name or "data of the model", shape=tuple(lengths))
        self.variable.tag.trace = getattr(source.tag, "trace", [])  # the line of the program that reports name
        order = [*range(1, axis + 1), 0, *range(axis + 1, source.ndim)]
        self.expression = self.variable.dimshuffle(order) if axis else self.variable
        back = [axis, *(one for one in range(source.ndim) if one != axis)]
        self.whole = source.dimshuffle(back) if axis else source
        self._sent: Any = None

    @property
    def n_bytes(self) -> int:
        """The bytes of all rows."""
        return int(_value_of(self.source).nbytes)

    def send(self) -> None:
        """Scatter the current value, unless the ranks have it already."""
        if _value_of(self.source) is not self._sent:
            self.scatter()

    def scatter(self) -> None:
        """Scatter the current value."""
        value = _value_of(self.source)
        synkhronos.scatter(self.variable, np.moveaxis(value, self._axis, 0))  # a view, for restart_workers
        on_ranks = synkhronos.get_lengths(self.variable)
        self.n_ranks, self.n_rows, self.is_divided = len(on_ranks), int(sum(on_ranks)), all(on_ranks)
        self._sent = value

    def __str__(self) -> str:
        kind = "pm.Data" if self.is_variable else "constant"
        return (
            f"{kind} {self.source.name!r}" if self.source.name else f"a {kind} of shape {_value_of(self.source).shape}"
        )


class ModelData:
    """The arrays of a model that are sharded, and their shared variables, which all functions share.

    These arrays are observed values, `pm.Data`, and constants of 65 numbers or more. An array is sharded along its
    first axis of ``n_rows`` entries. For each `pm.Data` the axis is determined once, and stays the same when
    ``set_data`` changes lengths.

    Parameters
    ----------
    model : pymc.Model
    rows : int or None

    Attributes
    ----------
    n_rows : int
        The number of rows of the data, for the function that is being built.

    Raises
    ------
    TypeError, ValueError
        See `parallel`.
    """

    def __init__(self, model: Any, rows: int | None) -> None:
        import pymc

        if not isinstance(model, pymc.Model):
            raise TypeError(
                f"synkhronos.extensions.pymc.parallel: got {model!r}, expected a pymc.Model. Instead of a frozen "
                "model, pass the model from which it was made"
            )
        self._model = model
        self._axes: dict[Any, int | None] = {}
        self._made: dict[Any, Scattered | None] = {}
        self._arrays: dict[Any, np.ndarray] = {}
        density = model.logp()
        indexed = [one.owner for one in ancestors([density]) if one.owner and isinstance(one.owner.op, _INDEXING)]
        indices = [node.inputs[-1] for node in indexed if isinstance(node.inputs[-1], TensorConstant)]
        masks = [one.data for one in indices if one.dtype == "bool"]
        self._shapes = {(int(mask.sum()),): mask.shape for mask in masks}  # of arrays with missing values
        observed = [model.rvs_to_values[one] for one in model.observed_RVs]
        self.n_rows = self._of_model = self._most(observed, [density]) if rows is None else rows
        self._is_given, self._warned = rows is not None, set[str]()
        for one in model.data_vars:
            self._axis_of_variable(one)
        if self.used_by([density]):
            return
        if rows is not None:
            raise ValueError(
                f"got rows={rows}, but no array of the model's data has this many rows; pass the number of rows "
                "of the data"
            )
        self._warn("data", "the model has no data that can be sharded, so PyMC computes it on the controller alone")

    def used_by(
        self, expressions: Sequence[Any], inputs: Iterable[Any] = (), givens: Mapping[Any, Any] | None = None
    ) -> list[tuple[Any, Scattered]]:
        """Find the data that expressions use.

        Parameters
        ----------
        expressions : sequence of variables
        inputs : iterable of variables
            Inputs of the function, which do not count as data.
        givens : mapping, optional
            Replacements of variables in the expressions.

        Returns
        -------
        list of (variable, Scattered)
        """
        givens = givens or {}
        ends, found = {*inputs, *givens}, []
        seen: dict[Any, None] = {}
        waiting = list(expressions)
        while waiting:
            new = [one for one in ancestors(waiting, ends) if one not in seen]
            seen.update(dict.fromkeys(new))
            waiting = [givens[one] for one in new if isinstance(givens.get(one), Variable)]
        for one in seen:
            axis = None if one in ends else self.axis(one)
            scattered = None if axis is None else self._scattered(one, axis)
            if scattered is not None:
                found.append((one, scattered))
        return found

    def use_variables(self, expressions: Sequence[Any]) -> bool:
        """Return whether expressions depend on `pm.Data`."""
        return not set(ancestors(expressions)).isdisjoint(self._model.data_vars)

    def same(self, value: np.ndarray) -> np.ndarray:
        """Return an equal array that was passed before, or else this one, so that functions share their data."""
        content = hashlib.sha256(np.ascontiguousarray(value).data).digest()
        return self._arrays.setdefault((value.dtype, value.shape, content), value)

    def axis(self, one: Any) -> int | None:
        """Return the axis of a variable's rows; ``None`` if the variable is not data that can be sharded."""
        if not isinstance(one.type, DenseType):
            return None
        if isinstance(one, TensorConstant):
            return self._first_axis(one) if self._is_data(one) else None
        return self._axis_of_variable(one) if one in self._model.data_vars else None

    def _axis_of_variable(self, one: Any) -> int | None:
        if one not in self._axes:
            self._axes[one] = self._first_axis(one) if isinstance(one.type, DenseType) else None
        return self._axes[one]

    def _first_axis(self, one: Any) -> int | None:
        """Return the first axis of ``n_rows`` entries, except for axes of fixed length 1, which are broadcast."""
        lengths = zip(_value_of(one).shape, known_lengths(one))
        return next((axis for axis, (n, known) in enumerate(lengths) if n == self.n_rows and known != 1), None)

    def _is_data(self, constant: Any) -> bool:
        return constant.data.size >= LARGE or self.is_observed(constant)

    def is_observed(self, one: Any) -> bool:
        """Return whether a variable is a constant of observed values."""
        if not isinstance(one, TensorConstant):
            return False
        values = [self._model.rvs_to_values[each] for each in self._model.observed_RVs]
        return any(one.data is each.data for each in values if isinstance(each, TensorConstant))

    def fit(self, expressions: Sequence[Any]) -> None:
        """Set the number of rows for a function of some expressions.

        It is that of the model, unless PyMC has computed other data from these, such as differences in a time series.
        """
        self.n_rows = self._of_model
        if not self._is_given and all(self.axis(one) is None for one in ancestors(expressions)):
            n_rows = self._most(expressions)
            self.n_rows = n_rows if n_rows >= max(LARGE, self._of_model // 2) else self._of_model

    def warn_of_shapes(self, expressions: Sequence[Any]) -> None:
        """Warn once if expressions have constants as large as data, though none that can be sharded."""
        shapes = [one.data.shape for one in ancestors(expressions) if isinstance(one, TensorConstant)]
        large = [shape for shape in shapes if np.prod(shape) >= max(LARGE, self._of_model // 2)]
        if large and not self._is_given:
            self._warn(
                "shapes",
                f"PyMC has made arrays of the shapes {', '.join(map(str, dict.fromkeys(large)))} from the data, none "
                f"of which has {self.n_rows} rows. PyMC computes a function with them on the controller alone",
            )

    def warn_of_times(self, on_ranks: float, alone: float) -> None:
        """Warn once that an evaluation takes longer on all ranks than on the controller alone, in seconds."""
        times = f"in about {1e3 * alone:.2g} ms, and all ranks in {1e3 * on_ranks:.2g} ms"
        self._warn(
            "times",
            f"the controller alone evaluates the model {times}, so the controller does it. Models with more rows, "
            "or more work for each row, gain from ranks",
        )

    def _warn(self, of: str, message: str) -> None:
        if of not in self._warned:
            self._warned.add(of)
            message = f"synkhronos.extensions.pymc.parallel: {message}"
            warnings.warn(message, RuntimeWarning, skip_file_prefixes=NOT_SHOWN)  # type: ignore[call-overload]

    def _most(self, *alternatives: Sequence[Any]) -> int:
        """Return the number of rows that most of the data have in the first alternative with data; 1 without data."""
        for expressions in alternatives:
            sizes: collections.Counter[int] = collections.Counter()
            for one in ancestors(expressions):
                is_constant = isinstance(one, TensorConstant)
                if self._is_data(one) if is_constant else one in self._model.data_vars:
                    shape = _value_of(one).shape
                    shape = self._shapes.get(shape, shape)
                    n_rows = next((n for n in shape if n >= LARGE), max(shape, default=1))
                    sizes.update({n_rows: int(np.prod(shape))} if n_rows > 1 else {})
            if sizes:
                return sizes.most_common(1)[0][0]
        return 1

    def _scattered(self, source: Any, axis: int) -> Scattered | None:
        is_constant = isinstance(source, TensorConstant)
        # other graphs have copies of a constant, with the same data
        key = (id(source.data) if is_constant else source, axis)
        if key not in self._made:
            made = Scattered(source, axis)
            if is_constant:
                made.send()
            self._made[key] = made if made.is_divided or not is_constant else None
        return self._made[key]


def _value_of(source: Any) -> Any:
    return source.container.storage[0] if isinstance(source, SharedVariable) else source.data
