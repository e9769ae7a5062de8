"""Measurements for predictions of training steps: a function on one rank by rows, contention, and all-reduces."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np

from synkhronos import _graph
from synkhronos._api.call_plan import rows_on_ranks, slices_of
from synkhronos._api.checks import arrange
from synkhronos._api.data_arrays import Data
from synkhronos._api.exact import ExactFunction
from synkhronos._api.functions import Function
from synkhronos._api.run import averages_within_nodes, makes_exact_steps
from synkhronos._collectives import LEAST_EARLY, PIECE_BYTES, SHARED_BYTES
from synkhronos._costs import (
    Cluster,
    Curve,
    Link,
    Operand,
    RowTimes,
    Rule,
    Spread,
    Workload,
    fit_row_times,
    link_through,
    predict_step,
)
from synkhronos._graph.ops import collectives_of
from synkhronos._rank import TimeFunction, TimeReduction
from synkhronos._session import Session
from synkhronos._utils.display import Progress
from synkhronos._utils.rendezvous import assuming_nodes

_ROUNDS = 3  # of all sizes, one after the other: a delay by other programs seldom lasts for all
_SECONDS, _LEAST = 0.06, 3  # of the calls in one round
_LONG = 10  # times as long as `_SECONDS`: one call is enough
#: Seconds of all rounds: of a function, of its updates, of several ranks at once, and of steps. If the first round of
#: one takes longer, there is no second one.
_OF_FUNCTION, _OF_UPDATES, _OF_RANKS, _OF_STEPS = 20.0, 5.0, 10.0, 20.0
BYTES = (8, 2**10, 2**14, 2**17, 2**20, 2**23)  # of all-reduces, and of messages
_REPETITIONS = 7
_LONG_MESSAGE, _LEAST_OF_LONG = 0.01, 3  # seconds of a message, and repetitions of one after a longer one
_MOST_RANKS = 1 << 20  # of one node
_LARGE = 0.1  # part of all bytes that a large gradient has, at least
_MAD = 1.4826  # standard deviation of a normal distribution by its median absolute deviation

_Found = TypeVar("_Found")


class Check(NamedTuple):
    """A step that was predicted and measured.

    Attributes
    ----------
    ranks, batch : int
    predicted, measured : float
        Seconds.
    alone : float
        Seconds of one rank with the same rows.
    """

    ranks: int
    batch: int
    predicted: float
    measured: float
    alone: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1

    @property
    def error_of_perfect_scaling(self) -> float:
        """Relative error of the seconds of one rank, divided by the number of ranks."""
        return self.alone / self.ranks / self.measured - 1


# -- the function


class _Part(NamedTuple):
    """A function of a step, with the values of its inputs."""

    function: Function
    values: list[Any]


class Target:
    """A step to measure: its functions, and how all ranks make it.

    Attributes
    ----------
    name : str
    n_rows : int
        Number of rows of the inputs.
    updated : list of shared variables
        All variables that the step changes.
    rule : Rule or None
        The training rule of the step.
    is_shuffled : bool
        Whether an index picks the rows of a call.
    in_nodes : bool
        Whether a loop with averages makes exact steps of the function within nodes.
    is_local : bool
        Whether the step has a rule, and each rank makes steps alone.
    """

    def __init__(
        self,
        session: Session,
        f: Any,
        inputs: Sequence[Any],
        named: dict[str, Any],
        params: Sequence[Any],
        *,
        is_shuffled: bool = False,
    ) -> None:
        self._session, self._call, self._inputs, self._named = session, f, inputs, named
        self.name, self.is_shuffled = repr(f), is_shuffled
        self.rule = getattr(f, "rule", None)
        self.parts = self._parts_of(f)
        self.reduced = list(getattr(f, "_reduced", ())) if len(self.parts) > 1 else []
        main = self.parts[0].function
        self.in_nodes = makes_exact_steps(main) and not hasattr(f, "_functions")
        self._has_loop_of_gradients = getattr(f, "_make_step", None) is not None  # a `TrainFunction` without weights
        self.is_local = self.rule is not None and not self.in_nodes
        if self.rule is not None and self.in_nodes:  # a step on all ranks is a call
            self._call, self._inputs, self._named = main, self.parts[0].values, {}
        self._main, graph = main, main._graph
        if graph.packed:
            raise TypeError(f"{f!r} has inputs that are not dense arrays; expected only these")
        self._params = list(params) or list(getattr(f, "_params", ()))
        given = [(value, spec.axis) for value, spec in zip(self.parts[0].values, main._scattered)]
        if given:
            self.n_rows = int(np.shape(given[0][0])[given[0][1]])
        elif graph.sliceable_shareds:
            self.n_rows = sum(rows_on_ranks(session, graph))
        else:
            raise ValueError(
                f"{f!r} has no scattered inputs and no sliceable shared variables; expected some, because steps are "
                "measured with different numbers of rows"
            )
        if not self.n_rows:
            raise ValueError("got inputs with 0 rows; expected at least 1")
        session.distribute()
        self.takes_batch = bool(given)
        of_arrays = [value for value, _ in given if not isinstance(value, Data)]
        self.row_bytes = sum(np.asarray(value).nbytes for value in of_arrays) / self.n_rows
        self.updated = list(dict.fromkeys(var for part in self.parts for var in _updated_by(session, part.function)))
        self.updated += [var for var in self.reduced if var not in self.updated]

    def _parts_of(self, f: Any) -> list[_Part]:
        """Return the functions of a step, the one that takes the rows first."""
        inputs, named = self._inputs, self._named
        if isinstance(getattr(f, "exact", None), Function):  # of `parallelize`, or of a PyMC model
            order = getattr(f, "_order", None)
            if order is not None:
                values = arrange(f._inputs, inputs, named, ())
                inputs, named = [values[position] for position in order], {}
            self._call, self._inputs, self._named = f, inputs, named
            if order is not None:
                self._call = f.exact
            return [_Part(f.exact, arrange(f.exact._graph, inputs, named, ()))]
        if isinstance(f, Function):
            return [_Part(f, arrange(f._graph, inputs, named, ()))]
        structure = getattr(f, "_structure", None)
        functions = getattr(f, "_functions", None) or [getattr(f, "function", None)]
        found = [one for one in functions if isinstance(one, Function)]
        if structure is None or not found or len(inputs) != len(structure):
            raise TypeError(
                f"got {f!r} with {len(inputs)} inputs; expected a function of synkhronos, or a step of train"
            )
        self._flat = [
            value
            for one, pattern in zip(inputs, structure)
            for value in (one if isinstance(pattern, (list, tuple)) else [one])
        ]
        return [self._part(one, self._flat if one is found[0] else []) for one in found]

    def _part(self, function: Function, values: list[Any]) -> _Part:
        names, named = [var.name for var in function._graph.input_variables[len(values) :]], self._named
        if not {*names} <= {*named}:
            raise TypeError(f"got the inputs {sorted(named)} by name; expected also {names}")
        return _Part(function, [*values, *(named[name] for name in names)])

    def over_nodes(self) -> _Part:
        """Return the first function of the step as it is on several nodes, which reduce gradients one by one."""
        part, in_one = self.parts[0], getattr(self._call, "_in_one", None)
        if in_one is not None:
            return self._part(in_one(keeps=True), self._flat)
        if isinstance(part.function, ExactFunction):
            part = _Part(part.function._again({}, False), part.values)
        return part

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Make the step with the plan ``"rows"`` within a block, and give the ranks what the program has set before."""
        exact = [part.function for part in self.parts if isinstance(part.function, ExactFunction)]
        asked = [(one, one._planner.asked) for one in exact]
        counts = [(part.function, part.function.counts) for part in self.parts]
        try:
            for one in exact:
                one.plan = "rows"
                one._give_what_was_set(self._session)
            yield
        finally:
            for one, before in asked:
                one.plan = before
            for function, found in counts:
                function.counts = found

    def step_of(self, batch: int) -> Callable[[], Any]:
        """Return a call that makes a step on all ranks with the first rows, or with any that an index picks."""
        rows: Any = {} if batch == self.n_rows else {"batch": batch}
        if self.is_shuffled and self.takes_batch:
            rows = {"batch": np.random.default_rng(0).permutation(self.n_rows)[:batch]}
        return functools.partial(self._call, *self._inputs, **rows, **self._named)

    def exchange(self) -> tuple[float, int]:
        """Return the number of bytes that a step all-reduces, and the number of collectives. A step was made before."""
        main = self._main
        if isinstance(main, ExactFunction):
            entries = list(main.partition)
            meetings = {one.meeting for one in entries}
            return float(sum(one.n_bytes or 0 for one in entries)), max(1, len(meetings))
        if self.reduced:
            return float(sum(_n_bytes(var) for var in self.reduced)), 1
        ops = collectives_of(main._theano)
        return float(sum(sum(op.n_bytes) for op in ops)), max(1, len(ops))

    def picks(self, sizes: Sequence[int], in_loop: bool = False) -> RowTimes | None:
        """Measure the copies of rows by index on a rank: of `Data`, or in a loop of all inputs. ``None``: none."""
        given = zip(self.parts[0].values, self._main._scattered)
        arrays = [np.moveaxis(_array(one), spec.axis, 0) for one, spec in given if in_loop or isinstance(one, Data)]
        if not arrays:
            return None
        seconds = []
        for size in sizes:
            index = np.random.default_rng(0).integers(self.n_rows, size=size)
            copies = [(array, np.empty((size, *array.shape[1:]), array.dtype)) for array in arrays]

            def copy(copies: Any = copies, index: Any = index) -> None:
                for array, buffer in copies:
                    np.take(array, index, axis=0, out=buffer, mode="clip")

            seconds.append(_typical([_measured_calls(copy, 0.002) for _ in range(_ROUNDS)]))
        return fit_row_times(sizes, seconds)

    def possible(self, given: Any, rule: Rule) -> Rule:
        """Return the model of a training rule; raise `ValueError` if no loop makes steps of the function by it."""
        if rule.kind == "auto" and not (self.in_nodes or self._has_loop_of_gradients):
            raise ValueError(
                f"rule is 'delayed:auto' for {self.name}; expected a function with exact=True or collectives, or a "
                "step of train without weights, of which the ranks of a node make exact steps"
            )
        if averages_within_nodes(given) and self.in_nodes:
            raise ValueError(
                f"rule is {given!r} for {self.name}; expected averages of all ranks alone, because the ranks of a node "
                "make exact steps"
            )
        return rule

    def is_exact_by(self, rule: Rule) -> bool:
        """Return whether the ranks of a node make exact steps between the averages of a training rule.

        A `TrainFunction` is made into a function with collectives for ``"auto"``, and into one without for other rules.
        """
        return rule.kind == "auto" or (self.in_nodes and rule.kind in ("local", "delayed"))

    def local(self, workload: Workload, rule: Rule, picks: RowTimes | None) -> Workload:
        """Return the same with averages of the parameters, and with the copies of rows that a loop makes."""
        params = self._params or [var for var in self.updated if _is_float(var)]
        in_nodes = (workload.n_bytes, workload.n_collectives) if self.is_exact_by(rule) else None
        of_call = None
        if rule.kind == "auto" and isinstance(self._main, ExactFunction):  # which copies rows of `Data` alone by index
            of_call = replace(workload, picks=workload.picks if workload.row_bytes else picks)
        averaged = replace(workload, n_bytes=float(sum(map(_n_bytes, params))), n_collectives=1, operands=())
        return replace(averaged, in_nodes=in_nodes, on_one_node=of_call, picks=picks or workload.picks)

    def memory(self) -> tuple[float, float]:
        """Return the bytes of the shared variables, and of each row of the inputs and sliceable shared variables."""
        sliceable = self._main._graph.sliceable_shareds
        variables = {var for part in self.parts for var in part.function.get_shared() if var not in sliceable}
        rows = [value for value, _ in zip(self.parts[0].values, self._main._scattered)]
        of_rows = sum(_array(one).nbytes for one in rows) / self.n_rows
        of_rows += sum(_n_bytes(var) / max(1, len(_graph.get_array(var))) for var in sliceable)
        return float(sum(map(_n_bytes, variables))), float(of_rows)

    def resized(self, part: _Part, rows: int) -> list[np.ndarray]:
        """Return the values of a function's inputs, with another number of rows."""
        found = []
        for i, value in enumerate(part.values):
            array = np.asarray(part.function._graph.filter_input(i, value.data if isinstance(value, Data) else value))
            if i < len(part.function._scattered):
                axis = part.function._scattered[i].axis
                array = np.take(array, np.resize(np.arange(array.shape[axis]), rows), axis=axis)
            found.append(array)
        return found


