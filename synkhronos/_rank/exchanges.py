"""Exchanges of a training rule on one rank: averages, a centre, and gossip.

There are three kinds of exchanges (see `synkhronos.rules`). In an *average*, all ranks take part at step numbers that
all know. A *centre* is a vector in shared memory, with which each rank exchanges on its own, part by part under locks.
In *gossip*, a rank writes its parameters to a mailbox of another rank. Ranks that have a centre or mailboxes take
their batches from a common counter, so that a slow rank takes fewer.
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
from synkhronos._collectives import Ticket
from synkhronos._memory import LOCK_BYTES, SharedLocks, aligned
from synkhronos._processes import COLLECTIVES
from synkhronos._rank.commands import Exchange, Loop
from synkhronos._rank.messages import Records
from synkhronos._utils.interrupts import interrupt_behind
from synkhronos.errors import SynkhronosError

if TYPE_CHECKING:
    from synkhronos._rank.loop import Ahead, Loops

_PART = 1 << 16  # elements of a centre that one lock protects


class Board:
    """Memory of a node in which ranks exchange parameters without waiting for each other.

    Parameters
    ----------
    memory : uint8 array
        Shared memory of `n_bytes` bytes.
    engine : str
        ``"centre"`` or ``"gossip"``.
    n_ranks : int
    size : int
        Number of parameters.
    dtype : dtype
        Their dtype.

    Attributes
    ----------
    locks : SharedLocks
        Lock 0 protects the counters. The others protect one part of the centre each, or one rank's mailboxes.
    counters : int64 array of shape (2,)
        Number of batches of the epoch that ranks have taken, and number of exchanges.
    parts : list of slice
        Parts of the centre.
    centre : array of shape (size,)
    is_full : int64 array of shape (n_ranks, n_ranks)
        Whether there is a message for a rank (first axis) from another.
    weights : float64 array of shape (n_ranks, n_ranks)
    messages : array of shape (n_ranks, n_ranks, size)
    """

    def __init__(self, memory: np.ndarray, engine: str, n_ranks: int, size: int, dtype: np.dtype) -> None:
        used = 0

        def take(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            nonlocal used
            start, used = used, used + aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            return memory[start:used][: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

        self.parts = [slice(start, min(start + _PART, size)) for start in range(0, size, _PART)]
        n_locks = 1 + (len(self.parts) if engine == "centre" else n_ranks)
        self.lock_memory = take((n_locks, LOCK_BYTES), np.uint8)
        self.locks = SharedLocks(self.lock_memory)
        self.counters = take((2,), np.int64)
        if engine == "centre":
            self.centre = take((size,), dtype)
        else:
            self.is_full = take((n_ranks, n_ranks), np.int64)
            self.weights = take((n_ranks, n_ranks), np.float64)
            self.messages = take((n_ranks, n_ranks, size), dtype)

    def count(self, which: int, check: Callable[[], None]) -> int:
        """Increment a counter, and return its value before."""
        with self.locks.hold(0, check):
            value = int(self.counters[which])
            self.counters[which] = value + 1
        return value

    def create(self, x: np.ndarray) -> None:
        """Initialize the memory, which is all zero: make the locks, and set the centre to the parameters."""
        SharedLocks.create(self.lock_memory)
        if hasattr(self, "centre"):
            self.centre[:] = x

    @staticmethod
    def n_bytes(engine: str, n_ranks: int, size: int, dtype: np.dtype) -> int:
        """Return the bytes that a board needs."""
        n_parts = -(-size // _PART)
        arrays = [LOCK_BYTES * (1 + (n_parts if engine == "centre" else n_ranks)), 16]
        n_vectors = 1 if engine == "centre" else n_ranks * n_ranks
        arrays += [] if engine == "centre" else [8 * n_vectors] * 2
        return sum(map(aligned, [*arrays, n_vectors * size * np.dtype(dtype).itemsize]))


class Parameters:
    """The parameters of one rank as a flat vector, and what else an engine needs of the rank."""

    def __init__(self, loops: Loops, exchange: Exchange) -> None:
        self._pickled, self.rule = exchange.rule, cloudpickle.loads(exchange.rule)
        self.variables = [loops.variables[key] for key in exchange.variables]
        self.others = [loops.variables[key] for key in exchange.others]
        self.of_others = exchange.of_others
        resets = self.others if self.of_others == "reset" else []
        self.first_others = [to_host(_graph.get_array(var)).copy() for var in resets]
        self.rank, self.n_ranks = loops.rank, loops.n_ranks
        #: Of averages: all ranks, or the nodes, if the parameters are equal on the ranks of each.
        self.n_members = len(loops.group.world.sizes) if exchange.together == "node" else self.n_ranks
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
        self.board: Board | None = None
        if exchange.memory is not None:
            memory = loops.segments.view(exchange.memory)
            self.board = Board(memory, self.rule.engine, self.n_ranks, size, dtype)
        self.pack()
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
            if not isinstance(error, SynkhronosError) and interrupt_behind(error) is None:
                error.args = (f"{type(error).__name__} in the rule {self.rule!r} after step {self.n_steps}: {error}",)
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
        _check_shape(x, self.x)
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


def _span(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


class _Engine:
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

    def state(self) -> dict[str, Any]:
        """Return numbers and arrays with which `restore` continues the exchanges."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue exchanges from a state; an empty one is that of the beginning."""


