"""`synk.plan`: measure a function on one rank, and predict its steps on other numbers of nodes, ranks and rows."""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple

import numpy as np

import synkhronos
from synkhronos import _graph
from synkhronos._api.build import function
from synkhronos._api.calibration import measured
from synkhronos._api.call_plan import rows_on_ranks, slices_of
from synkhronos._api.checks import arrange
from synkhronos._api.data_arrays import Data
from synkhronos._api.exact import ExactFunction
from synkhronos._api.functions import Function
from synkhronos._costs import (
    MOST_BUSY,
    Cluster,
    Curve,
    Link,
    PredictionTable,
    Rule,
    RowTimes,
    Spread,
    StepPrediction,
    Workload,
    fit_link,
    fit_row_times,
    predict_step,
    predict_steps,
    verdict,
)
from synkhronos._graph.ops import collectives_of
from synkhronos._rank import KeepValues, TimeFunction, TimeReduction
from synkhronos._session import Session, current
from synkhronos._utils.display import Progress, html_table, progress, public_names
from synkhronos._utils.resources import busy
from synkhronos.errors import SessionError, SynkhronosError, WorkerRestarted
from synkhronos.rules import BSP, Average, Centre
from synkhronos.rules import Rule as TrainingRule

_N_SIZES = 6  # numbers of rows at which a function is measured
_RANGE = 8  # ratio of the largest and the least of them, at least: it shows what does not depend on rows
_ROUNDS = 3  # of all sizes, one after the other: a delay by other programs seldom lasts for all
_SECONDS, _LEAST = 0.06, 3  # of the calls in one round
_MOST_SECONDS = 60.0  # of all calls for one function
_BYTES = (8, 2**10, 2**14, 2**17, 2**20, 2**23)  # of all-reduces
_REPETITIONS = 7
_MAD = 1.4826  # standard deviation of a normal distribution by its median absolute deviation
#: Assumed seconds of a message without bytes if only the bandwidth of a link is given: TCP between two hosts.
LATENCY = 50e-6
_UNITS = {"M": 1e6 / 8, "G": 1e9 / 8}  # bytes per second
_EVERY = 10  # steps between two exchanges of a training rule that is named without a number


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


