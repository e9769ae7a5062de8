"""Noticing that a machine is gone, or its line cut, of which TCP tells nothing for minutes.

Beside each leader a small process, forked before the ranks are, sends datagrams to those of the other machines, and
writes into shared memory which of them are silent. It shares no lock with its leader, so that nothing there delays it.

Invariants
----------
* A machine of which nothing was ever heard is not watched: a firewall may be between.
* It ends with its leader. A leader that hears nothing of the master is killed by it, and its ranks end with it.
* It is no child of its leader: a program that waits for its children, or ends them, does not meet it.
* Who does not know this machine's token is not listened to. What cannot be sent or received now is left out.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

from synkhronos._team import Lifeline, Patience, Process

__all__ = ["HEARTBEAT", "LEAVE", "Door", "Heartbeat"]

#: The signal that ends a leader with exit code 0, so that the exit code of the job is that of the script, and not 9.
LEAVE = signal.SIGRTMAX - 1
_LEAVE_SECONDS = 1.0

#: After so many seconds of silence a machine is lost.
HEARTBEAT = 2.0

_BETWEEN_SECONDS = 0.25
_TOKEN_BYTES = 16
_FORM = struct.Struct(
    f"<{_TOKEN_BYTES}s?HH"
)  # the receiver's token; whether the sender leaves, which it is, who is silent
_NOBODY = 0xFFFF
_MOST_DESCRIPTORS = 65536
_GOODBYES = 3  # one may be lost


class Door(NamedTuple):
    """Where one listens, and what one must say there."""

    port: int
    token: bytes


class Heartbeat:
    """That of one machine; makes its socket at once.

    Parameters
    ----------
    machine : int

    Attributes
    ----------
    door : Door
    """

    def __init__(self, machine: int) -> None:
        self._machine = machine
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("", 0))
        self.door = Door(self._socket.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        self._others: list[tuple[tuple[str, int], bytes]] = []
        self._silent: mmap.mmap  # a byte for each machine, and one that the leader leaves
        self._lifeline: Lifeline

    def start(self, places: Mapping[int, tuple[str, Door]]) -> None:
        """Watch over other machines; ``places`` are the names of their hosts, and their doors."""
        for host, door in places.values():
            with contextlib.suppress(OSError):  # unknown here by that name: it is not watched
                self._others.append(((socket.gethostbyname(host), door.port), door.token))
        self._silent = mmap.mmap(-1, max(self._machine, *places) + 2)
        self._lifeline, leader = Lifeline(), os.getpid()
        Process(lambda: self._begin(leader)).join(Patience(None))
        self._lifeline.forked()

    def silent(self) -> int | None:
        """A machine that was heard of, by this one or by another one, and is silent now."""
        found = self._silent.find(b"\1", 0, len(self._silent) - 1)
        return None if found < 0 else found

    def leave(self) -> None:
        """From now on the leader cannot look: it is killed if any machine falls silent."""
        self._silent[-1] = 1

    def stop(self) -> None:
        """Tell the others that this machine is gone: they do not wait for it more."""
        self._lifeline.let_go()
        for _ in range(_GOODBYES):
            self._send(True, _NOBODY)

    def _send(self, leaves: bool, silent: int) -> None:
        for address, token in self._others:
            with contextlib.suppress(OSError):  # no way there now
                self._socket.sendto(_FORM.pack(token, leaves, self._machine, silent), address)

    # -- the process

    def _begin(self, leader: int) -> None:
        if os.fork():
            return
        gc.disable()  # what was inherited is not its own to finish
        self._lifeline.hold(by_main_thread=False)
        kept = sorted((self._socket.fileno(), self._lifeline.fileno()))
        for start, end in zip((-1, *kept), (*kept, _MOST_DESCRIPTORS)):
            os.closerange(start + 1, end)  # the launcher waits until nobody holds its pipes
        self._watch(leader)

    def _watch(self, leader: int) -> None:
        heard: dict[int, float] = {}
        gone: set[int] = set()
        silent, looked = _NOBODY, time.monotonic()
        leader_ends = select.poll()  # not `select`, which fails above 1,023 descriptors
        leader_ends.register(self._lifeline)
        while True:
            self._send(False, silent)
            if leader_ends.poll(1000 * _BETWEEN_SECONDS):
                return
            now = time.monotonic()
            if now - looked > HEARTBEAT / 2:  # this process was stopped: it has listened to nobody meanwhile
                heard = dict.fromkeys(heard, now)
            looked = now
            for leaves, machine, reported in self._received():
                if leaves:
                    gone.add(machine)
                    heard.pop(machine, None)
                elif machine not in gone:
                    heard[machine] = now
                if not self._machine and reported < len(self._silent) - 1 and reported not in gone:
                    self._silent[reported] = 1
            for machine, last in heard.items():
                if now - last > HEARTBEAT:
                    self._silent[machine], silent = 1, machine
                    if not machine or self._silent[-1]:
                        _end(leader)

    def _received(self) -> list[tuple[bool, int, int]]:
        """What others have said since the last time."""
        found: list[tuple[bool, int, int]] = []
        while True:
            try:
                message = self._socket.recv(_FORM.size + 1)
            except BlockingIOError:
                return found
            except OSError:  # told of what was sent before
                continue
            if len(message) == _FORM.size:
                token, leaves, machine, silent = _FORM.unpack(message)
                if secrets.compare_digest(token, self.door.token):
                    found.append((leaves, machine, silent))


def _end(leader: int) -> None:
    """End the leader, and this process with it."""
    os.kill(leader, LEAVE)
    time.sleep(_LEAVE_SECONDS)  # this process ends here, unless the leader was stopped
    os.kill(leader, signal.SIGKILL)
