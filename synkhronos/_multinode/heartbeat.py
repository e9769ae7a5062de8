"""Heartbeats between nodes, to detect a node that is frozen or unreachable; TCP reports this only after minutes.

Next to each leader run two small processes, forked before the ranks. The *heartbeat process* sends datagrams to those
of the other nodes, prints a warning about a silent node, and writes the number of a lost node to shared memory. The
*guardian* is its parent, and restarts it if it is killed. If the guardian is killed, the heartbeat process becomes the
guardian of a new one. They share no lock with the leader, so that it cannot delay them.

`FailureDetector` holds the conclusions that a node draws from received and missing heartbeats.

Invariants
----------
* A node that was never heard from is not watched, because a firewall may drop its datagrams. Neither is one that left.
* Time counts only while this process runs. A process that was frozen, or a node that was suspended, therefore does
  not take its own absence for the silence of others.
* A node that hears none of at least two nodes, or cannot send, is cut off itself: it blames no other node.
* Both processes are killed when their leader ends (`end_with`). A leader whose node has lost node 0 is ended by its
  heartbeat process, and its ranks end with it.
* Neither is a child of the leader, so that a program that waits for its children, or kills them, does not affect them.
* The socket is open in the leader and in these two processes, and nowhere else. If the kernel of another node refuses a
  datagram, all three have ended there.
* A datagram without this node's token is ignored. Datagrams that cannot be sent or received at once are skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import logging
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from synkhronos._memory import Descriptor, OwnedSocket
from synkhronos._processes import end_with, start_detached
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos.errors import SessionError

#: Seconds of silence after which a warning is printed.
WARNING_SECONDS = 2.0
#: Stands for no node in a message.
NOBODY = 0xFFFF

_MOST_SECONDS = 0.5  # between two looks at the clock; if it is more, this process did not run
_RECENT_SECONDS = 1.0
_REFUSED_SECONDS = 0.5  # of silence after which a refused datagram means that the node ended, not a firewall


class State(enum.IntEnum):
    """Knowledge about a node."""

    UNKNOWN = 0
    HEARD = 1
    LEFT = 2


class Reason(enum.IntEnum):
    """Reason why a node is lost."""

    SILENT = 0
    ENDED = 1  # none of its processes holds its socket
    CUT_OFF = 2  # this node itself hears no other


class Loss(NamedTuple):
    """A lost node.

    Attributes
    ----------
    node : int
    reason : Reason
    observer : int
        The node that detected it.
    """

    node: int
    reason: Reason
    observer: int


class Message(NamedTuple):
    """One heartbeat.

    Attributes
    ----------
    sender : int
    leaves : bool
        Whether this is the sender's last heartbeat, because its program ends.
    silent : int
        The node that the sender has not heard from for the longest time, if that is long enough for a warning; else
        `NOBODY`.
    is_lost : bool
        Whether that node has been silent for so long that it is lost.
    """

    sender: int
    leaves: bool = False
    silent: int = NOBODY
    is_lost: bool = False


class FailureDetector:
    """One node's knowledge about the silence of the others.

    Parameters
    ----------
    own : int
        The number of this node.
    states : memoryview of bytes
        The `State` of each node, in memory that outlives this process. A new process starts to count at 0.
    """

    def __init__(self, own: int, states: memoryview) -> None:
        self._own, self._states = own, states
        self._seconds = {node: 0.0 for node, state in enumerate(states) if state == State.HEARD}
        self._ended: set[int] = set()
        self._reports: dict[int, Message] = {}  # those that name a silent node, by sender
        self._warned: set[int] = set()
        self._can_send = True

    def advance(self, seconds: float) -> None:
        """Add the seconds that have passed since the last look at the clock."""
        for node in self._seconds:
            self._seconds[node] += min(seconds, _MOST_SECONDS)

    def receive(self, messages: Iterable[Message]) -> None:
        """Process heartbeats."""
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
        """Record the result of sending.

        Parameters
        ----------
        refused : iterable of int
            Nodes that refused a datagram, because no process holds their sockets.
        can_send : bool
            Whether the network could be reached.
        """
        self._ended.update(refused)
        self._can_send = can_send

    def report(self, limit: float) -> Message:
        """Return the next heartbeat of this node."""
        silent = max(self._quiet(), key=self._seconds.__getitem__, default=NOBODY)
        if silent == NOBODY or self._is_cut_off():
            return Message(self._own)
        return Message(self._own, silent=silent, is_lost=self._seconds[silent] > limit)

    def warnings(self) -> dict[int, int]:
        """Return the nodes that fell silent since the last call, each with the node that noticed it.

        Among nodes that hear each other only the first warns, so that a user reads one warning.
        """
        observers: Mapping[int, int] = {}
        quiet = self._quiet()
        if self._is_cut_off():
            observers = {} if self._own else {self._own: self._own}
        elif all(node in quiet for node in self._seconds if node < self._own):
            reports = {
                report.silent: sender for sender, report in self._reports.items() if self._is_watched(report.silent)
            }
            observers = {**reports, **dict.fromkeys(quiet, self._own)}
        new = {node: observer for node, observer in observers.items() if node not in self._warned}
        self._warned = set(observers)
        return new

    def losses(self, limit: float) -> dict[int, Loss]:
        """Return the lost nodes, by number; node 0 also counts those that other nodes have lost.

        Parameters
        ----------
        limit : float
            The seconds of silence after which a node is lost.
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
        return [node for node, seconds in self._seconds.items() if seconds > WARNING_SECONDS]

    def _is_watched(self, node: int) -> bool:
        return node in self._seconds

    def _is_cut_off(self) -> bool:
        """Return whether this node is cut off, rather than the others being silent."""
        is_alone = len(self._seconds) > 1 or not self._can_send
        return is_alone and bool(self._quiet()) and min(self._seconds.values()) > _RECENT_SECONDS