class Plan:
    """Predicted training steps by numbers of nodes, ranks and rows, as `plan` returns them.

    ``str()`` returns the table, the errors of the model at sizes that were measured, and a sentence about what limits
    the largest size.

    Attributes
    ----------
    table : PredictionTable
        The predictions; ``table.steps`` is a tuple of them.
    checks : list of Check
        Steps on the ranks of the session, which were predicted from one rank and then measured.
    verdict : str
        What limits a step on the most nodes and ranks, and what helps.
    notes : list of str
        What was measured, and what is assumed.

    Examples
    --------
    >>> x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.dot(w).sum(), updates=[(w, 0.9 * w)], exact=True)
    ...     table = synk.plan(f, np.ones((64, 3)), batch=[32, 64])
    >>> len(table.table.steps), len(table.checks), table.seconds(ranks=2, batch=64) > 0, w.get_value()
    (4, 2, True, array([1., 1., 1.]))
    """

    def __init__(
        self,
        table: PredictionTable,
        model: tuple[Workload, Cluster],
        *,
        rules: Sequence[tuple[Workload, Rule]],
        checks: Sequence[Check],
        verdict: str,
        notes: Sequence[str],
    ) -> None:
        self.table, self.checks, self.verdict, self.notes = table, list(checks), verdict, list(notes)
        self._workload, self._cluster = model
        self._rules = list(rules)

    def seconds(self, *, ranks: int, batch: int, nodes: int = 1) -> float:
        """Return the predicted seconds of a step, by the first training rule, also with numbers that have no line.

        Parameters
        ----------
        ranks, batch, nodes : int
            Number of ranks on each node, of rows of all ranks, and of nodes.

        Returns
        -------
        float
        """
        return self._step(nodes, ranks, batch).seconds

    def _step(self, nodes: int, ranks: int, batch: int) -> StepPrediction:
        workload, rule = self._rules[0]
        return predict_step(workload, self._cluster, nodes, ranks, batch, rule)

    def to_csv(self) -> str:
        """Return the predictions as CSV: one line for each, times in seconds."""
        return self.table.to_csv()

    def plot(self, path: Any = None) -> Any:
        """Draw the speed-up with measured points, and the parts of each step as stacked bars.

        Parameters
        ----------
        path : str, optional
            Path of a file to draw to. Its suffix selects the format.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            If Matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        steps = [step for step in self.table.steps if step.rule == self.table.steps[0].rule]
        for batch in dict.fromkeys(step.batch for step in steps):
            alone = self._workload.compute(batch)
            points = sorted((step.nodes * step.ranks, alone / step.seconds) for step in steps if step.batch == batch)
            (line,) = left.plot(*zip(*points), marker=".", label=f"{batch} rows")
            found = [(one.ranks, one.alone / one.measured) for one in self.checks if one.batch == batch]
            left.plot(*zip(*found) if found else ([], []), "o", mfc="none", color=line.get_color())
        left.set(xlabel="ranks", ylabel="speed-up over one rank (circles: measured)")
        left.legend()
        bottom = np.zeros(len(steps))
        names = [f"{step.nodes}×{step.ranks}\n{step.batch}" for step in steps]
        for title, part in (("computing", "compute"), ("waiting", "waiting"), ("exchange", "exposed")):
            heights = np.array([1e3 * getattr(step, part) for step in steps])
            right.bar(range(len(steps)), heights, bottom=bottom, label=title)
            bottom += heights
        right.set(ylabel="ms per step", xlabel="nodes × ranks, rows", xticks=range(len(steps)))
        right.set_xticklabels(names, fontsize=7)
        right.legend()
        if path is not None:
            figure.savefig(path)
        return figure

    def _lines_of_checks(self) -> list[tuple[str, ...]]:
        titles = ("ranks", "batch", "predicted ms", "measured ms", "error", "error of perfect scaling")
        return [titles] + [
            (
                *map(str, one[:2]),
                *(f"{1e3 * seconds:.4g}" for seconds in one[2:4]),
                f"{one.error:+.1%}",
                f"{one.error_of_perfect_scaling:+.1%}",
            )
            for one in self.checks
        ]

    def _error(self) -> str:
        if not self.checks:
            return "No size could be checked here: the session has one rank, or the rule makes local steps."
        errors = [abs(one.error) for one in self.checks]
        return (
            f"Error of the model at {len(errors)} measured sizes: median {statistics.median(errors):.1%}, "
            f"largest {max(errors):.1%}."
        )

    def __str__(self) -> str:
        lines = self._lines_of_checks()
        widths = [max(map(len, column)) for column in zip(*lines)]
        checks = ["  ".join(map(str.rjust, line, widths)) for line in lines] if self.checks else []
        return "\n".join(
            [str(self.table), "", *checks, self._error(), f"Verdict: {self.verdict}.", "", *self.notes]
        )

    def __repr__(self) -> str:
        return f"<synkhronos.Plan of {len(self.table.steps)} predictions and {len(self.checks)} checks>"

    def _repr_html_(self) -> str:
        """Return the tables as HTML, for notebooks."""
        checks = html_table(self._lines_of_checks()) if self.checks else ""
        sentences = html_table([(self._error(),), (f"Verdict: {self.verdict}.",)])
        return html_table(self.table.lines()) + checks + sentences

    def __dir__(self) -> list[str]:
        return public_names(self)


def plan(
    f: Any,
    *inputs: Any,
    ranks: Sequence[int] | int | None = None,
    nodes: Sequence[int] | int | None = None,
    batch: Sequence[int] | int | None = None,
    line: str | tuple[float, float] | None = None,
    rule: Any = None,
    slow: Sequence[float] = (),
    params: Sequence[Any] = (),
    **named: Any,
) -> Plan:
    """Measure a function on one rank, and predict its steps on other numbers of nodes, ranks and rows.

    The function is called some times at five or six numbers of rows, and so are all-reduces. Then all updates are
    undone on all ranks, also those of random states, and also after an exception or Ctrl-C. Steps on the ranks of the
    session are measured, too, so that the result has the error of the model. docs/cost_model.md has the formulas and
    assumptions. No other thread may use the session meanwhile.

    Parameters
    ----------
    f : Function, or step of `synkhronos.extensions.train`
        Also a function that was built under `parallelize`, or by PyMC in a `parallel` block. Steps are predicted for
        the plan ``"rows"``.
    *inputs
        Its inputs, as in a call.
    ranks : int or list of int, optional
        Numbers of ranks on each node. Default: 1 to the number of ranks on this node.
    nodes : int or list of int, optional
        Numbers of nodes. Default: 1, or 1 to the number of nodes of the session.
    batch : int or list of int, optional
        Numbers of rows of all ranks in a step. Default: that of the inputs.
    line : str or tuple of float, optional
        Link between nodes: bits per second, such as ``"10Gbit"`` or ``"100Mbit"``; or seconds of a message without
        bytes, and bytes per second. Default: measured, if the session has several nodes.
    rule : Rule or str, or list of these, optional
        Training rules of `synkhronos.rules`, or ``"bsp"``, ``"local"``, ``"delayed"`` and ``"centre"``, the latter with
        a number of steps between exchanges if wanted, as in ``"local:16"``. Default: that of ``f``, or ``"bsp"``.
    slow : list of float, optional
        How many times as long as the others some ranks compute: ``[5]`` for one that takes five times as long.
    params : list of shared variables, optional
        The parameters that training rules average. Default: those of a step of `synkhronos.extensions.train`, or all
        variables of floating-point numbers that ``f`` updates.
    **named
        Inputs by name, such as hyperparameters of a step.

    Returns
    -------
    Plan
        The predictions as a table.

    Raises
    ------
    SessionError
        Without a session, or in a `sequence`.
    TypeError, ValueError
        For invalid arguments, and for a function of which the number of rows cannot be changed.
    WorkerError
        If a rank fails.

    Examples
    --------
    >>> x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.dot(w).sum(), updates=[(w, 0.9 * w)], exact=True)
    ...     table = synk.plan(f, np.ones((64, 3)), ranks=[1, 2], nodes=[1, 4], line="10Gbit")
    >>> [(step.nodes, step.ranks) for step in table.table.steps]
    [(1, 1), (1, 2), (4, 1), (4, 2)]
    """
    session = current("plan")
    if session.sequencer.place:
        raise SessionError("plan cannot be called in a sequence; call it outside of the block")
    if session.on_gpu:
        raise TypeError("plan measures CPU cores; got a session on GPUs")
    n_local, n_nodes = len(session.replica.on_node), session.n_ranks // len(session.replica.on_node)
    link = _link_of(line)
    every_ranks = _numbers("ranks", ranks, range(1, n_local + 1))
    every_nodes = _numbers("nodes", nodes, range(1, n_nodes + 1))
    if max(every_nodes) > 1 and link is None and n_nodes == 1:
        raise ValueError(
            f"nodes is {every_nodes}, and the session has one node, so no link can be measured; expected also line, "
            'such as line="10Gbit"'
        )
    target = _Target(session, f, inputs, named, params)
    given = target.rule if rule is None else rule
    kinds = [_rule_of(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    batches = _numbers("batch", batch, [target.n_rows])
    most = max(every_ranks) * max(every_nodes)
    sizes = _sizes(math.ceil(min(batches) / most), max(batches))
    every, session.replica_check.every = session.replica_check.every, 0
    try:
        with progress("measuring", 4) as work, target.prepared(), _restored(session, target.updated):
            workload = _workload(session, target, sizes, work)
            cluster = _cluster(session, target, sizes, link, most, work)
            cluster = replace(cluster, slow=tuple(slow))
            rules = [(workload if one.kind == "bsp" else target.local(workload), one) for one in kinds]
            checks = []
            if not target.is_local and kinds[0].kind == "bsp":
                checks = _checks(session, target, workload, replace(cluster, slow=()), batches)
            work.done += 1
    finally:
        session.replica_check.every = every
    table = predict_steps(workload, cluster, nodes=every_nodes, ranks=every_ranks, batches=batches, rules=rules)
    first, kind = rules[0]
    sentence = verdict(first, cluster, nodes=every_nodes, ranks=max(every_ranks), batch=max(batches), rule=kind)
    notes = _notes(first, cluster, sizes, n_local, n_nodes, is_given=line is not None)
    return Plan(table, (workload, cluster), rules=rules, checks=checks, verdict=sentence, notes=notes)


# -- arguments


def _numbers(name: str, given: Any, default: Sequence[int]) -> list[int]:
    """Return numbers in increasing order, each once."""
    found = list(default) if given is None else [given] if np.ndim(given) == 0 else list(given)
    for one in found:
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)) or one < 1:
            raise ValueError(f"{name} has {one!r}; expected ints of at least 1")
    if not found:
        raise ValueError(f"{name} is empty; expected at least one int")
    return sorted({int(one) for one in found})


def _link_of(line: Any) -> Link | None:
    if line is None:
        return None
    if isinstance(line, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG])bit(?:/s)?", line.strip())
        if found and float(found[1]) > 0:
            return Link(LATENCY, float(found[1]) * _UNITS[found[2]])
    elif isinstance(line, tuple) and len(line) == 2 and line[0] >= 0 and line[1] > 0:
        return Link(float(line[0]), float(line[1]))
    raise ValueError(f'line is {line!r}; expected such as "10Gbit" or "100Mbit", or (seconds, bytes per second)')


def _rule_of(given: Any) -> Rule:
    """Return how the model describes a training rule."""
    if given is None or isinstance(given, BSP):
        return Rule()
    if isinstance(given, Average):
        return Rule("delayed" if given.delay else "local", given.every, given.delay or None)
    if isinstance(given, Centre):
        return Rule("centre", given.every)
    if isinstance(given, TrainingRule):
        raise ValueError(f"rule is {given!r}; expected BSP, an average or a centre, because gossip has no model")
    kind, _, every = str(given).partition(":")
    if kind == "bsp" and not every:
        return Rule()
    if kind not in ("local", "delayed", "centre") or not re.fullmatch("([1-9][0-9]*)?", every):
        raise ValueError(f'rule is {given!r}; expected "bsp", "local:10", "delayed:10" or "centre:10"')
    return Rule(kind, int(every or _EVERY))  # type: ignore[arg-type]


def _sizes(least: int, most: int) -> list[int]:
    """Return numbers of rows from the least, or fewer, to the largest, with equal ratios."""
    least = max(1, min(least, most // _RANGE))
    ratio = (most / least) ** (1 / (_N_SIZES - 1))
    return sorted({round(least * ratio**i) for i in range(_N_SIZES)})


# -- the function


class _Part(NamedTuple):
    """A function of a step, with the values of its inputs."""

    function: Function
    values: list[Any]


class _Target:
    """A step to measure: its functions, and how all ranks make it.

    Attributes
    ----------
    n_rows : int
        Number of rows of the inputs.
    updated : list of shared variables
        All variables that the step changes.
    rule : Rule or None
        The training rule of the step.
    """

    def __init__(
        self, session: Session, f: Any, inputs: Sequence[Any], named: Mapping[str, Any], params: Sequence[Any]
    ) -> None:
        self._session, self._call, self._inputs, self._named = session, f, inputs, named
        self.rule, self.reduced = getattr(f, "rule", None), list(getattr(f, "_reduced", ()))
        self.is_local = self.rule is not None
        self.parts = self._parts_of(f)
        main = self.parts[0].function
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
        functions = [getattr(f, name, None) for name in ("function", "gradient", "update")]
        found = [one for one in functions if isinstance(one, Function)]
        if structure is None or not found or len(inputs) != len(structure):
            raise TypeError(f"got {f!r} with {len(inputs)} inputs; expected a function of synkhronos, or a step of train")
        flat = [
            value
            for one, pattern in zip(inputs, structure)
            for value in (one if isinstance(pattern, (list, tuple)) else [one])
        ]
        parts = []
        for one in found:
            own = flat if one is found[0] else []
            names = [var.name for var in one._graph.input_variables[len(own) :]]
            if not {*names} <= {*named}:
                raise TypeError(f"got the inputs {sorted(named)} by name; expected also {names}")
            parts.append(_Part(one, [*own, *(named[name] for name in names)]))
        return parts

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Make the step with the plan ``"rows"`` within a block."""
        exact = [part.function for part in self.parts if isinstance(part.function, ExactFunction)]
        asked = [(one, one._planner.asked, one.counts) for one in exact]
        try:
            for one in exact:
                one.plan = "rows"
            yield
        finally:
            for one, before, counts in asked:
                one.plan, one.counts = before, counts

    def step(self, batch: int) -> None:
        """Make a step on all ranks with the first rows."""
        whole = {} if batch == self.n_rows else {"batch": batch}
        self._call(*self._inputs, **whole, **self._named)

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

    def local(self, workload: Workload) -> Workload:
        """Return the same with the parameters in place of gradients, as ranks exchange them with local steps."""
        params = self._params or [var for var in self.updated if _is_float(var)]
        return replace(workload, n_bytes=float(sum(map(_n_bytes, params))), n_collectives=1, first=1.0)

    def memory(self) -> tuple[float, float]:
        """Return the bytes of the shared variables, and of each row of the inputs and sliceable shared variables."""
        sliceable = self._main._graph.sliceable_shareds
        variables = {var for part in self.parts for var in part.function.get_shared() if var not in sliceable}
        rows = [value for value, _ in zip(self.parts[0].values, self._main._scattered)]
        of_rows = sum(np.asarray(one.data if isinstance(one, Data) else one).nbytes for one in rows) / self.n_rows
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