def _updated_by(session: Session, one: Function) -> list[Any]:
    """Return all variables that a function changes."""
    found = list(_graph.updated_variables(one._theano))
    if isinstance(one, ExactFunction):
        slices = slices_of(session, one._graph)
        found += [var for var, _ in one._graph.updates]
        found += [] if slices is None else slices.drawn
    session.distribute_variables([var for var in found if session.replica.variables.key(var) is None])
    return found


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.data if isinstance(value, Data) else value)


def _is_float(var: Any) -> bool:
    return _graph.is_tensor_variable(var) and np.dtype(var.dtype).kind == "f"


def _n_bytes(var: Any) -> int:
    return int(getattr(_graph.get_array(var), "nbytes", 0))


# -- measurements


def _time(
    session: Session,
    target: Target,
    part: _Part,
    rows: int,
    ranks: Sequence[int],
    *,
    graph: Any = None,
    of_operands: bool = False,
) -> list[Any]:
    """Return the seconds of calls on the first of some ranks, which all call the function at once.

    With ``of_operands``, return when operands exist in their place; see `TimeFunction`.
    """
    function = part.function
    graph = function._first if graph is None else graph
    key = function._distributed(session, function._plain, graph)
    with session.lock:
        arrays = target.resized(part, rows)
        command = TimeFunction(
            key,
            tuple(session.stage(arrays)),
            rows,
            bool(getattr(function._graph, "takes_rows", False)),
            session.keys(function._graph.sliceable_shareds),
            tuple(ranks),
            _SECONDS,
            _LEAST,
            of_operands,
        )
        results = session.run(command)
    return [one for rank in ranks for one in results[rank]]


