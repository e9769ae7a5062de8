"""Heartbeats between nodes, to detect frozen or unreachable nodes in seconds; TCP would take minutes.

Two small processes run next to each node leader; they are forked before the ranks. The *heartbeat process* exchanges
UDP datagrams with the heartbeat processes of the other nodes. It prints a warning about a silent node, and writes the
number of a lost node to shared memory. The *guardian* is its parent, and restarts it if it is killed. If the guardian
is killed, the heartbeat process becomes the guardian of a new heartbeat process. Both share no lock with the leader, so
that the leader cannot delay them.

`FailureDetector` decides from received and missing heartbeats which nodes are silent or lost. Up to 16 nodes send
heartbeats to all others. In larger jobs, each sends them to node 0 and to few others (`peers`), and node 0 to all, so
that their number does not grow with the square of the number of nodes.

Invariants
----------
* A node is watched from its first heartbeat on, because a firewall may drop its datagrams. A node that has left is not
  watched any more.
* Time counts only while the heartbeat process runs. After a process was frozen, or a node was suspended, it therefore
  does not report that the others were silent in the meantime.
* A node is cut off if it hears none of the nodes that it watches, and either watches at least two or cannot send. It
  then reports itself, and no other node.
* Both processes are killed when their leader ends (`end_with`). If a node has lost node 0, its heartbeat process ends
  the leader, and the ranks end with the leader.
* Neither process is a child of the leader. A program that waits for its children, or kills them, does not affect them.
* Only the leader and these two processes hold the socket. If the kernel of a node refuses a datagram, all three have
  ended.
* Datagrams without the receiver's token are ignored. Datagrams that cannot be sent or received at once are skipped.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import enum
import errno
import logging
import math
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from synkhronos._memory import Descriptor, OwnedSocket
from synkhronos._processes import end_with, start_detached
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos.errors import SessionError

#: Seconds of silence after which a warning is printed.
WARNING_SECONDS = 2.0
#: Value of `Message.silent` that names no node.
NOBODY = 0xFFFF

_MOST_COMPLETE = 16  # nodes that all exchange heartbeats with each other
_MOST_SECONDS = 0.5  # longer intervals between two readings of the clock count as this: the process was frozen
_RECENT_SECONDS = 1.0  # a node that has heard another one within this time is not cut off
_REFUSED_SECONDS = 0.5  # silence that must precede a refused datagram; otherwise a firewall has refused it


def peers(node: int, n_nodes: int) -> list[int]:
    """Return the nodes with which a node exchanges heartbeats.

    In large jobs, these are node 0, the nodes with the next lower and the next higher number, and those at a distance
    of about the square root of the number of nodes, in a circle.
    """
    if n_nodes <= _MOST_COMPLETE or not node:
        return [one for one in range(n_nodes) if one != node]
    circle = [node + sign * step for step in (1, math.isqrt(n_nodes)) for sign in (-1, 1)]
    return sorted({0, *(one % n_nodes for one in circle)})


class State(enum.IntEnum):
    """State of a node, as this node knows it."""

    UNKNOWN = 0
    HEARD = 1
    LEFT = 2


class Reason(enum.IntEnum):
    """Reason why a node is lost."""

    SILENT = 0
    ENDED = 1  # all of its processes that hold its socket have ended
    CUT_OFF = 2  # the node that reports this is itself cut off


class Loss(NamedTuple):
    """Loss of a node.

    Attributes
    ----------
    node : int
        Number of the lost node.
    reason : Reason
    observer : int
        Number of the node that has detected the loss.
    """

    node: int
    reason: Reason
    observer: int


class Message(NamedTuple):
    """Heartbeat.

    Attributes
    ----------
    sender : int
        Number of the node that sends it.
    leaves : bool
        Whether this is the sender's last heartbeat, because its program ends.
    silent : int
        Node that the sender has not heard from for the longest time, if that time is long enough for a warning;
        otherwise `NOBODY`.
    is_lost : bool
        Whether the node ``silent`` has been silent for so long that it counts as lost.
    steps : int
        Number of steps that the ranks of the sender have made in their training loop.
    """

    sender: int
    leaves: bool = False
    silent: int = NOBODY
    is_lost: bool = False
    steps: int = 0


class FailureDetector:
    """Failure detector of one node: decide from heartbeats which other nodes are silent or lost.

    Parameters
    ----------
    own : int
        Number of this node.
    states : memoryview of bytes
        `State` of each node, in shared memory that outlives this process. A new process keeps these states, and starts
        to count seconds of silence at 0.
    """

    def __init__(self, own: int, states: memoryview) -> None:
        self._own, self._states = own, states
        self._seconds = {node: 0.0 for node, state in enumerate(states) if state == State.HEARD}
        self._ended: set[int] = set()
        self._reports: dict[int, Message] = {}  # last heartbeat of each sender, if it names a silent node
        self._warned: set[int] = set()
        self._can_send = True

    def advance(self, seconds: float) -> None:
        """Add the seconds since the last reading of the clock to the silence of each watched node."""
        for node in self._seconds:
            self._seconds[node] += min(seconds, _MOST_SECONDS)

    def receive(self, messages: Iterable[Message]) -> None:
        """Process received heartbeats."""
        for message in messages:
            sender = message.sender
            if sender >= len(self._states):
                continue
            if message.leaves:
                self._states[sender] = State.LEFT
                self._seconds.pop(sender, None)
            elif self._states[sender] != State.LEFT:
                self._states[sender] = State.HEARD
                self._seconds[sender] = 0.0
                self._ended.discard(sender)
            self._reports.pop(sender, None)
            if not message.leaves and message.silent < len(self._states):
                self._reports[sender] = message

    def sent(self, refused: Iterable[int], can_send: bool) -> None:
        """Record the result of sending heartbeats.

        Parameters
        ----------
        refused : iterable of int
            Nodes that have refused a datagram, because no process holds their socket.
        can_send : bool
            Whether the network is reachable.
        """
        self._ended.update(refused)
        self._can_send = can_send

    def report(self, limit: float) -> Message:
        """Return the next heartbeat to send; silence of more than ``limit`` seconds is reported as a loss."""
        silent = max(self._quiet(), key=self._seconds.__getitem__, default=NOBODY)
        if silent == NOBODY or self._is_cut_off():
            return Message(self._own)
        return Message(self._own, silent=silent, is_lost=self._seconds[silent] > limit)

    def warnings(self) -> dict[int, int]:
        """Return the nodes that have become silent since the last call, each with the node that has detected it.

        Among the nodes that hear each other, only the one with the lowest number warns, so that users see one warning.
        """
        observers: Mapping[int, int] = {}
        quiet = self._quiet()
        if self._is_cut_off():
            observers = {} if self._own else {self._own: self._own}
        elif all(node in quiet for node in self._seconds if node < self._own):
            reports = {one.silent: sender for sender, one in self._reports.items() if one.silent in self._seconds}
            observers = {**reports, **dict.fromkeys(quiet, self._own)}
        new = {node: observer for node, observer in observers.items() if node not in self._warned}
        self._warned = set(observers)
        return new

    def losses(self, limit: float) -> dict[int, Loss]:
        """Return the lost nodes, by number. Node 0 includes the nodes that other nodes report as lost.

        Parameters
        ----------
        limit : float
            Seconds of silence after which a node is lost.
        """
        if any(seconds > limit for seconds in self._seconds.values()) and self._is_cut_off():
            return {node: Loss(self._own, Reason.CUT_OFF, self._own) for node in (0, self._own)}
        found = {}
        if not self._own:
            for sender, report in self._reports.items():
                if report.is_lost and self._states[report.silent] != State.LEFT:
                    found[report.silent] = Loss(report.silent, Reason.SILENT, sender)
        for node, seconds in self._seconds.items():
            if node in self._ended and seconds > _REFUSED_SECONDS:
                found[node] = Loss(node, Reason.ENDED, self._own)
            elif seconds > limit:
                found[node] = Loss(node, Reason.SILENT, self._own)
        return found

    def _quiet(self) -> list[int]:
        """Return the watched nodes that have been silent long enough for a warning."""
        return [node for node, seconds in self._seconds.items() if seconds > WARNING_SECONDS]

    def _is_cut_off(self) -> bool:
        """Return whether the link of this node is down, as opposed to single other nodes that are silent."""
        is_alone = len(self._seconds) > 1 or not self._can_send
        return is_alone and bool(self._quiet()) and min(self._seconds.values()) > _RECENT_SECONDS


#: Signal that ends a leader with exit code 0, so that the job's exit code is that of the script instead of 9.
LEAVE = signal.SIGRTMAX - 1
_LEAVE_SECONDS = 1.0  # time after `LEAVE` until the leader is killed, in case it is stopped

#: Default number of seconds of silence after which a node is lost; `fork(heartbeat=)` changes it.
DEFAULT_LIMIT = 10.0

_BETWEEN_SECONDS = 0.25  # time between two heartbeats
_TOKEN_BYTES = 16
_FORM = struct.Struct(f"<{_TOKEN_BYTES}sH?H?Q")  # the receiver's token, and the fields of a `Message`
_GOODBYES = 3  # number of last heartbeats, because some of them may be lost
_MOST_STARTS = 20  # limit on the number of heartbeat processes that are started for one node of a job

_STDERR = 2
_IP_RECVERR = 11  # from Linux's <linux/in.h>; Python has no name for it
_ERROR = struct.Struct("=IB")  # first fields of Linux's `struct sock_extended_err`: error number and origin
_BY_ICMP = 2  # SO_EE_ORIGIN_ICMP

_logger = logging.getLogger("synkhronos")


class Endpoint(NamedTuple):
    """UDP port of a node, and the token that the node expects in datagrams."""

    port: int
    token: bytes


class _Shared(ctypes.Structure):
    """Memory that a leader shares with its heartbeat process and guardian.

    The number of steps of each node follows it, then when that has last changed, by `time.monotonic`, then its `State`.
    """

    _fields_ = (
        ("limit", ctypes.c_double),
        ("is_leaving", ctypes.c_bool),
        ("is_over", ctypes.c_bool),
        ("n_starts", ctypes.c_int),
        ("is_lost", ctypes.c_bool),  # whether `loss` is set
        ("loss", ctypes.c_int * 3),  # the fields of a `Loss`
        ("steps", ctypes.c_uint64),  # `Message.steps` of this node
    )


class Heartbeat:
    """Heartbeat of one node. Its socket is bound when the object is created; `start` starts the two processes.

    Parameters
    ----------
    node : int
        Number of this node.

    Attributes
    ----------
    door : Endpoint
        Address at which this node receives heartbeats.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listening.bind(("", 0))
        with contextlib.suppress(OSError):  # without this option, a node whose processes ended only becomes silent
            listening.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        self.door = Endpoint(listening.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        self._socket = OwnedSocket(listening)
        self._names: list[str] = []
        self._others: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._shared: _Shared
        self._states: memoryview
        self._steps: Any  # memoryviews of other types than bytes
        self._moved: Any
        self._alive: Descriptor | None = None  # read end of a pipe; only the two processes hold the write end
        self._tie: Descriptor | None = None  # the two processes are killed when it is closed; see `start_detached`
        self._is_starting = False
        self._unprinted: list[bytes] = []

    def start(self, hosts: Sequence[str], doors: Sequence[Endpoint]) -> None:
        """Start the two processes, and so begin to watch other nodes.

        Parameters
        ----------
        hosts : sequence of str
            Host name of each node.
        doors : sequence of Endpoint
            Address of each node.
        """
        self._names = [f"node {node} ({host})" for node, host in enumerate(hosts)]
        for node in peers(self._node, len(hosts)):
            with contextlib.suppress(OSError):  # a host whose name cannot be resolved is not watched
                self._others[socket.gethostbyname(hosts[node]), doors[node].port] = node, doors[node].token
        n_nodes, head = len(doors), ctypes.sizeof(_Shared)
        memory = mmap.mmap(-1, head + 17 * n_nodes)
        self._shared, view = _Shared.from_buffer(memory), memoryview(memory)[head : head + 17 * n_nodes]
        self._steps, self._moved = view[: 8 * n_nodes].cast("Q"), view[8 * n_nodes : 16 * n_nodes].cast("d")
        self._states = view[16 * n_nodes :]
        self._moved[:] = memoryview(array.array("d", [-math.inf] * n_nodes))
        self._shared.limit = DEFAULT_LIMIT
        os.register_at_fork(after_in_child=self._let_go)
        self._launch()

    def set_limit(self, seconds: float) -> None:
        """Set the seconds of silence after which a node is lost."""
        if not self._shared.is_lost:  # the message about a loss names the limit that was in force then
            self._shared.limit = seconds

    def note_steps(self, steps: int) -> None:
        """Set the number of steps that the ranks of this node have made in their training loop."""
        self._shared.steps = steps

    def moved(self, node: int) -> float:
        """Return when another node has last reported another number of steps, by `time.monotonic`."""
        return float(self._moved[node])

    def loss(self) -> Loss | None:
        """Return the first loss that was detected; ``None`` if there is none. Only node 0 records losses."""
        if not self._shared.is_lost:
            return None
        node, reason, observer = self._shared.loss
        return Loss(node, Reason(reason), observer)

    def describe(self, loss: Loss) -> str:
        """Return a description of a loss, for an error message."""
        name, seconds = self._names[loss.node], f"{self._shared.limit:g} seconds"
        if loss.reason == Reason.ENDED:
            return f"{name} has closed its connection: its processes were killed, or the machine was restarted"
        if loss.reason == Reason.CUT_OFF:
            reason = "its link is down, or those of all other nodes are"
            return f"{name} has heard from no other node for {seconds}: {reason}"
        is_own = loss.observer == self._node
        heard = "nothing was heard" if is_own else f"{self._names[loss.observer]} has heard nothing"
        return f"{heard} from {name} for {seconds}: it is down or frozen, or the link to it is cut"

    def leave(self) -> None:
        """From now on, end the leader when any node is lost, because the leader no longer checks `loss`."""
        self._shared.is_leaving = True

    def stop(self) -> None:
        """Notify the other nodes that this node leaves, so that they stop watching it; close the socket."""
        self._shared.is_over = True
        for _ in range(_GOODBYES):
            self._send(Message(self._node, leaves=True))
        self._socket.close()
        self._alive = self._tie = None

    def look_after(self) -> None:
        """Restart the two processes if both were killed; the leader calls this regularly."""
        alive = -1 if self._alive is None else self._alive.find()
        if alive < 0:  # the program has closed the pipe, so the end of the processes can no longer be detected
            return
        ended = select.poll()
        ended.register(alive, 0)
        if any(event & select.POLLHUP for _, event in ended.poll(0)):
            try:
                with deferred_interrupts():
                    self._launch()
            except SessionError:  # the program has closed the socket
                pass
            except OSError as error:  # the user's command can do without them; the next look tries again
                self._shared.n_starts += 1
                _logger.warning("%s could not start its heartbeat processes again: %s", self._names[self._node], error)

    def _launch(self) -> None:
        """Start the guardian, which starts the heartbeat process; do nothing if they were started too often."""
        self._alive = None
        if self._shared.n_starts >= _MOST_STARTS:
            return
        leader, kept = os.getpid(), self._socket.fileno()
        self._alive, writer = map(Descriptor, os.pipe())
        self._is_starting = True
        try:
            # not on node 0, where the program runs: it might close the descriptor, which would kill the processes
            watched = self._node > 0
            self._tie = start_detached(lambda: self._guard(leader), [kept, writer.fileno()], while_stopped=watched)
        finally:
            self._is_starting = False
            writer.close()

    def _let_go(self) -> None:
        """Close the socket and pipes in a process forked from the leader, unless it is one of the two processes."""
        if not self._is_starting:
            self._socket.close()
            self._alive = self._tie = None

    def _send(self, message: Message) -> bool:
        """Send a heartbeat to the `peers`; return whether the network is reachable."""
        has_network = False
        with contextlib.suppress(SessionError), self._socket.use() as sending:  # the program may have closed it
            for address, (_, token) in self._others.items():
                for _ in range(2):  # the first attempt may raise the error of an earlier datagram
                    try:
                        sending.sendto(_FORM.pack(token, *message._replace(steps=self._shared.steps)), address)
                    except OSError as error:
                        has_network = has_network or error.errno not in (errno.ENETUNREACH, errno.ENETDOWN)
                    else:
                        has_network = True
                        break
        return has_network

    # -- heartbeat process and guardian

    def _guard(self, leader: int) -> None:
        """Run as guardian: fork a heartbeat process, and again if it is killed.

        The forked heartbeat process returns from `_watch` here if its guardian is killed, and then is the guardian.
        """
        while self._shared.n_starts < _MOST_STARTS:
            self._shared.n_starts += 1
            guardian = os.getpid()
            process = os.fork()
            if process:
                _, status = os.waitpid(process, 0)
                if not status:  # it has ended normally, because the leader leaves
                    return
                continue
            end_with(leader)
            if not self._watch(leader, guardian):
                return
        text = f"the heartbeat process of {self._names[self._node]} was killed {_MOST_STARTS} times"
        self._print(f"{text}, and is not started again: other nodes will consider this node lost")

    def _watch(self, leader: int, guardian: int) -> bool:
        """Run as heartbeat process until the leader leaves.

        Returns
        -------
        bool
            ``True`` if the guardian has ended, so that this process becomes the guardian.
        """
        silence = FailureDetector(self._node, self._states)
        looked = time.monotonic()
        while True:
            can_send = self._send(silence.report(self._shared.limit))
            time.sleep(_BETWEEN_SECONDS)
            if self._shared.is_over:
                return False
            if os.getppid() != guardian:
                return True
            now = time.monotonic()
            silence.advance(now - looked)
            looked = now
            silence.sent(self._refused(), can_send)
            received = self._received()
            silence.receive(received)
            for message in received:
                if message.sender < len(self._steps) and message.steps != self._steps[message.sender]:
                    self._steps[message.sender], self._moved[message.sender] = message.steps, now
            for node, observer in silence.warnings().items():
                self._warn(node, observer)
            self._flush()
            self._judge(silence, leader)

    def _judge(self, silence: FailureDetector, leader: int) -> None:
        """Act on losses: report the first one to the controller, if this is node 0, and end the leader if necessary.

        The leader ends if its node has lost node 0, or, while the leader is leaving, any node.
        """
        losses = silence.losses(self._shared.limit)
        if losses and not self._node and not self._shared.is_lost:
            self._shared.loss = tuple(losses[min(losses)])
            self._shared.is_lost = True
        if losses and (self._shared.is_leaving or (self._node and 0 in losses)):
            loss = losses.get(0) or losses[min(losses)]
            if loss.reason != Reason.ENDED:  # the launcher reports processes that have ended
                self._print(f"{self.describe(loss)}; {self._names[self._node]} ends")
            self._send(silence.report(self._shared.limit))
            _end(leader)

    def _received(self) -> list[Message]:
        """Return the heartbeats that arrived since the last call."""
        found: list[Message] = []
        with self._socket.use() as receiving:
            while True:
                try:
                    datagram = receiving.recv(_FORM.size + 1)
                except BlockingIOError:
                    return found
                except OSError:  # the error of an earlier datagram
                    continue
                if len(datagram) == _FORM.size:
                    token, *message = _FORM.unpack(datagram)
                    if secrets.compare_digest(token, self.door.token):
                        found.append(Message(*message))

    def _refused(self) -> list[int]:
        """Return the nodes whose kernels have refused datagrams since the last call: no process holds their sockets."""
        found: list[int] = []
        with self._socket.use() as receiving:
            while True:
                try:
                    _, details, _, address = receiving.recvmsg(_FORM.size, 64, socket.MSG_ERRQUEUE)
                except OSError:
                    return found
                for level, kind, detail in details:
                    is_error = (level, kind) == (socket.IPPROTO_IP, _IP_RECVERR)
                    is_refused = is_error and _ERROR.unpack_from(detail) == (errno.ECONNREFUSED, _BY_ICMP)
                    if is_refused and address in self._others:
                        found.append(self._others[address][0])

    # -- warnings

    def _warn(self, node: int, observer: int) -> None:
        """Print a warning about a silent node."""
        seconds, limit = f"{WARNING_SECONDS:g} seconds", f"{self._shared.limit:g} seconds"
        if node == self._node:
            text = f"{self._names[node]} has heard from no other node for {seconds}: its own link may be down"
        elif observer:
            text = f"{self._names[observer]} has heard nothing from {self._names[node]} for {seconds}"
        else:
            text = f"nothing was heard from {self._names[node]} for {seconds}"
        self._print(f"{text}; after {limit} of silence a node is lost (fork's heartbeat=)")

    def _print(self, text: str) -> None:
        """Print a line on standard error, if the log level of synkhronos permits warnings."""
        if _logger.isEnabledFor(logging.WARNING):
            self._unprinted.append(f"synkhronos: {text}\n".encode())
        self._flush()

    def _flush(self) -> None:
        """Print as much as possible without blocking, because nothing may read the pipe while a node is frozen."""
        with contextlib.suppress(OSError):
            writable = select.poll()
            writable.register(_STDERR, select.POLLOUT)
            while self._unprinted and writable.poll(0):
                os.write(_STDERR, self._unprinted.pop(0))


def _end(leader: int) -> None:
    """End the leader, and this process with it."""
    os.kill(leader, LEAVE)
    time.sleep(_LEAVE_SECONDS)  # this process is killed here, unless the leader is stopped
    os.kill(leader, signal.SIGKILL)
