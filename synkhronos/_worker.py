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
        reply: Any
        try:
            for ref in envelope.attach:
                replica.segments.attach(ref)
            replica.forget(*envelope.release)
            reply = replica.execute(envelope.command)
            if isinstance(envelope.command, (Call, Get)) and reply is not None:
                reply = replica.publish(reply)
        except Exception as error:
            aborted = isinstance(error, CollectiveAborted)
            reply = Failure(time.monotonic(), f"{type(error).__name__}: {error}", traceback.format_exc(), aborted)
            if not aborted:
                team.signals.abort()
        team.answer(pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL))
