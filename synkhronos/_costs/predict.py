"""Prediction of training steps on other numbers of nodes, ranks and rows. Pure functions of numbers.

The seconds of one rank by its number of rows are measured; the rest follows from formulas, which docs/cost_model.md
lists with their sources and assumptions. In them, m is the number of bytes that are all-reduced, P the number of
processes, α the latency and β = 1 / bandwidth of a link, t the seconds that a rank computes in a step, t_x those of an
exchange.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from synkhronos._costs.kernels import Operand, RowTimes, Spread, expected_slowest
from synkhronos._costs.model import Curve, Link, Machine, bytes_sent

#: Bytes of an element on the wire, relative to float32, which gradients have.
WIRE_DTYPES = {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5}

AUTO = "delayed:auto"  # the name of a training rule
_EVERY = 10  # steps between two exchanges of a training rule that is named without a number
_HIDDEN = 0.05  # part of a step below which exchange counts as hidden
_WORTHWHILE = 1.05  # speed-up from which another wire dtype is worth a word
_MOST_STEPS = 1024  # between two exchanges that the verdict proposes


def from_first(first: float) -> tuple[Operand, ...]:
    """Return operands that all exist after a part of the computation, while the rest waits for no exchange."""
    return Operand(1.0, (1.0,), (first,)), Operand(0.0, (1.0,), (1.0,))


def overlapped(compute: float, exchange: float, operands: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a step whose exchange begins while gradients are still computed.

    Gradient k exists after r_k t, and its exchange takes x_k. Exchanges follow each other in this order, so the last
    one ends after max over k of (r_k t + Σ_{j ≥ k} x_j). The computation that is left then follows, and so does the
    exchange of arrays that are not among the operands. With all gradients at t_first, and nothing that waits for them,
    this is max(t, t_first + t_x).

    Parameters
    ----------
    compute : float
        t.
    exchange : float
        t_x, of all arrays.
    operands : sequence of tuple of float
        r_k, in increasing order, and x_k / t_x. Empty: exchange begins when all is computed.
    """
    end = later = 0.0
    for until, part in reversed(operands):
        later += part * exchange
        end = max(end, until * compute + later)
    last = operands[-1][0] if operands else 0.0
    return end + (1 - last) * compute + exchange - later


def smallest_delay(compute: float, exchange: float) -> int:
    """Return the smallest W with W t ≥ t_x: for how many steps an average is delayed if no step waits for it."""
    return math.ceil(exchange / compute)


def to_hide(exchange: float, step: float) -> int:
    """Return the delay that a loop with ``rule="local"`` chooses, so that averages are made during its steps.

    That is one step more than the seconds take, because leaders begin to send at their first step after all nodes have
    reached the average.
    """
    return smallest_delay(step, exchange) + 1


def delayed_step(compute: float, exchange: float, every: int, delay: int | None = None) -> float:
    """Return the seconds of a step if an average begins every B steps and is merged W steps later.

    The step takes max(t, t_x / B), because the next average begins when the last one is complete. If W is given, each
    average is waited for if W steps are too short for it: t + max(0, t_x - W t) / B. With W = 0, this
    is t + t_x / B.

    Parameters
    ----------
    compute : float
        t.
    exchange : float
        t_x.
    every : int
        B.
    delay : int, optional
        W.
    """
    if delay is None:
        return max(compute, exchange / every)
    return compute + max(0.0, exchange - min(delay, every) * compute) / every


def centre_saturates(compute: float, exchange: float, every: int, n_ranks: int) -> bool:
    """Return whether p t_x ≥ τ t: more ranks meet at a centre, one by one, than it has time for."""
    return n_ranks * exchange >= every * compute


def centre_step(compute: float, exchange: float, every: int, n_ranks: int) -> float:
    """Return max(t + t_x / τ, p t_x / τ): the seconds of a step if each of p ranks meets a centre every τ steps.

    The centre serves one rank at a time. Chance queues before it saturates are neglected.
    """
    return max(compute + exchange / every, n_ranks * exchange / every)