def _in_rounds(measure: Callable[[], _Found], seconds: float) -> list[_Found]:
    """Return the results of `_ROUNDS` measurements, or of as many as a time allows, but at least one."""
    begin, found = time.perf_counter(), [measure()]
    while len(found) < _ROUNDS and (time.perf_counter() - begin) * (1 + 1 / len(found)) <= seconds:
        found.append(measure())
    return found


def _typical(rounds: Sequence[Sequence[float]]) -> float:
    """Return the least median of some rounds of calls, because other programs only add to it."""
    return min(map(statistics.median, rounds))


def _measured_rows(
    session: Session, target: Target, part: _Part, sizes: Sequence[int], graph: Any
) -> tuple[RowTimes, float]:
    """Return the seconds of a function on one rank by rows, and the standard deviation of equal calls, relative."""

    def measure() -> list[list[float]]:
        return [_time(session, target, part, size, [session.master_rank], graph=graph) for size in sizes]

    _time(session, target, part, sizes[0], [session.master_rank], graph=graph)  # the backend may compile, which is long
    rounds = list(zip(*_in_rounds(measure, _OF_FUNCTION)))  # of each size
    deviations = []
    for some in rounds:
        of_rounds = some if max(map(len, some)) > 1 else [[one for found in some for one in found]]
        ratios = [one / statistics.median(found) - 1 for found in of_rounds for one in found]
        deviations.append(_MAD * statistics.median(map(abs, ratios)))
    return fit_row_times(sizes, list(map(_typical, rounds))), statistics.median(deviations)


