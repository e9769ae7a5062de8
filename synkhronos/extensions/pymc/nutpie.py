"""Support for nutpie, a sampler written in Rust: build a model's functions for it, and raise their exceptions.

nutpie calls compiled code, in one thread for each chain. Here this is the code of a `Combiner`, so that the points of
all chains that wait are evaluated in one call on all ranks. In compiled code an exception becomes an error without a
message; here it is raised where the program waits for draws.

Where dividing rows gains nothing, ranks are divided over points instead: nutpie's own model computes all rows, on as
many cores as there are ranks, in the controller's process. So there is no communication. The choice is made before the
chains start, by measured times, and then stays the same: so the draws do not depend on which points meet.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import synkhronos
from synkhronos._backends import SharedVariable, ancestors, divert
from synkhronos.extensions.pymc._combiner import Combiner
from synkhronos.extensions.pymc.building import Builder, Each, ModelFunction, replaced

__all__ = ["diverted"]

_MOST_THREADS = 64
_SECONDS, _LEAST = 0.05, 5  # of calls that are timed
#: Bytes of data from which rows are divided without a comparison with nutpie's own model, which would copy the data.
_LARGE = 1 << 25
_NEAR = 1.1  # a smaller gain from dividing rows does not count: other programs delay ranks, which wait for each other
_COMMAND = 1e-4  # seconds in which no evaluation on all ranks ends, so that it need not be compiled for a comparison
_WAKE_UP = 1e-4  # seconds between two calls, in which the threads of the chains wake up
_DOUBLES = ctypes.POINTER(ctypes.c_double)
_EXPAND = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64, _DOUBLES, _DOUBLES, ctypes.c_void_p)


@contextlib.contextmanager
def diverted(builder: Builder) -> Iterator[None]:
    """Have ``nutpie.compile_pymc_model``, which `pm.sample` calls, call this module in a ``with`` block."""
    from nutpie import compile_pymc

    with contextlib.ExitStack() as ending:
        for backend in ("numba", "jax"):
            name = f"_compile_pymc_model_{backend}"
            ours = functools.partial(compile_model, builder, getattr(compile_pymc, name), backend)
            ending.enter_context(replaced(compile_pymc, name, ours))
        yield


def compile_model(
    builder: Builder,
    plain: Callable[..., Any],
    backend: str,
    model: Any,
    pymc_initial_point_fn: Any,
    var_names: Any = None,
    **others: Any,
) -> Any:
    """Make a model for nutpie, whose density all ranks evaluate.

    Parameters
    ----------
    builder : Builder
    plain : callable
        nutpie's function that makes a model.
    backend : str
        Must be ``"numba"``, nutpie's default. Here it means PyTensor's default mode.
    model, pymc_initial_point_fn, var_names
        As for ``plain``.
    **others
        Must be empty.

    Returns
    -------
    nutpie's model
        Its samplers raise the exceptions of the model's functions. If the density does not use data that can be
        sharded, this is nutpie's own model.

    Raises
    ------
    ValueError
        For another backend, or other arguments.
    """
    if backend != "numba" or others:
        raise ValueError(
            f"got nutpie with backend={backend!r}, {others} under synkhronos.extensions.pymc.parallel, which "
            "compiles its functions itself; leave these arguments out"
        )
    from nutpie import compile_pymc
    from pymc.pytensorf import get_mode

    def build_own() -> Any:
        with contextlib.ExitStack() as ending:
            ending.callback(divert(lambda plain, asked: plain(**asked)))
            return plain(model=model, pymc_initial_point_fn=pymc_initial_point_fn, var_names=var_names)

    with builder.mapping():
        n_dimensions, n_expanded, density, expand, start, shape_info, reparameterized = compile_pymc._make_functions(
            model,
            mode=get_mode(None),
            compute_grad=True,
            join_expanded=True,
            pymc_initial_point_fn=pymc_initial_point_fn,
            var_names=var_names,
        )
    if not isinstance(density, ModelFunction):
        return build_own()
    dims, coords = compile_pymc._prepare_dims_and_coords(model, shape_info, reparameterized)
    used = [*model.data_vars, *ancestors([model.logp()])]
    shared_variables = [one for one in used if isinstance(one, SharedVariable)]  # a frozen model has constants
    return _model_class()(
        _n_dim=n_dimensions,
        dims=dims,
        _coords=coords,
        _shapes={name: tuple(shape) for name, _, shape in zip(*shape_info)},
        compiled_logp_func=None,
        compiled_expand_func=_compiled_expand(n_dimensions, n_expanded, expand),
        initial_point_func=compile_pymc._wrap_with_lock(start),
        shared_data={},
        shared_var_keys={},
        user_data=np.zeros(()),
        n_expanded=n_expanded,
        shape_info=shape_info,
        logp_func=density,
        expand_func=compile_pymc._wrap_with_lock(expand),
        reparameterized_names=reparameterized,
        own=OwnModel(build_own, shared_variables),
    )


def _compiled_expand(n_dimensions: int, n_expanded: int, expand: Any) -> Any:
    """Return numba's compilation of the function that computes the draws of all variables from a point.

    ``None`` if it cannot be used. With it, a chain does not need Python's lock.
    """
    compiled = getattr(getattr(expand, "vm", None), "jit_fn", None)
    if compiled is None or isinstance(expand, ModelFunction) or expand.get_shared():
        return None
    import numba
    from nutpie import compile_pymc

    no_data = compile_pymc.make_user_data({}, {})
    code, signature = compile_pymc._make_c_expand_func(n_dimensions, n_expanded, compiled, no_data, [], {})
    return numba.cfunc(signature)(code)


def _expand_in_python(expand: Callable[..., Any], failures: Failures) -> Any:
    """Return an object whose `address` is that of a C function that calls a Python function to compute the draws."""

    def store(point: Any, values: Any) -> None:
        (found,) = expand(np.array(point))
        if found.shape != values.shape:
            raise ValueError(
                f"a draw has {found.size} numbers, and the model was compiled for {values.size}: pm.set_data has "
                "changed the shape of a variable that is stored. Compile the model again"
            )
        values[:] = found

    noted = failures.noted(store)

    def in_python(n_point: int, n_values: int, point: Any, values: Any, _: Any) -> int:
        try:
            noted(np.ctypeslib.as_array(point, (n_point,)), np.ctypeslib.as_array(values, (n_values,)))
        except BaseException:  # is noted; an exception cannot pass through compiled code
            return -1
        return 0

    function = _EXPAND(in_python)
    return types.SimpleNamespace(address=ctypes.cast(function, ctypes.c_void_p).value, function=function)


@functools.cache
def _model_class() -> type:
    """Return a class of nutpie's models whose samplers evaluate the density on all ranks."""
    from nutpie.compile_pymc import CompiledPyMCModel

    @dataclasses.dataclass(frozen=True)
    class Model(CompiledPyMCModel):
        own: Any = None

        def _make_sampler(self, settings: Any, init_mean: Any, cores: int, *others: Any) -> Any:
            n_chains = settings.as_dict()["settings"]["num_chains"]
            n_threads = max(1, min(n_chains, _MOST_THREADS))
            faster = self.own.if_faster(self.logp_func, self.initial_point_func(0), n_threads)
            if faster is not None:
                model, n_cores = faster
                model = dataclasses.replace(model, _transform_adapt_args=self._transform_adapt_args)
                return model._make_sampler(settings, init_mean, n_cores, *others)
            failures = Failures()
            combiner = combiner_of(self.logp_func, n_threads, self.n_dim, failures.note)
            argument = types.SimpleNamespace(data=combiner.argument)
            changes: Any = {
                "compiled_logp_func": types.SimpleNamespace(address=combiner.function, keeps=combiner),
                "user_data": types.SimpleNamespace(ctypes=argument),
                "initial_point_func": failures.noted(self.initial_point_func),
            }
            if self.compiled_expand_func is None:
                changes["compiled_expand_func"] = _expand_in_python(self.expand_func, failures)
            running = dataclasses.replace(self, **changes)
            sampler = super(Model, running)._make_sampler(settings, init_mean, n_threads, *others)
            return Sampler(sampler, combiner, failures)

        def benchmark_logp(self, *_: Any, **__: Any) -> Any:
            raise ValueError("benchmark_logp: all ranks evaluate this model; call synkhronos.extensions.pymc.report")

        def with_data(self, **updates: Any) -> Any:
            raise ValueError(f"with_data: set {sorted(updates)} by pm.set_data, which the model's functions follow")

    return Model


