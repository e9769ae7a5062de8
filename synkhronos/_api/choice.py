"""Choice of the plan of an exact function's calls: every rank computes its rows, or the controller computes all.

The choice depends on the shapes of the call, on the measured costs of the machine, and on the calls before it. It does
not depend on the time that the program's own calls take. The same program therefore gives the same results, bit by bit,
as long as it uses the same file of costs.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import re
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos import _backends, _graph
from synkhronos._api.call_plan import ControllerCall, Inputs, chosen
from synkhronos._api.checks import Input
from synkhronos._api.data_arrays import Data, data
from synkhronos._backends import Constant, io_toposort, ops
from synkhronos._costs import (
    MOST_BUSY,
    Estimate,
    Machine,
    Store,
    Work,
    along_rows,
    choose,
    seconds_by_rows,
    seconds_on_controller,
)
from synkhronos._graph import Graph
from synkhronos._rank import Call
from synkhronos._session import Place, Session
from synkhronos._sharding import Prediction, ShardedGraph, WorkReader
from synkhronos._utils.interrupts import deferred_interrupts, let_interrupts_pass
from synkhronos._utils.keyed_cache import KeyedCache
from synkhronos._utils.resources import busy, free_memory

#: Numbers of rows at which both plans are timed. A line between them also holds well for other numbers.
_FEW, _MANY = 16, 1024
#: Predictions whose ratio is smaller do not decide.
_NEAR = 1.3
_STEPS = 4  # numbers of rows for which seconds are predicted, in each octave
_WARM_UPS, _LEAST_CALLS, _MOST_CALLS, _SECONDS = 2, 5, 50, 0.05  # of the calls that are timed
_KNOWN = (_backends.engine, "synkhronos", "pymc", "lasagne")  # packages whose operations have no effects
_EFFECTS = ("Print", "PdbBreakpoint")  # operations of the backends that have


class Costs(NamedTuple):
    """Measured costs for a session."""

    store: Store
    name: str  # of the machine, in the store
    machine: Machine


class Unmeasured(Exception):
    """A call needs measurements, which are to be made before it. ``inputs`` is ``None`` for those of the machine."""

    def __init__(self, inputs: Inputs | None) -> None:
        super().__init__()
        self.inputs = inputs


class Chooser:
    """Chooser of the plans of one function.

    Parameters
    ----------
    graph : ShardedGraph
    user : Graph
        The user's graph.
    compiled : compiled function
        Of the sharded graph.
    specs : list of Input
        The inputs, with the axes of their rows.

    Attributes
    ----------
    estimates : dict
        The `Estimate` for each (rounded number of rows, further shapes) so far.
    """

    def __init__(self, graph: ShardedGraph, user: Graph, compiled: Any, specs: Sequence[Input]) -> None:
        self.estimates: dict[Any, Estimate] = {}
        self._graph, self._user, self._compiled, self._specs = graph, user, compiled, specs
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
        n_rows = sum(inputs.counts) if inputs.shares is not None else 1
        rounded = _rounded(n_rows)
        key = (rounded, *(self._shape(i, value, 0) for i, value in enumerate(inputs.values)))
        found = self.estimates.get(key)
        if found is None:
            found = self.estimates[key] = self._predict(session, costs, inputs, rounded)
        return found

    def predictions(self) -> list[Prediction]:
        """Return the predictions so far, for the function's report."""
        return [Prediction(key[0], one.rows, one.controller, one.source) for key, one in self.estimates.items()]

    def _predict(self, session: Session, costs: Costs, inputs: Inputs, n_rows: int) -> Estimate:
        work, rows, controller, _ = self._model(session, costs.machine, inputs, n_rows)
        updated = _graph.updated_variables(self._compiled)
        variables = updated or _graph.shared_variables_of(self._compiled)
        n_bytes = sum([_graph.host_array(var).nbytes for var in variables if not _backends.is_random_state(var)])
        rest = costs.machine.broadcast.at(n_bytes) if n_bytes else 0.0, bool(updated)
        if not work.unknown and not 1 / _NEAR < rows / controller < _NEAR:
            return Estimate(rows, controller, *rest, "model")
        name = self._name_of_graph(inputs)
        times = costs.store.times(costs.name, name)
        if self._can_be_timed() and (times is None or self._is_to_be_timed_again(costs, name)):
            raise Unmeasured(inputs)
        if times:
            rows, controller = (along_rows(times[plan], n_rows) for plan in ("rows", "controller"))
            return Estimate(rows, controller, *rest, "timed")
        if work.unknown:
            return Estimate(rows, math.inf, *rest, "unknown")
        return Estimate(rows, controller, *rest, "model")

    def _model(
        self, session: Session, machine: Machine, inputs: Inputs, n_rows: int
    ) -> tuple[Work, float, float, float]:
        """Return the work of a rank, seconds by rows and on the controller, and the bytes of the latter's values."""
        reader = self._reader = self._reader or WorkReader(self._compiled)
        on_rank = -(-n_rows // session.n_ranks) if inputs.shares is not None else n_rows
        share, all_rows = (
            reader.needs(*self._arguments(inputs, n_rows, here)) for here in (min(on_rank, n_rows), n_rows)
        )
        staged = sum(
            [
                math.prod(self._shape(i, value, n_rows)) * np.dtype(value.dtype).itemsize
                for i, value in enumerate(inputs.values)
                if isinstance(value, np.ndarray)
            ]
        )
        rows = seconds_by_rows(share.work, share.exchange._replace(staged=staged), machine)
        return share.work, rows, seconds_on_controller(all_rows.work, machine), all_rows.n_bytes

    def _arguments(self, inputs: Inputs, n_rows: int, here: int) -> tuple[list[tuple[int, ...]], list[Any]]:
        """Return the shapes, and the values of scalars, of the inputs of a rank's function; it has `here` rows."""
        shapes = [self._shape(i, value, here) for i, value in enumerate(inputs.values)]
        values: list[Any] = [value if shape == () else None for value, shape in zip(inputs.values, shapes)]
        if self._graph.takes_rows:
            shapes += [()] * 3
            values += [n_rows, 0, here]
        for container in self._compiled.input_storage[len(shapes) :]:
            value = container.storage[0]
            shapes.append(np.shape(value) if isinstance(value, np.ndarray) else ())
            values.append(value if np.ndim(value) == 0 else None)
        return shapes, values

    def _shape(self, position: int, value: Any, n_rows: int) -> tuple[int, ...]:
        """Return the shape of an input's value, with another number of rows."""
        shape = value.shape if isinstance(value, (Data, np.ndarray)) else ()
        if position < self._user.n_scattered:
            axis = self._specs[position].axis
            shape = (*shape[:axis], n_rows, *shape[axis + 1 :])
        return tuple(shape)

    # -- times of both plans

    def _name_of_graph(self, inputs: Inputs) -> str:
        """Return a digest of the user's graph, and of all shapes but the number of rows."""
        shapes = [self._shape(i, value, 0) for i, value in enumerate(inputs.values)]
        shared = [np.shape(var.container.storage[0]) for var in _graph.shared_variables_of(self._compiled)]
        if not self._digest:
            outputs, updates = self._user.expressions
            self._digest = digest_of([*self._user.input_variables, *outputs, *itertools.chain(*updates)])
        return hashlib.sha256(repr((self._digest, shapes, shared)).encode()).hexdigest()[:32]

    def _is_to_be_timed_again(self, costs: Costs, name: str) -> bool:
        """Return whether the cores were busy when the function was timed by an earlier program, and are free now."""
        if self._is_timed or not costs.store.is_provisional("functions", costs.name, name):
            return False
        return busy() <= MOST_BUSY

    def _can_be_timed(self) -> bool:
        """Return whether more calls than the program asks for have no effect but updates, which are undone."""
        outputs, updates = self._user.expressions
        kinds = {type(node.op) for node in io_toposort([], [*outputs, *(new for _, new in updates)])}
        return all(one.__module__.partition(".")[0] in _KNOWN and one.__name__ not in _EFFECTS for one in kinds)

    def time(self, session: Session, inputs: Inputs, by_plan: Callable[[str, list[Any]], Callable[[], Any]]) -> None:
        """Time both plans at few and at many rows, undo all updates, and store the times. The caller holds the lock.

        Parameters
        ----------
        session : Session
        inputs : Inputs
            Of the call that needs the times. Its rows are repeated.
        by_plan : callable
            ``by_plan(plan, values)`` returns a function that makes a call with a plan.
        """
        assert self._costs is not None
        arrays = chosen(inputs.values, inputs.batch, self._specs, self._user.n_scattered)
        n_rows = len(inputs.batch.rows[0]) if inputs.shares is not None else 0
        sizes = [max(_FEW, session.n_ranks), self._many(session, inputs, n_rows)] if n_rows else [1]
        is_busy, self._is_timed = busy() > MOST_BUSY, True
        times: dict[str, list[list[float]]] = {"rows": [], "controller": []}
        variables = _graph.updated_variables(self._compiled)
        with _unchanged(session, variables):
            try:
                for size in sizes:
                    values = [self._resized(i, one, n_rows, size) for i, one in enumerate(arrays)]
                    values = [
                        data(value) if isinstance(given, Data) else value for value, given in zip(values, inputs.values)
                    ]
                    for plan, points in times.items():
                        points.append([size, _seconds_of(by_plan(plan, values))])
            except Exception as error:  # the program's own call shows it, or it is due to the number of rows
                let_interrupts_pass(error)
                session.check_usable()
                times = {}
        self._costs.store.put(
            "functions", self._costs.name, self._name_of_graph(inputs), value=times, is_provisional=is_busy
        )

    def _many(self, session: Session, inputs: Inputs, n_rows: int) -> int:
        """Return the larger number of rows; all values of a call then fit into a quarter of the free memory."""
        assert self._costs is not None
        work, *_, n_bytes = self._model(session, self._costs.machine, inputs, _MANY)
        if work.unknown:
            return max(n_rows, 8 * _FEW)
        size = _MANY
        room = min(free_memory())[0] / 4 / session.n_ranks
        while size > n_rows and n_bytes * size / _MANY > room:
            size //= 2
        return max(size, n_rows, 2 * _FEW)

    def _resized(self, position: int, array: Any, n_rows: int, size: int) -> Any:
        if position >= self._user.n_scattered or not n_rows:
            return array
        return np.take(array, np.resize(np.arange(n_rows), size), axis=self._specs[position].axis)


def _rounded(n_rows: int) -> int:
    """Round a number of rows, so that a program with many sizes needs few predictions."""
    return round(2 ** (round(_STEPS * math.log2(n_rows)) / _STEPS)) if n_rows else 0


def _seconds_of(call: Callable[[], Any]) -> float:
    """Return the median of the seconds of some calls."""
    for _ in range(_WARM_UPS):
        call()
    found: list[float] = []
    while len(found) < _LEAST_CALLS or (sum(found) < _SECONDS and len(found) < _MOST_CALLS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return median(found)


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
        op = re.sub(r"0x[0-9a-f]+", "", str(node.op))
        inner = ops.inner_outputs(node.op)
        op += digest_of(inner) if inner else ""
        found.update(f"{type(node.op).__name__} {op} {list(map(name, node.inputs))}\n".encode())
        names.update({var: f"{i}.{j}" for j, var in enumerate(node.outputs)})
    found.update(repr(list(map(name, ends))).encode())
    return found.hexdigest()


def _digest_of_value(value: Any) -> str:
    content = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
    return hashlib.sha256(content).hexdigest()[:16]


class ChosenPlans(KeyedCache[Any]):
    """Cache of planned calls, as `KeyedCache`, in which a call may have a plan of each kind.

    Parameters
    ----------
    most_slots : int
    prefer : callable
        ``prefer(estimate)`` returns whether the controller is to compute the call alone.
    latest : callable
        ``latest()`` returns the estimate for the call that was planned last; ``None`` if its plan was not chosen.
    """

    __slots__ = ("_latest", "_prefer")

    def __init__(
        self, most_slots: int, prefer: Callable[[Estimate], bool], latest: Callable[[], Estimate | None]
    ) -> None:
        super().__init__(most_slots)
        self._prefer, self._latest = prefer, latest

    def get(self, slot: Any, key: Any) -> tuple[Call | ControllerCall, Sequence[Place]] | None:
        """Return the plan to use now; ``None`` if it must be made."""
        entry = super().get(slot, key)
        if entry is None:
            return None
        estimate, plans = entry
        if estimate is None:
            return plans[0]
        return plans[self._prefer(estimate)]

    def put(self, slot: Any, key: Any, value: Any) -> Any:
        """Store the plan that was made for the latest estimate."""
        estimate, entry = self._latest(), super().get(slot, key)
        plans = [None, None] if entry is None or entry[0] is not estimate else entry[1]
        plans[isinstance(value[0], ControllerCall) and estimate is not None] = value
        super().put(slot, key, (estimate, plans))
        return value


def prefers_controller(session: Session, estimate: Estimate) -> bool:
    """Return whether the controller is to compute the next call alone."""
    stale = session.stale
    alone, stale.lead = choose(stale.lead, bool(stale.keys), estimate)
    return alone
