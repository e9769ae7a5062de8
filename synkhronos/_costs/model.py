"""Cost model: the seconds that a call of a function takes on the ranks of one machine. Pure functions of numbers.

The work of a rank is read from its graph (`synkhronos._sharding.work`), and the constants are measured once for each
machine (`synkhronos._api.calibration`). Seconds of matrix products and of passes over memory are interpolated between
measured sizes, on logarithmic scales; beyond the measured sizes they grow with the number of operations or bytes.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: Assumed seconds of a message without bytes if only the bandwidth of a link is given: TCP between two hosts.
LATENCY = 50e-6
_UNITS = {"M": 1e6 / 8, "G": 1e9 / 8}  # bytes per second
_FEW_BYTES = 8192  # for up to 4 processes; for more, in inverse proportion, as in `_collectives.buckets`


class Product(NamedTuple):
    """Product of a matrix of m x k and one of k x n elements, computed `times` times."""

    m: int
    n: int
    k: int
    dtype: str
    times: int = 1


class Work(NamedTuple):
    """What a process computes in one call.

    Attributes
    ----------
    products : tuple of Product
    passes : tuple of float
        Bytes that each elementwise operation, sum or copy reads and writes.
    divided : tuple of float
        Bytes of further elementwise operations, which threads divide if the controller computes alone.
    special : float
        Elements of exponential functions, logarithms and the like.
    n_nodes : int
        Number of Apply nodes.
    unknown : tuple of str
        Operations for which the model has no term.
    """

    products: tuple[Product, ...] = ()
    passes: tuple[float, ...] = ()
    divided: tuple[float, ...] = ()
    special: float = 0.0
    n_nodes: int = 0
    unknown: tuple[str, ...] = ()


class Exchange(NamedTuple):
    """What the ranks of one machine exchange in a call.

    Attributes
    ----------
    staged : float
        Bytes of inputs that the controller copies to shared memory.
    n_meetings : int
        Number of times that all ranks wait for each other in collectives.
    reduced : float
        Bytes of the arrays that are all-reduced, on each rank.
    gathered : float
        Bytes of results that the controller copies from shared memory.
    """

    staged: float = 0.0
    n_meetings: int = 0
    reduced: float = 0.0
    gathered: float = 0.0


class Curve(NamedTuple):
    """Measured seconds by size, in increasing order of sizes; at least two."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Return the seconds for a size: interpolated, in proportion above the largest, constant below the least."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        i = bisect.bisect_right(self.sizes, size)
        return _between(size, self.sizes[i - 1 : i + 1], self.seconds[i - 1 : i + 1])


