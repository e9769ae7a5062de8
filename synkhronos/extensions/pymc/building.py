"""Build exact functions in place of the functions that PyMC requests from PyTensor, if they use a model's data."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import synkhronos
from synkhronos._backends import TensorType, is_random_state
from synkhronos.extensions.pymc.graphs import (
    check_after_sum,
    folded,
    forget_call,
    lengths_computed,
    missing_by_rows,
    rewritten,
    sum_of_parts,
    without_checks,
)
from synkhronos.extensions.pymc.rows import NOT_SHOWN, ModelData, Scattered

__all__ = ["Builder", "Each", "ModelFunction", "replaced"]

#: Arguments of `pytensor.function` that are passed in another way, or that exact functions do not use.
_OWN = ("inputs", "outputs", "updates", "givens", "accept_inplace", "rebuild_strict")

#: Error message if a function is called, or sent to be called, in another process.
_OTHER_PROCESS = (
    "under synkhronos.extensions.pymc.parallel all ranks together evaluate the model, so another process cannot: its "
    "functions can be called in the program's own process only"
)

_CALLS_BEFORE_COMPARISON = 10

_n_forks = 0  # number of forks between the process that imported this module and this process


def _note_fork() -> None:
    global _n_forks
    _n_forks += 1


os.register_at_fork(after_in_child=_note_fork)

_replaced: dict[tuple[Any, str], list[Any]] = {}  # values of attributes of modules: the module's own, then others
_lock = threading.Lock()


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module in a ``with`` block. The blocks of several threads may end in any order."""
    with _lock:
        values = _replaced.setdefault((module, name), [getattr(module, name)])
        values.append(value)
        setattr(module, name, value)
    try:
        yield
    finally:
        with _lock:
            values.remove(value)
            setattr(module, name, values[-1])
            if len(values) == 1:
                del _replaced[module, name]


class Builder:
    """Builds the functions that PyMC requests from `pytensor.function`.

    Parameters
    ----------
    data : ModelData
    """

    def __init__(self, data: ModelData) -> None:
        self._data = data
        self._mapping: set[int] = set()  # threads

    @contextlib.contextmanager
    def mapping(self) -> Iterator[None]:
        """Build the first function with inputs in a ``with`` block for several points at once, if it uses the data.

        Functions that other threads request meanwhile are not affected.
        """
        thread = threading.get_ident()
        self._mapping.add(thread)
        try:
            yield
        finally:
            self._mapping.discard(thread)

    def __call__(self, plain: Callable[..., Any], asked: dict[str, Any]) -> Any:
        """Build an exact function, or PyMC's own if it does not use the data or only draws random numbers.

        Functions without inputs are PyMC's own, too.

        Parameters
        ----------
        plain : callable
            ``pytensor.function``.
        asked : dict
            The arguments of PyMC's request, by name.
        """
        outputs, inputs = asked["outputs"], [getattr(one, "variable", one) for one in asked["inputs"]]
        updates, givens = dict(asked["updates"] or ()), dict(asked["givens"] or ())
        many = isinstance(outputs, (list, tuple))
        results = [getattr(one, "variable", one) for one in (outputs if many else [outputs])]
        only_draws = bool(updates) and all(map(is_random_state, updates))
        are_tensors = all(isinstance(getattr(one, "type", None), TensorType) for one in results)
        if only_draws or not are_tensors or not (inputs or updates):
            return plain(**asked)
        thread = threading.get_ident()
        maps = thread in self._mapping
        self._mapping.discard(thread)
        given = [*results, *updates.values()]
        self._data.fit(given)
        conditions: list[Any] = []
        graph = functools.partial(rewritten, leaves=[*inputs, *givens])
        if updates:
            found = graph(given, check_after_sum)
        else:
            found, conditions = without_checks(given, graph)
        found = missing_by_rows([*found, *conditions], self._data, graph)
        found = graph(found, sum_of_parts)
        found = folded(found, self._data, graph)
        found = lengths_computed(found, self._data, graph)
        expressions, conditions = found[: len(given)], found[len(given) :]
        forget_call([*given, *expressions])
        data = self._data.used_by(expressions, inputs, givens)
        if not data:
            self._data.warn_of_shapes(expressions)
            return plain(**asked)
        scattered = list(dict.fromkeys(one for _, one in data))
        kwargs = {name: value for name, value in asked.items() if name not in _OWN}

        def build(outputs: Any, new: Sequence[Any], **options: Any) -> Any:
            return synkhronos.function(
                [],
                outputs,
                bcast_inputs=asked["inputs"],
                updates=list(zip(updates, new)),
                exact=True,
                **kwargs,
                **options,
            )

        of_points = Each if maps else lambda function: function

        def of_all_rows() -> Any:
            return of_points(build(results if many else results[0], list(updates.values()), givens=givens))

        def divided() -> Any:
            outputs, new = [*expressions[: len(results)], *conditions], expressions[len(results) :]
            made = functools.partial(
                build,
                outputs if many or conditions else outputs[0],
                new,
                givens=[*((source, one.expression) for source, one in data), *givens.items()],
                sliceable_shareds=[one.variable for one in scattered],
                whole={one.variable: one.whole for one in scattered},
                rebuild_strict=False,
            )
            if maps:
                with contextlib.suppress(ValueError):
                    return made(blocked=True, mapped=inputs)
            try:
                exact = made(blocked=True)
            except ValueError:  # `blocked` allows only all-reduces, at the end of the graph
                exact = made()
            return of_points(exact)

        own = lambda: of_points(plain(**asked))  # noqa: E731
        is_density = bool(results) and results[0].ndim == 0
        warn = self._data.warn_of_times if is_density else None
        return ModelFunction(divided(), scattered, of_all_rows, own, many=many if conditions else None, warn=warn)


