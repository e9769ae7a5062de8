"""Messages between the controller and the workers, and their pickling: commands out, replies back."""

from __future__ import annotations

import copyreg
import pickle
import time
import traceback
from typing import Any, NamedTuple

from synkhronos._memory import ArrayRef, SegmentRef
from synkhronos._rank.commands import AllReduce, Call, Command, Follow, Source
from synkhronos._utils import KeyedCache
from synkhronos._utils.rows import Rows
from synkhronos.errors import CollectiveAborted


class Release(NamedTuple):
    """Keys of segments, functions and variables that the program has dropped, and the workers must drop.

    A key is sent with every message until all workers have answered a message with it.
    """

    segments: tuple[str, ...] = ()
    functions: tuple[int, ...] = ()
    variables: tuple[int, ...] = ()


class Envelope(NamedTuple):
    """A message to a worker: a command (``None``: stop), and the memory to map and the objects to drop first.

    `n_failures` is the number of commands so far that have failed or were interrupted.
    """

    attach: tuple[SegmentRef, ...]
    release: Release
    command: Command | None
    n_failures: int = 0


class Failure(NamedTuple):
    """Report of an exception that a rank raised while it executed a command.

    A worker sends it as its reply. For the controller, `Dispatcher.issue` puts it among the results.
    """

    when: float  # time.monotonic(), one clock for all ranks of a node
    summary: str  # type and message of the exception
    traceback: str  # traceback, without type and message
    aborted: bool = False  # the rank stopped only because another rank had failed
    unprepared: bool = False  # the rank could not map or drop memory, and did not begin
    completed: int = 0  # number of completed parts of an `InOrder`

    @classmethod
    def of(cls, error: Exception, unprepared: bool = False, completed: int = 0) -> Failure:
        """Return the reply for an exception; call it while the exception is handled."""
        aborted = isinstance(error, CollectiveAborted)
        return cls(time.monotonic(), summarize(error), _traceback_of(error), aborted, unprepared, completed)


def _traceback_of(error: Exception) -> str:
    """Return the traceback of an exception without its message, preceded by that of its cause.

    An exception that a Theano function raises is a copy of the one that it caught, with a longer message. The cause is
    then that of the original.
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
    """Return the class of an exception and its message, if it has one.

    The message comes from ``__str__``, which is the user's code and may raise.
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}".rstrip(": ")
    except Exception as another:
        return f"{name} (its message cannot be shown: {type(another).__name__} in __str__)"


class Placed(NamedTuple):
    """Place of an array in memory that the controller and a worker share."""

    memory: int  # 0: the outboxes of all ranks; 1: the shared heap
    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: Any  # see `dtype_spec`


class Sent(NamedTuple):
    """An array that is sent with the message."""

    content: bytes
    shape: tuple[int, ...]
    dtype: Any


class Arrays(NamedTuple):
    """A worker's reply to a command that returns arrays (``None``: not wanted by the controller)."""

    values: list[Placed | Sent | None]


class Records(NamedTuple):
    """A rank's records on a loop, part of its reply to `Loop` and `EndLoop`.

    Attributes
    ----------
    outputs : list of list of float
        The outputs of each step.
    n_exchanges : int
    ages : list of int
        Number of steps that the rank had made since it sent the parameters, for each average.
    waited : float
        Seconds in exchanges.
    n_bytes : int
        Bytes that the rank has sent in exchanges.
    order : list of tuple
        ``(turn, kind, step, other)`` of each exchange through a `Board`: its turn among those of the node's ranks (for
        a centre, with its first part), ``"meet"``, ``"send"``, ``"merge"`` or ``"nodes"``, the number of steps that the
        rank had made, and the other rank.
    seconds : float
        Seconds of the command.
    """

    outputs: list[list[float]]
    n_exchanges: int
    ages: list[int]
    waited: float
    n_bytes: int
    order: list[tuple[int, str, int, int]]
    seconds: float = 0.0


def _reduced(value: Any) -> tuple[type, tuple[Any, ...]]:
    return type(value), tuple(value)


copyreg.pickle(Rows, Rows.__reduce__)
for _type in (ArrayRef, SegmentRef, Source, Release, Call, AllReduce, Follow, Envelope, Placed):
    copyreg.pickle(_type, _reduced)  # takes half the time of pickle's default for named tuples


#: Larger messages, which contain arrays, are not kept: they seldom repeat.
MOST_CACHED_BYTES = 1 << 18


class Encoder:
    """Pickle messages; a message that equals the previous one is not pickled again, unless it is large.

    A message must not be changed after it was sent.
    """

    def __init__(self) -> None:
        self._pickled: KeyedCache[bytes] = KeyedCache()

    def dumps(self, message: Any) -> bytes:
        """Return a message as bytes, for a `Decoder`."""
        pickled = self._pickled.get(None, message)
        if pickled is None:
            pickled = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            if len(pickled) <= MOST_CACHED_BYTES:
                self._pickled.put(None, message, pickled)
        return pickled


class Decoder:
    """Unpickle the messages of one `Encoder`; bytes that equal the previous ones give the same object again.

    Messages must therefore not be changed.
    """

    def __init__(self) -> None:
        self._messages: KeyedCache[Any] = KeyedCache()

    def loads(self, pickled: bytes) -> Any:
        """Return the message."""
        message = self._messages.get(None, pickled)
        if message is None:
            message = pickle.loads(pickled)
            if len(pickled) <= MOST_CACHED_BYTES:
                self._messages.put(None, pickled, message)
        return message