def measure_function(session: Session, target: Target, sizes: Sequence[int], work: Progress) -> Workload:
    """Measure what one rank computes, and read what ranks exchange."""
    first, *others = target.parts
    if not target.is_local:
        target.step_of(target.n_rows)()
    function, one_rank, divided = first.function, [session.master_rank], 0.0
    slices = isinstance(function, ExactFunction) and function._first is not function._graph
    times, deviation = _measured_rows(session, target, first, sizes, function._graph if slices else None)
    if slices:  # ranks divide the updates by elements, but not the products of their rows for these
        ends, graphs = sorted({sizes[0], sizes[-1]}), (function._first, function._graph)
        extra = []
        for size in ends:

            def measure(size: int = size) -> list[list[float]]:
                return [_time(session, target, first, size, one_rank, graph=one) for one in graphs]

            without, full = zip(*_in_rounds(measure, _OF_UPDATES))
            extra.append(max(0.0, _typical(full) - _typical(without)))
        divided = fit_row_times(ends, extra).constant
        times = RowTimes(
            times.rows, tuple(max(0.0, one - divided) for one in times.seconds), max(0.0, times.constant - divided)
        )
    kernels = [times]
    for part in others:
        seconds = _typical(_in_rounds(functools.partial(_time, session, target, part, 1, one_rank), _OF_UPDATES))
        kernels.append(RowTimes((1.0,), (seconds,), seconds))
    work.done += 1
    exchanged = [*target.updated, *target.reduced] or [getattr(one, "variable", one) for one in function._graph.outputs]
    n_bytes, n_collectives = (0.0, 1) if target.is_local else target.exchange()
    return Workload(
        tuple(kernels),
        n_bytes,
        n_collectives,
        spread=Spread(deviation),
        divided=divided,
        row_bytes=target.row_bytes,
        memory=target.memory(),
        is_float32=all(var.dtype == "float32" for var in exchanged if _is_float(var)),
    )


