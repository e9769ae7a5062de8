"""Choice of the plan of an exact function's calls: every rank computes its rows, or the controller computes all.

The choice depends on the shapes of the call, on the measured costs of the machine, and on the calls before it. It does
not depend on the time that the program's own calls take. The same program therefore gives the same results, bit by bit,
as long as it uses the same file of costs.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import logging
import math
import re
import time
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos import _backends, _graph
from synkhronos._api.call_plan import ControllerCall, Inputs, count_rows, slices_of
from synkhronos._api.checks import Input
from synkhronos._api.data_arrays import Data, data
from synkhronos._backends import Constant, io_toposort, ops
from synkhronos._costs import (
    MOST_BUSY,
    Estimate,
    Machine,
    Store,
    along_rows,
    choose,
    seconds_by_rows,
    seconds_on_controller,
)
from synkhronos._graph import Graph
from synkhronos._rank import Call
from synkhronos._session import PLANS, Place, Session
from synkhronos._sharding import Needs, Prediction, Slices, WorkReader
from synkhronos._utils import KeyedCache
from synkhronos._utils.interrupts import deferred_interrupts, let_interrupts_pass
from synkhronos._utils.resources import busy, free_memory
from synkhronos._utils.rows import Rows, Selection
from synkhronos.errors import SynkhronosError, WorkerError

_logger = logging.getLogger("synkhronos")

#: Numbers of rows at which both plans are timed. Lines between them also hold well for other numbers.
_SIZES = (4, 32, 1024)
_MOST_UNKNOWN = 256  # rows, if the bytes of some values are not known
#: Predictions whose ratio is smaller do not decide.
_NEAR = 1.3
_STEPS = 4  # numbers of rows for which seconds are predicted, in each octave
_MOST_ESTIMATES = 1000
_CLEAR = 20  # times a command
_SECONDS, _LEAST_CALLS, _MOST_CALLS = 0.05, 3, 50  # of the calls that are timed at one size
#: Seconds of calls by rows before those that are timed. The host of a virtual machine may need them to move cores that
#: were idle close to each other.
_WARM_UP = 0.1
_MOST_SECONDS = 1.0  # of a call at the larger number of rows
_ADDRESS = re.compile("0x[0-9a-f]+")
_KNOWN = (_backends.engine, "synkhronos", "pymc", "lasagne")  # packages whose operations have no effects
#: Operations of the backends that have.
_EFFECTS = ("LoadFromDisk", "MPIRecv", "MPIRecvWait", "MPISend", "MPISendWait", "PdbBreakpoint", "Print")


class Costs(NamedTuple):
    """Measured costs for a session."""

    store: Store
    name: str  # of the machine, in the store
    machine: Machine | None  # ``None``: could not be measured


class Unmeasured(Exception):
    """A call needs measurements, which are to be made before it. ``inputs`` is ``None`` for those of the machine."""

    def __init__(self, inputs: Inputs | None) -> None:
        super().__init__()
        self.inputs = inputs


class Repeated(NamedTuple):
    """Inputs of a call that needs times, and `Data` inputs with its rows repeated, by position."""

    inputs: Inputs
    n_rows: int  # of the latter
    data: dict[int, Data]


class Chooser:
    """Chooser of the plans of one function.

    Parameters
    ----------
    divided : ShardedGraph
    user : Graph
        The user's graph.
    compiled : compiled function
        Of the sharded graph, or that of ``slices``. Calls give it the rows.
    specs : list of Input
        The inputs, with the axes of their rows.
    options : str
        Other arguments of the function on which times depend; empty if it must not be timed.
    slices : Slices or None
        How large updates are computed by slices, if they are.

    Attributes
    ----------
    estimates : dict
        The `Estimate` for each (rounded number of rows, further shapes) so far.
    """

    def __init__(
        self, divided: Any, user: Graph, compiled: Any, specs: Sequence[Input], *, options: str, slices: Slices | None
    ) -> None:
        self.estimates: dict[Any, Estimate] = {}
        self._divided = divided
        #: Whether calls may have any number of rows. Otherwise both plans are timed for the call as it is.
        self._resizes = user.n_scattered > 0
        self._user, self._compiled, self._specs, self._options, self._slices = user, compiled, specs, options, slices
        self._updated = [var for var, _ in divided.expressions[1]]
        self._may_be_timed: bool | None = None if options else False  # ``None``: not known yet
        self._variables: list[Any] | None = None
        self._reader: WorkReader | None = None
        self._digest = ""
        self._is_timed = False  # in this program
        self._costs: Costs | None = None

    def estimate(self, session: Session, inputs: Inputs) -> Estimate:
        """Return the predicted seconds of a call; raise `Unmeasured` if measurements are needed first."""
        costs: Costs | None = session.costs
        if costs is None:
            raise Unmeasured(None)
        if self._costs is not costs:
            self._costs, self.estimates = costs, {}
        rounded = _rounded(count_rows(session, self._divided, inputs))
        key = (rounded, *self._other_shapes(inputs))
        found = self.estimates.get(key)
        if found is None:
            if len(self.estimates) >= _MOST_ESTIMATES:
                self.estimates.clear()
            found = self.estimates[key] = self._predict(session, costs, inputs, rounded)
        return found

    def predictions(self) -> list[Prediction]:
        """Return the predictions so far, for the function's report."""
        return [Prediction(key[0], one.rows, one.controller, one.source) for key, one in self.estimates.items()]

    def _predict(self, session: Session, costs: Costs, inputs: Inputs, n_rows: int) -> Estimate:
        updates = bool(self._updated)
        unknown = Estimate(0.0, math.inf, 0.0, updates, "unknown")
        if costs.machine is None:
            return unknown
        broadcast = self._seconds_of_broadcast(session, costs.machine)
        found = self._modelled(session, costs.machine, inputs, n_rows)
        if found is not None and not (found[0] < _NEAR * found[1] and found[1] < _NEAR * found[0]):
            return Estimate(*found, broadcast, updates, "model")
        name = self._name_of_graph(inputs)
        times = costs.store.times(costs.name, name)
        if self._can_be_timed() and (times is None or self._is_to_be_timed_again(costs, name)):
            raise Unmeasured(inputs)
        if times:
            rows, controller = (along_rows(times[plan], n_rows) for plan in ("rows", "controller"))
            return Estimate(rows, controller, broadcast, updates, "timed")
        return unknown if found is None else Estimate(*found, broadcast, updates, "model")

    def _seconds_of_broadcast(self, session: Session, machine: Machine) -> float:
        """Return the seconds in which the other ranks get the variables that the function updates, or else reads.

        Large variables are not copied, unless each rank changes them by itself: the other ranks view the controller's
        memory.
        """
        variables = self._updated
        if not variables or slices_of(session, self._divided) is not None:
            variables = session.stale.copied(variables or self._shared())
        n_bytes = _n_bytes_of(variables)
        return machine.broadcast.at(n_bytes) if n_bytes else 0.0

    def _modelled(self, session: Session, machine: Machine, inputs: Inputs, n_rows: int) -> tuple[float, float] | None:
        """Return the seconds by rows, and on the controller; ``None`` if the model does not know an operation."""
        try:
            share, everything = self._needs(session, inputs, n_rows)
            if share.work.unknown:
                return None
            arrays = [value for value in inputs.values if isinstance(value, np.ndarray)]
            part = n_rows / max(1, sum(inputs.counts)) if self._resizes else 1
            staged = sum([value.nbytes for value in arrays]) * part
            exchange = share.exchange._replace(staged=staged)
            rows = seconds_by_rows(share.work, exchange, machine, session.n_ranks)
            n_threads = session.replica.thread_limits.most_threads
            return rows, seconds_on_controller(everything.work, machine, n_threads)
        except Exception as error:  # the model must not end a program, which may have graphs of any kind
            let_interrupts_pass(error)
            _logger.debug("cannot predict the seconds of %s: %r", self._compiled, error)
            return None

    def _needs(self, session: Session, inputs: Inputs, n_rows: int) -> tuple[Needs, Needs]:
        """Return what a rank needs, and what the controller needs alone."""
        reader = self._reader = self._reader or WorkReader(self._compiled)
        on_rank = min(-(-n_rows // session.n_ranks), n_rows)
        share, everything = (
            reader.needs(*self._arguments(inputs, n_rows, here), n_ranks)
            for here, n_ranks in ((on_rank, session.n_ranks), (n_rows, 1))
        )
        if self._slices is None:
            return share, everything
        return self._slices.needs(share, session.n_ranks), self._slices.needs(everything, 1)

    def _shared(self) -> list[Any]:
        """Return the function's shared variables."""
        if self._variables is None:
            self._variables = list(dict.fromkeys([*_graph.shared_variables_of(self._compiled), *self._updated]))
        return self._variables

    def _arguments(self, inputs: Inputs, n_rows: int, here: int) -> tuple[list[tuple[int, ...]], list[Any]]:
        """Return the shapes, and the values of scalars, of the inputs of a rank's function; it has `here` rows."""
        shapes = [self._shape(i, value, here) for i, value in enumerate(inputs.values)]
        values: list[Any] = [value if shape == () else None for value, shape in zip(inputs.values, shapes)]
        if self._divided.takes_rows:
            shapes += [()] * 3
            values += [n_rows, 0, here]
        add_variables(self._compiled, self._divided.sliceable_shareds, here, shapes, values)
        return shapes, values

    def _shape(self, position: int, value: Any, n_rows: int) -> tuple[int, ...]:
        """Return the shape of an input's value, with another number of rows."""
        shape = value.shape if isinstance(value, (Data, np.ndarray)) else ()
        if position < self._user.n_scattered:
            axis = self._specs[position].axis
            shape = (*shape[:axis], n_rows, *shape[axis + 1 :])
        return tuple(shape)

    def _other_shapes(self, inputs: Inputs) -> list[tuple[int, ...]]:
        """Return the rounded shapes of inputs and variables, without the number of rows."""
        shapes = [self._shape(i, value, 0) for i, value in enumerate(inputs.values)]
        return [tuple(map(_rounded, shape)) for shape in (*shapes, *map(_shape_of, _dense(self._shared())))]

    # -- times of both plans

    def _name_of_graph(self, inputs: Inputs) -> str:
        """Return a digest of the user's graph, and of all shapes but the number of rows."""
        if not self._digest:
            outputs, updates = self._user.expressions
            self._digest = digest_of([*self._user.input_variables, *outputs, *itertools.chain(*updates)])
        axes = [one.axis for one in self._specs]
        named = repr((self._digest, self._options, axes, self._user.n_scattered, self._other_shapes(inputs)))
        return hashlib.sha256(named.encode()).hexdigest()[:32]

    def _is_to_be_timed_again(self, costs: Costs, name: str) -> bool:
        """Return whether the cores were busy when the function was timed by an earlier program, and are free now."""
        if self._is_timed or not costs.store.is_provisional("functions", costs.name, name):
            return False
        return busy() <= MOST_BUSY

    def _can_be_timed(self) -> bool:
        """Return whether more calls than the program asks for have no effect but updates, which are undone."""
        if self._may_be_timed is None:
            outputs, updates = self._user.expressions
            self._may_be_timed = not _have_effects([*outputs, *(new for _, new in updates)])
        return self._may_be_timed

    def repeated(self, session: Session, inputs: Inputs) -> Repeated | None:
        """Return the inputs of a call that needs times; ``None`` if there is too little memory to time it.

        This allocates shared memory, which needs the lock to be free.
        """
        largest = self._largest(session, inputs)
        if largest >= (max(_SIZES[0], session.n_ranks) if self._resizes else 1):
            with contextlib.suppress(MemoryError):
                found = {
                    i: data(self._resized(i, value.data, inputs, largest))
                    for i, value in enumerate(inputs.values[: self._user.n_scattered])
                    if isinstance(value, Data)
                }
                return Repeated(inputs, largest, found)
        self._may_be_timed = False  # in this program
        return None

    def time(self, session: Session, of: Repeated, by_plan: Callable[[str, list[Any], Any], Callable[[], Any]]) -> None:
        """Time both plans at some numbers of rows, undo all updates, and store the times. The caller holds the lock.

        Parameters
        ----------
        session : Session
        of : Repeated
        by_plan : callable
            ``by_plan(plan, values, batch)`` returns a function that makes a call with a plan.
        """
        assert self._costs is not None
        inputs, largest, repeated = of
        name, self._is_timed = self._name_of_graph(inputs), True
        is_busy = busy() > MOST_BUSY
        times: dict[str, list[list[float]]] = {"rows": [], "controller": []}
        sizes = [max(one, session.n_ranks) for one in _SIZES] if self._resizes else [1]
        every, session.replica_check.every = session.replica_check.every, 0

        def planned(plan: str, size: int) -> Callable[[], Any]:
            values = [
                repeated[i] if i in repeated else self._resized(i, value, inputs, size)
                for i, value in enumerate(inputs.values)
            ]
            return by_plan(plan, values, size if self._resizes else None)

        try:
            planned("rows", sizes[0])  # moves values to memory that the workers view, before they are saved
            with _unchanged(session, self._updated):
                for size in sizes:
                    if times["rows"]:  # a later size takes a second at most
                        before, slowest = max(points[-1] for points in times.values())
                        size = min(size, largest, int(before * _MOST_SECONDS / slowest))
                        if size < 2 * before:
                            break
                    for plan, points in times.items():
                        if plan == "rows" or not self._is_clear(times["rows"]):
                            call = planned(plan, size)
                            warm_up = _WARM_UP if plan == "rows" else 0.0
                            points.append([size, seconds_of(call, _SECONDS, _LEAST_CALLS, _MOST_CALLS, warm_up)])
        except Exception as error:  # the program's own call shows it, or it is due to the number of rows
            let_interrupts_pass(error)
            if isinstance(error.exception if isinstance(error, WorkerError) else error, MemoryError):
                self._may_be_timed = False  # in this program
                return
            if isinstance(error, SynkhronosError) and not isinstance(error, WorkerError):
                raise  # a worker has died
            times = {}
        finally:
            session.replica_check.every = every
        session.trim()
        self._costs.store.put("functions", self._costs.name, name, value=times, is_provisional=is_busy)

    def _is_clear(self, by_rows: list[list[float]]) -> bool:
        """Return whether the plan is ``"rows"``, so that the function for the controller need not be compiled.

        If a call on scattered variables takes many times as long as a command to the ranks, most of it is work that the
        controller would have to do for all rows.
        """
        assert self._costs is not None and self._costs.machine is not None
        return bool(self._divided.sliceable_shareds) and by_rows[-1][1] >= _CLEAR * self._costs.machine.command

    def _largest(self, session: Session, inputs: Inputs) -> int:
        """Return a number of rows of which all values of a call fit into a quarter of the free memory."""
        given = sum([value.size * np.dtype(value.dtype).itemsize for value in inputs.values[: self._user.n_scattered]])
        n_bytes, most = 3 * given / max(1, sum(inputs.counts)), _MOST_UNKNOWN  # the caller's rows are copied twice
        n_rows = _SIZES[-1] if self._resizes else count_rows(session, self._divided, inputs)
        try:
            _, everything = self._needs(session, inputs, n_rows)
        except Exception as error:
            let_interrupts_pass(error)
        else:
            n_bytes += everything.n_bytes / (n_rows if self._resizes else 1)
            most = _MOST_UNKNOWN if everything.work.unknown else _SIZES[-1]
        room = min(free_memory())[0] / 4 - _n_bytes_of(self._updated)  # which are copied
        return int(min(most, max(0.0, room) / session.n_ranks / max(1.0, n_bytes)))

    def _resized(self, position: int, value: Any, inputs: Inputs, size: int) -> Any:
        """Return an array of an input with another number of rows."""
        if position >= self._user.n_scattered:
            return value
        axis = self._specs[position].axis
        rows = np.arange(value.shape[axis])[_slice_of(inputs.batch.rows[position])]
        return np.take(value, np.resize(rows, size), axis=axis)


def add_variables(
    compiled: Any, sliceable: Sequence[Any], here: int, shapes: list[tuple[int, ...]], values: list[Any]
) -> None:
    """Append the shapes, and the values of scalars, of a function's shared variables, some with `here` rows."""
    scattered = {id(var.container.storage) for var in sliceable}
    for container in compiled.input_storage[len(shapes) :]:
        value = container.storage[0]
        is_array = isinstance(value, (np.ndarray, np.generic))
        shape = value.shape if is_array else ()
        shapes.append((here, *shape[1:]) if id(container.storage) in scattered else shape)
        values.append(value if is_array and value.ndim == 0 else None)


def _slice_of(rows: Selection) -> Any:
    return slice(*rows.bounds) if isinstance(rows, Rows) else rows


def _shape_of(var: Any) -> tuple[int, ...]:
    value = var.container.storage[0]
    return tuple(value.shape)


def _n_bytes_of(variables: Sequence[Any]) -> int:
    """Return the bytes of the variables whose values are arrays."""
    return sum([math.prod(_shape_of(var)) * np.dtype(var.dtype).itemsize for var in _dense(variables)])


def _dense(variables: Sequence[Any]) -> list[Any]:
    """Return the variables whose values are arrays."""
    return [var for var in variables if isinstance(var.container.storage[0], (np.ndarray, np.generic))]


def _have_effects(ends: Sequence[Any]) -> bool:
    """Return whether a graph has operations that may do more than compute, in inner graphs, too."""
    return any(_has_effects(node.op) for node in io_toposort([], list(ends)))


def _has_effects(op: Any) -> bool:
    kind = type(op)
    if kind.__module__.partition(".")[0] not in _KNOWN or kind.__name__ in _EFFECTS or kind is ops.FromFunctionOp:
        return True
    applied = [getattr(op, name, None) for name in ("scalar_op", "core_op")]  # to each element, or to parts of arrays
    return any(one is not None and _has_effects(one) for one in applied) or _have_effects(ops.inner_outputs(op))


def _rounded(n_rows: int) -> int:
    """Round a number of rows, so that a program with many sizes needs few predictions."""
    return round(2 ** (round(_STEPS * math.log2(n_rows)) / _STEPS)) if n_rows else 0


def seconds_of(call: Callable[[], Any], seconds: float, least: int, most: int, warm_up: float = 0.0) -> float:
    """Return the lower quartile of the seconds of some calls, because other programs only add to it.

    There are at least ``least`` calls, and more, up to ``most``, until they have taken ``seconds``. A first call is not
    counted, because the backend may compile then, and neither are more calls until ``warm_up`` seconds have passed. One
    call is enough if it takes more than `_MOST_SECONDS`.
    """
    begin = time.perf_counter()
    call()
    while time.perf_counter() - begin < warm_up:
        call()
    found: list[float] = []
    while len(found) < least or (sum(found) < seconds and len(found) < most):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
        if found[0] > _MOST_SECONDS:
            break
    return sorted(found)[len(found) // 4]


class _unchanged:
    """Context in which variables may change; at its end they have the same values as before, on all ranks."""

    def __init__(self, session: Session, variables: Sequence[Any]) -> None:
        self._session, self._variables = session, variables

    def __enter__(self) -> None:
        values = [var.container.storage[0] for var in self._variables]
        self._saved = [(value, copy.deepcopy(value)) for value in values]

    def __exit__(self, *exception: object) -> None:
        with deferred_interrupts():
            for var, (value, before) in zip(self._variables, self._saved):
                if isinstance(value, np.ndarray) and value.flags.writeable:
                    np.copyto(value, before)  # the program may hold this array, and a function may have overwritten it
                    before = value
                var.container.storage[0] = before
            self._session.stale.add(self._variables)


def digest_of(ends: Sequence[Any]) -> str:
    """Return a digest of a graph, the same in each run of a program: its operations, types and constants."""
    names: dict[Any, str] = {}
    found = hashlib.sha256()

    def name(var: Any) -> str:
        if var not in names:
            content = f"constant {_digest_of_value(var.data)}" if isinstance(var, Constant) else f"leaf {len(names)}"
            names[var] = content
        return f"{names[var]} {var.type}"

    for i, node in enumerate(io_toposort([], ends)):
        op = _ADDRESS.sub("", str(node.op))
        inner = ops.inner_outputs(node.op)
        op += digest_of(inner) if inner else ""
        found.update(f"{type(node.op).__name__} {op} {list(map(name, node.inputs))}\n".encode())
        names.update({var: f"{i}.{j}" for j, var in enumerate(node.outputs)})
    found.update(repr(list(map(name, ends))).encode())
    return found.hexdigest()


def _digest_of_value(value: Any) -> str:
    if isinstance(value, np.ndarray):
        content = f"{value.shape} {value.dtype} ".encode() + value.tobytes()
    else:
        content = _ADDRESS.sub("", repr(value)).encode()
    return hashlib.sha256(content).hexdigest()[:16]


class ChosenPlans(KeyedCache[Any]):
    """Cache of planned calls, as `KeyedCache`, in which a call may have a plan of each kind.

    Parameters
    ----------
    most_slots : int
    prefer : callable
        ``prefer(estimate, plans)`` returns the plan to use now, as `preferred` does.
    latest : callable
        ``latest()`` returns the estimate for the call that was planned last; ``None`` if its plan was not chosen.
    """

    __slots__ = ("_latest", "_prefer")

    def __init__(
        self, most_slots: int, prefer: Callable[[Estimate, list[Any]], Any], latest: Callable[[], Estimate | None]
    ) -> None:
        super().__init__(most_slots)
        self._prefer, self._latest = prefer, latest

    def get(self, slot: Any, key: Any) -> tuple[Call | ControllerCall, Sequence[Place]] | None:
        """Return the plan to use now; ``None`` if it must be made."""
        entry = super().get(slot, key)
        if entry is None:
            return None
        estimate, plans = entry
        return plans[0] if estimate is None else self._prefer(estimate, plans)

    def put(self, slot: Any, key: Any, value: Any) -> Any:
        """Store the plan that was made for the latest estimate."""
        estimate, entry = self._latest(), super().get(slot, key)
        plans = [None, None] if entry is None or entry[0] is not estimate else entry[1]
        plans[isinstance(value[0], ControllerCall) and estimate is not None] = value
        super().put(slot, key, (estimate, plans))
        return value


def check_plan(plan: Any, fits_controller: bool = True) -> None:
    """Raise `ValueError` for a plan that does not exist, or that a function cannot have."""
    if plan not in (None, *PLANS):
        raise ValueError(f"plan is {plan!r}; expected {', '.join(map(repr, PLANS))} or None")
    if plan == "controller" and not fits_controller:
        raise ValueError(
            'plan is "controller", but the controller alone does not have all data: the function computes on GPUs, '
            'uses sliceable_shareds without whole=, updates one of them, or has random="own"'
        )


def prefers_controller(session: Session, estimate: Estimate) -> bool:
    """Return whether the controller is to compute the next call alone."""
    return bool(preferred(session, estimate, (False, True)))


def preferred(session: Session, estimate: Estimate, plans: Sequence[Any]) -> Any:
    """Return the plan of the next call: the first for `"rows"`, the second for the controller alone.

    ``None`` stands for a plan that is not made yet. It is returned, too, but `StaleReplicas.lead` stays as it is then.
    """
    stale = session.stale
    alone, lead = choose(stale.lead, bool(stale.keys), estimate)
    if plans[alone] is not None:
        stale.lead = lead
    return plans[alone]
