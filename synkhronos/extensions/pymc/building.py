"""Functions that PyMC asks PyTensor for, built as exact functions where they use a model's data."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from synkhronos._calls import ParallelFunction, function
from synkhronos._engine import clone, is_random_state
from synkhronos.errors import SessionError
from synkhronos.extensions.pymc.rows import ModelData, Scattered

__all__ = ["Builder"]

#: The arguments of `pytensor.function` that are handed on otherwise, or that exact functions have no use for.
_OWN = ("inputs", "outputs", "updates", "accept_inplace")


class Builder:
    """Builds what PyMC asks of `pytensor.function`.

    Parameters
    ----------
    data : ModelData
    """

    def __init__(self, data: ModelData) -> None:
        self._data = data

    def __call__(self, plain: Callable[..., Any], asked: dict[str, Any]) -> Any:
        """Build an exact function, or PyMC's own where that is as good."""
        given = asked["outputs"]
        many = isinstance(given, (list, tuple))
        outputs = [getattr(one, "variable", one) for one in (given if many else [given])]
        if given is None or isinstance(given, dict):
            return plain(**asked)
        updates = dict(asked["updates"] or ())
        expressions = [*outputs, *updates.values()]
        data = self._data.of(expressions)
        if not data or self._has_rows(outputs) or (updates and all(map(is_random_state, updates))):
            return plain(**asked)
        new = clone(expressions, {one.source: one.expression for one in data})
        outputs, values = new[: len(outputs)], new[len(outputs) :]
        exact = function(
            [],
            outputs if many else outputs[0],
            bcast_inputs=asked["inputs"],
            updates=list(zip(updates, values)),
            sliceable_shareds=[one.variable for one in data],
            exact=True,
            **{name: value for name, value in asked.items() if name not in _OWN},
        )
        return ModelFunction(exact, asked["inputs"], data)

    def _has_rows(self, outputs: list[Any]) -> bool:
        """Whether results have rows, which the master would have to put together."""
        return any(self._data.n_rows in getattr(one.type, "shape", ()) for one in outputs)


class ModelFunction(ParallelFunction):
    """A function of a model, which all ranks compute, and PyMC calls as its own.

    Parameters
    ----------
    exact : Function
    inputs : list of variables or pytensor.In
    data : list of Scattered
        What it uses of the model's data.
    """

    def __init__(self, exact: Any, inputs: Any, data: list[Scattered]) -> None:
        super().__init__(exact, inputs, list(range(len(inputs))), None)
        self._data, self._pid = data, os.getpid()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on all ranks, of the model's data as they are now."""
        if os.getpid() != self._pid:
            raise SessionError(_ONE_CORE)
        for one in self._data:
            one.send()
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SessionError(_ONE_CORE)


_ONE_CORE = (
    "all ranks together evaluate a model under synkhronos.extensions.pymc.parallel, so that chains cannot be sampled by "
    "processes of their own: give pm.sample the argument cores=1; chains then follow each other. Where each chain fits "
    "a core and its memory, chains in parallel, without synkhronos, serve better"
)