def measure_overlap(
    session: Session, target: Target, workload: Workload, sizes: Sequence[int], n_nodes: int
) -> tuple[Workload, str]:
    """Measure when the gradients exist that several nodes exchange; return the workload with them, and a sentence.

    Times are those of single Apply nodes on one rank that makes all updates itself. If there are none, exchange counts
    as if it began after all gradients.
    """
    assumed = "Assumed: exchange between nodes begins when all gradients exist, because "
    if target.is_local or n_nodes == 1:
        return workload, ""
    if workload.n_bytes < LEAST_EARLY:
        return workload, f"{assumed}they have fewer than {LEAST_EARLY >> 10} KiB"
    own, some = [session.master_rank], sizes[::2]
    with assuming_nodes() if session.is_on_one_node else contextlib.nullcontext():
        part = target.over_nodes() if session.is_on_one_node else target.parts[0]
        graph = part.function._graph
        of_sizes = [_time(session, target, part, size, own, graph=graph, of_operands=True) for size in some]
    if not all(of_sizes):
        return workload, f"{assumed}no times of single Apply nodes show it"
    rows = tuple(map(float, some))
    operands = _together(
        [Operand(of_one[-1][1], rows, tuple(until for until, _ in of_one)) for of_one in zip(*of_sizes)],
        workload.n_bytes,
    )
    if len(operands) == 1:
        return workload, f"{assumed}they are exchanged in one piece"
    large = [one for one in operands if one.part >= _LARGE] or operands
    text = (
        f"Measured: with {some[-1]} rows, the first large gradient exists after {large[0].until[-1]:.0%} of a step, "
        f"the last one after {operands[-1].until[-1]:.0%}; exchange between nodes begins with the first"
    )
    return replace(workload, operands=operands), text


def _together(operands: Sequence[Operand], n_bytes: float) -> tuple[Operand, ...]:
    """Join consecutive small operands, which nodes exchange in one piece when the last of them exists."""
    found: list[Operand] = []
    room = 0.0  # bytes that still fit into the last piece
    for one in operands:
        size = one.part * n_bytes
        if size <= min(room, SHARED_BYTES):
            found[-1] = replace(one, part=found[-1].part + one.part)
            room -= size
        else:
            found.append(one)
            room = PIECE_BYTES - size if size <= SHARED_BYTES else 0.0
    return tuple(found)


def _within_node(session: Session) -> Curve:
    """Return the seconds of all-reduces on a node, by bytes."""
    found = [session.run(TimeReduction(n_bytes, _REPETITIONS))[session.master_rank] for n_bytes in BYTES]
    return Curve(tuple(map(float, BYTES)), tuple(map(statistics.median, found)))


def measure_link(session: Session) -> Link:
    """Measure the link between nodes, by messages from the leader of node 0 to the others, and from that of node 1."""
    seconds: list[float] = []
    for n_bytes in BYTES:
        n = _LEAST_OF_LONG if seconds and seconds[-1] > _LONG_MESSAGE else _REPETITIONS
        found = session.run(TimeReduction(n_bytes, n, between_nodes=True))[session.master_rank]
        seconds.append(statistics.median(found))
    n_others = session.n_ranks // len(session.replica.on_node) - 1  # to which a leader sends through one port
    return link_through([n_others * n_bytes for n_bytes in BYTES], seconds)


