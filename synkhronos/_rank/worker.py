"""A worker's life."""

from __future__ import annotations

from typing import Any

from synkhronos._processes import Team
from synkhronos._rank.messages import Decoder, Encoder, Envelope, Failure
from synkhronos._rank.replica import Replica

__all__ = ["serve"]


def serve(team: Team, replica: Replica) -> None:
    """A worker's life: execute what the master says until it says stop."""
    decoder, encoder = Decoder(), Encoder()
    while True:
        envelope: Envelope = decoder.loads(team.receive())
        if envelope.command is None:
            return
        reply: Any = None
        if envelope.attach or any(envelope.release):
            try:
                replica.forget(*envelope.release)
                replica.attach(envelope.attach, team.passage)
                if envelope.attach or envelope.release.segments:
                    team.passage.clear()
            except Exception as error:
                reply = Failure.of(error, unprepared=True)
        if reply is None:
            try:
                reply = replica.execute(envelope.command)
            except Exception as error:
                reply = Failure.of(error, completed=replica.completed)
        try:
            _answer(team, encoder, reply)
        except MemoryError:  # there is no room for all that this rank has to tell
            replica.regions.trim()
            try:
                _answer(team, encoder, reply)
            except MemoryError as error:
                _answer(team, encoder, Failure.of(error))


def _answer(team: Team, encoder: Encoder, reply: Any) -> None:
    """Tell the master, and, of a failure, the ranks that wait."""
    if isinstance(reply, Failure) and not reply.aborted:
        team.signals.abort()
    team.answer(encoder.dumps(reply))
