"""nutpie, a sampler in Rust: a model's functions for it, and failures that end the sampling.

nutpie takes compiled code, in which an exception becomes a divergent draw, or Python functions, which it gets here and
calls from a thread of its own. An exception in them, and Ctrl-C, is raised where the program waits for draws; the draws
made until then are no result.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from synkhronos.extensions.pymc.building import ONE_CORE

__all__ = ["diverted"]


@contextlib.contextmanager
def diverted() -> Iterator[None]:
    """Replace ``nutpie.compile_pymc_model``, which `pm.sample` calls, by that of this module, in a ``with`` block."""
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
    """Make a model for nutpie, as ``nutpie.compile_pymc_model`` does, of functions that are called in Python.

    Parameters
    ----------
    model, initial_points, jitter_rvs, default_initialization_strategy, var_names
        As in nutpie.
    backend : str
        ``"numba"``, which is nutpie's default, and means PyTensor's default mode here.
    **others
        Refused unless they are ``None``.
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
        value, gradient = density(np.array(point))  # a copy, since nutpie reuses the memory
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
    """Failures of functions that nutpie calls, however nutpie handles them."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def note(self, failure: BaseException) -> None:
        """Record a failure if it is the first one."""
        self.first = self.first or failure

    def noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records its failures, and that computes nothing after a failure."""

        def call(*args: Any) -> Any:
            self.check()
            try:
                return function(*args)
            except BaseException as failure:
                self.note(failure)
                raise

        return call

    def check(self) -> None:
        """Raise the failure, if there was one."""
        if self.first is not None:
            raise self.first


class Sampler:
    """nutpie's sampler, without results after a failure.

    Parameters
    ----------
    sampler : nutpie._lib.PySampler
    failures : Failures
    """

    def __init__(self, sampler: Any, failures: Failures) -> None:
        self._sampler, self._failures = sampler, failures

    def wait(self, *args: Any) -> None:
        """Wait for the draws."""
        try:
            self._sampler.wait(*args)
        except BaseException as failure:  # also Ctrl-C, after which nutpie would return the draws made so far
            with contextlib.suppress(BaseException):  # nutpie panics if its thread has ended
                self._sampler.abort()
            self._failures.note(failure)
            self._failures.check()

    def abort(self) -> None:
        """End the sampling, unless a failure has ended it."""
        if self._failures.first is None:
            self._sampler.abort()

    def take_results(self) -> Any:
        """Return the draws of a sampling without failures."""
        self._failures.check()
        results = self._sampler.take_results()
        self._failures.check()  # a draw may have failed in the meantime
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _watched(model: Any, failures: Failures) -> Any:
    """Return a model of nutpie's whose samplers are watched."""

    class Watched(type(model)):  # type: ignore[misc]
        def _make_sampler(self, settings: Any, init_mean: Any, cores: int, *others: Any) -> Any:
            if min(cores, settings.as_dict()["settings"]["num_chains"]) > 1:
                raise ValueError(ONE_CORE)
            return Sampler(super()._make_sampler(settings, init_mean, cores, *others), failures)

    fields = {one.name: getattr(model, one.name) for one in dataclasses.fields(model)}
    return Watched(**fields)
