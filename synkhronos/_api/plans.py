"""`synk.plan`: measure a function on one rank, and predict its steps on other numbers of nodes, ranks and rows."""

from __future__ import annotations

import importlib.metadata
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from synkhronos._api.build import function
from synkhronos._api.calibration import measured
from synkhronos._api.choice import add_variables
from synkhronos._api.step_measurements import (
    BYTES,
    Check,
    Target,
    check_steps,
    measure_function,
    measure_machine,
    measure_overlap,
)
from synkhronos._api.variables import restored
from synkhronos._costs import (
    AUTO,
    MOST_BUSY,
    Cluster,
    Curve,
    PredictionTable,
    Rule,
    Speeds,
    StepPrediction,
    Work,
    Workload,
    contention_on,
    link_of,
    predict_step,
    predict_steps,
    reduction_on,
    rule_named,
    speeds_from,
    speeds_of,
    times_on,
    verdict,
    write_speeds,
)
from synkhronos._session import Session, current
from synkhronos._sharding import WorkReader
from synkhronos._utils.display import html_table, progress, public_names
from synkhronos._utils.interrupts import let_interrupts_pass
from synkhronos._utils.resources import busy
from synkhronos.errors import SessionError
from synkhronos.rules import BSP, Average, Centre, Hierarchical
from synkhronos.rules import Rule as TrainingRule

