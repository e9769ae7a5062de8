"""Exchanges of a training rule on one rank: its parameters as a vector, and averages.

In an *average*, all ranks take part, at step numbers that all know. For exchanges with a centre and by gossip, in which
ranks do not wait for each other, see `synkhronos._rank.unsynchronized`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import cloudpickle
import numpy as np

from synkhronos import _graph
from synkhronos._backends import to_host
from synkhronos._collectives import Ticket, average_of_leaders
from synkhronos._memory import Board
from synkhronos._processes import COLLECTIVES
from synkhronos._rank.commands import Exchange, Loop
from synkhronos._rank.messages import Records
from synkhronos._utils.interrupts import interrupt_behind
from synkhronos.errors import SynkhronosError

if TYPE_CHECKING:
    from synkhronos._rank.loop import Ahead, Loops


class Parameters:
    """The parameters of one rank as a flat vector, and what else an engine needs of the rank."""

    def __init__(self, loops: Loops, exchange: Exchange) -> None:
        self._pickled, self.rule = exchange.rule, cloudpickle.loads(exchange.rule)
        self.variables = [loops.variables[key] for key in exchange.variables]
        self.others = [loops.variables[key] for key in exchange.others]
        self.of_others = exchange.of_others
        resets = self.others if self.of_others == "reset" else []
        self.first_others = [to_host(_graph.get_array(var)).copy() for var in resets]
        self.rank, self.n_ranks, self.first = loops.rank, loops.n_ranks, loops.group.world.first
        group = self.group = loops.group
        self.local, self.n_local, self.n_nodes = group.rank, group.n_ranks, len(group.world.sizes)
        self.leads = group.rank == group.master_rank
        #: Of averages: all ranks, or the nodes, if their ranks have equal parameters; of a centre: its ranks.
        self.n_members = self.n_local if self.rule.engine == "centre" else self.n_ranks
        if exchange.together == "node":
            self.n_members = self.n_nodes
        self.transport, self.check, self.check_processes = loops.transport, loops.check, loops.check_processes
        self.begin_wait = loops.group.deadline.begin
        self.timeline, self.status = loops.group.timeline, loops.group.loops[loops.group.rank]
        self.status[1:] = 0
        self.status_loss = self.status[3:].view(np.float64)
        self.random = np.random.default_rng([exchange.seed, self.rank])
        self.n_steps = 0
        self.outputs: list[list[float]] = []
        self.given: tuple[int, Records] | None = None  # the number of the last complete command, and its records
        self.items: Ahead | None = None  # batches of the program
        self.epoch_of_items = 0
        self.n_exchanges, self.n_bytes, self.waited = 0, 0, 0
        self.ages: list[int] = []
        self.order: list[tuple[int, str, int, int]] = []
        size = sum(to_host(_graph.get_array(var)).size for var in self.variables)
        dtype = np.dtype(self.variables[0].dtype)
        self.x, self.received = np.empty(size, dtype), np.empty(size, dtype)
        self.pack()
        self.board: Board | None = None
        if exchange.memory is not None:
            memory = loops.segments.view(exchange.memory)
            self.board = Board(memory, self.rule.engine, self.n_local, size, dtype)
            if self.leads:
                self.board.create(self.x)
        #: Equal on all ranks. If values are rounded on their way between nodes, differences from it are sent.
        self.reference = self.x.copy() if loops.group.world.wire_dtype and dtype == np.float32 else None
        with self.named():
            has_state = self.rule.engine in ("average", "centre")
            self.state = self.rule.begin(self.x.copy(), self.n_members) if has_state else {}

    def use(self, rule: bytes) -> None:
        """Use a pickled rule from now on, if it is another one than before."""
        if rule != self._pickled:
            self._pickled, self.rule = rule, cloudpickle.loads(rule)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Add the rule and the step to the message of an error that a rule raises."""
        try:
            yield
        except Exception as error:
            if isinstance(error, SynkhronosError) or interrupt_behind(error) is not None:
                raise
            message = f"{type(error).__name__} in the rule {self.rule!r} after step {self.n_steps}: {error}"
            if type(error).__str__ not in (BaseException.__str__, KeyError.__str__):  # it may not show its `args`
                raise RuntimeError(message) from error
            error.args = (message,)
            raise

    def split(self, x: np.ndarray) -> list[np.ndarray]:
        """Return views of a flat vector, of the shapes of the parameters."""
        views, place = [], 0
        for var in self.variables:
            shape = _graph.get_array(var).shape
            size = int(np.prod(shape))
            views.append(x[place : place + size].reshape(shape))
            place += size
        return views

    def pack(self) -> np.ndarray:
        """Copy the parameters to the flat vector, and return it."""
        for var, view in zip(self.variables, self.split(self.x)):
            view[...] = to_host(_graph.get_array(var))
        return self.x

    def unpack(self, x: np.ndarray) -> None:
        """Set the parameters to the values in a flat vector."""
        check_shape(x, self.x)
        for var, view in zip(self.variables, self.split(x)):
            _graph.copy_array(var, view)

    def take_records(self) -> Records:
        """Return the records since this was last called."""
        records = Records(self.outputs, self.n_exchanges, self.ages, self.waited / 1e9, self.n_bytes, self.order)
        self.outputs, self.ages, self.order = [], [], []
        self.n_exchanges = self.n_bytes = self.waited = 0
        return records

    def exchanged(self, began: int, n_bytes: int) -> None:
        """Record an exchange."""
        self.n_exchanges += 1
        self.status[2] += 1
        self.n_bytes += n_bytes
        self.waited += monotonic_ns() - began

    def average(self, arrays: list[np.ndarray], op: str = "avg", group: str = "all") -> None:
        """Average arrays over all ranks, or the ranks of this node, in place."""
        self.begin_wait()
        transport = self.transport.on_node if group == "node" else self.transport
        transport.all_reduce(arrays, op, None)

    def average_parameters(self, x: np.ndarray, group: str = "all", keep: bool = False) -> np.ndarray:
        """Return the average of parameters over all ranks, or the ranks of this node, in a buffer that is reused.

        With ``keep``, the next averages are as if this one had not been made.
        """
        received, reference = self.received, self.reference
        if reference is None or group == "node":
            received[:] = x
            self.average([received], group=group)
            return received
        np.subtract(x, reference, out=received)
        self.average([received])
        received += reference
        if not keep:
            reference[:] = received
        return received

    def start_average(self, message: Message) -> Message:
        """Begin to average a message over several nodes, while they make steps; on one node, do nothing."""
        background, reference = self.transport.early, self.reference
        if background is None or message.group == "node":
            return message
        self.begin_wait()
        if reference is None:
            return message._replace(ticket=background.start(message.values))
        return message._replace(ticket=background.start(message.values - reference), reference=reference.copy())

    def finish_average(self, message: Message) -> np.ndarray:
        """Return the average of a message over its group, in a buffer that is reused."""
        if message.ticket is None:
            return self.average_parameters(message.values, group=message.group)
        self.begin_wait()
        received = message.ticket.wait()
        if self.reference is not None:
            received += message.reference
            self.reference[:] = received
        return received

    def average_nodes(self, values: np.ndarray, share: float = 1.0, keep: bool = False) -> np.ndarray:
        """Return the mean of a vector over the node leaders; each calls this, while its other ranks go on.

        A leader's vector counts ``share`` times; the mean of all shares is 1. With ``keep``, the next averages are as
        if this one had not been made.
        """
        self.begin_wait()
        if self.reference is None:
            return average_of_leaders(self.group, float(share) * values)
        mean = average_of_leaders(self.group, float(share) * (values - self.reference)) + self.reference
        if not keep:
            self.reference[:] = mean
        return mean

    def average_weights(self, weight: float) -> float:
        """Return the mean of a number over the node leaders."""
        self.begin_wait()
        return float(average_of_leaders(self.group, np.array([weight]))[0])

    def renew_reference(self) -> None:
        """Make the reference equal on all ranks again, after an interrupt of an average."""
        if self.reference is not None:
            self.received[:] = self.pack()
            self.average([self.received])  # rounded, but equal on all ranks
            self.reference[:] = self.received

    def treat_others(self, group: str = "all") -> None:
        """Average or reset the variables that the function updates in addition to the parameters."""
        if self.of_others == "average" and self.others:
            self.average_others(group)
        elif self.of_others == "reset":
            for var, value in zip(self.others, self.first_others):
                _graph.copy_array(var, value)

    def average_others(self, group: str = "all") -> None:
        """Average the variables that the function updates in addition to the parameters."""
        arrays = [np.array(to_host(_graph.get_array(var)), order="C") for var in self.others]
        self.kept = arrays  # other ranks may still write to them after an interrupt
        self.average(arrays, group=group)
        for var, array in zip(self.others, arrays):
            _graph.copy_array(var, array)