class OwnModel:
    """nutpie's own model, which is compiled and used where it is faster than to divide rows.

    Parameters
    ----------
    build : callable
        Builds it.
    variables : list of shared variables
        The shared variables of the density, whose values nutpie's model copies.
    """

    def __init__(self, build: Callable[[], Any], variables: Sequence[Any]) -> None:
        self._build, self._variables = build, list(dict.fromkeys(variables))
        self._values: list[Any] = []
        self._model: Any = None
        self._choices: dict[Any, tuple[Any, int] | None] = {}

    def if_faster(self, density: Any, point: Any, k: int) -> tuple[Any, int] | None:
        """Return the model and the number of cores that it should use, if it is faster for k chains, else ``None``.

        Parameters
        ----------
        density : ModelFunction
            Function of several points.
        point : array
        k : int
        """
        values = [one.container.storage[0] for one in self._variables]
        if len(values) != len(self._values) or any(new is not old for new, old in zip(values, self._values)):
            self._values, self._model, self._choices = values, None, {}
        is_mapped = not isinstance(density.exact, Each)
        function = density.exact if is_mapped else density.exact.function
        function.plan = None
        asked, function.plan = function.plan, "rows"
        points = np.tile(point, (k, 1))
        n_ranks = len(synkhronos.get_lengths(density.data[0].variable))
        key = (asked, n_ranks, k)
        if key not in self._choices:
            is_large = is_mapped and n_ranks > 1 and sum([one.n_bytes for one in density.data]) >= _LARGE
            divides = asked == "rows" or (asked == "auto" and is_large)
            self._choices[key] = None if divides else self._chosen(density, points, asked, n_ranks)
        if self._choices[key] is None:
            density(points)  # compiles it before the chains start
        return self._choices[key]

    def _chosen(self, density: Any, points: Any, asked: str, n_ranks: int) -> tuple[Any, int] | None:
        self._model = self._model or self._build()
        k, point = len(points), points[0]
        n_cores = min(k, n_ranks, len(os.sched_getaffinity(0)))
        if asked == "controller":
            return self._model, n_cores
        code, data = self._model.compiled_logp_func.ctypes, self._model.user_data.ctypes.data
        arrays = [array.ctypes.data_as(_DOUBLES) for array in (point, np.empty_like(point), np.empty(1))]
        own_call = lambda: code(len(point), *arrays, data)  # noqa: E731
        if own_call() != 0:  # there is no density at this point, so its time says nothing
            return None
        of_own = seconds_of(own_call) * -(-k // n_cores)
        if of_own > _COMMAND:
            of_all = seconds_of(lambda: density(points)) + _WAKE_UP * (k > 1)
            if of_own > _NEAR * of_all:
                return None
        return self._model, n_cores


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the median of the seconds that a call takes, after two calls that are not timed."""
    call()
    call()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < _LEAST or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def combiner_of(
    density: Callable[[Any], Sequence[Any]], n_threads: int, n_dimensions: int, note: Callable[[BaseException], None]
) -> Combiner:
    """Return a combiner that evaluates a density for the threads of a sampler.

    Parameters
    ----------
    density : callable
        ``density(points)`` returns k values and, as an array of shape (k, n_dimensions), the gradients.
    n_threads, n_dimensions : int
    note : callable
        Called with the exception, if the density raises one. The sampler then gets errors.
    """
    points, gradients = np.empty((n_threads, n_dimensions)), np.empty((n_threads, n_dimensions))
    values = np.empty(n_threads)

    def evaluate(k: int) -> bool:
        try:
            values[:k], gradients[:k] = density(points[:k])
        except BaseException as failure:  # cannot pass through compiled code
            note(failure)
            return False
        return True

    return Combiner(evaluate, points, values, gradients)


class Failures:
    """Record of the first exception in a function that nutpie calls.

    nutpie may handle the exception itself; the record makes it available to the program.
    """

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def note(self, failure: BaseException) -> None:
        """Record an exception if it is the first one."""
        self.first = self.first or failure

    def noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it records its exceptions, and raises the first one again in later calls."""

        def call(*args: Any) -> Any:
            self.check()
            try:
                return function(*args)
            except BaseException as failure:
                self.note(failure)
                raise

        return call

    def check(self) -> None:
        """Raise the recorded exception, if there is one."""
        if self.first is not None:
            raise self.first


class Sampler:
    """Wrapper of nutpie's sampler that raises recorded exceptions instead of returning results.

    Parameters
    ----------
    sampler : nutpie._lib.PySampler
    combiner : Combiner
    failures : Failures
    """

    def __init__(self, sampler: Any, combiner: Any, failures: Failures) -> None:
        self._sampler, self._combiner, self._failures = sampler, combiner, failures

    def wait(self, *args: Any) -> None:
        """Wait for the draws; raise the first exception of the model's functions."""
        try:
            self._sampler.wait(*args)
        except BaseException as failure:
            if self._failures.first is None and isinstance(failure, (KeyboardInterrupt, TimeoutError)):
                raise  # the sampling goes on; after Ctrl-C, nutpie aborts it, and returns the draws so far
            self._failures.note(failure)
            self._combiner.close()
            self._failures.check()

    def abort(self) -> None:
        """End the sampling; the draws so far can be taken."""
        try:
            self._sampler.abort()
        except BaseException:  # nutpie panics if its thread has ended
            if self._failures.first is None:
                raise
        finally:
            self._combiner.close()

    def take_results(self) -> Any:
        """Return the draws; raise the recorded exception instead, if there is one."""
        self._failures.check()
        results = self._sampler.take_results()
        self._failures.check()  # a draw may have failed meanwhile
        self._combiner.close()
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
