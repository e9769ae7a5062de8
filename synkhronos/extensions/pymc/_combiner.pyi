from typing import Any

class Combiner:
    """Collects the points of a sampler's threads; see combiner.c."""

    def __init__(self, n_threads: int, n_dimensions: int, /) -> None: ...
    @property
    def function(self) -> int:
        """Address of the function that samplers call."""

    @property
    def argument(self) -> int:
        """Last argument of that function."""

    def exchange(self, values: Any, gradients: Any, points: Any, /) -> int:
        """Give the results of the last points, wait for points, and copy them to `points`; return their number.

        Parameters
        ----------
        values : array of shape (k,), float64
        gradients : array of shape (k, n_dimensions), float64
        points : array of shape (n_threads, n_dimensions), float64

        Returns
        -------
        int
            0 if the combiner is closed.

        Raises
        ------
        ValueError
            For arrays of other dtypes, or that are too small.
        """

    def close(self) -> None:
        """End all calls, now and later, with an error."""