class _Together(_Engine):
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


class _Averages(_Engine):
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
        _check_shape(values, of.x)
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

    @_span("average")
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


class _Unsynchronized(_Engine):
    """Engine whose ranks take batches from a common counter."""

    def __init__(self, of: Parameters) -> None:
        super().__init__(of)
        assert of.board is not None
        self._board = of.board

    def turns(self, loop: Loop) -> Iterator[int]:
        """Yield the numbers of this rank's batches."""
        board, stop = self._board, loop.first + loop.n_batches
        while (turn := board.count(0, self._of.check)) < stop:
            yield turn

    def state(self) -> dict[str, Any]:
        """Return the number of exchanges of all ranks."""
        return {"turns": self._board.counters[1]}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue the number of exchanges."""
        if "turns" in state and not self._of.rank:
            self._board.counters[1] = state["turns"]

    def _note(self, kind: str, other: int) -> None:
        """Record an exchange, of which the locks are held."""
        of = self._of
        of.order.append((self._board.count(1, of.check_processes), kind, of.n_steps, other))


class _Centre(_Unsynchronized):
    """Exchanges with a centre in shared memory. An exchange that has begun is completed."""

    _met = 0  # number of steps before the last exchange

    def after_step(self) -> None:
        """Exchange with the centre if it is time."""
        if self._of.n_steps % self._of.rule.every == 0:
            self._meet()

    @_span("centre")
    def _meet(self) -> None:
        of, board = self._of, self._board
        began, x = monotonic_ns(), of.pack()
        for number, part in enumerate(board.parts):
            state = {name: one[part] if isinstance(one, np.ndarray) else one for name, one in of.state.items()}
            with board.locks.hold(1 + number, of.check_processes):
                own, centre = of.rule.meet(x[part], board.centre[part], state)
                _check_shape(own, x[part])
                _check_shape(centre, x[part])
                x[part], board.centre[part] = own, centre
                if not number:
                    self._note("meet", of.rank)
        of.unpack(x)
        self._met = of.n_steps
        of.exchanged(began, x.nbytes)

    def state(self) -> dict[str, Any]:
        """Return the centre, on the first rank, and the step of this rank's last exchange."""
        return {**super().state(), "met": self._met, **({} if self._of.rank else {"centre": self._board.centre})}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the centre, which otherwise has the parameters of the beginning."""
        super().restore(state)
        self._met = int(state.get("met", self._of.n_steps))
        if not self._of.rank:
            self._board.centre[:] = state.get("centre", self._of.x)

    def result(self, drop: bool, keep: bool) -> np.ndarray:
        """Exchange with the centre if there were steps since the last exchange, and return the centre."""
        if not keep and self._of.n_steps > self._met:
            self._meet()
        self._of.transport.barrier()
        return self._board.centre


class _Gossip(_Unsynchronized):
    """Exchanges through mailboxes in shared memory."""

    def __init__(self, of: Parameters) -> None:
        super().__init__(of)
        self._weight = 1.0 / of.n_ranks

    def state(self) -> dict[str, Any]:
        """Return the weight of this rank, and the messages to it that it has not merged."""
        board, own = self._board, self._of.rank
        senders = np.flatnonzero(board.is_full[own])
        sent = {"senders": senders, "weights": board.weights[own, senders], "messages": board.messages[own, senders]}
        return {**super().state(), "weight": self._weight, **sent}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the weight, and put the messages back into the mailboxes."""
        super().restore(state)
        if "weight" in state:
            board, own, senders = self._board, self._of.rank, state["senders"]
            self._weight = float(state["weight"])
            board.weights[own, senders], board.messages[own, senders] = state["weights"], state["messages"]
            board.is_full[own, senders] = 1

    def before_step(self) -> None:
        """Merge all messages that have come."""
        if self._board.is_full[self._of.rank].any():
            self._merge()

    @_span("merge")
    def _merge(self) -> None:
        of, board = self._of, self._board
        began, x = monotonic_ns(), of.pack()
        with board.locks.hold(1 + of.rank, of.check_processes):
            for sender in np.flatnonzero(board.is_full[of.rank]):
                other, weight = board.messages[of.rank, sender], float(board.weights[of.rank, sender])
                merged, self._weight = of.rule.merge(x, self._weight, other, weight)
                _check_shape(merged, x)
                x[:] = merged
                board.is_full[of.rank, sender] = 0
                self._note("merge", int(sender))
        of.unpack(x)
        of.waited += monotonic_ns() - began

    def after_step(self) -> None:
        """With some probability, send the parameters to another rank, unless its mailbox is full."""
        if self._of.n_ranks > 1 and self._of.random.random() < self._of.rule.probability:
            self._send()

    @_span("send")
    def _send(self) -> None:
        of, board = self._of, self._board
        to = int(of.random.integers(of.n_ranks - 1))
        to += to >= of.rank
        began = monotonic_ns()
        with board.locks.hold(1 + to, of.check_processes):
            if board.is_full[to, of.rank]:
                return
            self._weight, board.weights[to, of.rank] = of.rule.split(self._weight)
            board.messages[to, of.rank] = of.pack()
            board.is_full[to, of.rank] = 1
            self._note("send", to)
        of.exchanged(began, of.x.nbytes)

    def result(self, drop: bool, keep: bool) -> np.ndarray:
        """Merge all messages, and return the mean of the parameters by the ranks' weights."""
        of = self._of
        if not keep:
            self.before_step()
        own = self._board.messages[of.rank] if keep else []
        full = self._board.is_full[of.rank] if keep else []
        total = np.array([self._weight])
        of.received[:] = self._weight * of.pack()
        for message, weight, is_full in zip(own, self._board.weights[of.rank], full):
            if is_full:
                of.received += weight * message
                total += weight
        of.average([of.received, total], "sum")
        of.received /= total.astype(of.received.dtype)
        return of.received


ENGINES: dict[str, Any] = {"none": _Together, "average": _Averages, "centre": _Centre, "gossip": _Gossip}


def _check_shape(value: Any, x: np.ndarray) -> None:
    if np.shape(value) != x.shape:
        raise ValueError(f"the rule returned an array of shape {np.shape(value)}; expected {x.shape}")