def _between(size: float, sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Interpolate between two points on logarithmic scales."""
    part = math.log(size / sizes[0]) / math.log(sizes[1] / sizes[0])
    return seconds[0] ** (1 - part) * seconds[1] ** part


@dataclass(frozen=True)
class Link:
    """Connection between nodes, or between the ranks of a node.

    Attributes
    ----------
    latency : float
        α: seconds of a message without bytes.
    bandwidth : float
        1 / β: bytes per second in each direction.
    deviation : float
        Largest relative difference of a measured message from α + mβ.
    """

    latency: float
    bandwidth: float
    deviation: float = 0.0

    def message(self, n_bytes: float) -> float:
        """Return α + mβ, the seconds of one message."""
        return self.latency + n_bytes / self.bandwidth

    def reduce_scatter(self, n_bytes: float, n_processes: int) -> float:
        """Return (P - 1)α + (P - 1) / P mβ, the seconds of a reduce-scatter or an all-gather, by a ring or directly.

        In a ring, a process sends P - 1 messages of m / P bytes to the next one. In the direct algorithm, it sends as
        many of the same size to all others, through the same port.
        """
        return (n_processes - 1) * self.message(n_bytes / n_processes)

    def all_reduce(self, n_bytes: float, n_processes: int) -> float:
        """Return 2(P - 1)α + 2(P - 1) / P mβ: a reduce-scatter and an all-gather.

        Few bytes are gathered by all processes in ⌈log₂ P⌉ rounds, which takes ⌈log₂ P⌉α + (P - 1)mβ.

        R. Thakur, R. Rabenseifner, W. Gropp (2005), Optimization of collective communication operations in MPICH. J.
        Bruck et al. (1997), Efficient algorithms for all-to-all communications in multiport message-passing systems.
        """
        n_messages, size = messages_of(n_bytes, n_processes)
        return n_messages * self.message(size)


def messages_of(n_bytes: float, n_processes: int) -> tuple[int, float]:
    """Return the messages that follow each other in an all-reduce, and the bytes of each; see `Link.all_reduce`."""
    if n_processes > 1 and n_bytes <= _FEW_BYTES * 4 / max(4, n_processes):
        rounds = math.ceil(math.log2(n_processes))
        return rounds, (n_processes - 1) * n_bytes / rounds
    return 2 * (n_processes - 1), n_bytes / n_processes


def bytes_sent(n_bytes: float, n_processes: int) -> float:
    """Return 2(P - 1) / P m, the bytes that each process sends in an all-reduce."""
    return 2 * (n_processes - 1) / n_processes * n_bytes


def link_of(line: Any) -> Link | None:
    """Return a link between nodes, as `synkhronos.plan` takes it."""
    if line is None:
        return None
    if isinstance(line, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG])bit(?:/s)?", line.strip())
        if found and float(found[1]) > 0:
            return Link(LATENCY, float(found[1]) * _UNITS[found[2]])
    elif (
        isinstance(line, tuple)
        and len(line) == 2
        and all(isinstance(one, (int, float)) for one in line)
        and line[0] >= 0
        and line[1] > 0
    ):
        return Link(float(line[0]), float(line[1]))
    raise ValueError(f'line is {line!r}; expected such as "10Gbit" or "100Mbit", or (seconds, bytes per second)')


def link_through(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Return the link on which the shortest and the longest of some messages take as long as measured.

    β is the slope between both. A fit to all messages would miss the long ones if some of the others take less than
    α + mβ, because buffers hold them.

    Parameters
    ----------
    sizes : sequence of float
        Bytes of messages, in increasing order; at least two.
    seconds : sequence of float
        From one end of the link to the other.

    Returns
    -------
    Link
    """
    per_byte = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    if not per_byte > 0:
        raise ValueError(
            f"got messages of {list(sizes)} bytes in {list(seconds)} seconds; expected longer ones to take longer"
        )
    link = Link(max(0.0, seconds[0] - sizes[0] * per_byte), 1 / per_byte)
    return replace(link, deviation=max(abs(one / link.message(size) - 1) for size, one in zip(sizes, seconds)))


class Grid(NamedTuple):
    """Measured seconds of matrix products of one dtype.

    Attributes
    ----------
    m, n, k : tuple of int
        Measured lengths, in increasing order; at least two of each.
    seconds : tuple of float
        For all combinations, with k varying fastest.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, product: Product) -> float:
        """Return the seconds of one product.

        Between measured lengths, the seconds are interpolated along the three axes. A length outside of them is
        replaced by the nearest measured one; the seconds are then multiplied by the ratio of the lengths if it is
        longer, because the number of operations is proportional to it.
        """
        factor, places = 1.0, []
        for length, measured in zip(product[:3], self[:3]):
            inside = min(max(length, measured[0]), measured[-1])
            factor *= max(1.0, length / measured[-1])
            i = min(bisect.bisect_right(measured, inside), len(measured) - 1)
            places.append((i, math.log(inside / measured[i - 1]) / math.log(measured[i] / measured[i - 1])))
        logarithm = 0.0
        for corner in range(8):
            weight, index = 1.0, 0
            for axis, (i, part) in enumerate(places):
                is_upper = corner >> axis & 1
                weight *= part if is_upper else 1 - part
                index = index * len(self[axis]) + i - 1 + is_upper
            if weight:
                logarithm += weight * math.log(self.seconds[index])
        return factor * math.exp(logarithm)


class Rates(NamedTuple):
    """Speed of one way of computing: by the controller alone, or by all ranks at the same time.

    Attributes
    ----------
    products : dict of str to Grid
        By dtype.
    passes : Curve
        Seconds of an elementwise pass, by the bytes that it reads and writes.
    special : float
        Seconds of an element of an exponential function.
    node : float
        Seconds of an Apply node that computes next to nothing.
    """

    products: dict[str, Grid]
    passes: Curve
    special: float
    node: float


class Machine(NamedTuple):
    """Measured constants of a machine, for a number of ranks.

    Attributes
    ----------
    alone : Rates
        The controller computes alone, with as many BLAS threads as there are cores.
    together : Rates
        All ranks compute at the same time, each with its share of the cores.
    call : float
        Seconds of the call of a function that the controller computes alone, without Apply nodes.
    command : float
        Seconds of a command that all ranks execute and that computes nothing.
    meeting : float
        Seconds in which all ranks wait for each other, if they come at the same time.
    copy : Curve
        Seconds of a copy to or from shared memory, by bytes.
    reduction : Curve
        Seconds of an all-reduce, by bytes of an array.
    broadcast : Curve
        Seconds in which all ranks get the controller's value of a variable, by bytes.
    """

    alone: Rates
    together: Rates
    call: float
    command: float
    meeting: float
    copy: Curve
    reduction: Curve
    broadcast: Curve


def seconds_of_work(work: Work, rates: Rates) -> float:
    """Return the seconds in which one thread of a process computes."""
    products = sum(one.times * rates.products[one.dtype].at(one) for one in work.products)
    passes = sum(map(rates.passes.at, (*work.passes, *work.divided)))
    return products + passes + work.special * rates.special + work.n_nodes * rates.node


def seconds_on_controller(work: Work, machine: Machine, n_threads: int) -> float:
    """Return the seconds of a call that the controller computes alone.

    Parameters
    ----------
    work : Work
        For all rows.
    machine : Machine
    n_threads : int
        Number of threads that divide operations; each is as fast as a rank while all ranks compute.
    """
    divided = sum(machine.together.passes.at(n_bytes / n_threads) for n_bytes in work.divided)
    return machine.call + seconds_of_work(work._replace(divided=()), machine.alone) + divided


def seconds_by_rows(work: Work, exchange: Exchange, machine: Machine, n_ranks: int) -> float:
    """Return the seconds of a call in which every rank computes its rows.

    Parameters
    ----------
    work : Work
        Of one rank.
    exchange : Exchange
    machine : Machine
    n_ranks : int
    """
    seconds = seconds_of_work(work, machine.together)
    seconds += machine.command + exchange.n_meetings * machine.meeting
    for n_bytes, curve in (
        (exchange.staged, machine.copy),
        (exchange.reduced, machine.reduction),
        (exchange.gathered, machine.copy),
    ):
        seconds += curve.at(n_bytes) if n_bytes else 0.0
    return seconds


def most_rows_by_slices(m: int, n: int) -> int:
    """Return the largest number of rows for which a product is faster by slices than as a sum of the ranks' products.

    The product is the gradient of m x n weights. In slices, each rank computes its part of the m x n elements from all
    ranks' rows, of m and n numbers each. As a sum, it computes m x n elements from its own rows, and then adds its part
    of all ranks' arrays. The numbers of operations are equal; these arrays are written and read in one case, and copies
    of the rows in the other. They have equal sizes at m n / (m + n) rows. A third of this is the measured limit: the
    slices are computed in blocks, which BLAS does less fast.
    """
    return m * n // max(1, 3 * (m + n))


class Estimate(NamedTuple):
    """Predicted seconds of a call with each plan.

    Attributes
    ----------
    rows, controller : float
        Seconds of the call. ``controller`` is infinite if it cannot be predicted.
    broadcast : float
        Seconds in which the other ranks get the variables that the function uses.
    updates : bool
        Whether the call updates variables. On the controller alone, it then leaves the other replicas stale.
    source : str
        What predicts them: ``"model"``, ``"timed"`` (measured times of this function), or ``"unknown"``.
    """

    rows: float
    controller: float
    broadcast: float
    updates: bool
    source: str


def along_rows(points: Sequence[Sequence[float]], n_rows: float) -> float:
    """Return the seconds for a number of rows, on straight lines between measured points, in order of their rows.

    The first and the last line are extended, but are never below half of the smallest measured time. One point holds
    for all numbers of rows; without a point, the result is infinite. A time that is longer than one for more rows was
    delayed, and is replaced by that one.
    """
    if not points:
        return math.inf
    sizes, measured = zip(*points)
    points = list(zip(sizes, _undelayed(measured)))
    if len(points) == 1:
        return points[0][1]
    i = min(max(bisect.bisect_left(sizes, n_rows), 1), len(points) - 1)
    (first, lower), (last, upper) = points[i - 1 : i + 1]
    line = lower + (upper - lower) * (n_rows - first) / (last - first)
    return max(line, points[0][1] / 2)


def _undelayed(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of increasing sizes, each at most as long as those of all larger sizes."""
    return tuple(min(seconds[i:]) for i in range(len(seconds)))


def choose(lead: float | None, is_stale: bool, estimate: Estimate) -> tuple[bool, float | None]:
    """Choose the plan of a call; return whether the controller computes it alone, and the new lead.

    After a call that the controller computed alone, the replicas of its variables are stale, and a later call by rows
    needs a broadcast. The plan therefore changes only when the calls have lost half of a broadcast by not changing it:
    the work function algorithm for a task system of two states, each half of a broadcast from the other (A. Borodin, N.
    Linial, M. Saks (1992), An optimal on-line algorithm for metrical task systems, J. ACM 39). The choices take at most
    three times as long as the best ones. If no replica is stale, and none will be, the faster plan is chosen.

    Parameters
    ----------
    lead : float or None
        How many seconds the calls so far would have taken less by rows than on the controller, within half of a
        broadcast of 0; ``None`` before the first call.
    is_stale : bool
        Whether the replicas are stale now.
    estimate : Estimate
    """
    rows, controller, broadcast, updates, _ = estimate
    if not broadcast or not (is_stale or updates):
        return controller <= rows, lead
    most = broadcast / 2
    if lead is None:
        lead = most if rows < controller else -most
    lead = min(max(lead + controller - rows, -most), most)
    return lead < most if is_stale else lead <= -most, lead


def describe_machine(machine: Machine) -> list[str]:
    """Return the main constants as lines: seconds of a command and of a meeting, speed of products and of memory."""
    lines = [f"command {1e6 * machine.command:.3g} µs, meeting {1e6 * machine.meeting:.3g} µs"]
    for title, rates in (("the controller alone", machine.alone), ("each rank, all at once", machine.together)):
        grid, passes = rates.products["float32"], rates.passes
        products = 2e-9 * math.prod(axis[-1] for axis in grid[:3]) / grid.seconds[-1]
        memory = 1e-9 * passes.sizes[-1] / passes.seconds[-1]
        lines.append(f"{title}: {products:.3g} GFLOP/s of float32 products, {memory:.3g} GB/s")
    return lines


def typical(machines: Sequence[Machine]) -> Machine:
    """Combine repeated measurements: the median of each constant, and no product or pass slower than a larger one.

    Other programs delay single measurements. A delay that lasts longer is found by comparison with larger sizes.
    """

    def median(found: Sequence[Any]) -> Any:
        first = found[0]
        if isinstance(first, dict):
            return {name: median([one[name] for one in found]) for name in first}
        if isinstance(first, tuple):
            parts = [median(parts) for parts in zip(*found)]
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        return statistics.median(found)

    def smooth(curve: Curve) -> Curve:
        return Curve(curve.sizes, _undelayed(curve.seconds))

    def smooth_grid(grid: Grid) -> Grid:
        places = list(itertools.product(*(range(len(axis)) for axis in grid[:3])))
        pairs = list(zip(places, grid.seconds))
        least = [
            min(seconds for other, seconds in pairs if all(a >= b for a, b in zip(other, place))) for place in places
        ]
        return grid._replace(seconds=tuple(least))

    def smooth_rates(rates: Rates) -> Rates:
        products = {dtype: smooth_grid(grid) for dtype, grid in rates.products.items()}
        return rates._replace(products=products, passes=smooth(rates.passes))

    found: Machine = median(machines)
    return found._replace(
        alone=smooth_rates(found.alone),
        together=smooth_rates(found.together),
        copy=smooth(found.copy),
        reduction=smooth(found.reduction),
        broadcast=smooth(found.broadcast),
    )


def machine_from(entry: Any) -> Machine:
    """Return the constants from what `json` has read; raise an exception if something is missing or not a number."""

    def numbers(found: Any, n: int) -> tuple[float, ...]:
        read = tuple(map(float, found))
        if len(read) != n or not all(0 <= one < math.inf for one in read):
            raise ValueError(f"got {found}; expected {n} numbers")
        return read

    def curve(one: Any) -> Curve:
        sizes, seconds = one
        return Curve(numbers(sizes, max(2, len(sizes))), numbers(seconds, len(sizes)))

    def rates(one: Any) -> Rates:
        products, passes, special, node = one
        grids = {}
        for dtype, (*axes, seconds) in products.items():
            m, n, k = (tuple(map(int, numbers(axis, max(2, len(axis))))) for axis in axes)
            grids[str(dtype)] = Grid(m, n, k, numbers(seconds, len(m) * len(n) * len(k)))
        return Rates(grids, curve(passes), *numbers([special, node], 2))

    alone, together, *scalars, copy, reduction, broadcast = entry
    call, command, meeting = numbers(scalars, 3)
    speeds = rates(alone), rates(together)
    return Machine(*speeds, call, command, meeting, curve(copy), curve(reduction), curve(broadcast))