def span(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of an engine's exchange, which shows it in traces."""

    def decorated(exchange: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(exchange)
        def shown(engine: Any, *arguments: Any) -> None:
            timeline = engine._of.timeline
            with timeline.call(name):
                timeline.switch(COLLECTIVES)
                exchange(engine, *arguments)

        return shown

    return decorated


class Engine:
    """Exchanges of one rank."""

    waits = False  # for other ranks, in a step

    def __init__(self, of: Parameters) -> None:
        self._of = of

    def turns(self, loop: Loop) -> Iterator[int]:
        """Yield the numbers of this rank's batches."""
        yield from range(loop.first + self._of.rank, loop.first + loop.n_batches, self._of.n_ranks)

    def before_step(self) -> None:
        """Do nothing, unless there is something to merge before a step."""

    def after_step(self) -> None:
        """Do nothing, unless there is something to exchange after a step."""

    def after_steps(self) -> None:
        """Do nothing, unless there is something to exchange after the steps of a command."""

    def state(self) -> dict[str, Any]:
        """Return numbers and arrays with which `restore` continues the exchanges."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue exchanges from a state; an empty one is that of the beginning."""


class Together(Engine):
    """No exchanges between steps, because the steps have collectives."""

    waits = True

    def result(self, drop: bool, keep: bool) -> np.ndarray:
        """Return the parameters, which are equal on all ranks."""
        return self._of.pack()


class Message(NamedTuple):
    """What a rank has sent, and not yet merged.

    Attributes
    ----------
    step, due : int
        The step after which it was sent, and the step after which it is merged.
    group : str
        See `Average.exchanges_at`.
    values : array of shape (n,)
    ticket : Ticket or None
        The average of the values, or of their differences from ``reference``, if it was begun.
    reference : array of shape (n,), or None
    """

    step: int
    due: int
    group: str
    values: np.ndarray
    ticket: Ticket | None = None
    reference: np.ndarray | None = None


class Averages(Engine):
    """Averages over all ranks or those of a node, at step numbers that all ranks know.

    With a delay, averages between nodes are made while the ranks make steps. They are complete at the end of each
    command, so that nothing is on its way while the program of the controller runs. What is sent after the last step of
    a command is on its way in the next one.
    """

    waits = True
    _sent: Message | None = None
    _is_last = False  # whether this is the last step of a command

    def turns(self, loop: Loop) -> Iterator[int]:
        """Yield the numbers of this rank's batches, and then complete what was sent to other nodes."""
        of = self._of
        if self._sent is not None and self._sent.ticket is None:
            self._sent = of.start_average(self._sent)
        turns = range(loop.first + of.rank, loop.first + loop.n_batches, of.n_ranks)
        for turn in turns:
            self._is_last = turn == turns[-1]
            yield turn
        if self._sent is not None and self._sent.ticket is not None:
            began = monotonic_ns()
            of.begin_wait()
            self._sent.ticket.complete()
            of.waited += monotonic_ns() - began

    def before_step(self) -> None:
        """Continue to send what is on its way to other nodes."""
        if self._sent is not None and self._sent.ticket is not None:
            self._sent.ticket.advance()

    def after_step(self) -> None:
        """Merge what was sent, and send the parameters, if it is time for either."""
        of, step = self._of, self._of.n_steps
        group = of.rule.exchanges_at(step)
        if self._sent is not None and (group is not None or step >= self._sent.due):
            self._merge(self._sent)
        if group is None:
            return
        began = monotonic_ns()
        values = np.array(of.rule.before(of.pack(), of.state))  # may be the buffer itself
        check_shape(values, of.x)
        self._sent = Message(step, step + of.rule.delay_at(step), group, values)
        if step < self._sent.due and not self._is_last:
            self._sent = of.start_average(self._sent)
        of.exchanged(began, values.nbytes)
        if step >= self._sent.due:
            self._merge(self._sent)

    def state(self) -> dict[str, Any]:
        """Return the message that was sent and not yet merged."""
        sent = self._sent
        return {} if sent is None else {"sent": sent.values, "steps": [sent.step, sent.due], "group": sent.group}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Send the message again."""
        if "sent" in state:
            step, due = state["steps"].tolist()
            self._sent = Message(step, due, str(state["group"]), state["sent"])

    @span("average")
    def _merge(self, message: Message) -> None:
        of, began = self._of, monotonic_ns()
        age = of.n_steps - message.step
        received = of.finish_average(message)
        of.unpack(of.rule.after(of.pack().copy(), message.values, received.copy(), age, of.state))
        of.treat_others(message.group)
        self._sent = None
        of.ages.append(age)
        of.waited += monotonic_ns() - began

    def result(self, drop: bool, keep: bool) -> np.ndarray:
        """Merge what was sent, and return the mean of the parameters."""
        of = self._of
        if drop:
            self._sent = None
            of.renew_reference()
        elif self._sent is not None and not keep:
            self._merge(self._sent)
        return of.average_parameters(of.pack(), keep=keep)


def check_shape(value: Any, x: np.ndarray) -> None:
    if np.shape(value) != x.shape:
        raise ValueError(f"the rule returned an array of shape {np.shape(value)}; expected {x.shape}")