def _is_float(var: Any) -> bool:
    return _graph.is_tensor_variable(var) and np.dtype(var.dtype).kind == "f"


def _n_bytes(var: Any) -> int:
    return int(getattr(_graph.get_array(var), "nbytes", 0))


@contextlib.contextmanager
def _restored(session: Session, variables: Sequence[Any]) -> Iterator[None]:
    """Give variables on all ranks the values at the end of a block that they had at its beginning."""
    keys, lead = session.keys(variables), session.stale.lead
    session.run(KeepValues(keys))
    try:
        yield
    except WorkerRestarted:
        session.replica.measurements.restore()
        session.stale.add(variables)  # the new worker has copied none
        raise
    finally:
        with contextlib.suppress(SynkhronosError):  # the exception that has ended the session says more
            if not session.broken:
                session.run(KeepValues(keys, restore=True))
        session.replica.measurements.restore()
        session.stale.lead = lead


# -- measurements


def _time(
    session: Session, target: _Target, part: _Part, rows: int, ranks: Sequence[int], *, graph: Any = None
) -> list[float]:
    """Return the seconds of calls on the first of some ranks, which all call the function at once."""
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
        )
        results = session.run(command)
    return [one for rank in ranks for one in results[rank]]


def _typical(rounds: Sequence[Sequence[float]]) -> float:
    """Return the least median of some rounds of calls, because other programs only add to it."""
    return min(map(statistics.median, rounds))


