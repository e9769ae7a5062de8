"""Execution of parts on the ranks, either one at once or all those recorded by a `sequence` in one message.

A part is a call or a collective. It is prepared when it is submitted: its command is made, and its NumPy inputs are
copied, each part's to a staging arena of its own. The controller processes the results when all ranks have replied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from synkhronos._rank import Command, InOrder, summarize
from synkhronos.errors import SessionError, WorkerError

if TYPE_CHECKING:
    from synkhronos._session.state import Session


class Submission(NamedTuple):
    """A command, and how the controller processes its results.

    Parameters
    ----------
    command : Command
    finish : callable
        ``finish(results)`` returns the program's value, from the results in rank order.
    explain : callable, optional
        Raises an error that says more than the `WorkerError` of this part, if there is one.
    shared : callable, optional
        For a call: returns the function's shared variables.
    check : callable, optional
        ``check(session)`` raises an error if the part cannot be executed when the sequence ends; then nothing is sent.
    """

    command: Command
    finish: Callable[[Sequence[Any]], Any]
    explain: Callable[[], None] | None = None
    shared: Callable[[], list[Any]] | None = None
    check: Callable[[Session], None] | None = None


class Future:
    """The result of a call in a `sequence`, available after the block.

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
        self._unknown: str | None = "the call is sent at the end of the block; ask for the result after it"
        self._value: Any = None
        self._make: Callable[[Any], Any] | None = None

    def __repr__(self) -> str:
        return "<synkhronos.Future, pending>" if self._unknown else f"<synkhronos.Future: {self._value!r}>"

    def result(self) -> Any:
        """Return the result of the call; it does not wait, since the end of the block does.

        Returns
        -------
        array, list of array, or dict
            As the call outside of a sequence.

        Raises
        ------
        SessionError
            In the block, and if the sequence failed.

        Examples
        --------
        >>> x = T.dvector("x")
        >>> with synk.session(2):
        ...     f = synk.function([x], x.sum(), exact=True)
        ...     with synk.sequence():
        ...         futures = [f([1, 2, 6]), f([3, 4])]
        ...     print(*[future.result() for future in futures])
        9.0 7.0
        """
        if self._unknown is not None:
            raise SessionError(f"no result of this call of a sequence: {self._unknown}")
        return self._value

    def through(self, make: Callable[[Any], Any]) -> Future:
        """Pass the result through a function before it is returned.

        Parameters
        ----------
        make : callable
            Takes the result, and returns what `result` returns instead.

        Returns
        -------
        Future
            This one.
        """
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
        The thread whose calls are recorded.
    """

    def __init__(self) -> None:
        self.parts: list[Submission] = []
        self.thread = threading.get_ident()
        self._futures: list[Future] = []
        self._kept: list[Any] = []

    def record(self, part: Submission) -> Future:
        """Add a part, and return the `Future` of its result."""
        future = Future()
        self.parts.append(part)
        self._futures.append(future)
        return future

    def keep(self, things: Sequence[Any]) -> None:
        """Keep objects alive that the parts need and the program may drop."""
        self._kept += things

    def send(self, session: Session) -> None:
        """Execute all parts; raises the first error after all other parts have their results."""
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
                del first  # otherwise it and this frame keep each other alive

    def drop(self, error: BaseException) -> None:
        """Mark all results as failed, because of an error."""
        for future in self._futures:
            future._fail(error)


class Sequencer:
    """Submit commands of a session: execute them at once, or record them in a sequence.

    Parameters
    ----------
    session : Session

    Attributes
    ----------
    recorder : Recorder or None
        That of the sequence in whose block a thread is.
    one_at_a_time : threading.RLock
        Held by that thread; reentrant, since a signal handler may interrupt it and take it again.
    """

    def __init__(self, session: Session) -> None:
        self.recorder: Recorder | None = None
        self.one_at_a_time = threading.RLock()
        self._session = session

    @property
    def recording(self) -> Recorder | None:
        """The recorder, if this thread is in the block of the sequence; otherwise ``None``."""
        recorder = self.recorder
        return recorder if recorder is not None and recorder.thread == threading.get_ident() else None

    @property
    def place(self) -> int:
        """The number of the part that is submitted now, from 1; 0 outside of a sequence."""
        recorder = self.recorder and self.recording
        return 0 if recorder is None else 1 + len(recorder.parts)

    def keep(self, things: Sequence[Any]) -> None:
        """Keep objects alive until the recorded sequence, if there is one, is sent."""
        recorder = self.recording
        if recorder is not None:
            recorder.keep(things)

    def check_first(self, what: str) -> None:
        """Raise `SessionError` if the recorded sequence has parts already, which are not sent yet."""
        if self.place > 1:
            raise SessionError(
                f"{what} needs the ranks' current values, but earlier parts of this sequence are not sent yet; call it "
                "first in the block, or outside"
            )

    def run(self, command: Command) -> list[Any]:
        """Execute a command as `Session.issue` does; refused after the first part of a sequence."""
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
        """Have every rank execute a command, at once or in the recorded sequence; parameters as of `Submission`.

        Returns the value of ``finish(results)``, or a `Future` of it.
        """
        part = Submission(command, finish, explain, shared, check)
        recorder = self.recorder and self.recording
        return finish(_execute(self._session, [part])[0]) if recorder is None else recorder.record(part)


def _execute(session: Session, parts: Sequence[Submission]) -> list[Sequence[Any]]:
    """Have every rank execute the parts, sent as one message; returns the results of each part, in rank order."""
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