@dataclass(frozen=True)
class Rule:
    """How ranks combine parameters: a training rule.

    Attributes
    ----------
    kind : str
        ``"bsp"``: gradients are all-reduced in each step. ``"local"``: parameters are averaged after ``every`` steps.
        ``"delayed"``: the same, while further steps are computed. ``"auto"``: the same, with the delay that a loop with
        ``rule="local"`` chooses, and twice as many steps between averages. ``"centre"``: each rank meets the centre of
        its node after ``every`` steps, and the nodes' centres are averaged after ``nodes_every`` steps.
    every : int
        Steps between exchanges; 1 for ``"bsp"``, and not used with ``"auto"``.
    delay : int or None
        Steps after which a delayed average is merged; less than ``every``. By default, as many as are needed so that no
        step waits, but less than ``every``.
    nodes_every : int or None
        With ``"centre"``: steps between two averages of the nodes' centres; by default ``every``.

    Raises
    ------
    ValueError
        If there is no such delay, as for the rules of `synkhronos.rules`.
    """

    kind: Literal["bsp", "local", "delayed", "auto", "centre"] = "bsp"
    every: int = 1
    delay: int | None = None
    nodes_every: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "delayed" and self.every <= (1 if self.delay is None else self.delay):
            raise ValueError(f"rule is {str(self)!r}; expected a delay of at least 1 and less than every")

    def __str__(self) -> str:
        if self.kind == "bsp":
            return self.kind
        if self.kind == "auto":
            return "delayed auto"
        return f"{self.kind} every={self.every}" + (f" delay={self.delay}" if self.delay is not None else "")


