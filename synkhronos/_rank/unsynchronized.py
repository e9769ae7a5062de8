"""Exchanges of a training rule on one rank without waiting for other ranks: a centre, and gossip.

A *centre* is a vector in shared memory, with which each rank exchanges on its own, part by part under locks. In
*gossip*, a rank writes its parameters to a mailbox of another rank. The ranks take their batches from a common counter
of their node, so that a slow rank takes fewer.

Ranks of a node exchange with each other alone. At step numbers that all nodes know, the node leaders exchange with each
other: they average the centres, or send the mean of a part of their weights to all leaders. A leader waits for the
others, while the other ranks of its node go on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic_ns
from typing import Any, Callable

import numpy as np

from synkhronos._rank.commands import Loop
from synkhronos._rank.exchanges import Engine, Parameters, check_shape, span
from synkhronos._utils.interrupts import deferred_interrupts


class _Unsynchronized(Engine):
    """Engine whose ranks take batches from a common counter of their node; each node has a fixed number of them."""

    _due: Sequence[int] = ()  # numbers of batches of this node after which its leader exchanges with other leaders

    def __init__(self, of: Parameters) -> None:
        super().__init__(of)
        assert of.board is not None
        self._board = of.board

    def turns(self, loop: Loop) -> Iterator[int]:
        """Yield the numbers of this rank's batches, and exchange with other nodes between them where that is due."""
        of, first, steps = self._of, loop.first + self._of.first, range(1, loop.n_batches // self._of.n_ranks + 1)
        if of.leads and of.n_nodes > 1:
            self._due = [step * of.n_local for step in steps if (loop.step + step) % of.rule.nodes_every == 0]
        while (number := self._board.take_batch(loop.number, of.check)) < len(steps) * of.n_local:
            yield first + number // of.n_local * of.n_ranks + number % of.n_local
            while self._due and self._board.counters[0] >= self._due[0]:
                self._meet_nodes()

    def after_steps(self) -> None:
        """Make the exchanges with other nodes that are left, because their leaders take part in them."""
        while self._due:
            self._meet_nodes()

    @abstractmethod
    def _meet_nodes(self) -> None:
        """Exchange with the leaders of all nodes, and drop the first entry of what is due."""

    def state(self) -> dict[str, Any]:
        """Return the number of exchanges of all ranks of this node."""
        return {"turns": self._board.counters[1]}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue the number of exchanges."""
        if "turns" in state and self._of.leads:
            self._board.counters[1] = state["turns"]

    def _note(self, kind: str, other: int) -> None:
        """Record an exchange, of which the locks are held."""
        of = self._of
        of.order.append((self._board.count_exchange(of.check_processes), kind, of.n_steps, other))


class Centre(_Unsynchronized):
    """Exchanges with a centre in shared memory. An exchange that has begun is completed.

    On several nodes, the leaders average the centres of all nodes: each adds to its centre the difference between the
    mean and what it has sent. This conserves the sum of all centres, to which ranks may have added meanwhile.
    """

    _met = 0  # number of steps before the last exchange

    def after_step(self) -> None:
        """Exchange with the centre if it is time."""
        if self._of.n_steps % self._of.rule.every == 0:
            self._meet()

    def _lock_parts(self, kind: str, act: Callable[[slice], None]) -> None:
        """Call ``act`` for each part of the centre while its lock is held, and record the exchange."""
        for number, part in enumerate(self._board.parts):
            with self._board.locks.hold(1 + number, self._of.check_processes):
                act(part)
                if not number:
                    self._note(kind, self._of.rank)

    @span("centre")
    def _meet(self) -> None:
        of, centre = self._of, self._board.centre
        began, x = monotonic_ns(), of.pack()

        def meet(part: slice) -> None:
            state = {name: one[part] if isinstance(one, np.ndarray) else one for name, one in of.state.items()}
            own, new = of.rule.meet(x[part], centre[part], state)
            check_shape(own, x[part])
            check_shape(new, x[part])
            x[part], centre[part] = own, new

        self._lock_parts("meet", meet)
        of.unpack(x)
        self._met = of.n_steps
        of.exchanged(began, x.nbytes)

    @span("nodes")
    def _meet_nodes(self) -> None:
        of, centre, began = self._of, self._board.centre, monotonic_ns()
        sent = np.empty_like(centre)

        def copy(part: slice) -> None:
            sent[part] = centre[part]

        def add(part: slice) -> None:
            centre[part] += change[part]

        self._lock_parts("send", copy)
        change = of.average_nodes(sent) - sent
        with deferred_interrupts():
            self._lock_parts("merge", add)
            self._due = self._due[1:]
            of.exchanged(began, sent.nbytes)

    def state(self) -> dict[str, Any]:
        """Return the centre, on the leader, and the step of this rank's last exchange."""
        return {**super().state(), "met": self._met, **({"centre": self._board.centre} if self._of.leads else {})}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the centre, which otherwise has the parameters of the beginning."""
        super().restore(state)
        self._met = int(state.get("met", self._of.n_steps))
        if self._of.leads:
            self._board.centre[:] = state.get("centre", self._of.x)

    def result(self, drop: bool, keep: bool) -> np.ndarray:
        """Exchange with the centre if there were steps since the last exchange; return the mean of all centres."""
        of, mean = self._of, self._board.centre
        if not keep and of.n_steps > self._met:
            self._meet()
        of.transport.barrier()
        if of.n_nodes == 1:
            return mean
        if drop:
            of.renew_reference()
        if of.leads:
            mean = of.average_nodes(mean, keep=keep)
            if not keep:
                self._board.centre[:] = mean
        of.transport.barrier()
        return mean if of.leads else self._board.centre


class Gossip(_Unsynchronized):
    """Exchanges through mailboxes in shared memory.

    On several nodes, all leaders get the same message from all leaders: the mean of what they send, with their mean
    weight. This conserves the sum of the weights, and of the weighted parameters, as messages between two ranks do.
    """

    def __init__(self, of: Parameters) -> None:
        super().__init__(of)
        self._weight = 1.0 / of.n_ranks

    def state(self) -> dict[str, Any]:
        """Return the weight of this rank, and the messages to it that it has not merged."""
        board, own = self._board, self._of.local
        senders = np.flatnonzero(board.is_full[own])
        sent = {"senders": senders, "weights": board.weights[own, senders], "messages": board.messages[own, senders]}
        return {**super().state(), "weight": self._weight, **sent}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the weight, and put the messages back into the mailboxes."""
        super().restore(state)
        if "weight" in state:
            board, own, senders = self._board, self._of.local, state["senders"]
            self._weight = float(state["weight"])
            board.weights[own, senders], board.messages[own, senders] = state["weights"], state["messages"]
            board.is_full[own, senders] = 1

    def before_step(self) -> None:
        """Merge all messages that have come."""
        if self._board.is_full[self._of.local].any():
            self._merge()

    @span("merge")
    def _merge(self) -> None:
        of, board, own = self._of, self._board, self._of.local
        began, x = monotonic_ns(), of.pack()
        with board.locks.hold(1 + own, of.check_processes):
            for sender in np.flatnonzero(board.is_full[own]):
                other, weight = board.messages[own, sender], float(board.weights[own, sender])
                merged, self._weight = of.rule.merge(x, self._weight, other, weight)
                check_shape(merged, x)
                x[:] = merged
                board.is_full[own, sender] = 0
                self._note("merge", of.first + int(sender))
        of.unpack(x)
        of.waited += monotonic_ns() - began

    def after_step(self) -> None:
        """With some probability, send the parameters to another rank of this node, unless its mailbox is full."""
        if self._of.n_local > 1 and self._of.random.random() < self._of.rule.probability:
            self._send()

    @span("send")
    def _send(self) -> None:
        of, board, own = self._of, self._board, self._of.local
        to = int(of.random.integers(of.n_local - 1))
        to += to >= own
        began = monotonic_ns()
        with board.locks.hold(1 + to, of.check_processes):
            if board.is_full[to, own]:
                return
            self._weight, board.weights[to, own] = of.rule.split(self._weight)
            board.messages[to, own] = of.pack()
            board.is_full[to, own] = 1
            self._note("send", of.first + to)
        of.exchanged(began, of.x.nbytes)

    @span("nodes")
    def _meet_nodes(self) -> None:
        of, began = self._of, monotonic_ns()
        with of.named():
            kept, sent = of.rule.split(self._weight)
            x, weight = of.pack(), of.average_weights(sent)
            mean = of.average_nodes(x, sent / weight)
            x, total = of.rule.merge(x, kept, mean, weight)
        with deferred_interrupts():
            of.unpack(x)
            self._weight, self._due = total, self._due[1:]
            self._note("nodes", of.rank)
            of.exchanged(began, x.nbytes)

    def result(self, drop: bool, keep: bool) -> np.ndarray:
        """Merge all messages, and return the mean of the parameters by the ranks' weights."""
        of = self._of
        if drop and of.n_nodes > 1:
            of.renew_reference()
        if not keep:
            self.before_step()
        own = self._board.messages[of.local] if keep else []
        full = self._board.is_full[of.local] if keep else []
        total = np.array([self._weight])
        of.received[:] = self._weight * of.pack()
        for message, weight, is_full in zip(own, self._board.weights[of.local], full):
            if is_full:
                of.received += weight * message
                total += weight
        of.average([of.received, total], "sum", "node")
        of.received /= total.astype(of.received.dtype)
        if of.n_nodes > 1:
            mean = of.average_nodes(of.received, total[0] / of.average_weights(total[0]), keep) if of.leads else 0
            of.received[:] = mean
            of.average([of.received], "sum", "node")  # the leader's
        return of.received
