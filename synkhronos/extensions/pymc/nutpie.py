"""Support for nutpie, a sampler written in Rust: build a model's functions for it, and raise their exceptions.

nutpie calls compiled code, in one thread for each chain. Here this is the code of a `Combiner`, so that all chains that
wait for an evaluation are evaluated in one call on all ranks. In compiled code an exception becomes an error without a
message; here it is raised where the program waits for draws.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from synkhronos.extensions.pymc.building import Builder
from synkhronos.extensions.pymc.points import Density, Evaluator

__all__ = ["diverted"]

_MOST_THREADS = 64
_EXPAND = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64, *[ctypes.POINTER(ctypes.c_double)] * 2, ctypes.c_void_p
)


@contextlib.contextmanager
def diverted(builder: Builder) -> Iterator[None]:
    """Replace ``nutpie.compile_pymc_model``, which `pm.sample` calls, by this module's version in a ``with`` block."""
    import nutpie

    plain = nutpie.compile_pymc_model
    nutpie.compile_pymc_model = functools.partial(compile_pymc_model, plain, builder)
    try:
        yield
    finally:
        nutpie.compile_pymc_model = plain


def compile_pymc_model(
    plain: Callable[..., Any],
    builder: Builder,
    model: Any,
    *,
    backend: str = "numba",
    initial_points: Any = None,
    jitter_rvs: Any = None,
    default_initialization_strategy: str = "support_point",
    var_names: Any = None,
    **others: Any,
) -> Any:
    """Make a model for nutpie like ``nutpie.compile_pymc_model``, whose density all ranks evaluate.

    Parameters
    ----------
    plain : callable
        nutpie's own function, for models whose density does not use data that can be sharded.
    builder : Builder
    model, initial_points, jitter_rvs, default_initialization_strategy, var_names
        As in nutpie.
    backend : str
        Must be ``"numba"``, nutpie's default. Here it means PyTensor's default mode.
    **others
        Must be ``None``.

    Returns
    -------
    nutpie's model
        Its samplers raise the exceptions of the model's functions.

    Raises
    ------
    ValueError
        For another backend, or other arguments.
    """
    unknown = {name: value for name, value in others.items() if value is not None}
    if backend.lower() != "numba" or unknown:
        raise ValueError(
            f"got nutpie with backend={backend!r}, {unknown} under synkhronos.extensions.pymc.parallel, which "
            "compiles its functions itself; leave these arguments out"
        )
    from nutpie import compile_pymc
    from pymc.initial_point import make_initial_point_fn
    from pymc.pytensorf import get_mode

    start_at = {
        "initial_points": initial_points,
        "jitter_rvs": jitter_rvs,
        "default_initialization_strategy": default_initialization_strategy,
    }
    if not builder.divides([model.logp()]):
        return plain(model, var_names=var_names, **start_at)
    if default_initialization_strategy == "support_point" and jitter_rvs is None:
        jitter_rvs = set(model.free_RVs)
    initial = make_initial_point_fn(
        model=model,
        overrides=initial_points,
        default_strategy=default_initialization_strategy,
        jitter_rvs=jitter_rvs,
        return_transformed=True,
    )
    with builder.mapping():
        n_dimensions, n_expanded, density, expand, start, shape_info, reparameterized = compile_pymc._make_functions(
            model,
            mode=get_mode(None),
            compute_grad=True,
            join_expanded=True,
            pymc_initial_point_fn=initial,
            var_names=var_names,
        )
    dims, coords = compile_pymc._prepare_dims_and_coords(model, shape_info, reparameterized)
    failures = Failures()
    return _model_class()(
        _n_dim=n_dimensions,
        dims=dims,
        _coords=coords,
        _shapes={name: tuple(shape) for name, _, shape in zip(*shape_info)},
        compiled_logp_func=None,
        compiled_expand_func=_compiled_expand(n_dimensions, n_expanded, expand, failures),
        initial_point_func=failures.noted(start),
        shared_data={},
        shared_var_keys={},
        user_data=np.zeros(()),
        n_expanded=n_expanded,
        shape_info=shape_info,
        logp_func=density,
        expand_func=expand,
        reparameterized_names=reparameterized,
        failures=failures,
    )


def _compiled_expand(n_dimensions: int, n_expanded: int, expand: Any, failures: Failures) -> Any:
    """Return what has the address of a C function that computes the draws of all variables from a point."""
    compiled = getattr(getattr(expand, "vm", None), "jit_fn", None)
    if compiled is not None and not expand.get_shared():  # numba's; a chain does not need Python's lock
        import numba
        from nutpie import compile_pymc

        code, signature = compile_pymc._make_c_expand_func(
            n_dimensions, n_expanded, compiled, compile_pymc.make_user_data({}, {}), [], {}
        )
        return numba.cfunc(signature)(code)
    call = failures.noted(expand)

    def in_python(n_point: int, n_values: int, point: Any, values: Any, _: Any) -> int:
        try:
            (found,) = call(np.array(np.ctypeslib.as_array(point, (n_point,))))
            np.ctypeslib.as_array(values, (n_values,))[:] = found
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
        failures: Any = None

        def _make_sampler(self, settings: Any, init_mean: Any, cores: int, *others: Any) -> Any:
            n_chains = settings.as_dict()["settings"]["num_chains"]
            n_threads = max(1, min(n_chains, _MOST_THREADS))
            density: Density = self.logp_func
            self.failures.first = None  # of an earlier run
            density.choose(np.tile(self.initial_point_func(None), (n_threads, 1)))
            evaluator = Evaluator(density, n_threads, self.n_dim, self.failures.note)
            address = types.SimpleNamespace(data=evaluator.combiner.argument)
            code = types.SimpleNamespace(address=evaluator.combiner.function, keeps=evaluator.combiner)
            own: Any = {"compiled_logp_func": code, "user_data": types.SimpleNamespace(ctypes=address)}
            running = dataclasses.replace(self, **own)
            try:
                sampler = super(Model, running)._make_sampler(settings, init_mean, n_threads, *others)
            except BaseException:
                evaluator.close()
                raise
            return Sampler(sampler, evaluator, self.failures)

        def with_data(self, **updates: Any) -> Any:
            raise ValueError(f"with_data: set {sorted(updates)} by pm.set_data, which the model's functions follow")

    return Model


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
        """Wrap a function so that it records its exceptions, and after the first one only raises that again.

        The wrapper runs the function in one thread at a time, as functions of PyTensor need it.
        """
        lock = threading.Lock()

        def call(*args: Any) -> Any:
            with lock:
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
    evaluator : Evaluator
    failures : Failures
    """

    def __init__(self, sampler: Any, evaluator: Evaluator, failures: Failures) -> None:
        self._sampler, self._evaluator, self._failures = sampler, evaluator, failures

    def wait(self, *args: Any) -> None:
        """Wait for the draws; raise the first exception of the model's functions."""
        try:
            self._sampler.wait(*args)
        except KeyboardInterrupt:  # nutpie then aborts, and returns the draws so far
            raise
        except BaseException as failure:
            self._failures.note(failure)
            self._evaluator.close()
            self._failures.check()

    def abort(self) -> None:
        """End the sampling; the draws so far can be taken."""
        try:
            self._sampler.abort()
        except BaseException:  # nutpie panics if its thread has ended
            if self._failures.first is None:
                raise
        finally:
            self._evaluator.close()

    def take_results(self) -> Any:
        """Return the draws; raise the recorded exception instead, if there is one."""
        self._failures.check()
        results = self._sampler.take_results()
        self._failures.check()  # a draw may have failed meanwhile
        self._evaluator.close()
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
