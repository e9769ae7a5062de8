"""A worker's life."""

from __future__ import annotations

import pickle
import time
import traceback
from typing import Any

from synkhronos._protocol import Call, Envelope, Failure, Get
from synkhronos._replica import Replica
from synkhronos._team import Team
from synkhronos.errors import CollectiveAborted

__all__ = ["serve"]


def serve(team: Team, replica: Replica) -> None:
    """A worker's life: execute what the master says until it says stop."""
    while True:
        envelope: Envelope = pickle.loads(team.receive())
        if envelope.command is None:
            return
        reply: Any = None
        try:
            replica.forget(*envelope.release)
            replica.attach(envelope.attach)
        except Exception as error:
            reply = _failure(error)._replace(unprepared=True)
        if reply is None:
            try:
                reply = replica.execute(envelope.command)
                if isinstance(envelope.command, (Call, Get)) and reply is not None:
                    reply = replica.publish(reply)
            except Exception as error:
                reply = _failure(error)
        if isinstance(reply, Failure) and not reply.aborted:
            team.signals.abort()
        team.answer(pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL))


def _failure(error: Exception) -> Failure:
    summary = f"{type(error).__name__}: {error}"
    return Failure(time.monotonic(), summary, traceback.format_exc(), isinstance(error, CollectiveAborted))