def _measured_rows(
    session: Session, target: _Target, part: _Part, sizes: Sequence[int], graph: Any = None
) -> tuple[RowTimes, float]:
    """Return the seconds of a function on one rank by rows, and the standard deviation of equal calls, relative."""
    rounds: dict[int, list[list[float]]] = {size: [] for size in sizes}
    spent = 0.0
    for turn in range(_ROUNDS):
        for size in sizes:
            if turn and spent > _MOST_SECONDS:
                break
            found = _time(session, target, part, size, [session.master_rank], graph=graph)
            rounds[size].append(found)
            spent += sum(found)
    deviations = []
    for some in rounds.values():
        ratios = [one / statistics.median(found) - 1 for found in some for one in found]
        deviations.append(_MAD * statistics.median(map(abs, ratios)))
    return fit_row_times(sizes, [_typical(rounds[size]) for size in sizes]), statistics.median(deviations)


def _workload(session: Session, target: _Target, sizes: Sequence[int], work: Progress) -> Workload:
    """Measure what one rank computes, and read what ranks exchange."""
    first, *others = target.parts
    if not target.is_local:
        target.step(target.n_rows)
    times, deviation = _measured_rows(session, target, first, sizes)
    kernels, divided = [times], 0.0
    if isinstance(first.function, ExactFunction) and first.function._first is not first.function._graph:
        full, _ = _measured_rows(session, target, first, sizes, first.function._graph)
        divided = max(0.0, statistics.median(full.at(size) - times.at(size) for size in sizes))
    for part in others:
        seconds = _typical([_time(session, target, part, 1, [session.master_rank]) for _ in range(_ROUNDS)])
        kernels.append(RowTimes((1.0,), (seconds,), seconds))
    work.done += 1
    n_bytes, n_collectives = (0.0, 1) if target.is_local else target.exchange()
    return Workload(
        tuple(kernels),
        n_bytes,
        n_collectives,
        spread=Spread(deviation),
        divided=divided,
        row_bytes=target.row_bytes,
        memory=target.memory(),
    )