def measure_machine(
    session: Session, target: Target, workload: Workload, sizes: Sequence[int], link: Link | None
) -> Cluster:
    """Measure the machine: contention, commands, copies, all-reduces on this node, and the link between nodes.

    The command is what a step with one row on each rank takes in addition to computing and exchange.
    """
    on_node, own = session.replica.on_node, session.master_rank
    within = _within_node(session)
    if link is None:
        link = Link(0.0, math.inf) if session.is_on_one_node else measure_link(session)
    counts = sorted({len(on_node), *(2**i for i in range(len(on_node).bit_length()) if 2**i <= len(on_node))})
    others = [rank for rank in on_node if rank != own]
    factors = {1: 1.0}
    some = sizes[1:-1:2] or sizes
    for n in counts[1:]:
        ratios = []
        for size in some:

            def measure(n: int = n, size: int = size) -> list[list[float]]:
                some_ranks = [own], [own, *others[: n - 1]]
                return [_time(session, target, target.parts[0], size, ranks) for ranks in some_ranks]

            alone, together = zip(*_in_rounds(measure, _OF_RANKS / (len(some) * (len(counts) - 1))))
            ratios.append(_typical(together) / _typical(alone))
        factors[n] = max(1.0, statistics.median(ratios))
    last = max(factors)
    factors[_MOST_RANKS] = factors[last]  # of more ranks than here: that of as many as here
    contention = Curve(tuple(map(float, factors)), tuple(factors.values()))
    cluster = Cluster(
        link,
        within,
        session.replica.wire_dtype or "float32",
        contention=contention,
        copy=_copies() if target.row_bytes else None,
    )
    if session.n_ranks == 1:
        return cluster
    if target.is_local or not target.takes_batch:
        return replace(cluster, command=statistics.median(_measured_calls(session.flush, _SECONDS)))
    n_rows, n_local = min(session.n_ranks, target.n_rows), len(on_node)
    step = _seconds_of_step(target, n_rows)
    predicted = predict_step(workload, cluster, session.n_ranks // n_local, n_local, n_rows)
    return replace(cluster, command=max(0.0, step - predicted.seconds))


def _copies() -> Curve:
    """Return the seconds of copies, by bytes."""
    arrays = [np.ones(n_bytes, np.uint8) for n_bytes in BYTES]
    calls = [functools.partial(np.copyto, np.empty_like(array), array) for array in arrays]
    seconds = [_typical([_measured_calls(call, 0.002) for _ in range(_ROUNDS)]) for call in calls]
    return Curve(tuple(map(float, BYTES)), tuple(seconds))


def _seconds_of_step(target: Target, batch: int, most: float = _OF_UPDATES) -> float:
    """Return the seconds of a step of all ranks, measured in some seconds, or by two steps if they take longer."""
    step = target.step_of(batch)
    (first,) = _measured_calls(step, 0.0, 1)
    least = _LEAST if first < _LONG * _SECONDS else 1
    return _typical(_in_rounds(lambda: _measured_calls(step, 2 * _SECONDS, least), most - first))


def _measured_calls(call: Callable[[], Any], seconds: float, least: int = _LEAST) -> list[float]:
    begin = time.perf_counter()
    found: list[float] = []
    while len(found) < least or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def check_steps(
    session: Session, target: Target, workload: Workload, cluster: Cluster, batches: Sequence[int]
) -> list[Check]:
    """Measure steps on all ranks of the session, and predict them."""
    possible = [size for size in batches if session.n_ranks <= size <= target.n_rows]
    if not target.takes_batch:
        possible = [size for size in batches if size == target.n_rows]
    found = []
    for size in possible if session.n_ranks > 1 else ():
        n_local = len(session.replica.on_node)
        predicted = predict_step(workload, cluster, session.n_ranks // n_local, n_local, size)
        measured = _seconds_of_step(target, size, _OF_STEPS / len(possible))
        found.append(Check(session.n_ranks, size, predicted.seconds, measured, workload.compute(size)))
    return found