def rule_named(name: Any) -> Rule:
    """Return the training rule of a name such as ``"local:16"``, as `synkhronos.plan` takes it."""
    kind, _, every = str(name).partition(":")
    if name in ("bsp", AUTO):
        return Rule("bsp" if name == "bsp" else "auto")
    if kind not in ("local", "delayed", "centre") or not re.fullmatch("([1-9][0-9]*)?", every):
        raise ValueError(f'rule is {name!r}; expected "bsp", "local:10", "delayed:10", "{AUTO}" or "centre:10"')
    return Rule(kind, int(every or _EVERY))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Workload:
    """What a training function computes and exchanges in a step.

    Attributes
    ----------
    kernels : tuple of RowTimes
        Of one rank; their sum is the time of a step.
    n_bytes : float
        Bytes of the arrays that are all-reduced.
    n_collectives : int
        Number of collectives that exchange them.
    operands : tuple of Operand
        Arrays that nodes exchange while others are computed, in the order in which they exist. Empty: exchange does not
        overlap.
    spread : Spread
        Of the seconds of equal steps of one rank.
    divided : float
        Seconds of updates that one rank makes alone, and of which the ranks of a node each make a part.
    picks : RowTimes or None
        Of the copies that a rank makes of its rows, if an index picks them. ``None``: it reads them in place.
    in_nodes : tuple of (float, int), or None
        Bytes and number of the collectives in each step, if the ranks of a node make exact steps together, and a
        training rule averages between nodes; ``n_bytes`` are then those of an average. ``None``: with such a rule, each
        rank makes steps alone.
    on_one_node : Workload or None
        With ``"auto"`` on one node: the step as a call, which such a loop makes of an exact function. ``None``: there
        it is the same as on several nodes.
    row_bytes : float
        Bytes of each row of inputs that the controller copies to shared memory in each step, for the other ranks.
    memory : tuple of float
        Bytes that a rank needs without rows, and for each row.
    is_float32 : bool
        Whether all arrays that are all-reduced are float32, which a wire dtype makes shorter.
    """

    kernels: tuple[RowTimes, ...]
    n_bytes: float
    n_collectives: int = 1
    operands: tuple[Operand, ...] = ()
    spread: Spread = field(default_factory=Spread)
    divided: float = 0.0
    picks: RowTimes | None = None
    in_nodes: tuple[float, int] | None = None
    on_one_node: Workload | None = None
    row_bytes: float = 0.0
    memory: tuple[float, float] = (0.0, 0.0)
    is_float32: bool = True

    def compute(self, rows: float, ranks: int = 1) -> float:
        """Return the seconds that one rank computes, if a node has some number of ranks."""
        kernels = self.kernels if self.picks is None else (*self.kernels, self.picks)
        return sum(kernel.at(rows) for kernel in kernels) + self.divided / ranks

    def bytes_on_wire(self, dtype: str) -> float:
        """Return the bytes of the arrays between nodes: a wire dtype makes float32 arrays alone shorter."""
        return self.n_bytes * (WIRE_DTYPES[dtype] if self.is_float32 else 1.0)

    def exposed(self, compute: float, exchange: float, rows: float) -> float:
        """Return the seconds of an exchange between nodes in which ranks do not compute."""
        of_rows = [(one.at(rows), one.part) for one in self.operands]
        return max(0.0, overlapped(compute, exchange, of_rows) - compute)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes, and the link between them.

    Attributes
    ----------
    link : Link
        Between nodes.
    within : Link or Curve
        Between ranks of a node: a link, or measured seconds of an all-reduce by bytes.
    wire_dtype : str
        Type of gradients on the link between nodes: a key of `WIRE_DTYPES`.
    barrier : float
        Seconds in which the ranks of a node wait for each other, for each collective.
    command : float
        Seconds of the command by which ranks start a step.
    contention : Curve or None
        How many times as long kernels take while several ranks of a node compute, by the number of these. ``None``:
        ranks do not slow each other down.
    slow : tuple of float
        How many times as long some ranks compute, in addition to contention. All others: 1.
    copy : Curve or None
        Seconds of a copy to shared memory, by bytes. ``None``: inputs are not copied.
    """

    link: Link
    within: Link | Curve
    wire_dtype: str = "float32"
    barrier: float = 0.0
    command: float = 0.0
    contention: Curve | None = None
    slow: tuple[float, ...] = ()
    copy: Curve | None = None


def cluster_of(machine: Machine, n_ranks: int, link: Link) -> Cluster:
    """Return nodes like a measured machine.

    Parameters
    ----------
    machine : Machine
    n_ranks : int
        Number of ranks with which it was measured; at least 2.
    link : Link
        Between nodes.

    Returns
    -------
    Cluster
        Contention is that of a pass over the largest measured arrays: the bandwidth of memory.
    """
    slowdown = machine.together.passes.seconds[-1] / machine.alone.passes.seconds[-1]
    contention = Curve((1.0, float(n_ranks)), (1.0, max(1.0, slowdown)))
    return Cluster(link, machine.reduction, "float32", machine.meeting, machine.command, contention, copy=machine.copy)


def input_seconds(workload: Workload, cluster: Cluster, nodes: int, ranks: int, batch: int) -> float:
    """Return the seconds in which the other ranks get their rows of inputs that are not in shared memory.

    The controller copies the rows of all other ranks of its node, and sends those of other nodes.
    """
    n_bytes = workload.row_bytes * batch * (1 - 1 / (nodes * ranks))
    seconds = cluster.copy.at(n_bytes) if cluster.copy and n_bytes else 0.0
    return seconds + workload.row_bytes * batch * (1 - 1 / nodes) / cluster.link.bandwidth


def exchange_seconds(workload: Workload, cluster: Cluster, nodes: int, ranks: int) -> tuple[float, float]:
    """Return the seconds of a hierarchical all-reduce within nodes, and between them.

    The ranks of a node reduce their arrays, one process of each node takes part in the all-reduce between nodes, in the
    wire dtype, and the ranks of a node share the result.
    """
    n_bytes, n_collectives = workload.n_bytes, workload.n_collectives
    if not n_bytes:
        return 0.0, 0.0
    within = between = 0.0
    if ranks > 1:
        each = n_bytes / n_collectives
        once = cluster.within.at(each) if isinstance(cluster.within, Curve) else cluster.within.all_reduce(each, ranks)
        within = n_collectives * (once + cluster.barrier)
    if nodes > 1:
        each = workload.bytes_on_wire(cluster.wire_dtype) / n_collectives
        between = n_collectives * cluster.link.all_reduce(each, nodes)
    return within, between


@dataclass(frozen=True)
class StepPrediction:
    """Predicted step on some nodes.

    Attributes
    ----------
    nodes, ranks : int
        Number of nodes, and of ranks on each.
    batch : int
        Rows of all ranks in one step.
    seconds : float
        Of the step: ``compute + waiting + exposed``.
    compute : float
        Mean of the seconds in which a rank computes.
    undivided : float
        Of these, seconds that do not depend on a rank's number of rows: also the command, and copies of inputs.
    waiting : float
        Seconds in which a rank waits for the slowest one.
    exposed : float
        Seconds of exchange during which ranks do not compute.
    on_link : float
        Of these, seconds of the link between nodes.
    efficiency : float
        Seconds of one rank with the same batch, divided by the number of all ranks and by ``seconds``.
    link_bytes : float
        Bytes that each node sends to others, on average over steps.
    rule : Rule
    memory : float
        Bytes that each rank needs.
    delay_to_hide : int
        For how many steps an average between nodes must be delayed so that no step waits for it; with ``"auto"``, for
        how many it is. 0: there are no such averages.
    """

    nodes: int
    ranks: int
    batch: int
    seconds: float
    compute: float
    undivided: float
    waiting: float
    exposed: float
    on_link: float
    efficiency: float
    link_bytes: float
    rule: Rule = field(default_factory=Rule)
    memory: float = 0.0
    delay_to_hide: int = 0

    @property
    def rows_per_second(self) -> float:
        """Rows of all ranks per second."""
        return self.batch / self.seconds

    @property
    def limit(self) -> str:
        """The part of a step that takes the longest, in words."""
        parts = {
            "compute": self.compute - self.undivided,
            "work that is not divided": self.undivided,
            "waiting for the slowest rank": self.waiting,
            "the exchange within nodes": self.exposed - self.on_link,
            "the link": self.on_link,
        }
        return max(parts, key=parts.__getitem__)


def predict_step(
    workload: Workload, cluster: Cluster, nodes: int, ranks: int, batch: int, rule: Rule | None = None
) -> StepPrediction:
    """Predict a step of a training rule.

    Every rank computes ``batch / (nodes * ranks)`` rows, rounded up. With ``"bsp"``, ranks wait for the slowest in each
    step. Averages of parameters leave them the steps between two averages to catch up, and with ``"centre"`` no rank
    waits for another one. If the ranks of a node make exact steps together, they wait for each other in each step, and
    nodes catch up; on one node, nothing is averaged.
    """
    rule = rule or Rule()
    if rule.kind == "auto" and nodes == 1 and workload.on_one_node is not None:
        return replace(predict_step(workload.on_one_node, cluster, nodes, ranks, batch), rule=rule)
    n_ranks = nodes * ranks
    contention = cluster.contention.at(ranks) if cluster.contention and ranks > 1 else 1.0
    command, is_bsp = 0.0, rule.kind == "bsp"
    if n_ranks > 1 and is_bsp:  # a loop of local steps is one command, and its data is copied once
        command = cluster.command + input_seconds(workload, cluster, nodes, ranks, batch)
    rows = math.ceil(batch / n_ranks)
    n_dividing = ranks if is_bsp else 1  # of updates
    own = contention * workload.compute(rows, n_dividing)
    undivided = contention * workload.compute(0, n_dividing) + command
    factors = (*cluster.slow[:n_ranks], *(1.0,) * (n_ranks - len(cluster.slow)))
    within, between = exchange_seconds(workload, cluster, nodes, ranks)
    needed, period = 0, rule.nodes_every or rule.every  # of exchanges between nodes
    if rule.kind == "centre":
        compute = slowest = n_ranks / sum(1 / (own * factor + command) for factor in factors)
        within = exchange_seconds(workload, cluster, 1, min(ranks, 2))[0]  # a rank and the centre
        exposed = max(centre_step(compute, within, rule.every, ranks), between / period) - compute
        on_link = max(0.0, exposed - (centre_step(compute, within, rule.every, ranks) - compute))
    elif is_bsp:
        compute = own * statistics.fmean(factors) + command
        slowest = max(compute, own * expected_slowest(factors, workload.spread) + command)
        on_link = workload.exposed(slowest - command, between, rows)
        exposed = within + on_link
    else:
        compute, in_step = own * statistics.fmean(factors), 0.0
        if workload.in_nodes is not None:
            exact = replace(workload, n_bytes=workload.in_nodes[0], n_collectives=workload.in_nodes[1])
            in_step, within = exchange_seconds(exact, cluster, 1, ranks)[0], within if nodes > 1 else 0.0
            of_nodes = [factors[first : first + ranks] for first in range(0, n_ranks, ranks)]
            factors = tuple(expected_slowest(one, workload.spread) for one in of_nodes)
        delay = {"local": 0, "delayed": period - 1 if rule.delay is None else rule.delay}.get(rule.kind)
        if delay is None:
            delay = needed = to_hide(within + between, own * max(factors) + in_step)
            period = 2 * delay
        slowest = max(compute, own * expected_slowest(factors, workload.spread.of_sum(period)))
        step = slowest + in_step
        needed = needed or smallest_delay(step, between)
        on_link = delayed_step(step, between, period, delay) - step
        exposed = in_step + within / period + on_link
    seconds = slowest + exposed
    sent = bytes_sent(workload.bytes_on_wire(cluster.wire_dtype), nodes) / period
    efficiency = workload.compute(batch) / (n_ranks * seconds)
    memory = workload.memory[0] + rows * workload.memory[1]
    return StepPrediction(
        nodes=nodes,
        ranks=ranks,
        batch=batch,
        seconds=seconds,
        compute=compute,
        undivided=undivided,
        waiting=slowest - compute,
        exposed=exposed,
        on_link=on_link,
        efficiency=efficiency,
        link_bytes=sent,
        rule=rule,
        memory=memory,
        delay_to_hide=needed if nodes > 1 else 0,
    )


@dataclass(frozen=True)
class PredictionTable:
    """Predicted steps by numbers of nodes, of ranks on each, and of rows.

    Attributes
    ----------
    steps : tuple of StepPrediction
    """

    steps: tuple[StepPrediction, ...]

    def at(self, nodes: int, ranks: int, batch: int, rule: str = "") -> StepPrediction:
        """Return one prediction; raise `KeyError` if the table does not have it. ``""`` is the first rule."""
        for step in self.steps:
            if (step.nodes, step.ranks, step.batch) == (nodes, ranks, batch) and rule in ("", str(step.rule)):
                return step
        raise KeyError(f"got nodes={nodes}, ranks={ranks}, batch={batch}; expected numbers of this table")

    def seconds(self, nodes: int, ranks: int, batch: int) -> float:
        """Return the seconds of a step."""
        return self.at(nodes, ranks, batch).seconds

    def lines(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, with titles. It has a column of rules if there are several, and of memory."""
        has_rules, has_memory = len({step.rule for step in self.steps}) > 1, any(step.memory for step in self.steps)
        lines: list[tuple[str, ...]] = []
        for one in self.steps:
            cells = {"nodes": str(one.nodes), "ranks": str(one.ranks), "batch": str(one.batch)}
            cells |= {"rule": str(one.rule)} if has_rules else {}
            parts = {"step ms": one.seconds, "compute": one.compute, "waiting": one.waiting, "exchange": one.exposed}
            cells |= {title: f"{1e3 * part:.4g}" for title, part in parts.items()}
            cells |= {"efficiency": f"{one.efficiency:.0%}", "sent MB": f"{1e-6 * one.link_bytes:.4g}"}
            cells |= {"memory MB": f"{1e-6 * one.memory:.4g}"} if has_memory else {}
            cells["rows/s"] = f"{one.rows_per_second:.4g}"
            lines += [(*cells.values(),)] if lines else [(*cells,), (*cells.values(),)]
        return lines

    def to_csv(self) -> str:
        """Return the table as CSV: seconds and bytes in full precision, with a line of titles."""
        names = ["nodes", "ranks", "batch", "seconds", "compute", "waiting", "exposed", "on_link", "efficiency"]
        names += ["link_bytes", "memory", "rows_per_second", "limit", "delay_to_hide"]
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("rule", *names))
        writer.writerows((step.rule, *(getattr(step, name) for name in names)) for step in self.steps)
        return file.getvalue()

    def __str__(self) -> str:
        lines = self.lines()
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def predict_steps(
    workload: Workload,
    cluster: Cluster,
    *,
    nodes: Sequence[int],
    ranks: Sequence[int],
    batches: Sequence[int],
    rules: Sequence[tuple[Workload, Rule]] = (),
) -> PredictionTable:
    """Predict steps with all combinations of numbers of nodes, of ranks on each, and of rows of all ranks.

    ``rules`` are training rules, each with what is exchanged by it. Default: ``"bsp"``, with ``workload``.
    """
    return PredictionTable(
        tuple(
            predict_step(one, cluster, n_nodes, n_ranks, batch, rule)
            for one, rule in rules or ((workload, Rule()),)
            for n_nodes in nodes
            for n_ranks in ranks
            for batch in batches
        )
    )