_N_SIZES = 6  # numbers of rows at which a function is measured
_RANGE = 8  # ratio of the largest and the least of them, at least: it shows what does not depend on rows


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
        is_of_here: bool = True,
    ) -> None:
        self.table, self.checks, self.verdict, self.notes = table, list(checks), verdict, list(notes)
        self._workload, self._cluster = model
        self._rules, self._is_of_here = list(rules), is_of_here

    def seconds(self, *, ranks: int, batch: int, nodes: int = 1) -> float:
        """Return the predicted seconds of a step, by the first training rule, also with numbers that have no line.

        Parameters
        ----------
        ranks, batch, nodes : int
            Number of ranks on each node, of rows of all ranks, and of nodes.

        Returns
        -------
        float
            Seconds.
        """
        return self._step(nodes, ranks, batch).seconds

    def _step(self, nodes: int, ranks: int, batch: int) -> StepPrediction:
        workload, rule = self._rules[0]
        for name, one in (("nodes", nodes), ("ranks", ranks), ("batch", batch)):
            _numbers(name, one, ())
        return predict_step(workload, self._cluster, nodes, ranks, batch, rule)

    def to_csv(self) -> str:
        """Return the predictions as CSV.

        Returns
        -------
        str
            A line of titles, and one for each prediction, with times in seconds.
        """
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
            With two axes.

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
            checks = [one for one in self.checks if one.batch == batch and self._is_of_here]
            found = [(one.ranks, one.alone / one.measured) for one in checks]
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
            return (
                "No size could be checked here: the session has one rank, the first rule makes local steps, or no "
                "batch is between the number of ranks and that of the rows of the inputs."
            )
        errors = [abs(one.error) for one in self.checks]
        size = "size" if len(errors) == 1 else "sizes"
        where = "" if self._is_of_here else " of the machine that was measured"
        return (
            f"Error of the model{where} at {len(errors)} measured {size}: median {statistics.median(errors):.1%}, "
            f"largest {max(errors):.1%}."
        )

    def __str__(self) -> str:
        lines = self._lines_of_checks()
        widths = [max(map(len, column)) for column in zip(*lines)]
        checks = ["  ".join(map(str.rjust, line, widths)) for line in lines] if self.checks else []
        return "\n".join([str(self.table), "", *checks, self._error(), f"Verdict: {self.verdict}.", "", *self.notes])

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
    shuffled: bool = False,
    machine: Any = None,
    machine_out: str | os.PathLike[str] | None = None,
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
        Numbers of ranks on each node. Default: 1 to the number of ranks on this node; 1, 2, 4, … to the cores of
        ``machine``.
    nodes : int or list of int, optional
        Numbers of nodes. Default: 1, or 1 to the number of nodes of the session.
    batch : int or list of int, optional
        Numbers of rows of all ranks in a step. Default: that of the inputs.
    line : str or tuple of float, optional
        Link between nodes: bits per second, such as ``"10Gbit"`` or ``"100Mbit"``; or seconds of a message without
        bytes, and bytes per second. Default: measured, if the session has several nodes.
    rule : Rule or str, or list of these, optional
        Training rules of `synkhronos.rules`, or ``"bsp"``, ``"local"``, ``"delayed"`` and ``"centre"``. The last three
        may have a number of steps between exchanges, as in ``"local:16"``; without one, it is 10. So ``"local"`` is
        not the ``"local"`` of `loop`, which is ``"delayed:auto"`` here. With averages, exact functions and functions
        with collectives make exact steps within nodes, as in `loop`. Default: that of ``f``, or ``"bsp"``.
    slow : list of float, optional
        How many times as long as the others some ranks compute: ``[5]`` for one that takes five times as long.
    params : list of shared variables, optional
        The parameters that training rules average. Default: those of a step of `synkhronos.extensions.train`, or all
        variables of floating-point numbers that ``f`` updates.
    shuffled : bool
        Whether calls pick their rows by an index list as ``batch``: then each rank copies its rows of `Data`. In loops
        of training rules, ranks always do.
    machine : dict or str, optional
        Another machine, for which the times measured here are scaled by the roofline t = max(flops / F, bytes / B): a
        dict, or the path of a file of JSON. Its keys are ``products`` (FLOP/s of matrix products on a rank, by dtype),
        ``memory`` (bytes per second of one rank), ``memory_of_all`` (of all ranks), ``cores`` (their number), and
        optionally ``command`` and ``meeting`` (seconds of a command, and of a wait of all ranks for each other).
        Default: this machine.
    machine_out : str, optional
        Path of a file to which this machine's own numbers are written, in the same form.
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
        For invalid arguments, for a function of which the number of rows cannot be changed, and if ``machine`` is given
        and no operation of the function can be counted.
    OSError
        If ``machine_out`` cannot be written.
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
        raise SessionError("plan measures CPU cores only, and this session computes on GPUs")
    n_local, n_nodes = len(session.replica.on_node), session.n_ranks // len(session.replica.on_node)
    if n_local * n_nodes != session.n_ranks:
        raise ValueError(
            f"the session has {session.n_ranks} ranks, {n_local} of them on this node; expected equally many on each "
            "node"
        )
    link, there = link_of(line), None if machine is None else speeds_from(machine)
    usual = range(1, n_local + 1) if there is None else [2**i for i in range(there.cores.bit_length())] + [there.cores]
    every_ranks = _numbers("ranks", ranks, usual)
    every_nodes = _numbers("nodes", nodes, range(1, n_nodes + 1))
    if max(every_nodes) > 1 and link is None and n_nodes == 1:
        raise ValueError(
            f"nodes is {every_nodes}, and the session has one node, so no link can be measured; expected also line, "
            'such as line="10Gbit"'
        )
    if np.ndim(slow) != 1 or not all(isinstance(one, (int, float, np.number)) and one > 0 for one in slow):
        raise ValueError(f"slow is {slow!r}; expected a list of positive numbers")
    target = Target(session, f, inputs, named, params, is_shuffled=shuffled)
    given = rule if rule is not None else AUTO if target.rule == "local" else target.rule
    kinds = [target.possible(one, rule_of(one)) for one in (given if isinstance(given, (list, tuple)) else [given])]
    if not kinds:
        raise ValueError(f"rule is {given!r}; expected at least one training rule")
    batches = _numbers("batch", batch, [target.n_rows])
    most = math.ceil(max(batches) / (every_ranks[0] * every_nodes[0]))
    most = max([most, *(size for size in batches if size <= target.n_rows)])  # which are checked
    sizes = sizes_between(math.ceil(min(batches) / (every_ranks[-1] * every_nodes[-1])), most)
    if there is not None:
        _check_counted(target, there)
    here = None if there is None and machine_out is None else _speeds_here(session, n_local)
    if machine_out is not None and here is not None:
        write_speeds(here, machine_out)
    every, session.replica_check.every = session.replica_check.every, 0
    try:
        with progress("measuring", 3) as work, target.prepared(), restored(session, target.updated):
            workload = measure_function(session, target, sizes, work)
            workload = replace(workload, picks=target.picks(sizes) if shuffled else None)
            is_loop = target.is_local or any(one.kind != "bsp" for one in kinds)
            in_loop = target.picks(sizes, in_loop=True) if is_loop else None
            workload, overlap = measure_overlap(session, target, workload, sizes, max(every_nodes))
            cluster = measure_machine(session, target, workload, sizes, link if session.is_on_one_node else None)
            work.done += 1
            checks = []
            if not target.is_local and kinds[0].kind == "bsp":
                checks = check_steps(session, target, workload, cluster, batches)
            work.done += 1
    finally:
        session.replica_check.every = every
    if link is not None:
        cluster = replace(cluster, link=link)

    def by_rule(work: Workload) -> list[tuple[Workload, Rule]]:
        by_calls = [one.kind == "bsp" and not target.is_local for one in kinds]
        return [(work if is_call else target.local(work, one, in_loop), one) for is_call, one in zip(by_calls, kinds)]

    measured_here, assumed = (by_rule(workload)[0][0], cluster), list[str]()
    if there is not None and here is not None:
        workload, cluster, assumed = _on_machine(target, workload, cluster, here, there)
        in_loop = in_loop and in_loop.scaled(here.memory / there.memory)
    cluster = replace(cluster, slow=tuple(slow))
    rules = by_rule(workload)
    table = predict_steps(workload, cluster, nodes=every_nodes, ranks=every_ranks, batches=batches, rules=rules)
    first, kind = rules[0]
    averaged, most, rows = target.local(workload, Rule("local", 2), in_loop), max(every_ranks), max(batches)
    sentence = verdict(first, cluster, nodes=every_nodes, ranks=most, batch=rows, rule=kind, averaged=averaged)
    wrong = max((one.error for one in checks), default=0.0)
    if wrong > 1:
        sentence = f"none, because a prediction is wrong by {wrong:+.0%}; measure again while nothing else runs"
    is_given = line is not None
    notes = [f"Function: {target.name}", *_notes(*measured_here, sizes, n_local, n_nodes, is_given=is_given)]
    if overlap and max(every_nodes) > 1 and kind.kind == "bsp":
        notes.append(overlap)
    notes += [*_notes_on_steps(target, kinds), *assumed, *_notes_on_delays(table)]
    if sizes[-1] < max(batches):
        notes.append(f"Assumed: efficiencies, by times of one rank with up to {max(batches)} rows, which are extended")
    if any(1 < one < n_local for one in every_ranks):
        notes.append(f"Assumed: with fewer ranks than {n_local}, exchange within a node is as with {n_local}")
    if max(every_ranks) > n_local:
        what = "exchange within a node and contention are" if there is None else "exchange within a node is"
        notes.append(
            f"Assumed: with more ranks than {n_local}, {what} as with {n_local}, and each rank has as many BLAS threads"
        )
    return Plan(
        table,
        (workload, cluster),
        rules=rules,
        checks=checks,
        verdict=sentence,
        notes=notes,
        is_of_here=there is None,
    )


