"""Measure the constants of this machine for the cost model, with functions on the ranks of the session."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import product
from typing import Any, Callable

import numpy as np
import scipy

from synkhronos import _backends, _graph
from synkhronos._api.choice import Costs, seconds_of
from synkhronos._api.data_arrays import data
from synkhronos._backends import T, shared
from synkhronos._costs import MOST_BUSY, Curve, Grid, Machine, Rates, Store, path_of_store, typical
from synkhronos._rank import AllReduce
from synkhronos._session import Session
from synkhronos._utils.display import Progress, progress
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.resources import busy, count_cores, processor
from synkhronos.errors import SynkhronosError, WorkerError

_logger = logging.getLogger("synkhronos")

_DTYPES = ("float32", "float64")
_LENGTHS = (1, 16, 128, 1024)  # of products
_BYTES = (2**10, 2**14, 2**18, 2**21, 2**24)  # of arrays
_REPETITIONS = 3
_SECONDS, _LEAST, _MOST = 0.002, 2, 200  # of the calls for one constant, in each repetition
_SMALLEST = 1e-7  # seconds of work that is too short to be measured
_N_SPECIAL, _N_NODES, _N_MEETINGS = 2**16, 30, 8


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
    is_busy = (machine is None or store.is_provisional("machines", name)) and busy() > MOST_BUSY
    if machine is None or (store.is_provisional("machines", name) and not is_busy):
        _logger.info("measuring this machine, to choose the plans of exact functions: %s", name)
        every, session.replica_check.every = session.replica_check.every, 0
        try:
            with progress("measuring this machine", 1 + _REPETITIONS) as work, _usual_flags():
                measurement = _Measurement(session, build, work)
                machine = typical([measurement.machine() for _ in range(_REPETITIONS)])
        except Exception as error:  # the program's flags may refuse functions of any kind
            let_interrupts_pass(error)
            if isinstance(error, SynkhronosError) and not isinstance(error, WorkerError):
                raise  # a worker has died
            _logger.warning("cannot measure this machine, so exact functions have the plan rows: %s", error)
        else:
            store.put("machines", name, value=machine, is_provisional=is_busy)
        finally:
            session.replica_check.every = every
    return Costs(store, name, machine)


@contextlib.contextmanager
def _usual_flags() -> Iterator[None]:
    """Undo flags of the program that would change or refuse the functions that are measured."""
    own = os.environ.get("SYNKHRONOS_CHECK")
    os.environ["SYNKHRONOS_CHECK"] = "0"
    try:
        with _backends.usual_flags(), np.errstate(all="ignore"):
            yield
    finally:
        if own is None:
            del os.environ["SYNKHRONOS_CHECK"]
        else:
            os.environ["SYNKHRONOS_CHECK"] = own


def name_of_machine(session: Session, version: str) -> str:
    """Return a line with all that the constants depend on. It is the same in each program."""
    threads = session.replica.thread_limits.most_threads
    return "; ".join(
        [
            processor(),
            f"{session.n_ranks} ranks on {count_cores()} cores, BLAS on {threads} threads",
            ", ".join(["NumPy " + np.__version__, "SciPy " + scipy.__version__, *_libraries(_backends.blas_flags())]),
            f"{_backends.TITLE} {sys.modules[_backends.engine].__version__}",
            f"linker {_backends.config.linker}, optimizer {_backends.config.optimizer}",
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
    """Measurement of all constants, which can be repeated.

    Parameters
    ----------
    session : Session
    build : callable
        `synkhronos.function`.
    work : Progress
    """

    def __init__(self, session: Session, build: Callable[..., Any], work: Progress) -> None:
        self._session, self._work = session, work
        self._build = build = functools.partial(build, mode="FAST_RUN")
        x = T.matrix("x", dtype="float32")
        some = [np.ones((64, 4), np.float32)]
        value = x
        for _ in range(_N_MEETINGS + 1):
            value = value - value.mean()
        self._calls: list[Callable[[], Any]] = [functools.partial(build([], [], [x], on_unused_input="ignore"), *some)]
        self._calls += [
            functools.partial(build([x], one.sum(), exact=True, plan=plan), *some)
            for one, plan in ((2 * x, "controller"), (2 * x, "rows"), (value, "rows"))
        ]
        self._nothing = 0.0, 0.0  # seconds of calls that compute nothing, on the controller and on all ranks
        self._products = {dtype: self._products_of(dtype) for dtype in _DTYPES}
        x, y, out = T.vector("x", dtype="float32"), T.vector("y", dtype="float32"), shared(np.zeros(1, np.float32))
        add = self._both([x, y], x + y, out)
        self._passes = [functools.partial(add, *self._arrays((n_bytes // 12,), (n_bytes // 12,))) for n_bytes in _BYTES]
        self._special = functools.partial(self._both([x], T.exp(x), out), *self._arrays((_N_SPECIAL,)))
        value = x
        for _ in range(_N_NODES // 3):
            value = value - value.max()  # a maximum, a view with another dimension, and a difference
        self._nodes = functools.partial(self._both([x], value, out), *self._arrays((1,)))
        self._variables = [shared(np.ones(n_bytes // 4, np.float32)) for n_bytes in _BYTES]
        session.distribute_variables(self._variables)
        self._work.done += 1

    def machine(self) -> Machine:
        """Measure the constants."""
        nothing, call, one_meeting, more_meetings = map(_seconds, self._calls)
        with self._session.lock:
            self._nothing = _seconds(lambda: self._session.replica.compute(list, [])), nothing
        meeting = max(_SMALLEST, (more_meetings - one_meeting) / _N_MEETINGS)
        rates = self._rates()
        curves = [Curve(_BYTES, seconds) for seconds in zip(*self._exchanges())]
        self._work.done += 1
        return Machine(*rates, call, max(_SMALLEST, one_meeting - meeting), meeting, *curves)

    def _rates(self) -> tuple[Rates, Rates]:
        """Return the rates of the controller alone, and of all ranks at the same time."""
        grids: tuple[dict[str, Grid], dict[str, Grid]] = {}, {}
        for dtype, products in self._products.items():
            for grid, seconds in zip(grids, zip(*(measure() for measure in products))):
                grid[dtype] = Grid(_LENGTHS, _LENGTHS[1:], _LENGTHS[1:], seconds)
        passes = zip(*(measure() for measure in self._passes))
        alone, together = (
            Rates(grid, Curve(_BYTES, curve), one / _N_SPECIAL, all_nodes / _N_NODES)
            for grid, curve, one, all_nodes in zip(grids, passes, self._special(), self._nodes())
        )
        return alone, together

    def _products_of(self, dtype: str) -> list[Callable[[], tuple[float, float]]]:
        """Return functions that measure products of matrices of one dtype."""
        x, y, out = T.matrix("x", dtype=dtype), T.matrix("y", dtype=dtype), shared(np.zeros((1, 1), dtype))
        both = self._both([x, y], T.dot(x, y), out)
        arrays = functools.cache(lambda *shape: self._arrays(shape, dtype=dtype)[0])
        return [
            functools.partial(both, arrays(m, k), arrays(k, n))
            for m, n, k in product(_LENGTHS, _LENGTHS[1:], _LENGTHS[1:])
        ]

    def _arrays(self, *shapes: tuple[int, ...], dtype: str = "float32") -> list[Any]:
        """Return `Data` of some shapes."""
        rng = np.random.default_rng(0)
        return [data(rng.random(shape, np.float32).astype(dtype)) for shape in shapes]

    def _both(self, inputs: list[Any], value: Any, out: Any) -> Callable[..., tuple[float, float]]:
        """Return a function that takes `Data`, and measures the controller alone, and all ranks at the same time.

        It computes ``value`` from the inputs, and stores it in a shared variable.
        """
        function = self._build([], [], inputs, updates=[(out, value)])
        run = _graph.run_function(function._theano)

        def measure(*given: Any) -> tuple[float, float]:
            arrays = [one.data for one in given]
            with self._session.lock:
                alone = _seconds(lambda: self._session.replica.compute(run, arrays)) - self._nothing[0]
            together = _seconds(lambda: function(*given)) - self._nothing[1]
            return max(_SMALLEST, alone), max(_SMALLEST, together)

        return measure

    def _exchanges(self) -> Iterator[tuple[float, float, float]]:
        """Yield the seconds of a copy, of an all-reduce and of a broadcast, by bytes."""
        empty = _seconds(self._session.flush)
        for var in self._variables:
            array = var.get_value()
            copy = _seconds(functools.partial(np.copyto, np.empty_like(array), array))
            reduce = AllReduce(self._session.keys([var]), "max", None)
            reduction = _seconds(functools.partial(self._session.run, reduce)) - empty
            broadcast = _seconds(functools.partial(self._broadcast, var)) - empty
            yield copy, max(_SMALLEST, reduction), max(_SMALLEST, broadcast)

    def _broadcast(self, var: Any) -> None:
        """Give the workers the value, and have them copy it if they view the controller's array."""
        with self._session.lock:
            stale = self._session.stale
            stale.add([var])
            self._session.update_replicas()
            stale.unshare(stale.shared.intersection(self._session.keys([var])), self._session.issue)


def _seconds(call: Callable[[], Any]) -> float:
    return seconds_of(call, _SECONDS, _LEAST, _MOST)
