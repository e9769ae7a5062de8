"""Start a session on several nodes, on the controller."""

from __future__ import annotations

import atexit
import functools
from typing import Any, Callable

from synkhronos._graph import Definitions
from synkhronos._multinode.launch import StartLimit, find_comm
from synkhronos._multinode.leader_comm import ORDER, LeaderComm
from synkhronos._multinode.node_leader import lead
from synkhronos._multinode.node_messages import Ask, Leave, Options, Start, Stop
from synkhronos._processes import Deadline, World, kind_of
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rendezvous import RESTART, rendezvous
from synkhronos.errors import DeviceError, NodeLost, SessionError

_STOP_SECONDS = 5.0  # time that a leader may take to stop its ranks


class Nodes:
    """All nodes of the job; the controller is on node 0.

    Parameters
    ----------
    comm : LeaderComm

    Attributes
    ----------
    comm : LeaderComm
    names : list of str
        Device name of each rank.
    devices : list of str
        The same names, each with the node and host of the rank.
    world : World
        Numbering of the ranks.
    definitions : Definitions
        Definitions of the program that the processes of other nodes have. All sessions share them, because leaders
        never return from their first `fork`.
    """

    def __init__(self, comm: LeaderComm) -> None:
        self.comm = comm
        self.definitions = _definitions()
        self.names: list[str] = []
        self.devices: list[str] = []
        self.world: World

    def start(
        self, own: list[str], master_rank: int, asked: tuple[Any, ...], options: Options, limit: StartLimit
    ) -> None:
        """Order all leaders to find their devices, and to start a rank on each.

        Parameters
        ----------
        own : list of str
            Devices of this node.
        master_rank : int
            Rank of the controller.
        asked : tuple
            Arguments of `fork` that select devices.
        options : Options
        limit : StartLimit

        Raises
        ------
        DeviceError
            If the nodes have different versions or different kinds of devices.
        NodeLost
            If another node does not answer in time.
        SessionError
            If a node was lost in an earlier session.
        """
        if self.comm.is_lost:
            raise SessionError(f"a node is lost, or did not answer when the last session was closed; {RESTART}")
        if self.comm.differences:
            raise DeviceError(f"{self.comm.differences}; install the same on all nodes")
        self.comm.set_heartbeat(options.heartbeat)
        number = self.comm.number + 1
        limit.arm("ranks have not started on all nodes")
        self._ask([Ask(number, asked)] * self.comm.n_nodes, limit)
        names = [own, *(self.comm.answers[node].replies for node in self.comm.others)]
        for node, found in enumerate(names):
            if isinstance(found, Exception):
                found.args = (f"node {node} ({self.comm.hosts[node]}): {found}",)
                raise found
        for node, found in enumerate(names):
            if kind_of(found[0]) != kind_of(own[0]):
                raise DeviceError(
                    f"node {node} ({self.comm.hosts[node]}) has {found[0]}, and node 0 "
                    f"({self.comm.hosts[0]}) {own[0]}; expected one kind of device, for which functions are compiled. "
                    "Pass devices=, or use_gpu=False for CPU cores"
                )
        sizes = tuple(map(len, names))
        self._ask([Start(number + 1, found, sizes, master_rank, options) for found in names], limit)
        self.world = World(sizes, 0, master_rank, self.comm, options.wire_dtype)
        self.names = [device for found in names for device in found]
        self.devices = [
            f"node {node} ({self.comm.hosts[node]}): {device}" for node, found in enumerate(names) for device in found
        ]

    def _ask(self, orders: list[Any], limit: StartLimit) -> None:
        """Send each leader its order, and wait until all have answered; raise `NodeLost` at the limit."""
        silent = self._send_orders(orders, limit.remaining())
        if silent:
            self.comm.is_lost = True
            names = " and ".join(f"node {node} ({self.comm.hosts[node]})" for node in silent)
            raise NodeLost(
                f"{names} did not start ranks within start_timeout={limit.seconds:g} seconds; {RESTART}",
                machine=silent[0],
            )

    def _send_orders(self, orders: list[Any], seconds: float | None) -> list[int]:
        """Send each leader its order, and wait for the answers; return the nodes that are silent after ``seconds``."""
        number, deadline = orders[0].number, Deadline(seconds)
        with deferred_interrupts():  # either all leaders receive their orders, or none
            self.comm.begin(number)
            for node in self.comm.others:
                self.comm.send(node, ORDER, orders[node])
        self.comm.wait_outside_calls(lambda: not self.comm.silent() or deadline.is_over())
        return self.comm.silent()

    def stop(self) -> None:
        """Order all leaders to end any ranks that they have started, after the start of the session has failed."""
        if not self.comm.is_lost:
            self._send_orders([Stop(self.comm.number + 1)] * self.comm.n_nodes, _STOP_SECONDS)


@functools.cache
def _definitions() -> Definitions:
    return Definitions(lasting=True)


def find_nodes(find_devices: Callable[..., list[str]], limit: StartLimit) -> Nodes | None:
    """Connect the nodes of this job, and return them; ``None`` if it is a single process.

    On nodes other than the controller's, serve the controller until it ends, then exit; never return.

    Parameters
    ----------
    find_devices : callable
        Takes arguments of `fork`, and returns the device of each rank of this node.
    limit : StartLimit
    """
    comm = find_comm(limit)
    if comm is None or not comm.is_own_process():  # a process that the program has forked is not part of the job
        return None
    if comm.node:
        lead(comm, find_devices)
    atexit.unregister(_leave)
    atexit.register(_leave, comm)
    return Nodes(comm)


def _leave(comm: LeaderComm) -> None:
    """Order all leaders to end; called when the controller exits."""
    if not comm.is_own_process():
        return
    rendezvous.farewell()
    if comm.is_lost:
        comm.abort_job()
    for node in comm.others:
        comm.send(node, ORDER, Leave(comm.number + 1))
    comm.close()