# -- another machine


def _speeds_here(session: Session, n_local: int) -> Speeds:
    """Return the speeds of this machine, which are measured if the file of costs does not have them."""
    if not session.is_on_one_node:
        raise SessionError(
            "plan: machine and machine_out need a session on one node, because they describe one machine"
        )
    if session.costs is None:
        session.costs = measured(session, importlib.metadata.version("synkhronos"), function)
        session.trim()
    if session.costs.machine is None:
        raise SessionError("plan: this machine cannot be measured; the log says why")
    return speeds_of(session.costs.machine, n_local)


def _check_counted(target: Target, there: Speeds) -> None:
    """Raise `ValueError` if the times of a function cannot be scaled, before they are measured."""
    works = [_work_of(target, part, target.n_rows) for part in target.parts]
    dtypes = {product.dtype for work in works for product in work.products}
    if not dtypes <= {*there.products}:
        raise ValueError(
            f"got a machine with products of {', '.join(there.products)}; expected also {', '.join(sorted(dtypes))}, "
            "which the function computes"
        )
    if not there.seconds(works[0]):
        raise ValueError(
            f"got {target.name}, of which no operation can be counted; expected matrix products, convolutions or "
            f"elementwise operations, by which its times are scaled to another machine{_reason(works[0])}"
        )


