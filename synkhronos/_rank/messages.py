"""What travels between the master and the workers, and how it is pickled: a command there, a reply back."""

from __future__ import annotations

import copyreg
import pickle
import time
import traceback
from typing import Any, NamedTuple

from synkhronos._memory import ArrayRef, SegmentRef
from synkhronos._rank.commands import AllReduce, Call, Command, Follow, Source
from synkhronos._utils.rows import Rows
from synkhronos.errors import CollectiveAborted

__all__ = ["Arrays", "Decoder", "Encoder", "Envelope", "Failure", "Release", "summarize"]


class Release(NamedTuple):
    """What the master has dropped since the last command."""

    segments: tuple[str, ...] = ()
    functions: tuple[int, ...] = ()
    variables: tuple[int, ...] = ()


class Envelope(NamedTuple):
    """What travels from the master to a worker: a command (``None``: stop), and what to map and to forget first."""

    attach: tuple[SegmentRef, ...]
    release: Release
    command: Command | None


class Failure(NamedTuple):
    """What a worker answers when a command failed there."""

    when: float  # time.monotonic(), the same clock on every rank of a machine
    summary: str  # type and message of the exception
    traceback: str  # without them
    aborted: bool = False  # it only stopped because another rank had failed
    unprepared: bool = False  # it could not map what the envelope said, and did not begin
    completed: int = 0  # parts of the command that it had completed, if there are several

    @classmethod
    def of(cls, error: Exception, unprepared: bool = False, completed: int = 0) -> Failure:
        """What a rank answers when this was raised there; to be called while the exception is handled."""
        aborted = isinstance(error, CollectiveAborted)
        return cls(time.monotonic(), summarize(error), _way_to(error), aborted, unprepared, completed)


def _way_to(error: Exception) -> str:
    """The traceback of an exception, without its message, which is told beside it; before that, what it came from.

    What Theano raises while it computes is a copy, with a longer message, of an exception that it has caught.
    """
    origin: BaseException = error
    context = error.__context__
    if type(context) is type(error) and summarize(error).startswith(summarize(context)):
        origin = context
    before = origin.__cause__ or (None if origin.__suppress_context__ else origin.__context__)
    chain = [] if before is None else traceback.format_exception(type(before), before, before.__traceback__)
    chain += ["\nwhich led to\n\n"] if chain else []
    return "".join([*chain, "Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)])


def summarize(error: BaseException) -> str:
    """The class of an exception, and its message if it has one that can be had: ``__str__`` is the user's code."""
    name = type(error).__name__
    try:
        return f"{name}: {error}".rstrip(": ")
    except Exception as another:
        return f"{name} (its message cannot be shown: {type(another).__name__} in __str__)"


class Placed(NamedTuple):
    """Where an array lies: in which memory that master and workers see, from which byte on, shape, and dtype."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    dtype: Any


class Sent(NamedTuple):
    """An array that lies in no such memory."""

    content: bytes
    shape: tuple[int, ...]
    dtype: Any


class Arrays(NamedTuple):
    """What a worker answers when a command gave arrays (``None`` entries: not wanted by the master)."""

    values: list[Placed | Sent | None]


def _reduced(value: Any) -> tuple[type, tuple[Any, ...]]:
    return type(value), tuple(value)


copyreg.pickle(Rows, Rows.__reduce__)
for _type in (ArrayRef, SegmentRef, Source, Release, Call, AllReduce, Follow, Envelope, Placed):
    copyreg.pickle(_type, _reduced)  # half the time of what pickle does for named tuples by itself


class Encoder:
    """Pickles messages, which nobody changes later; one that equals the message before is not pickled again."""

    def __init__(self) -> None:
        self._last: tuple[Any, bytes] = (self, b"")

    def dumps(self, message: Any) -> bytes:
        """The message, for a `Decoder`."""
        last, pickled = self._last
        if message != last:
            pickled = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            self._last = (message, pickled)
        return pickled


class Decoder:
    """Reads the messages of one `Encoder`; of bytes that came before, it returns the message that it has made of them.

    So nobody may change a message.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, Any] = (b"", None)

    def loads(self, pickled: bytes) -> Any:
        """The message."""
        last, message = self._last
        if pickled != last:
            message = pickle.loads(pickled)
            self._last = (pickled, message)
        return message
