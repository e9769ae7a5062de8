"""Functions that PyMC asks PyTensor for, built as exact functions where they use a model's data."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import synkhronos
from synkhronos._engine import clone, is_random_state
from synkhronos.extensions.pymc.rows import ModelData, Scattered

__all__ = ["ONE_CORE", "Builder", "ModelFunction"]

#: The arguments of `pytensor.function` that are handed on otherwise, or that exact functions have no use for.
_OWN = ("inputs", "outputs", "updates", "accept_inplace")

#: What is said to several chains at a time.
ONE_CORE = (
    "under synkhronos.extensions.pymc.parallel all ranks together evaluate the model, so that chains cannot be sampled "
    "in processes or threads of their own: give pm.sample the argument cores=1, and chains follow each other. Where "
    "each core has memory and work enough for a chain of its own, chains in parallel, without synkhronos, serve better"
)


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
        asked_for, updates = asked["outputs"], dict(asked["updates"] or ())
        if asked_for is None or isinstance(asked_for, dict):
            return plain(**asked)
        many = isinstance(asked_for, (list, tuple))
        outputs = [getattr(one, "variable", one) for one in (asked_for if many else [asked_for])]
        expressions = [*outputs, *updates.values()]
        data = self._data.used_by(expressions)
        only_draws = bool(updates) and all(map(is_random_state, updates))
        if not data or only_draws or any(map(self._data.has_rows, outputs)):
            return plain(**asked)
        divided = clone(expressions, {one.source: one.expression for one in data})
        results, values = divided[: len(outputs)], divided[len(outputs) :]
        build = functools.partial(
            synkhronos.function,
            [],
            results if many else results[0],
            bcast_inputs=asked["inputs"],
            updates=list(zip(updates, values)),
            sliceable_shareds=[one.variable for one in data],
            exact=True,
            **{name: value for name, value in asked.items() if name not in _OWN},
        )
        try:
            exact = build(blocked=True)
        except ValueError:  # rows meet otherwise than in sums at the end
            exact = build()
        return ModelFunction(exact, data)


class ModelFunction:
    """A function of a model that all ranks compute, and that PyMC calls as it calls PyTensor's.

    Parameters
    ----------
    exact : synkhronos.Function
    data : list of Scattered
        What it uses of the model's data.

    Attributes
    ----------
    exact : synkhronos.Function
        Its attributes are those of this function, too.
    trust_input : bool
        May be set, and changes nothing: inputs are always checked.
    """

    trust_input = False

    def __init__(self, exact: Any, data: list[Scattered]) -> None:
        self.exact, self._data, self._pid = exact, data, os.getpid()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on all ranks, of the model's data as they are now."""
        if os.getpid() != self._pid:
            raise synkhronos.SessionError(ONE_CORE)
        for one in self._data:
            one.send()
        return self.exact(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exact, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise synkhronos.SessionError(ONE_CORE)
