"""Support for nutpie, a sampler written in Rust: build a model's functions for it, and raise their exceptions.

nutpie accepts compiled code or Python functions. This module gives it Python functions, which nutpie calls in a thread
of its own. In compiled code an exception becomes a divergent draw. Here an exception, or Ctrl-C, is raised where the
program waits for draws, and the draws made so far are discarded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["diverted"]


@contextlib.contextmanager
def diverted() -> Iterator[None]:
    """Replace ``nutpie.compile_pymc_model``, which `pm.sample` calls, by this module's version in a ``with`` block."""
    import nutpie

    plain = nutpie.compile_pymc_model
    nutpie.compile_pymc_model = compile_pymc_model
    try:
        yield
    finally:
        nutpie.compile_pymc_model = plain


def compile_pymc_model(
    model: Any,
    *,
    backend: str = "numba",
    initial_points: Any = None,
    jitter_rvs: Any = None,
    default_initialization_strategy: str = "support_point",
    var_names: Any = None,
    **others: Any,
) -> Any:
    """Make a model for nutpie like ``nutpie.compile_pymc_model``, but with Python functions.

    Parameters
    ----------
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
    from nutpie.compiled_pyfunc import from_pyfunc
    from pymc.initial_point import make_initial_point_fn
    from pymc.pytensorf import get_mode

    if default_initialization_strategy == "support_point" and jitter_rvs is None:
        jitter_rvs = set(model.free_RVs)
    initial = make_initial_point_fn(
        model=model,
        overrides=initial_points,
        default_strategy=default_initialization_strategy,
        jitter_rvs=jitter_rvs,
        return_transformed=True,
    )
    n_dimensions, _, density, expand, start, shape_info, reparameterized = compile_pymc._make_functions(
        model,
        mode=get_mode(None),
        compute_grad=True,
        join_expanded=False,
        pymc_initial_point_fn=initial,
        var_names=var_names,
    )
    names, _, shapes = shape_info
    dims, coords = compile_pymc._prepare_dims_and_coords(model, shape_info, reparameterized)
    failures = Failures()

    def evaluated(point: Any) -> tuple[float, Any]:
        value, gradient = density(np.array(point))  # a copy, because nutpie reuses the memory of the point
        return float(value), np.asarray(gradient, "float64", order="C")

    def expanded(point: Any) -> dict[str, Any]:
        values = zip(names, expand(np.array(point)), shapes)
        return {name: np.asarray(value, "float64", order="C").reshape(shape) for name, value, shape in values}

    made = from_pyfunc(
        ndim=n_dimensions,
        make_logp_fn=lambda: failures.noted(evaluated),
        make_expand_fn=lambda *seeds: failures.noted(expanded),
        make_initial_point_fn=failures.noted(start),
        expanded_dtypes=[np.dtype("float64")] * len(names),
        expanded_shapes=shapes,
        expanded_names=names,
        dims=dims,
        coords=coords,
        reparameterized_names=reparameterized,
    )
    return _watched(made, failures)


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
        """Wrap a function so that it records its exceptions, and after the first one only raises that again."""

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
    failures : Failures
    """

    def __init__(self, sampler: Any, failures: Failures) -> None:
        self._sampler, self._failures = sampler, failures

    def wait(self, *args: Any) -> None:
        """Wait for the draws; raise the first exception of the model's functions."""
        try:
            self._sampler.wait(*args)
        except BaseException as failure:  # including Ctrl-C, after which nutpie would return the draws made so far
            with contextlib.suppress(BaseException):  # nutpie panics if its thread has ended
                self._sampler.abort()
            self._failures.note(failure)
            self._failures.check()

    def abort(self) -> None:
        """Abort the sampling, unless an exception has ended it."""
        if self._failures.first is None:
            self._sampler.abort()

    def take_results(self) -> Any:
        """Return the draws; raise the recorded exception instead, if there is one."""
        self._failures.check()
        results = self._sampler.take_results()
        self._failures.check()  # a draw may have failed meanwhile
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _watched(model: Any, failures: Failures) -> Any:
    """Return a copy of a nutpie model whose samplers are wrapped in `Sampler`."""

    class Watched(type(model)):  # type: ignore[misc]
        def _make_sampler(self, settings: Any, init_mean: Any, cores: int, *others: Any) -> Any:
            return Sampler(super()._make_sampler(settings, init_mean, 1, *others), failures)  # one chain at a time

    fields = {one.name: getattr(model, one.name) for one in dataclasses.fields(model)}
    return Watched(**fields)
