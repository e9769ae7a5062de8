"""Evaluate a density at the points of several chains at once, on all ranks.

A sampler in compiled code calls a `Combiner`, in threads. One thread of Python takes all points that wait, and makes
one call of an exact function.

There are two ways to divide k points and n rows. *By rows*: each rank computes its rows for all points; a block of rows
is read from memory once for all of them. *By points*: each rank computes all rows for its points. The way is chosen
before the chains start, and then stays the same, so that the draws depend on the seed alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.extensions.pymc._combiner import Combiner

__all__ = ["Density", "Each", "Evaluator"]

#: Rows from which an evaluation takes much longer than a command to the ranks, whatever the model.
_MANY_ROWS = 50_000
_COMMAND = 1e-4  # seconds that a command takes at most, with its results


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


class Density:
    """Log-density and gradient at several points.

    Parameters
    ----------
    by_rows : callable
        Function of several points, divided by rows.
    build_by_points : callable
        Builds a function of several points, divided by points.
    n_rows : int or None
        Number of rows; ``None`` if the function by rows evaluates one point after the other.
    """

    def __init__(self, by_rows: Any, build_by_points: Callable[[], Any], n_rows: int | None) -> None:
        self._by_rows, self._build_by_points, self._n_rows = by_rows, build_by_points, n_rows
        self._by_points: Any = None
        self._chosen: dict[int, tuple[str | None, Any]] = {}
        self._function = by_rows

    def __call__(self, points: Any) -> tuple[Any, Any]:
        """Return the values and the gradients.

        Parameters
        ----------
        points : array of shape (k, n)

        Returns
        -------
        values : array of shape (k,), float64
        gradients : array of shape (k, n), float64
        """
        values, gradients = self._function(points)
        return np.ascontiguousarray(values, "float64"), np.ascontiguousarray(gradients, "float64")

    def choose(self, points: Any) -> None:
        """Choose the way for calls with at most as many points as these, and make a call.

        Parameters
        ----------
        points : array of shape (k, n)
        """
        k = len(points)
        if k not in self._chosen:
            self._chosen[k] = self._choice(points)
        plan, self._function = self._chosen[k]
        if plan is not None:
            self._by_rows.exact.plan = plan
        self._function(points)

    def _choice(self, points: Any) -> tuple[str | None, Any]:
        """Return the plan of the function by rows, if it is to be set, and the function to use."""
        k, plan = len(points), None
        self._by_rows(points)  # also makes the measurements that its plan needs
        n_ranks = self._by_rows.n_ranks
        if self._n_rows is None:
            is_by_points = n_ranks > 1 and k > 1
        elif n_ranks > 1 and self._n_rows >= _MANY_ROWS:
            plan, is_by_points = "rows", False
        else:
            plans = self._by_rows.exact.partition.plans  # the last one is that of this call
            rows, controller = (plans[-1].rows, plans[-1].controller) if plans else (0.0, np.inf)
            plan = "rows" if rows < controller else "controller"
            is_by_points = n_ranks > 1 and controller * -(-k // n_ranks) / k + _COMMAND < min(rows, controller)
        if not is_by_points:
            return plan, self._by_rows
        self._by_points = self._by_points or self._build_by_points()
        return plan, self._by_points


class Evaluator:
    """Thread that evaluates a density for the threads of a sampler.

    Parameters
    ----------
    density : Density
    n_threads, n_dimensions : int
    note : callable
        Called with the exception, if the density raises one. The sampler then gets errors.

    Attributes
    ----------
    combiner : Combiner
    """

    def __init__(
        self, density: Density, n_threads: int, n_dimensions: int, note: Callable[[BaseException], None]
    ) -> None:
        self.combiner = Combiner(n_threads, n_dimensions)
        self._density, self._note = density, note
        self._points = np.empty((n_threads, n_dimensions))
        self._thread = threading.Thread(target=self._run, name="synkhronos: evaluates points", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        values, gradients = np.empty(0), np.empty((0, self._points.shape[1]))
        try:
            while True:
                k = self.combiner.exchange(values, gradients, self._points)
                if k == 0:
                    break
                values, gradients = self._density(self._points[:k])
        except BaseException as failure:
            self._note(failure)
        finally:
            self.combiner.close()

    def close(self) -> None:
        """End the thread; the sampler gets errors from now on."""
        self.combiner.close()
        self._thread.join()