def _reason(work: Work) -> str:
    return f" (not counted: {', '.join(work.unknown)})" if work.unknown else ""


def _on_machine(
    target: Target, workload: Workload, cluster: Cluster, here: Speeds, there: Speeds
) -> tuple[Workload, Cluster, list[str]]:
    """Return a measured workload and node as they are assumed to be on another machine, and notes."""
    works = [
        [_work_of(target, part, round(rows)) for rows in times.rows]
        for part, times in zip(target.parts, workload.kernels)
    ]
    first = works[0][len(works[0]) // 2]
    kernels = [times_on(times, some, here, there) for times, some in zip(workload.kernels, works)]
    memory = here.memory / there.memory
    picks = workload.picks and workload.picks.scaled(memory)
    scaled = replace(workload, kernels=tuple(kernels), picks=picks, divided=memory * workload.divided)
    command = there.command / here.command if there.command and here.command else 1.0
    assert isinstance(cluster.within, Curve) and cluster.contention is not None
    copy = cluster.copy and Curve(cluster.copy.sizes, tuple(memory * one for one in cluster.copy.seconds))
    node = replace(
        cluster,
        within=reduction_on(cluster.within, here, there),
        command=command * cluster.command,
        contention=contention_on(cluster.contention, first, here, there),
        copy=copy,
    )
    notes = [
        f"Assumed, not measured: a machine with {there}",
        f"Its times are those of this machine, multiplied by the ratio of both rooflines; this one has {here}",
    ]
    if workload.operands:
        notes.append("Gradients are assumed to exist after the same parts of a step as on this machine")
    unknown = sorted({name for some in works for work in some for name in work.unknown})
    if unknown:
        notes.append(f"Not counted, and assumed to be scaled like the rest: {', '.join(unknown)}")
    return scaled, node, notes


def _work_of(target: Target, part: Any, rows: int) -> Work:
    """Return what one rank computes in a function with a number of rows, from the function's graph."""
    graph = part.function._graph
    compiled = graph.compile(part.function._plain)
    arrays = target.resized(part, rows)
    shapes: list[tuple[int, ...]] = [array.shape for array in arrays]
    values: list[Any] = [None if array.ndim else array for array in arrays]
    if getattr(graph, "takes_rows", False):
        shapes += [()] * 3
        values += [rows, 0, rows]
    add_variables(compiled, graph.sliceable_shareds, rows, shapes, values)
    try:
        return WorkReader(compiled).needs(shapes, values, 1).work
    except Exception as error:  # there are graphs of any kind
        let_interrupts_pass(error)
        return Work(unknown=(f"the graph, because of {error!r}",))


# -- arguments


def sizes_between(least: int, most: int) -> list[int]:
    """Return numbers of rows from the least, or fewer, to the largest, with equal ratios."""
    least = max(1, min(least, most // _RANGE))
    ratio = (most / least) ** (1 / (_N_SIZES - 1))
    return sorted({round(least * ratio**i) for i in range(_N_SIZES)})


def _numbers(name: str, given: Any, default: Sequence[int]) -> list[int]:
    """Return numbers in increasing order, each once."""
    found = list(default) if given is None else [given] if np.ndim(given) == 0 else list(given)
    for one in found:
        if isinstance(one, bool) or not isinstance(one, (int, np.integer)) or one < 1:
            raise ValueError(f"{name} has {one!r}; expected ints of at least 1")
    if not found:
        raise ValueError(f"{name} is empty; expected at least one int")
    return sorted({int(one) for one in found})


def rule_of(given: Any) -> Rule:
    """Return how the model describes a training rule."""
    if given is None or isinstance(given, BSP):
        return Rule()
    if isinstance(given, Average):
        period = given.every
        if isinstance(given, Hierarchical):  # only averages of all ranks use the link
            period = next((one for one, group in given.periods.items() if group == "all"), period)
        return Rule("delayed" if given.delay else "local", period, given.delay or None)
    if isinstance(given, Centre):
        return Rule("centre", given.every, nodes_every=given.nodes_every)
    if isinstance(given, TrainingRule):
        raise ValueError(f"rule is {given!r}; expected BSP, an average or a centre, because gossip has no model")
    return rule_named(given)


def _notes_on_steps(target: Target, kinds: Sequence[Rule]) -> list[str]:
    """Return a line for each way in which ranks make steps between the exchanges of training rules."""
    are_exact, notes = [target.is_exact_by(one) for one in kinds if one.kind != "bsp"], []
    if any(are_exact):
        notes.append("Averages are those of nodes, whose ranks make exact steps together; one node has none")
    if not all(are_exact) and not target.is_local:
        notes.append("Assumed: between the exchanges of a training rule, each rank makes steps alone")
    return notes


def _notes_on_delays(table: PredictionTable) -> list[str]:
    """Return a line for each rule whose delay is chosen, or whose averages ranks wait for with any possible delay."""
    notes = []
    for rule in dict.fromkeys(step.rule for step in table.steps):
        delays = [step.delay_to_hide for step in table.steps if step.rule == rule and step.delay_to_hide]
        if rule.kind == "auto" and delays:
            least, most = min(delays), max(delays)
            delay, every = (f"{n * least}" + f" to {n * most}" * (least < most) + " steps" for n in (1, 2))
            notes.append(f"{rule}: a loop chooses a delay of {delay}, and an average begins after every {every}")
        if rule.kind == "delayed" and rule.delay is None and delays and max(delays) >= rule.every:
            notes.append(
                f"{rule}: averages take up to {max(delays)} steps, and a delay must be less than every, so ranks wait; "
                f"every={max(delays) + 1} hides them"
            )
    return notes


def _notes(
    workload: Workload, cluster: Cluster, sizes: Sequence[int], n_local: int, n_nodes: int, is_given: bool
) -> list[str]:
    """Return lines on what was measured, and what is assumed."""
    assert isinstance(cluster.within, Curve) and cluster.contention is not None
    largest = cluster.within.seconds[-1]
    used = busy()
    lines = [f"Other programs used {used:.0%} of the cores, which makes errors larger"] if used > MOST_BUSY else []
    kernel, divided = workload.kernels[0], f", and {1e3 * workload.divided:.3g} ms for updates that ranks divide"
    picks = workload.picks
    lines += [
        f"Measured: one rank takes {', '.join(f'{1e3 * one:.3g}' for one in kernel.seconds)} ms with "
        f"{', '.join(map(str, sizes))} rows{divided if workload.divided else ''}; "
        f"fitted: {1e3 * kernel.constant:.3g} ms with 0 rows",
        *([f"Measured: {1e3 * picks.seconds[-1]:.3g} ms to copy {sizes[-1]} rows by index"] if picks else []),
        f"Measured: {workload.n_bytes:.0f} bytes in {workload.n_collectives} "
        f"collective{'s' * (workload.n_collectives > 1)}; command {1e3 * cluster.command:.3g} ms",
    ]
    if n_local > 1:
        lines.append(
            f"Measured: {n_local} ranks at once take {cluster.contention.at(n_local):.3f} times as long; an all-reduce "
            f"of {BYTES[-1] >> 20} MiB takes {1e3 * largest:.3g} ms"
        )
    else:
        lines.append("Assumed, because this node has one rank: ranks do not slow each other down, exchange is free")
    if is_given or n_nodes > 1:
        how = "Given" if is_given else "Measured"
        speed = f"{8e-9 * cluster.link.bandwidth:.3g} Gbit/s, {1e6 * cluster.link.latency:.3g} µs for a message"
        others = f"; messages of 8 bytes to 8 MiB differ from this by at most {cluster.link.deviation:.0%}"
        lines.append(f"{how}: a link of {speed}{'' if is_given else others}")
    return lines