class Each:
    """Evaluates a function for each of several points, in one call each.

    Parameters
    ----------
    function : callable
        Function of one point.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, points: Any) -> list[Any]:
        """Return the results, stacked along axis 0."""
        return [np.stack(values) for values in zip(*map(self.function, points))]

    def copy(self, *args: Any, **kwargs: Any) -> Each:
        """Copy the function, with the arguments of PyTensor's ``Function.copy``."""
        return Each(self.function.copy(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # is not there yet, while the object is copied
            raise AttributeError(name)
        return getattr(self.function, name)


class ModelFunction:
    """Function of a model that all ranks compute, and that PyMC calls like a function of PyTensor.

    Data cannot be sharded if there are fewer rows than ranks, or if arrays have different numbers of rows. In these
    cases every rank computes the function with all rows.

    Parameters
    ----------
    exact : synkhronos.Function
    data : list of Scattered
        The data that the function uses.
    build_undivided : callable
        ``build_undivided()`` builds the function for unsharded data.
    build_own : callable
        ``build_own()`` builds PyMC's own function.
    many : bool, optional
        If given, ``exact`` lacks checks, and has one more output: whether their conditions hold. If they do not,
        PyMC's own function computes the results, or raises the error. With ``many``, the results are a list.
    warn : callable or None
        ``warn(seconds by rows, seconds alone)`` is called after some calls, if the controller computes them alone.

    Attributes
    ----------
    exact : synkhronos.Function
        The exact function. Other attributes are looked up there.
    data : list of Scattered
    trust_input : bool
        Can be set, but has no effect: inputs are always checked.
    """

    trust_input = False

    def __init__(
        self,
        exact: Any,
        data: Sequence[Scattered],
        build_undivided: Callable[[], Any],
        build_own: Callable[[], Any],
        *,
        many: bool | None,
        warn: Callable[[float, float], None] | None,
    ) -> None:
        self.exact, self.data, self._n_forks = exact, data, _n_forks
        self._out_of_date = [one for one in data if one.is_variable]
        self._undivided = functools.cache(build_undivided)
        self._own, self._many, self._warn = functools.cache(build_own), many, warn
        self._n_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on all ranks, with the current data of the model.

        Raises
        ------
        ValueError
            If the computation fails because ``set_data`` set data of different lengths; the message names the lengths.
        SessionError
            If this process is not the program's own.
        """
        if self._n_forks != _n_forks:
            raise synkhronos.SessionError(_OTHER_PROCESS)
        if self._out_of_date:
            for one in self._out_of_date:
                one.send()
            if len({one.n_rows for one in self.data}) > 1:
                return self._of_different_lengths(args, kwargs)
            if not all(one.is_divided for one in self._out_of_date):
                return self._undivided()(*args, **kwargs)
        try:
            found = self.exact(*args, **kwargs)
        except ValueError:  # a new session does not have the data; other errors are raised again
            self._out_of_date = list(self.data)  # there may be more ranks now than constants have rows
            for one in self._out_of_date:
                one.scatter()
            if not all(one.is_divided for one in self.data):
                return self._undivided()(*args, **kwargs)
            found = self.exact(*args, **kwargs)
        self._n_calls += 1
        if self._n_calls == _CALLS_BEFORE_COMPARISON and self._warn is not None:
            self._compare(self._warn)
        if self._many is None:
            return found
        *results, hold = found
        if not hold.all():
            return self._own()(*args, **kwargs)
        return results if self._many else results[0]

    def copy(self, *args: Any, **kwargs: Any) -> ModelFunction:
        """Copy the function, with the arguments of PyTensor's ``Function.copy``."""
        undivided, own = self._undivided, self._own
        return ModelFunction(
            self.exact.copy(*args, **kwargs),
            self.data,
            lambda: undivided().copy(*args, **kwargs),
            lambda: own().copy(*args, **kwargs),
            many=self._many,
            warn=self._warn,
        )

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Call PyMC's own function, in the controller only."""
        return self._own()(*args, **kwargs)

    def _compare(self, warn: Callable[[float, float], None]) -> None:
        """Warn if the controller computes the function, because that is faster."""
        plan = next(reversed(self.exact.partition.plans), None)
        if plan is not None and plan.controller <= plan.rows and self.exact.plan == "auto":
            warn(plan.rows, plan.controller)

    def _of_different_lengths(self, args: Any, kwargs: Any) -> Any:
        lengths = ", ".join(f"{one}: {one.n_rows}" for one in self.data)
        is_new = self._undivided.cache_info().currsize == 0
        try:
            result = self._undivided()(*args, **kwargs)
        except synkhronos.WorkerError as error:
            raise ValueError(
                f"pm.set_data gave the data of the model different lengths: {lengths}; expected equal lengths. Set all "
                "data in one call of pm.set_data"
            ) from error
        if is_new:
            warnings.warn(
                f"the data of the model have different lengths since pm.set_data, and are not divided: {lengths}. "
                "Every rank computes with all rows",
                RuntimeWarning,
                skip_file_prefixes=NOT_SHOWN,  # type: ignore[call-overload]
            )
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exact, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise synkhronos.SessionError(_OTHER_PROCESS)
