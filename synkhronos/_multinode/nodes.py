"""Start of a session on several nodes, on the controller."""

from __future__ import annotations

import atexit
import functools
from typing import Any, Callable

from synkhronos._graph import Definitions
from synkhronos._multinode.launch import StartLimit, find_line
from synkhronos._multinode.leader_comm import ORDER, LeaderComm
from synkhronos._multinode.node_leader import lead
from synkhronos._multinode.node_messages import Ask, Leave, Start, Stop
from synkhronos._processes import Deadline, World, kind_of
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rendezvous import RESTART, rendezvous
from synkhronos.errors import DeviceError, NodeLost, SessionError

__all__ = ["Nodes", "find_machines"]

_STOP_SECONDS = 5.0  # that a leader may take to stop its ranks


class Nodes:
    """All nodes; the controller's is number 0.

    Parameters
    ----------
    line : Line

    Attributes
    ----------
    line : Line
    names : list of str
        Names of all ranks' devices.
    devices : list of str
        The same, with the names of their nodes.
    world : World
    definitions : Definitions
        Definitions of the program that the processes of other nodes have. Shared by all sessions, because leaders stay
        in their first `fork`.
    """

    def __init__(self, line: LeaderComm) -> None:
        self.line = line
        self.definitions = _definitions()
        self.names: list[str] = []
        self.devices: list[str] = []
        self.world: World

    def start(self, own: list[str], master_rank: int, asked: tuple[Any, ...], options: Any, limit: StartLimit) -> None:
        """Have all leaders find their devices, and start a rank on each.

        Parameters
        ----------
        own : list of str
            Devices of this node.
        master_rank : int
        asked : tuple
            The arguments of `fork` that select devices.
        options : Options
        limit : StartLimit

        Raises
        ------
        DeviceError
            If the nodes differ in versions or in the kind of devices.
        NodeLost
            If another node does not answer in time.
        SessionError
            If a node was lost in an earlier session.
        """
        if self.line.is_lost:
            raise SessionError(f"a node does not answer, or did not when the last session was stopped; {RESTART}")
        if self.line.differences:
            raise DeviceError(f"{self.line.differences}: sessions on several machines need the same on all of them")
        self.line.set_heartbeat(options.heartbeat)
        number = self.line.number + 1
        limit.arm("ranks have not started on all nodes")
        self._ask([Ask(number, asked)] * self.line.n_machines, limit)
        names = [own, *(self.line.answers[machine].replies for machine in self.line.others)]
        for machine, found in enumerate(names):
            if isinstance(found, Exception):
                found.args = (f"machine {machine} ({self.line.hosts[machine]}): {found}",)
                raise found
        for machine, found in enumerate(names):
            if kind_of(found[0]) != kind_of(own[0]):
                raise DeviceError(
                    f"machine {machine} ({self.line.hosts[machine]}) has {found[0]}, and machine 0 "
                    f"({self.line.hosts[0]}) {own[0]}: a function is compiled for one kind of device. Pass devices=, "
                    "or use_gpu=False for CPU cores"
                )
        sizes = tuple(map(len, names))
        start = [
            Start(
                number + 1,
                found,
                sizes,
                master_rank,
                options.profile_workers,
                options.timeout,
                options.wire_dtype,
                options.restart_workers,
                options.seed,
                options.heartbeat,
            )
            for found in names
        ]
        self._ask(start, limit)
        self.world = World(sizes, 0, master_rank, self.line, options.wire_dtype)
        self.names = [device for found in names for device in found]
        self.devices = [
            f"machine {machine} ({self.line.hosts[machine]}): {device}"
            for machine, found in enumerate(names)
            for device in found
        ]

    def _ask(self, orders: list[Any], limit: StartLimit) -> None:
        """Send each leader its order, and wait until all have answered."""
        silent = self._tell(orders, limit.remaining())
        if silent:
            self.line.is_lost = True
            names = " and ".join(f"node {machine} ({self.line.hosts[machine]})" for machine in silent)
            raise NodeLost(
                f"{names} did not start ranks within start_timeout={limit.seconds:g} seconds; {RESTART}",
                machine=silent[0],
            )

    def _tell(self, orders: list[Any], seconds: float | None) -> list[int]:
        """Send each leader its order, wait at most ``seconds`` for the answers, and return the nodes without one."""
        number, patience = orders[0].number, Deadline(seconds)
        with deferred_interrupts():  # all of them receive it, or none
            self.line.begin(number)
            for machine in self.line.others:
                self.line.send(machine, ORDER, orders[machine])
        answers = self.line.answers

        def silent() -> list[int]:
            return [one for one in self.line.others if one not in answers or answers[one].number != number]

        self.line.wait_outside_calls(lambda: not silent() or patience.is_over())
        return silent()

    def stop(self) -> None:
        """Have all leaders end the ranks that they may have, because the start of the session failed."""
        if not self.line.is_lost:
            self._tell([Stop(self.line.number + 1)] * self.line.n_machines, _STOP_SECONDS)


@functools.cache
def _definitions() -> Definitions:
    return Definitions(lasting=True)


def find_machines(find_devices: Callable[..., list[str]], limit: StartLimit) -> Nodes | None:
    """Return the nodes of this job, or ``None`` if it is a single process. On the leaders of other nodes, never return.

    Parameters
    ----------
    find_devices : callable
        Takes arguments of `fork`, and returns the device of each rank of this node.
    limit : StartLimit
    """
    line = find_line(limit)
    if line is None or not line.is_own_process():  # a process that the program forked runs alone
        return None
    if line.machine:
        lead(line, find_devices)
    atexit.unregister(_leave)
    atexit.register(_leave, line)
    return Nodes(line)


def _leave(line: LeaderComm) -> None:
    """Order all leaders to leave; called when the controller exits."""
    if not line.is_own_process():
        return
    rendezvous.farewell()
    if line.is_lost:
        line.break_off()
    for machine in line.others:
        line.send(machine, ORDER, Leave(line.number + 1))
    line.close()