#: The signal that ends a leader with exit code 0, so that the exit code of the job is that of the script, and not 9.
LEAVE = signal.SIGRTMAX - 1
_LEAVE_SECONDS = 1.0

#: Seconds of silence after which a node is lost, by default; `fork(heartbeat=)` changes it.
DEFAULT_LIMIT = 10.0

_BETWEEN_SECONDS = 0.25
_TOKEN_BYTES = 16
_FORM = struct.Struct(f"<{_TOKEN_BYTES}sH?H?")  # the receiver's token, and a `Message`
_GOODBYES = 3  # one may be lost
_MOST_STARTS = 20  # of heartbeat processes in one job

_STDERR = 2
_IP_RECVERR = 11  # from Linux's <linux/in.h>; Python has no name for it
_ERROR = struct.Struct("=IB")  # the beginning of `struct sock_extended_err`: number and origin
_BY_ICMP = 2

_logger = logging.getLogger("synkhronos")


class Endpoint(NamedTuple):
    """A node's UDP port, and the token that it expects in datagrams."""

    port: int
    token: bytes


class _Shared(ctypes.Structure):
    """Memory shared by a leader and its heartbeat processes; the `State` of each node follows it."""

    _fields_ = (
        ("limit", ctypes.c_double),
        ("is_leaving", ctypes.c_bool),
        ("is_over", ctypes.c_bool),
        ("n_starts", ctypes.c_int),
        ("is_lost", ctypes.c_bool),  # whether `loss` is set: the three fields of a `Loss`
        ("loss", ctypes.c_int * 3),
    )


