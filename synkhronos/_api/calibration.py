"""Measure the constants of this machine for the cost model, with functions on the ranks of the session."""

from __future__ import annotations

import functools
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from itertools import product
from typing import Any, Callable

import numpy as np
import scipy

from synkhronos import _backends, _graph
from synkhronos._api.choice import Costs
from synkhronos._api.data_arrays import data
from synkhronos._backends import T, shared
from synkhronos._costs import Curve, Grid, Machine, Rates, Store, path_of_store
from synkhronos._rank import AllReduce
from synkhronos._session import Session
from synkhronos._utils.display import Progress, progress
from synkhronos._utils.resources import count_cores, processor

_logger = logging.getLogger("synkhronos")

_DTYPES = ("float32", "float64")
_LENGTHS = (1, 16, 128, 1024)  # of products
_BYTES = (2**10, 2**14, 2**18, 2**21, 2**24)  # of arrays
_SECONDS, _LEAST, _MOST = 0.01, 3, 200  # of the calls for one constant
_SMALLEST = 1e-7  # seconds of work that is too short to be measured
_N_SPECIAL, _N_NODES, _N_MEETINGS = 2**16, 32, 8


def measured(session: Session, version: str, build: Callable[..., Any]) -> Costs:
    """Return the costs for a session: from the store if it has them, and otherwise measured now, in some seconds.

    Parameters
    ----------
    session : Session
    version : str
        Version of Synkhronos.
    build : callable
        `synkhronos.function`.
    """
    store, name = Store(path_of_store(os.environ)), name_of_machine(session, version)
    machine = store.machines().get(name)
    if machine is None:
        _logger.info("measuring this machine, to choose the plans of exact functions: %s", name)
        with progress("measuring this machine", 2 + 2 * len(_DTYPES) + len(_BYTES)) as work:
            machine = _Measurement(session, build, work).machine()
        store.put("machines", name, value=machine)
    return Costs(store, name, machine)


def name_of_machine(session: Session, version: str) -> str:
    """Return a line with all that the constants depend on. It is the same in each program."""
    threads = session.replica.thread_limits.most_threads
    return "; ".join(
        [
            processor(),
            f"{session.n_ranks} ranks on {count_cores()} cores, BLAS on {threads} threads",
            ", ".join(["NumPy " + np.__version__, "SciPy " + scipy.__version__, *_libraries(_backends.blas_flags())]),
            f"{_backends.TITLE} {sys.modules[_backends.engine].__version__}, linker {_backends.config.linker}",
            f"Synkhronos {version}",
        ]
    )


def _libraries(flags: str) -> list[str]:
    """Return the names and sizes of the libraries that flags of a linker name. A new version has another size."""
    words = flags.split()
    folders = [word[2:] for word in words if word.startswith("-L")]
    folders += [os.path.join(sys.prefix, "lib"), sysconfig.get_config_var("LIBDIR") or "/usr/lib"]
    folders += [f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}", "/usr/lib64", "/usr/lib"]
    found = []
    for word in words:
        if word.startswith("-l"):
            paths = [os.path.realpath(os.path.join(folder, f"lib{word[2:]}.so")) for folder in folders]
            there = [path for path in paths if os.path.isfile(path)]
            found += [f"{os.path.basename(path)} of {os.path.getsize(path)} bytes" for path in there[:1]] or [word]
    return found