def _reduction(session: Session, on_node: bool) -> list[float]:
    """Return the seconds of all-reduces of some numbers of bytes."""
    found = []
    for n_bytes in _BYTES:
        results = session.run(TimeReduction(n_bytes, _REPETITIONS, on_node))
        found.append(statistics.median(results[session.master_rank]))
    return found


def _cluster(
    session: Session, target: _Target, sizes: Sequence[int], link: Link | None, most: int, work: Progress
) -> Cluster:
    """Measure the machine: contention, commands, and all-reduces on this node and between nodes."""
    on_node, own = session.replica.on_node, session.master_rank
    costs = None
    if session.is_on_one_node:
        session.costs = session.costs or measured(session, synkhronos.__version__, function)
        costs = session.costs.machine
    n_commands = len(target.parts) + bool(target.reduced)
    command = n_commands * (costs.command if costs else _seconds_of_flush(session))
    within = Curve(tuple(map(float, _BYTES)), tuple(_reduction(session, on_node=True)))
    if link is None and session.is_on_one_node:
        link = Link(0.0, math.inf)
    elif link is None:
        n = session.n_ranks // len(on_node)
        pairs = zip(_BYTES, _reduction(session, on_node=False), within.seconds)
        messages = [(n_bytes / n, max(1e-7, (over - here) / (2 * (n - 1)))) for n_bytes, over, here in pairs]
        link = fit_link(*zip(*messages))
    work.done += 1
    counts = sorted({len(on_node), *(2**i for i in range(len(on_node).bit_length()) if 2**i <= len(on_node))})
    others = [rank for rank in on_node if rank != own]
    factors = {1: 1.0}
    some = sizes[:: max(1, len(sizes) // 3)]
    for n in counts[1:]:
        ratios = []
        for size in some:
            pairs = [
                (
                    _time(session, target, target.parts[0], size, [own]),
                    _time(session, target, target.parts[0], size, [own, *others[: n - 1]]),
                )
                for _ in range(_ROUNDS)
            ]
            alone, together = zip(*pairs)
            ratios.append(_typical(together) / _typical(alone))
        factors[n] = max(1.0, statistics.median(ratios))
    last = max(factors)
    factors[max(last + 1, most)] = factors[last]  # of more ranks than here: that of as many as here
    work.done += 1
    contention = Curve(tuple(map(float, factors)), tuple(factors.values()))
    return Cluster(
        link, within, command=command, contention=contention, copy=costs.copy if costs and target.row_bytes else None
    )


def _seconds_of_flush(session: Session) -> float:
    return statistics.median(_measured_calls(session.flush, 0.05))


def _measured_calls(call: Callable[[], Any], seconds: float) -> list[float]:
    begin, found = time.perf_counter(), []
    while len(found) < _LEAST or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def _checks(
    session: Session, target: _Target, workload: Workload, cluster: Cluster, batches: Sequence[int]
) -> list[Check]:
    """Measure steps on all ranks of the session, and predict them."""
    possible = [size for size in batches if session.n_ranks <= size <= target.n_rows]
    if not target.takes_batch:
        possible = [size for size in batches if size == target.n_rows]
    found = []
    for size in possible if session.n_ranks > 1 else ():
        target.step(size)
        rounds = [_measured_calls(lambda size=size: target.step(size), 2 * _SECONDS) for _ in range(_ROUNDS)]
        n_local = len(session.replica.on_node)
        predicted = predict_step(workload, cluster, session.n_ranks // n_local, n_local, size)
        found.append(Check(session.n_ranks, size, predicted.seconds, _typical(rounds), workload.compute(size)))
    return found


def _notes(
    workload: Workload, cluster: Cluster, sizes: Sequence[int], n_local: int, n_nodes: int, is_given: bool
) -> list[str]:
    """Return lines on what was measured, and what is assumed."""
    assert isinstance(cluster.within, Curve) and cluster.contention is not None
    largest = cluster.within.seconds[-1]
    used = busy()
    lines = [f"Other programs used {used:.0%} of the cores, which makes errors larger"] if used > MOST_BUSY else []
    lines += [
        f"Measured: one rank with {', '.join(map(str, sizes))} rows; {workload.n_bytes:.0f} bytes in "
        f"{workload.n_collectives} collective{'s' * (workload.n_collectives > 1)}; command {1e6 * cluster.command:.3g} µs",
    ]
    if n_local > 1:
        lines.append(
            f"Measured: {n_local} ranks at once take {cluster.contention.at(n_local):.3f} times as long; an all-reduce "
            f"of {_BYTES[-1] >> 20} MiB takes {1e3 * largest:.3g} ms"
        )
    else:
        lines.append("Assumed, because the session has one rank: ranks do not slow each other down, exchange is free")
    if is_given or n_nodes > 1:
        how = "Given" if is_given else "Measured"
        speed = f"{8e-9 * cluster.link.bandwidth:.3g} Gbit/s, {1e6 * cluster.link.latency:.3g} µs for a message"
        lines.append(f"{how}: a link of {speed}")
    return lines
