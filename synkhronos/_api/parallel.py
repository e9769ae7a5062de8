"""`synk.parallelize`: make `theano.function` build exact functions, to parallelize programs without changing them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from synkhronos import _backends, _graph
from synkhronos._api.build import function
from synkhronos._api.checks import arrange
from synkhronos._api.functions import Function
from synkhronos._session import current, held
from synkhronos._sharding import minibatches
from synkhronos._utils.display import suggests_keywords
from synkhronos.errors import SessionError
from synkhronos.typing import Input, Variable


@suggests_keywords
def parallelize(
    bcast_inputs: Sequence[Input | str] = (),
    shard: Mapping[Any, int] | Sequence[Variable | str] = (),
    random: Literal["serial", "own"] = "serial",
) -> contextlib.ExitStack:
    """Make ``theano.function`` build exact functions, which run on all ranks, from now on.

    This parallelizes programs that call ``theano.function`` (``pytensor.function``) themselves or through a library.
    Inputs with one dimension or more are scattered along axis 0, unless that axis is broadcastable. Scalars are
    broadcast. A function without scattered inputs is computed in full on every rank, or by the controller alone if it
    updates nothing. Functions that were compiled before stay serial, as do those that the backend compiles for itself
    (``Variable.eval``).

    Parameters
    ----------
    bcast_inputs : list of variables or of str
        Inputs (variables or their names) with dimensions that every rank gets in full.
    shard : dict or list of variables or of str
        Further sharded variables (or their names), each with the axis of its rows (0 for a list), as in `function`.
        These are inputs whose rows lie along another axis than 0, and variables of graphs, such as a minibatch that is
        selected by its number. Each applies to the functions that use it.
    random : str
        As in `function`.

    Returns
    -------
    contextlib.ExitStack
        Context manager that restores ``theano.function`` at the end of the block. Its method ``close`` does the same.

    Raises
    ------
    SessionError
        Without a session.
    TypeError, ValueError
        For invalid arguments.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2), synk.parallelize():
    ...     print(theano.function([x], (x - x.mean()).sum())([1, 2, 6]))
    0.0
    """
    current("parallelize")
    for name, value in (("bcast_inputs", bcast_inputs), ("shard", shard)):
        if not isinstance(value, (list, tuple, dict)):
            raise TypeError(f"{name} is {value!r}; expected a list of variables or names")
        for one in value:
            if not isinstance(getattr(one, "variable", one), (str, _backends.Variable)):
                raise TypeError(f"{name} has {one!r}; expected variables or names")
    if random not in ("serial", "own"):
        raise ValueError(f'random is {random!r}; expected "serial" or "own"')
    context = contextlib.ExitStack()
    axes = shard if isinstance(shard, dict) else dict.fromkeys(shard, 0)
    context.callback(_backends.divert(_Builder(list(bcast_inputs), axes, random)))
    return context


class _Builder:
    """Builder of the functions that a program requests from `theano.function`."""

    def __init__(self, bcast_inputs: list[Any], axes: dict[Any, int], random: Literal["serial", "own"]) -> None:
        self._whole, self._axes, self._random = bcast_inputs, axes, random

    def __call__(self, plain: Callable[..., Any], asked: dict[str, Any]) -> Any:
        if held() is None:
            raise SessionError(
                f"{_backends.engine}.function: synkhronos.parallelize is active, and this process has no session; "
                "call synkhronos.fork() first, or build the function outside of the block"
            )
        if asked["accept_inplace"]:
            raise ValueError(
                f"{_backends.engine}.function: got accept_inplace=True, which synkhronos.parallelize does not support; "
                "leave it out"
            )
        inputs = asked["inputs"]
        order = sorted(range(len(inputs)), key=lambda position: not self._has_rows(inputs[position]))
        n_scattered = sum(map(self._has_rows, inputs))
        shard = self._sharded(asked) if self._axes else {}
        if not (n_scattered or shard or asked["updates"] or any(minibatches(_graph.variables_used(asked)))):
            made = plain(**asked)
            if not _graph.updated_variables(made):  # a function that draws random numbers updates their states
                return made
        divided = [inputs[position] for position in order]
        own = ("inputs", "outputs", "output_keys", "accept_inplace")
        keys, outputs = asked.get("output_keys"), asked.get("outputs")
        made = function(
            divided[:n_scattered],
            outputs if keys is None else dict(zip(keys, outputs or ())),
            bcast_inputs=divided[n_scattered:],
            exact=True,
            shard=shard,
            random=self._random,
            **{name: value for name, value in asked.items() if name not in own},
        )
        return ParallelFunction(made, inputs, order, keys)

    def _has_rows(self, item: Any) -> bool:
        variable = getattr(item, "variable", item)
        if not _graph.is_tensor_variable(variable) or any(_refers_to(one, item) for one in self._whole):
            return False
        axis = next(iter(self._axes_of(item)), 0)
        # an axis that does not exist is refused later, with other errors in shard
        return variable.ndim > 0 and not (axis in range(-variable.ndim, variable.ndim) and variable.broadcastable[axis])

    def _sharded(self, asked: dict[str, Any]) -> dict[Any, int]:
        """Return the entries of ``shard`` that a function uses."""
        used = _graph.variables_used(asked)
        names = {item.variable: item for item in asked["inputs"] if hasattr(item, "variable")}
        return {variable: axis for variable in used for axis in self._axes_of(names.get(variable, variable))}

    def _axes_of(self, item: Any) -> list[int]:
        return [axis for one, axis in self._axes.items() if _refers_to(one, item)]


def _refers_to(one: Any, item: Any) -> bool:
    """Return whether ``one`` is a given input (an ``In`` or a variable), its variable, or its name."""
    variable = getattr(item, "variable", item)
    return one is variable or one is item or (isinstance(one, str) and one in (item.name, variable.name))


class _Inputs(NamedTuple):
    """Names and default values of a function's inputs, in the program's order."""

    input_names: list[Any]
    input_defaults: list[Any]


class ParallelFunction:
    """Exact function with the interface of the backend's functions; made by `theano.function` under `parallelize`.

    It has only the attributes of Theano's functions that are listed here.

    Attributes
    ----------
    exact : Function
        The exact function that it calls. It takes the scattered inputs first, and also `Data`, ``batch`` and the other
        arguments of `Function.__call__`.
    name, maker, fn, vm, profile, partition
        Attributes of ``exact``.
    output_keys : list of str, or None
    trust_input : bool
        May be set, but has no effect: inputs are always checked.
    """

    def __init__(self, exact: Any, inputs: Sequence[Any], order: list[int], output_keys: Any) -> None:
        self.exact = exact
        self.output_keys = output_keys
        self.trust_input = False
        self._order = order
        self._inputs = _Inputs([item.name for item in inputs], list(map(_graph.default_of, inputs)))

    def __call__(self, *args: Any, output_subset: Any = None, **kwargs: Any) -> Any:
        """Compute on all ranks.

        Parameters
        ----------
        *args, **kwargs : Data or array_like
            The inputs, in the program's order or by name.
        output_subset : list, optional
            The outputs to compute: their numbers, or their keys where outputs have keys.

        Returns
        -------
        array, list of array, or dict
            The outputs, as in Theano. In a `sequence`, a `Future` of the outputs.
        """
        values = arrange(self._inputs, args, kwargs, ("output_subset",))
        return self.exact(*[values[position] for position in self._order], output_subset=output_subset)

    name: Any = property(lambda self: self.exact.name)
    maker: Any = property(lambda self: self.exact.maker)
    fn: Any = property(lambda self: self.exact.fn)
    vm: Any = property(lambda self: self.exact.fn)
    profile: Any = property(lambda self: self.exact.profile)
    partition: Any = property(lambda self: self.exact.partition)

    def get_shared(self) -> list[Any]:
        """Return the shared variables that the function reads or updates."""
        return self.exact.get_shared()

    def copy(self, *args: Any, **kwargs: Any) -> ParallelFunction:
        """Copy the function, with the arguments of the backend's own ``copy``; see `ExactFunction.copy`."""
        made = object.__new__(ParallelFunction)
        made.__dict__.update(self.__dict__, exact=self.exact.copy(*args, **kwargs))
        return made

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a ParallelFunction has no attribute {name!r}; it has copy, exact, fn, get_shared, maker, name, "
            f"output_keys, partition, profile, trust_input and vm. For others, call {_backends.engine}.function "
            "outside of synkhronos.parallelize"
        )

    def __getitem__(self, name: Any) -> Any:
        raise TypeError(
            f"got f[{name!r}], which synkhronos.parallelize does not support; keep the state in a shared variable"
        )

    def __repr__(self) -> str:
        return f"<synkhronos.ParallelFunction of {self.exact!r}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.exact.__reduce_ex__(protocol)


_backends.make_printable(Function, ParallelFunction)