def verdict(
    workload: Workload,
    cluster: Cluster,
    *,
    nodes: Sequence[int],
    ranks: int,
    batch: int,
    rule: Rule | None = None,
    averaged: Workload | None = None,
) -> str:
    """Say in one sentence what limits a step on the largest number of nodes, from which number on, and what helps.

    If the link does, the sentence has the speed-up by bfloat16 on the wire, and the smallest power of 2 of steps
    between averages of parameters with which the link takes at most 5 % of a step; both on the largest number of nodes.
    ``averaged`` is what steps with these averages exchange. Default: ``workload``.
    """
    rule, sizes = rule or Rule(), sorted(nodes)
    steps = [predict_step(workload, cluster, size, ranks, batch, rule) for size in sizes]
    last = steps[-1]
    since = next(i for i in range(len(steps)) if all(step.limit == last.limit for step in steps[i:]))
    where = f"from {sizes[since]} nodes on" if since or sizes[0] > 1 else f"up to {sizes[-1]} nodes"
    where = where if sizes[-1] > 1 else f"of one node with {ranks} ranks"
    parts = [f"{last.limit} is the limit {where}"]
    if last.limit == "the link":
        if cluster.wire_dtype == "float32" and workload.is_float32:
            half = predict_step(workload, replace(cluster, wire_dtype="bfloat16"), sizes[-1], ranks, batch, rule)
            gain = last.seconds / half.seconds
            parts += [f"bfloat16 gives {gain:.1f}×"] if gain >= _WORTHWHILE else []
        every = 2
        while rule.kind == "bsp" and every <= _MOST_STEPS:
            step = predict_step(averaged or workload, cluster, sizes[-1], ranks, batch, Rule("local", every))
            if step.on_link <= _HIDDEN * step.seconds:
                parts.append(f"every={every} hides it")
                break
            every *= 2
    return "; ".join(parts)
