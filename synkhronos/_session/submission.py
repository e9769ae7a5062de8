"""Submit calls and collectives to the ranks, one at a time or several in one message (a `sequence`).

A call or a collective is a *part*. Before it is submitted, its NumPy inputs are copied to a staging arena, and its
command is created; each part of a sequence has an arena of its own. The controller processes the results when all ranks
have replied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from synkhronos._rank import Command, InOrder, summarize
from synkhronos._utils.interrupts import deferred_interrupts, new_lock
from synkhronos.errors import SessionError, WorkerError

if TYPE_CHECKING:
    from synkhronos._session.state import Session


class Submission(NamedTuple):
    """A command, and how the controller processes its results.

    Parameters
    ----------
    command : Command
    finish : callable
        ``finish(results)`` takes the results in rank order, and returns the value for the user's program.
    explain : callable, optional
        Called if this part fails with a `WorkerError`; may raise a more specific error instead.
    shared : callable, optional
        For a call: returns the function's shared variables.
    check : callable, optional
        ``check(session)`` is called at the end of a sequence. It raises an error if the part cannot be executed any
        more; then the sequence is not sent.
    """

    command: Command
    finish: Callable[[Sequence[Any]], Any]
    explain: Callable[[], None] | None = None
    shared: Callable[[], list[Any]] | None = None
    check: Callable[[Session], None] | None = None


class Future:
    """Result of a call in a `sequence`, available after the block.

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
        self._is_pending = True
        self._unknown: str | None = "the call is sent at the end of the block; ask for the result after it"
        self._value: Any = None
        self._make: Callable[[Any], Any] | None = None

    def __repr__(self) -> str:
        if self._is_pending:
            return "<synkhronos.Future, pending>"
        return f"<synkhronos.Future: {self._value!r}>" if self._unknown is None else "<synkhronos.Future, failed>"

    def result(self) -> Any:
        """Return the result of the call.

        This never waits, because the end of the block has waited for all results.

        Returns
        -------
        array, list of array, or dict
            The same as from the call outside of a sequence.

        Raises
        ------
        SessionError
            If called within the block, or if the sequence failed.

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
        """Apply a function to the result before `result` returns it.

        Parameters
        ----------
        make : callable
            ``make(result)`` returns the value that `result` returns instead.

        Returns
        -------
        Future
            This object.
        """
        self._make = make
        return self

    def _set(self, value: Any) -> None:
        self._value, self._unknown = value if self._make is None else self._make(value), None
        self._is_pending = False

    def _fail(self, error: BaseException) -> None:
        if self._is_pending:
            self._unknown, self._is_pending = summarize(error), False


class Recorder:
    """Recorded parts of a sequence, in order.

    Attributes
    ----------
    parts : list of Submission
    thread : int
        Identifier of the thread whose calls are recorded.
    undo : list of callable
        Called with whether parts may have been executed, the last one first, if the sequence does not succeed.
    kept : list
        Objects that the parts need, and that stay alive even if the program drops them before the sequence is sent.
    """

    def __init__(self) -> None:
        self.parts: list[Submission] = []
        self.thread = threading.get_ident()
        self._futures: list[Future] = []
        self.undo: list[Callable[[bool], None]] = []
        self.kept: list[Any] = []

    def record(self, part: Submission) -> Future:
        """Add a part, and return the `Future` of its result."""
        future = Future()
        self.parts.append(part)
        self._futures.append(future)
        return future

    def send(self, session: Session) -> None:
        """Execute all parts and set the results; then raise the first error, if any."""
        first: BaseException | None = None
        is_sent = False
        try:
            for part in self.parts:
                if part.check is not None:
                    part.check(session)
            is_sent = True
            results = _execute(session, self.parts) if self.parts else []
            self.undo.clear()
        except BaseException as error:
            self.drop(error, is_sent)
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
                del first  # break the reference cycle between the exception and this frame

    def drop(self, error: BaseException, is_sent: bool = False) -> None:
        """Mark pending results as failed with an error, and undo what was recorded of the variables."""
        for future in self._futures:
            future._fail(error)
        with deferred_interrupts():
            while self.undo:
                self.undo.pop()(is_sent)


class Sequencer:
    """Submits the commands of a session: executes them at once, or records them in a sequence.

    Parameters
    ----------
    session : Session

    Attributes
    ----------
    recorder : Recorder or None
        Recorder of the open sequence, if any.
    one_at_a_time : reentrant lock
        Held by the thread that records a sequence. Reentrant, because a signal handler in that thread may acquire it
        again.
    """

    def __init__(self, session: Session) -> None:
        self.recorder: Recorder | None = None
        self.one_at_a_time = new_lock()
        self._session = session

    @property
    def recording(self) -> Recorder | None:
        """The recorder of the open sequence if this thread opened it; otherwise ``None``."""
        recorder = self.recorder
        return recorder if recorder is not None and recorder.thread == threading.get_ident() else None

    @property
    def place(self) -> int:
        """Number, from 1, that the next part of the sequence gets; 0 outside of a sequence."""
        recorder = self.recorder and self.recording
        return 0 if recorder is None else 1 + len(recorder.parts)

    def keep(self, things: Sequence[Any]) -> None:
        """Keep objects alive until the open sequence, if there is one, is sent."""
        recorder = self.recording
        if recorder is not None:
            recorder.kept += things

    def note(self, note: Callable[[], Callable[[bool], None]]) -> None:
        """Call ``note()``, which records something and returns a function that undoes this; see `Recorder.undo`."""
        recorder = self.recording
        if recorder is None:
            note()
            return
        with deferred_interrupts():
            recorder.undo.append(note())

    def check_first(self, what: str) -> None:
        """Raise `SessionError` if the open sequence already has parts, which are not sent yet."""
        if self.place > 1:
            raise SessionError(
                f"{what} needs the ranks' current values, but earlier parts of this sequence are not sent yet; call it "
                "first in the block, or outside"
            )

    def run(self, command: Command) -> list[Any]:
        """Execute a command by `Session.issue`; raise `SessionError` after the first part of a sequence."""
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
        """Have every rank execute a command, at once or as a part of the open sequence.

        The parameters are those of `Submission`.

        Returns
        -------
        object or Future
            The value of ``finish(results)``, or its `Future` in a sequence.
        """
        part = Submission(command, finish, explain, shared, check)
        recorder = self.recorder and self.recording
        return finish(_execute(self._session, [part])[0]) if recorder is None else recorder.record(part)


def _execute(session: Session, parts: Sequence[Submission]) -> list[Sequence[Any]]:
    """Have every rank execute the parts, in one message; return for each part the results in rank order."""
    if session.replica_check.every:
        session.replica_check.see_calls([part.shared() for part in parts if part.shared is not None])
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
