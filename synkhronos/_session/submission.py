"""What goes to the ranks as one message: a call or a collective, or what a `sequence` has recorded of them.

Each part is prepared when it is given: its command is made, and its NumPy inputs are copied, each part's to an arena of
its own. What becomes of the results is done when the answers of all ranks are there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from synkhronos._rank import Command, InOrder, summarize
from synkhronos.errors import SessionError, WorkerError

if TYPE_CHECKING:
    from synkhronos._session.state import Session

__all__ = ["Future", "Part", "Recorder", "Sequencer"]


class Part(NamedTuple):
    """A command, and what the master makes of the results.

    Parameters
    ----------
    command : Command
    finish : callable
        ``finish(results)`` gives what the program gets, of the results in rank order.
    explain : callable, optional
        Raises what says more than the `WorkerError` of this part, if there is more to say.
    shared : callable, optional
        Of a function: gives its shared variables.
    check : callable, optional
        ``check(session)`` raises what speaks against it when the sequence with it ends; then nothing of that is sent.
    """

    command: Command
    finish: Callable[[Sequence[Any]], Any]
    explain: Callable[[], None] | None = None
    shared: Callable[[], list[Any]] | None = None
    check: Callable[[Session], None] | None = None


class Future:
    """What a call in a `sequence` will return.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.mean())
    ...     with synk.sequence():
    ...         future = f([1, 2, 6])
    ...     print(future.result())
    3.0
    """

    def __init__(self) -> None:
        self._unknown: str | None = "it is sent at the end of the block: ask for the result after it"
        self._value: Any = None
        self._make: Callable[[Any], Any] | None = None

    def __repr__(self) -> str:
        return "<synkhronos.Future, not known>" if self._unknown else f"<synkhronos.Future: {self._value!r}>"

    def result(self) -> Any:
        """What the call returns, once the sequence is carried out.

        Raises
        ------
        SessionError
            In the block, and if the sequence failed.
        """
        if self._unknown is not None:
            raise SessionError(f"the result of this part of a sequence is not known: {self._unknown}")
        return self._value

    def through(self, make: Callable[[Any], Any]) -> Future:
        """Have what ``make`` makes of the value; returns the same `Future`."""
        self._make = make
        return self

    def _set(self, value: Any) -> None:
        self._value, self._unknown = value if self._make is None else self._make(value), None

    def _fail(self, error: BaseException) -> None:
        self._unknown = summarize(error)


class Recorder:
    """The parts of a sequence, in order.

    Attributes
    ----------
    parts : list of Part
    thread : int
        Whose calls are recorded.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.thread = threading.get_ident()
        self._futures: list[Future] = []
        self._kept: list[Any] = []

    def record(self, part: Part) -> Future:
        """Take in a part."""
        future = Future()
        self.parts.append(part)
        self._futures.append(future)
        return future

    def keep(self, things: Sequence[Any]) -> None:
        """Keep what the parts need, and the program may drop meanwhile."""
        self._kept += things

    def send(self, session: Session) -> None:
        """Carry out all parts; raises the first error that there is, when every other part has its result."""
        first: BaseException | None = None
        try:
            for part in self.parts:
                if part.check is not None:
                    part.check(session)
            results = _execute(session, self.parts) if self.parts else []
        except BaseException as error:
            self.drop(error)
            raise
        for part, future, of_ranks in zip(self.parts, self._futures, results):
            try:
                future._set(part.finish(of_ranks))
            except BaseException as error:
                future._fail(error)
                first = first or error
        if first is not None:
            try:
                raise first
            finally:
                del first  # else it and this frame keep each other alive

    def drop(self, error: BaseException) -> None:
        """There will be no results, because of an error."""
        for future in self._futures:
            future._fail(error)


class Sequencer:
    """Commands of a session on their way to the ranks: at once, or recorded.

    Parameters
    ----------
    session : Session

    Attributes
    ----------
    recorder : Recorder or None
        Of the sequence in whose block a thread is.
    one_at_a_time : threading.RLock
        Which that thread holds; a handler of a signal that comes in between may take it again.
    """

    def __init__(self, session: Session) -> None:
        self.recorder: Recorder | None = None
        self.one_at_a_time = threading.RLock()
        self._session = session

    @property
    def recording(self) -> Recorder | None:
        """The recorder, if this thread is in the block."""
        recorder = self.recorder
        return recorder if recorder is not None and recorder.thread == threading.get_ident() else None

    @property
    def place(self) -> int:
        """Which part of a sequence is given now, from 1 on; 0: none, so that it goes to the ranks at once."""
        recorder = self.recorder and self.recording
        return 0 if recorder is None else 1 + len(recorder.parts)

    def keep(self, things: Sequence[Any]) -> None:
        """Keep what a part of the sequence needs, if there is one, until it is sent."""
        recorder = self.recording
        if recorder is not None:
            recorder.keep(things)

    def check_first(self, what: str) -> None:
        """Raise `SessionError` if parts of a sequence come first, and are not sent yet."""
        if self.place > 1:
            raise SessionError(
                f"{what} needs what the ranks hold now, and the parts of the sequence that come before it are not sent "
                "yet: it can be the first in the block, or stand outside"
            )

    def run(self, command: Command) -> list[Any]:
        """As `Session.issue`; but it cannot come after parts of a sequence."""
        self.check_first(type(command).__name__)
        return self._session.issue(command)

    def submit(
        self,
        command: Command,
        finish: Callable[[Sequence[Any]], Any],
        explain: Callable[[], None] | None = None,
        shared: Callable[[], list[Any]] | None = None,
        check: Callable[[Session], None] | None = None,
    ) -> Any:
        """Have every rank execute a command, at once or in the sequence that is recorded; see `Part`.

        Returns what ``finish`` makes of the results, or a `Future` of that.
        """
        part = Part(command, finish, explain, shared, check)
        recorder = self.recorder and self.recording
        return finish(_execute(self._session, [part])[0]) if recorder is None else recorder.record(part)


def _execute(session: Session, parts: Sequence[Part]) -> list[Sequence[Any]]:
    """Have every rank carry out the parts, in one message; returns the results of each, in rank order."""
    if session.replicas.every:
        session.replicas.see_calls([part.shared() for part in parts if part.shared is not None])
    if len(parts) == 1:
        command: Command = parts[0].command
    else:
        command = InOrder(tuple([part.command for part in parts]))
    try:
        results = session.issue(command)
    except WorkerError as error:
        explain = parts[error.part].explain
        if explain is not None:
            explain()
        raise
    return [results] if len(parts) == 1 else list(zip(*results))