class _Measurement:
    """Measurement of all constants."""

    def __init__(self, session: Session, build: Callable[..., Any], work: Progress) -> None:
        self._session, self._build, self._work = session, build, work
        self._controller = session.replica

    def machine(self) -> Machine:
        """Measure the constants."""
        x = T.matrix("x", dtype="float32")
        some = [np.ones((64, 4), np.float32)]
        alone, by_rows = (self._build([x], (2 * x).sum(), exact=True, plan=plan) for plan in ("controller", "rows"))
        value = x
        for _ in range(_N_MEETINGS + 1):
            value = value - value.sum()
        chain = self._build([x], value.sum(), exact=True, plan="rows")
        for one in (alone, by_rows, chain):
            one(*some)
        call, one_meeting = _seconds(lambda: alone(*some)), _seconds(lambda: by_rows(*some))
        meeting = max(_SMALLEST, (_seconds(lambda: chain(*some)) - one_meeting) / (_N_MEETINGS + 1))
        self._work.done += 1
        command = max(_SMALLEST, one_meeting - meeting)
        rates = self._rates()
        copies, reductions, broadcasts = zip(*self._exchanges())
        return Machine(
            *rates,
            call,
            command,
            meeting,
            Curve(_BYTES, copies),
            Curve(_BYTES, reductions),
            Curve(_BYTES, broadcasts),
        )

    def _rates(self) -> tuple[Rates, Rates]:
        """Return the rates of the controller alone, and of all ranks at the same time."""
        grids: tuple[dict[str, Grid], dict[str, Grid]] = {}, {}
        for dtype in _DTYPES:
            x, y, out = T.matrix("x", dtype=dtype), T.matrix("y", dtype=dtype), shared(np.zeros((1, 1), dtype))
            both = self._both([x, y], T.dot(x, y), out)
            rng = np.random.default_rng(0)
            shapes = [*product(_LENGTHS, _LENGTHS[1:], _LENGTHS[1:])]
            times = [
                both([rng.random(shape, np.float32).astype(dtype) for shape in ((m, k), (k, n))]) for m, n, k in shapes
            ]
            for grid, seconds in zip(grids, zip(*times)):
                grid[dtype] = Grid(_LENGTHS, _LENGTHS[1:], _LENGTHS[1:], tuple(seconds))
            self._work.done += 2
        x, y, out = T.vector("x", dtype="float32"), T.vector("y", dtype="float32"), shared(np.zeros(1, np.float32))
        both = self._both([x, y], x + y, out)
        passes = zip(*[both([np.ones(n_bytes // 12, np.float32)] * 2) for n_bytes in _BYTES])
        special = self._both([x], T.exp(x), out)([np.ones(_N_SPECIAL, np.float32)])
        value = x
        for _ in range(_N_NODES):
            value = T.exp(value)[::-1]
        chain = self._both([x], value, out)([np.ones(1, np.float32)])
        self._work.done += 1
        alone, together = (
            Rates(grid, Curve(_BYTES, tuple(curve)), one / _N_SPECIAL, all_nodes / (2 * _N_NODES))
            for grid, curve, one, all_nodes in zip(grids, passes, special, chain)
        )
        return alone, together

    def _both(self, inputs: list[Any], value: Any, out: Any) -> Callable[[list[Any]], tuple[float, float]]:
        """Return a function that takes arrays, and measures the controller alone, and all ranks at the same time.

        It computes ``value`` from the inputs, and stores it in a shared variable.
        """
        function = self._build([], [], inputs, updates=[(out, value)])
        run = _graph.run_function(function._theano)
        empty = self._build([], [], inputs, on_unused_input="ignore")

        def measure(arrays: list[Any]) -> tuple[float, float]:
            given = [data(array) for array in arrays]
            both = []
            for call, nothing in (
                (lambda: self._controller.compute(run, arrays), lambda: None),
                (lambda: function(*given), lambda: empty(*given)),
            ):
                both.append(max(_SMALLEST, _seconds(call) - _seconds(nothing)))
            return both[0], both[1]

        return measure

    def _exchanges(self) -> Iterator[tuple[float, float, float]]:
        """Yield the seconds of a copy, of an all-reduce and of a broadcast, by bytes."""
        empty = _seconds(self._session.flush)
        for n_bytes in _BYTES:
            array = np.ones(n_bytes // 4, np.float32)
            target, var = np.empty_like(array), shared(array.copy())
            self._session.distribute_variables([var])
            reduce = functools.partial(self._session.run, AllReduce(self._session.keys([var]), "max", None))
            copy = _seconds(functools.partial(np.copyto, target, array))
            reduction, broadcast = (
                max(_SMALLEST, _seconds(one) - empty) for one in (reduce, functools.partial(self._broadcast, var))
            )
            yield copy, reduction, broadcast
            self._work.done += 1

    def _broadcast(self, var: Any) -> None:
        self._session.stale.add([var])
        self._session.update_replicas()


def _seconds(call: Callable[[], Any]) -> float:
    """Return the lower quartile of the seconds of some calls, without the first one: other programs only add to it."""
    call()
    found: list[float] = []
    while len(found) < _LEAST or (sum(found) < _SECONDS and len(found) < _MOST):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 4]
