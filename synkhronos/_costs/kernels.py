"""Seconds in which ranks compute: by rows, on other processors, their spread, and those of kernels by their sizes."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from synkhronos._costs.model import Curve, Machine, Work


@dataclass(frozen=True)
class RowTimes:
    """Seconds of a kernel or a function by its number of rows: straight lines between points, never decreasing.

    Attributes
    ----------
    rows : tuple of float
        Numbers of rows, in increasing order.
    seconds : tuple of float
        In the same order, never decreasing.
    constant : float
        Seconds with 0 rows: work that is not divided, such as updates and the start of kernels.
    """

    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    constant: float

    def at(self, rows: float) -> float:
        """Return the seconds for a number of rows.

        Below the least number of rows, a line leads to the constant part. Above the largest, the line through the
        largest point and the last one with at most half of its rows is extended.
        """
        if rows > self.rows[-1]:
            points = zip((0.0, *self.rows), (self.constant, *self.seconds))
            first, lower = max(point for point in points if point[0] <= self.rows[-1] / 2)
            slope = (self.seconds[-1] - lower) / (self.rows[-1] - first)
            return self.seconds[-1] + slope * (rows - self.rows[-1])
        return float(np.interp(rows, (0.0, *self.rows), (self.constant, *self.seconds)))

    def scaled(self, factor: float) -> RowTimes:
        """Return the times multiplied by a factor."""
        return RowTimes(self.rows, tuple(factor * one for one in self.seconds), factor * self.constant)


def fit_row_times(rows: Sequence[float], seconds: Sequence[float]) -> RowTimes:
    """Fit never decreasing seconds to measured ones, at five to seven numbers of rows, in any order.

    The isotonic fit has the least sum of squared differences (pool-adjacent-violators algorithm; R. Barlow et al.
    (1972), Statistical inference under order restrictions). Repeated numbers of rows enter with their median. The
    constant part is where the line through the first point, and the first one with at least twice its rows, reaches 0
    rows; it is between 0 and the seconds of the first point.

    Parameters
    ----------
    rows : sequence of float
        Positive.
    seconds : sequence of float

    Returns
    -------
    RowTimes

    Raises
    ------
    ValueError
        If there is no point, or if a number of rows is not positive.
    """
    if not rows or len(rows) != len(seconds) or min(rows) <= 0:
        raise ValueError(
            f"got rows {list(rows)} and seconds {list(seconds)}; expected as many positive rows as seconds"
        )
    sizes = sorted(set(rows))
    values = [statistics.median(one for size, one in zip(rows, seconds) if size == each) for each in sizes]
    fitted = _isotonic(values)
    upper = next((i for i, size in enumerate(sizes) if size >= 2 * sizes[0]), len(sizes) - 1)
    constant = 0.0
    if upper:
        slope = (fitted[upper] - fitted[0]) / (sizes[upper] - sizes[0])
        constant = min(max(fitted[0] - slope * sizes[0], 0.0), fitted[0])
    return RowTimes(tuple(map(float, sizes)), tuple(fitted), constant)


def _isotonic(values: Sequence[float]) -> list[float]:
    """Return the never decreasing sequence with the least sum of squared differences from ``values``."""
    blocks: list[tuple[float, int]] = []  # mean and number of values
    for value in values:
        block = (float(value), 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, n = blocks.pop()
            block = ((mean * n + block[0] * block[1]) / (n + block[1]), n + block[1])
        blocks.append(block)
    return [mean for mean, n in blocks for _ in range(n)]


@dataclass(frozen=True)
class Operand:
    """An array that the nodes all-reduce in a step, and when it exists.

    Attributes
    ----------
    part : float
        Of all bytes that are all-reduced.
    rows : tuple of float
        Numbers of rows, in increasing order.
    until : tuple of float
        For these, the part of the computation after which the array exists.
    """

    part: float
    rows: tuple[float, ...]
    until: tuple[float, ...]

    def at(self, rows: float) -> float:
        """Return the part of the computation after which the array exists, for a number of rows."""
        return float(np.interp(rows, self.rows, self.until))


@dataclass(frozen=True)
class Roofline:
    """Peak speeds of a processor (S. Williams, A. Waterman, D. Patterson (2009), Roofline, CACM 52).

    Attributes
    ----------
    flops : float
        Floating-point operations per second.
    memory : float
        Bytes per second.
    """

    flops: float
    memory: float

    def seconds(self, flops: float, n_bytes: float) -> float:
        """Return t = max(flops / F, bytes / B), the least seconds of a kernel."""
        return max(flops / self.flops, n_bytes / self.memory)


def rescaled(seconds: float, flops: float, n_bytes: float, measured: Roofline, other: Roofline) -> float:
    """Return the seconds of a kernel on another processor, equally far from the roofline."""
    return seconds * other.seconds(flops, n_bytes) / measured.seconds(flops, n_bytes)


@dataclass(frozen=True)
class Speeds:
    """Speeds of a node, by which measured times are scaled to another machine.

    Attributes
    ----------
    products : dict of str to float
        Floating-point operations per second of matrix products on one rank, by dtype.
    memory : float
        Bytes per second that one rank reads and writes while the others wait.
    memory_of_all : float
        Bytes per second of all ranks together.
    cores : int
        Number of ranks.
    command, meeting : float or None
        Seconds of a command that all ranks execute, and of a wait of all ranks for each other. ``None``: those of the
        machine that was measured.
    """

    products: Mapping[str, float]
    memory: float
    memory_of_all: float
    cores: int
    command: float | None = None
    meeting: float | None = None

    def seconds(self, work: Work, n_ranks: float = 1) -> float:
        """Return the sum of max(flops / F, bytes / B) over the products and passes of a rank.

        B is the bandwidth of one rank while ``n_ranks`` compute. More ranks than cores share it like as many as cores.
        """
        memory = min(self.memory, self.memory_of_all / min(n_ranks, self.cores))
        seconds = sum((*work.passes, *work.divided)) / memory
        for m, n, k, dtype, times in work.products:
            n_bytes = np.dtype(dtype).itemsize * (m * k + k * n + m * n)
            seconds += times * Roofline(self.products[dtype], memory).seconds(2.0 * m * n * k, n_bytes)
        return seconds

    def slowdown(self, work: Work, n_ranks: float) -> float:
        """Return how many times as long a rank computes while ``n_ranks`` do."""
        return self.seconds(work, n_ranks) / self.seconds(work)

    def __str__(self) -> str:
        products = ", ".join(f"{1e-9 * flops:.3g} GFLOP/s of {dtype}" for dtype, flops in self.products.items())
        return (
            f"{self.cores} cores, each with {products} products, memory of {1e-9 * self.memory:.3g} GB/s for one rank "
            f"and {1e-9 * self.memory_of_all:.3g} GB/s for all"
        )


_NUMBERS = ("products", "memory", "memory_of_all", "cores")
_FURTHER = ("command", "meeting")


def speeds_of(machine: Machine, n_ranks: int) -> Speeds:
    """Return the speeds of a measured machine, with the number of ranks on a node with which it was measured.

    The arithmetic is that of the fastest product while all ranks compute, and the memory is that of passes over the
    largest arrays.
    """
    products = {
        dtype: max(2.0 * math.prod(sizes) / one for sizes, one in zip(itertools.product(*grid[:3]), grid.seconds))
        for dtype, grid in machine.together.products.items()
    }
    alone, together = (rates.passes.sizes[-1] / rates.passes.seconds[-1] for rates in (machine.alone, machine.together))
    return Speeds(products, alone, n_ranks * together, n_ranks, machine.command, machine.meeting)


def speeds_from(given: Any) -> Speeds:
    """Return the speeds that a dict has, or a file of JSON, given by its path.

    Raises
    ------
    TypeError
        If it is neither.
    ValueError
        If the file cannot be read, keys are missing or unknown, or a value is not a positive number.
    """
    if isinstance(given, Speeds):
        return given
    if isinstance(given, (str, os.PathLike)):
        given = _content_of(os.fspath(given))
    if not isinstance(given, Mapping):
        raise TypeError(f"machine is {given!r}; expected a dict, or the path of a file of JSON")
    if not {*_NUMBERS} <= {*given} <= {*_NUMBERS, *_FURTHER}:
        raise ValueError(
            f"got a machine with the keys {sorted(map(str, given))}; expected {', '.join(_NUMBERS)}, and if wanted "
            f"{', '.join(_FURTHER)}"
        )
    products = given["products"]
    if not isinstance(products, Mapping) or not products or not {*products} <= {"float32", "float64"}:
        raise ValueError(f"got products={products!r} of a machine; expected FLOP/s by dtype, as in {{'float32': 5e10}}")
    for name, value in (*products.items(), *((name, given[name]) for name in given if name != "products")):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"got {name}={value!r} of a machine; expected a positive number")
    if given["cores"] % 1:
        raise ValueError(f"got cores={given['cores']!r} of a machine; expected an int of at least 1")
    return Speeds(**{**given, "products": dict(products), "cores": int(given["cores"])})


def _content_of(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ValueError(
            f"machine is {path!r}, which cannot be read: {error.strerror}; expected a file of JSON"
        ) from error
    except ValueError as error:
        raise ValueError(f"machine is {path!r}, which is not JSON: {error}; expected a file of JSON") from error
    if not isinstance(content, dict):
        raise ValueError(f"machine is {path!r}, which has {content!r}; expected one object of JSON")
    return content


def write_speeds(speeds: Speeds, path: str | os.PathLike[str]) -> None:
    """Write speeds to a file of JSON, which `speeds_from` reads."""
    known = {name: value for name, value in asdict(speeds).items() if value is not None}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(known, file, indent=1)
        file.write("\n")


def times_on(times: RowTimes, works: Sequence[Work], here: Speeds, there: Speeds) -> RowTimes:
    """Return the seconds of a function on another machine, at each number of rows equally far from the roofline.

    Parameters
    ----------
    times : RowTimes
        Measured here.
    works : sequence of Work
        What the function computes with each number of rows of ``times``.
    here, there : Speeds
    """
    factors = [_ratio(there.seconds(work), here.seconds(work)) for work in works]
    if len(factors) == 1:
        return times.scaled(factors[0])
    return fit_row_times(times.rows, [factor * seconds for factor, seconds in zip(factors, times.seconds)])


def _ratio(there: float, here: float) -> float:
    return there / here if here else 1.0


def contention_on(contention: Curve, work: Work, here: Speeds, there: Speeds) -> Curve:
    """Return how many times as long a function takes on another machine while several ranks compute, by their number.

    The measured factor is multiplied by that of memory there, which all ranks share, and divided by that here.
    """
    counts = {*contention.sizes, *(2.0**i for i in range(there.cores.bit_length())), float(there.cores)}
    sizes = tuple(sorted(counts))
    factors = [contention.at(n) * (there.slowdown(work, n) / here.slowdown(work, n)) for n in sizes]
    return Curve(sizes, tuple(max(1.0, factor) for factor in factors))


def reduction_on(reduction: Curve, here: Speeds, there: Speeds) -> Curve:
    """Return the seconds of an all-reduce of a node on another machine: at least a meeting, and bytes / B of all ranks.

    Both are multiplied by the same factor as here.
    """
    meeting = here.meeting or 0.0

    def least(speeds: Speeds, meeting: float, n_bytes: float) -> float:
        return max(meeting, n_bytes / speeds.memory_of_all)

    seconds = [
        one * (least(there, there.meeting or meeting, n_bytes) / least(here, meeting, n_bytes))
        for n_bytes, one in zip(*reduction)
    ]
    return Curve(reduction.sizes, tuple(seconds))


@dataclass(frozen=True)
class Spread:
    """Random differences between the seconds of equal steps, independent on each rank.

    Attributes
    ----------
    deviation : float
        Standard deviation, relative to the mean, of a normal distribution.
    samples : tuple of float
        In its place, measured seconds, relative to their mean.
    """

    deviation: float = 0.0
    samples: tuple[float, ...] = ()

    @classmethod
    def measured(cls, seconds: Sequence[float]) -> Spread:
        """Return the empirical spread of the seconds of equal steps."""
        mean = statistics.fmean(seconds)
        return cls(samples=tuple(one / mean for one in seconds))

    def of_sum(self, n_steps: int) -> Spread:
        """Return the spread of the seconds of several steps, whose relative deviation is 1 / √n that of one step."""
        deviation = statistics.pstdev(self.samples) if self.samples else self.deviation
        return self if n_steps == 1 else Spread(deviation / math.sqrt(n_steps))


@functools.lru_cache(maxsize=1024)
def expected_slowest(factors: tuple[float, ...], spread: Spread) -> float:
    """Return E[max of fᵢ Xᵢ]: the expected seconds of the slowest rank, relative to the mean of a rank of factor 1.

    The distribution of a maximum of independent values is the product of theirs (order statistics; H. David, H.
    Nagaraja (2003)). For equal factors and a normal distribution of deviation σ, the result is 1 + cσ, with c = 0.564
    for 2 ranks, 1.03 for 4 and 1.42 for 8.

    Parameters
    ----------
    factors : tuple of float
        For each rank, how many times as long as others it computes.
    spread : Spread
    """
    if len(factors) == 1:
        return factors[0]
    counts = {factor: factors.count(factor) for factor in set(factors)}
    if spread.samples:
        samples = np.sort(spread.samples)
        points = np.sort([factor * one for factor in counts for one in samples])
        below = np.ones(len(points))
        for factor, count in counts.items():
            # the tolerance makes up for rounding in factor * one / factor
            at_most = np.searchsorted(samples, points / factor * (1 + 1e-12), side="right")
            below *= (at_most / len(samples)) ** count
        return float(points @ np.diff(below, prepend=0.0))
    if not spread.deviation:
        return max(factors)
    reach = 8 * spread.deviation
    points = np.linspace(min(factors) * (1 - reach), max(factors) * (1 + reach), 8001)
    normal = statistics.NormalDist(1.0, spread.deviation)
    above = np.ones(len(points))
    for factor, count in counts.items():
        above *= np.array([normal.cdf(one) for one in points / factor]) ** count
    above = 1 - above
    step = points[1] - points[0]
    return float(points[0] + step * (above.sum() - (above[0] + above[-1]) / 2))


class KernelRegressor:
    """Seconds of a kind of kernel by its sizes, from a small neural network.

    A multi-layer perceptron maps the logarithms of sizes to the logarithm of seconds, so that equal relative errors
    count equally. The result is the geometric mean of some networks that begin with different weights.

    Parameters
    ----------
    sizes : sequence of sequence of float
        Positive sizes of each measured kernel: (m, n, k) of a matrix product, (rows, channels, length, length of the
        filter) of a convolution, (bytes,) of an elementwise operation.
    seconds : sequence of float
    hidden : tuple of int, optional
        Units of the hidden layers.
    n_networks : int, optional

    Raises
    ------
    ImportError
        If scikit-learn is not installed.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[float]],
        seconds: Sequence[float],
        hidden: tuple[int, ...] = (32, 32),
        n_networks: int = 3,
    ) -> None:
        try:
            from sklearn.neural_network import MLPRegressor
        except ImportError as error:
            raise ImportError("KernelRegressor needs scikit-learn: pip install 'synkhronos[plan]'") from error
        inputs, outputs = np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float))
        self._centre, self._scale = inputs.mean(axis=0), np.maximum(inputs.std(axis=0), 1e-9)
        self._mean, self._deviation = outputs.mean(), max(outputs.std(), 1e-9)
        self._networks = [
            MLPRegressor(
                hidden_layer_sizes=hidden,
                activation="tanh",
                solver="lbfgs",
                alpha=1e-3,
                max_iter=3000,
                random_state=seed,
            ).fit((inputs - self._centre) / self._scale, (outputs - self._mean) / self._deviation)
            for seed in range(n_networks)
        ]

    def at(self, *sizes: float) -> float:
        """Return the seconds of one kernel. Beyond the measured sizes, they are not reliable."""
        inputs = (np.log(np.asarray([sizes], float)) - self._centre) / self._scale
        outputs = [network.predict(inputs)[0] for network in self._networks]
        return float(np.exp(self._mean + self._deviation * statistics.fmean(outputs)))


