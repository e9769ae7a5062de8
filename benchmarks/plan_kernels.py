"""Kernels of sizes that were not measured: small neural networks and interpolation, compared on this machine.

Products of matrices, convolutions and elementwise operations of Theano are measured in one thread, at the sizes of a
grid and at others between them. Both models get the former and predict the latter.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import threadpoolctl

from synkhronos._costs.kernels import held_out_errors
from synkhronos._utils.display import text_table

_ROUNDS, _SECONDS, _LEAST = 3, 0.02, 3  # of the calls of one kernel in a round
_LONG = 0.2  # seconds, after which fewer calls are enough
TITLES = ("kernel", "measured ms", "network ms", "error", "interpolated ms", "error")


class Kind(NamedTuple):
    """A kind of kernels: its lengths on each axis of the grid, and others between them.

    ``compile`` returns a function, and ``shapes`` those of its inputs for some lengths.
    """

    name: str
    axes: Sequence[Sequence[int]]
    between: Sequence[Sequence[int]]
    compile: Callable[[], Callable[..., Any]]
    shapes: Callable[..., Sequence[tuple[int, ...]]]


def _products() -> Callable[..., Any]:
    import theano
    import theano.tensor as T

    a, b = T.fmatrices("a", "b")
    return theano.function([a, b], a.dot(b))  # type: ignore[no-any-return]


def _convolutions() -> Callable[..., Any]:
    import theano
    import theano.tensor as T

    x, w = T.ftensor4("x"), T.ftensor4("w")
    return theano.function([x, w], T.nnet.conv2d(x, w))  # type: ignore[no-any-return]


def _elementwise() -> Callable[..., Any]:
    import theano
    import theano.tensor as T

    x = T.fvector("x")
    return theano.function([x], 2 * x + 1)  # type: ignore[no-any-return]


KINDS = (
    Kind(
        "products, (m, n, k)",
        ((16, 64, 256, 1024),) * 3,
        ((32, 128, 512),) * 3,
        _products,
        lambda m, n, k: [(m, k), (k, n)],
    ),
    Kind(
        "convolutions, (rows, channels, length, filter)",
        ((4, 16, 64), (4, 16, 64), (8, 16, 32), (1, 3, 5)),
        ((8, 32), (8, 32), (12, 24), (2, 4)),
        _convolutions,
        lambda rows, n, length, of_filter: [(rows, n, length, length), (n, n, of_filter, of_filter)],
    ),
    Kind(
        "elementwise operations, bytes",
        (tuple(4**i for i in range(5, 14)),),
        (tuple(2 * 4**i for i in range(5, 13)),),
        _elementwise,
        lambda n_bytes: [(n_bytes // 8,)],  # float32, read and written
    ),
)


def seconds_of(f: Callable[..., Any], shapes: Sequence[tuple[int, ...]]) -> float:
    """Return the least median of the rounds of calls with arrays of some shapes."""
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    f(*arrays)
    medians = []
    for _ in range(_ROUNDS):
        found: list[float] = []
        while sum(found) < (_SECONDS if len(found) >= _LEAST else _LONG):
            start = time.perf_counter()
            f(*arrays)
            found.append(time.perf_counter() - start)
        medians.append(statistics.median(found))
    return min(medians)


def validate(kinds: Sequence[Kind] = KINDS) -> None:
    """Print the measured and the predicted seconds of kernels, and the errors of each kind."""
    summaries = [["kind", "measured", "in s", "predicted", "in s", *("median error", "largest") * 2]]
    for kind in kinds:
        begin, f = time.perf_counter(), kind.compile()
        with threadpoolctl.threadpool_limits(1):
            grid = [seconds_of(f, kind.shapes(*sizes)) for sizes in itertools.product(*kind.axes)]
            held_out = list(itertools.product(*kind.between))
            measured = [seconds_of(f, kind.shapes(*sizes)) for sizes in held_out]
        middle = time.perf_counter()
        errors = held_out_errors(kind.axes, grid, held_out, measured)
        lines = [list(TITLES)]
        for sizes, seconds, *both in zip(held_out, measured, errors.regressor, errors.interpolation):
            cells = (cell for error in both for cell in (f"{1e3 * seconds * (1 + error):.4g}", f"{error:+.1%}"))
            lines.append([" × ".join(map(str, sizes)), f"{1e3 * seconds:.4g}", *cells])
        print(f"\n{kind.name}\n{text_table(lines)}", flush=True)
        times = f"{middle - begin:.0f}", f"{time.perf_counter() - middle:.0f}"
        found = (list(map(abs, some)) for some in (errors.regressor, errors.interpolation))
        both = [f"{one:.1%}" for some in found for one in (statistics.median(some), max(some))]
        summaries.append([kind.name, str(len(grid)), times[0], str(len(held_out)), times[1], *both])
    print(f"\nerrors of networks, and of interpolation\n{text_table(summaries)}")