class Heartbeat:
    """Heartbeat of one node; its socket is bound at once.

    Parameters
    ----------
    node : int

    Attributes
    ----------
    door : Endpoint
    """

    def __init__(self, node: int) -> None:
        self._node = node
        listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listening.bind(("", 0))
        with contextlib.suppress(OSError):  # without it, a node whose processes ended counts as silent
            listening.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        self.door = Endpoint(listening.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        self._socket = OwnedSocket(listening)
        self._names: list[str] = []
        self._others: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._shared: _Shared
        self._states: memoryview
        self._alive: Descriptor | None = None  # a pipe's reading end: only the two processes hold the other
        self._tie: Descriptor | None = None
        self._is_starting = False
        self._unprinted: list[bytes] = []

    def start(self, hosts: Sequence[str], doors: Sequence[Endpoint]) -> None:
        """Start to watch the other nodes; ``hosts`` and ``doors`` are those of all nodes."""
        self._names = [f"node {node} ({host})" for node, host in enumerate(hosts)]
        for node, (host, door) in enumerate(zip(hosts, doors)):
            with contextlib.suppress(OSError):  # an unknown name: that node is not watched
                if node != self._node:
                    self._others[socket.gethostbyname(host), door.port] = node, door.token
        memory = mmap.mmap(-1, ctypes.sizeof(_Shared) + len(doors))
        self._shared, self._states = _Shared.from_buffer(memory), memoryview(memory)[ctypes.sizeof(_Shared) :]
        self._shared.limit = DEFAULT_LIMIT
        os.register_at_fork(after_in_child=self._let_go)
        self._launch()

    def set_limit(self, seconds: float) -> None:
        """Set the seconds of silence after which a node is lost."""
        if not self._shared.is_lost:  # the message about a loss names the limit of its time
            self._shared.limit = seconds

    def loss(self) -> Loss | None:
        """Return the lost node, or ``None``."""
        if not self._shared.is_lost:
            return None
        node, reason, observer = self._shared.loss
        return Loss(node, Reason(reason), observer)

    def describe(self, loss: Loss) -> str:
        """Describe what happened to a lost node."""
        name, seconds = self._names[loss.node], f"{self._shared.limit:g} seconds"
        if loss.reason == Reason.ENDED:
            return f"{name} has closed its connection: its processes were killed, or the machine was restarted"
        if loss.reason == Reason.CUT_OFF:
            return f"{name} has heard from no other node for {seconds}: its own link is down, or all others are"
        heard = f"{self._names[loss.observer]} has heard nothing"
        if loss.observer == self._node:
            heard = "nothing was heard"
        return f"{heard} from {name} for {seconds}: it is down or frozen, or the link to it is cut"

    def leave(self) -> None:
        """Have the leader killed if any node is lost from now on, because it no longer checks `loss`."""
        self._shared.is_leaving = True

    def stop(self) -> None:
        """Notify the other nodes that this one leaves, so that they do not wait for it; close the socket."""
        self._shared.is_over = True
        for _ in range(_GOODBYES):
            self._send(Message(self._node, leaves=True))
        self._socket.close()
        self._alive = self._tie = None

    def look_after(self) -> None:
        """Restart the two processes if both were killed; called in the leader."""
        alive = -1 if self._alive is None else self._alive.find()
        if alive < 0:  # the program has closed it: their end can no longer be detected
            return
        ended = select.poll()
        ended.register(alive, 0)
        if any(event & select.POLLHUP for _, event in ended.poll(0)):
            with deferred_interrupts(), contextlib.suppress(SessionError):  # the program has closed the socket
                self._launch()

    def _launch(self) -> None:
        self._alive = None
        if self._shared.n_starts >= _MOST_STARTS:
            return
        leader, kept = os.getpid(), self._socket.fileno()
        self._alive, writer = map(Descriptor, os.pipe())
        self._is_starting = True
        # on node 0 the program might close the descriptor that ties stopped processes to the leader
        self._tie = start_detached(lambda: self._guard(leader), [kept, writer.fileno()], while_stopped=self._node > 0)
        self._is_starting = False
        writer.close()

    def _let_go(self) -> None:
        """Close the socket and pipes in a process forked from the leader, unless it is one of the two."""
        if not self._is_starting:
            self._socket.close()
            self._alive = self._tie = None

    def _send(self, message: Message) -> bool:
        """Send a message to all other nodes; return whether the network can be reached."""
        has_network = False
        with contextlib.suppress(SessionError), self._socket.use() as sending:  # the program may have closed it
            for address, (_, token) in self._others.items():
                for _ in range(2):  # the first attempt may report an error of an earlier datagram
                    try:
                        sending.sendto(_FORM.pack(token, *message), address)
                    except OSError as error:
                        has_network = has_network or error.errno not in (errno.ENETUNREACH, errno.ENETDOWN)
                    else:
                        has_network = True
                        break
        return has_network

    # -- heartbeat process and guardian

    def _guard(self, leader: int) -> None:
        """Run as guardian of heartbeat processes; a child runs as heartbeat process, and may become guardian."""
        while self._shared.n_starts < _MOST_STARTS:
            self._shared.n_starts += 1
            guardian = os.getpid()
            process = os.fork()
            if process:
                _, status = os.waitpid(process, 0)
                if not status:  # the session on several nodes is over
                    return
                continue
            end_with(leader)
            if not self._watch(leader, guardian):
                return
        text = f"the heartbeat process of {self._names[self._node]} was killed {_MOST_STARTS} times"
        self._print(f"{text}, and is not started again: other nodes will take this one for lost")

    def _watch(self, leader: int, guardian: int) -> bool:
        """Exchange heartbeats with other nodes to the end; return whether this process is to become the guardian."""
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
            silence.receive(self._received())
            for node, observer in silence.warnings().items():
                self._warn(node, observer)
            self._flush()
            self._judge(silence, leader)

    def _judge(self, silence: FailureDetector, leader: int) -> None:
        """Report a loss to the leader, or end the leader."""
        losses = silence.losses(self._shared.limit)
        if losses and not self._node and not self._shared.is_lost:
            self._shared.loss = tuple(losses[min(losses)])
            self._shared.is_lost = True
        if losses and (self._shared.is_leaving or (self._node and 0 in losses)):
            loss = losses.get(0) or losses[min(losses)]
            if loss.reason != Reason.ENDED:  # the launcher reports that itself
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
                except OSError:  # an error of an earlier datagram
                    continue
                if len(datagram) == _FORM.size:
                    token, *message = _FORM.unpack(datagram)
                    if secrets.compare_digest(token, self.door.token):
                        found.append(Message(*message))

    def _refused(self) -> list[int]:
        """Return the nodes whose kernels refused a datagram since the last call, because no process listens there."""
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
        seconds, limit = f"{WARNING_SECONDS:g} seconds", f"{self._shared.limit:g} seconds"
        if node == self._node:
            text = f"{self._names[node]} has heard from no other node for {seconds}: its own link may be down"
        elif observer:
            text = f"{self._names[observer]} has heard nothing from {self._names[node]} for {seconds}"
        else:
            text = f"nothing was heard from {self._names[node]} for {seconds}"
        self._print(f"{text}; after {limit} of silence a node is lost (fork's heartbeat=)")

    def _print(self, text: str) -> None:
        if _logger.isEnabledFor(logging.WARNING):
            self._unprinted.append(f"synkhronos: {text}\n".encode())
        self._flush()

    def _flush(self) -> None:
        """Print as much as possible without blocking: nobody may read the pipe while a node is frozen."""
        with contextlib.suppress(OSError):
            writable = select.poll()
            writable.register(_STDERR, select.POLLOUT)
            while self._unprinted and writable.poll(0):
                os.write(_STDERR, self._unprinted.pop(0))


def _end(leader: int) -> None:
    """End the leader, and this process with it."""
    os.kill(leader, LEAVE)
    time.sleep(_LEAVE_SECONDS)  # this process ends here, unless the leader was stopped
    os.kill(leader, signal.SIGKILL)
