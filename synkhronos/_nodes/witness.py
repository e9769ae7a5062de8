"""Telling ``python -m synkhronos run --hosts`` whether this process ends in peace.

A launcher ends the whole job when one of its processes dies, so nobody is left to say which one that was. Each process
holds a connection to the program that started the launcher; the kernel closes it, whatever the process dies of.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

from synkhronos._memory import OwnedSocket
from synkhronos.errors import SessionError

__all__ = ["Witness"]

#: ``HOST:PORT:SECRET`` of whom to tell.
_WITNESS = "SYNKHRONOS_WITNESS"

_CONNECT_SECONDS = 2.0  # where a firewall is between


class Witness:
    """One process's connection; none at first."""

    def __init__(self) -> None:
        self._socket: OwnedSocket | None = None

    def call(self, environment: MutableMapping[str, str], machine: int, host: str) -> None:
        """Connect, if the environment says to whom, which is taken out of it."""
        host_there, _, rest = environment.pop(_WITNESS, "").partition(":")
        port, _, secret = rest.partition(":")
        if not secret:
            return
        with contextlib.suppress(OSError, ValueError):  # the job does without
            connection = socket.create_connection((host_there, int(port)), _CONNECT_SECONDS)
            connection.sendall(f"{secret} {machine} {host}\n".encode())
            self._socket = OwnedSocket(connection)
            os.register_at_fork(after_in_child=self._close)

    def farewell(self) -> None:
        """Say that this process ends, and that it is no accident."""
        if self._socket is not None:
            with contextlib.suppress(OSError, SessionError), self._socket.use() as connection:
                connection.sendall(b"farewell\n", socket.MSG_NOSIGNAL)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