class KernelGrid:
    """Seconds of a kind of kernel by its sizes, interpolated on a grid of measured ones, on logarithmic scales.

    Parameters
    ----------
    axes : sequence of sequence of float
        Measured sizes along each axis, in increasing order; at least two.
    seconds : sequence of float
        For all combinations, with the last axis varying fastest.
    """

    def __init__(self, axes: Sequence[Sequence[float]], seconds: Sequence[float]) -> None:
        from scipy.interpolate import RegularGridInterpolator

        shape = tuple(map(len, axes))
        values = np.log(np.asarray(seconds, float)).reshape(shape)
        logarithms = [np.log(np.asarray(axis, float)) for axis in axes]
        self._interpolated = RegularGridInterpolator(logarithms, values, bounds_error=False, fill_value=None)

    def at(self, *sizes: float) -> float:
        """Return the seconds of one kernel; beyond the measured sizes, with the slope of the last interval."""
        return float(np.exp(self._interpolated(np.log(np.asarray([sizes], float)))[0]))


@dataclass(frozen=True)
class HeldOutErrors:
    """Relative errors at sizes that were not used.

    Attributes
    ----------
    regressor : tuple of float
        Of a `KernelRegressor`, for each kernel.
    interpolation : tuple of float
        Of a `KernelGrid`.
    """

    regressor: tuple[float, ...]
    interpolation: tuple[float, ...]


def held_out_errors(
    axes: Sequence[Sequence[float]],
    seconds: Sequence[float],
    held_out: Sequence[Sequence[float]],
    expected: Sequence[float],
) -> HeldOutErrors:
    """Compare a regressor with interpolation, both from the same grid of measured kernels.

    Parameters
    ----------
    axes, seconds
        As for `KernelGrid`.
    held_out : sequence of sequence of float
        Sizes of other kernels.
    expected : sequence of float
        Their measured seconds.
    """
    models = KernelRegressor(list(itertools.product(*axes)), seconds), KernelGrid(axes, seconds)
    return HeldOutErrors(*(tuple(one.at(*size) / each - 1 for size, each in zip(held_out, expected)) for one in models))
