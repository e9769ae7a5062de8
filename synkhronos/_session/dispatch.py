"""Send commands to all ranks, and recover if a rank fails, dies or does not reply, or if the user interrupts."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Sequence
from typing import Any, Callable, Protocol

from synkhronos._memory import Segment
from synkhronos._native import native
from synkhronos._processes import Timeline, log
from synkhronos._rank import (
    MOST_CACHED_BYTES,
    Arrays,
    Call,
    Command,
    Decoder,
    Encoder,
    EndLoop,
    Failure,
    InOrder,
    Loop,
    Replica,
    SaveLoop,
    TimeFunction,
    TimeReduction,
    TornUpdate,
    keeps_equal,
    summarize,
)
from synkhronos._session.diagnostics import (
    ALL_MADE,
    BROKEN,
    LOST,
    MAKE_EQUAL,
    NONE_MADE,
    Outcome,
    first_failure,
    worker_error,
)
from synkhronos._session.ledger import Ledger
from synkhronos._utils import KeyedCache
from synkhronos._utils.interrupts import (
    deferred_interrupts,
    interrupt_behind,
    let_interrupts_pass,
    new_lock,
    take_end,
)
from synkhronos.errors import CLOSED_WITHIN, NodeLost, SessionError, WorkerDied, WorkerRestarted, WorkerTimeout

#: Commands after which an interrupt waits for a rank's step, or copy.
_LONG = (Loop, EndLoop, SaveLoop, TimeFunction, TimeReduction)
_INTERRUPT_SECONDS = 0.7  # time for the ranks to reply after the controller was interrupted
_MAX_RESTARTS = 3  # in a row, without a successful one
_FRAMES = 150  # upper limit of the stack frames that `Dispatcher.issue` needs, including errors and logging

#: Error message for a signal handler or a finalizer that calls this package while a call is running.
BUSY = (
    "this call interrupts another one that the ranks still execute (from a signal handler or a finalizer); set a flag "
    "in the handler and check it after the call, or raise an exception in it and act where that is caught"
)


_n_forks = 0  # number of forks by Python between the process that imported this module and this process


def _note_fork() -> None:
    global _n_forks
    _n_forks += 1


os.register_at_fork(after_in_child=_note_fork)  # cheaper than `os.getpid`, which takes 0.3 µs in each call


class State(enum.Enum):
    """State of a session; a session that is broken or closed never becomes usable again."""

    USABLE = enum.auto()
    BROKEN = enum.auto()  # the clean-up after a command failed
    CLOSED = enum.auto()


_USABLE = State.USABLE


class FailureFlag(Protocol):
    """Flag that is set when a rank has failed in the current command."""

    @property
    def aborted(self) -> bool: ...
    def abort(self) -> None: ...
    def reset(self) -> None: ...


class RankGroup(Protocol):
    """Interface of the group of all ranks: `ProcessGroup` on one node, `MultiNodeGroup` on several.

    Attributes
    ----------
    ahead : list of int
        How far each rank's clock was ahead of the controller's at the start of the session, in nanoseconds.
    is_lost : bool
        Whether a node does not reply, so that this program cannot start another session.
    n_shipped : int
        Bytes of the controller's memory that have been sent to other nodes.
    """

    n_ranks: int
    master_rank: int
    devices: list[str]
    ahead: list[int]
    timeline: Timeline

    @property
    def sync(self) -> FailureFlag: ...
    @property
    def is_lost(self) -> bool: ...
    @property
    def n_shipped(self) -> int: ...
    @property
    def outstanding(self) -> bool: ...
    def send(self, message: bytes, memory: Sequence[Segment] = ()) -> None: ...
    def collect(self) -> list[bytes | None]: ...
    def settle(self, seconds: float | None = None) -> bool: ...
    def dead(self) -> list[int]: ...
    def replace(self, ranks: Sequence[int]) -> None: ...
    def report(self) -> tuple[list[int], list[tuple[int, int, int]]]: ...
    def stop(self, grace: float = 5.0) -> None: ...
    def await_end(self) -> None: ...


class Dispatcher:
    """Sends commands to the workers, executes them on the controller's replica, and collects the results.

    Parameters
    ----------
    group : RankGroup
    replica : Replica
        The controller's replica.
    ledger : Ledger
    timeout : float or None
        Seconds to wait for the answers of the other workers before a dead worker is replaced; ``None``: no limit.
    restore : callable, optional
        ``restore(ranks)`` sends functions, variables and data to new workers, and returns the shared variables that
        have lost rows. Default: workers that die are not replaced, and the session breaks.
    """

    def __init__(
        self,
        group: RankGroup,
        replica: Replica,
        ledger: Ledger,
        timeout: float | None,
        restore: Callable[[tuple[int, ...]], list[Any]] | None,
    ) -> None:
        self.lock = new_lock()
        self.state = State.USABLE
        self._cause = ""  # message: why the session is broken
        self._n_forks = _n_forks
        self._group = group
        self._replica, self._steps = replica, replica.steps
        self._ledger = ledger
        self._timeout = timeout
        self._ahead = group.ahead
        self._restore = restore
        self._encoder = Encoder()
        self._decoders = [Decoder() for _ in range(group.n_ranks)]
        self._decoded: KeyedCache[list[Any]] = KeyedCache()  # results by the replies of all ranks, without failures
        self._is_waiting = False  # whether a command was sent and is not yet complete and cleaned up
        self._restarts = 0  # in a row, without a successful one

    def issue(self, command: Command) -> list[Any]:
        """Have every rank execute a command; return the results in rank order."""
        native.require_frames(_FRAMES)  # raise RecursionError now rather than after the command is sent
        with self.lock, self._group.timeline.call(type(command).__name__):
            self.check_usable()
            if self._group.outstanding:
                self._take_up()
            envelope, memory = self._ledger.envelope(command)
            message = self._encoder.dumps(envelope)
            own_error: Exception | None = None
            if self._steps.is_open:  # an interrupt kept an earlier command from completing its updates
                self.finish_step(None)
            if self._group.sync.aborted:  # an earlier command failed, and an interrupt kept it from resetting this
                self._group.sync.reset()
            take_end()  # of an earlier command
            was_waiting, self._is_waiting = self._is_waiting, True
            self._ledger.n_failures += 1  # until the command has succeeded
            try:
                self._group.send(message, memory)
                if any(envelope.release):
                    self._replica.forget(*envelope.release)
                self._replica.heed(envelope.n_failures)
                try:
                    result = self._replica.execute(command)
                except (WorkerDied, WorkerTimeout):
                    raise
                except Exception as error:
                    let_interrupts_pass(error)
                    result = Failure.of(error, completed=self._replica.completed)
                    own_error = error
                    self._group.sync.abort()
                replies = self._group.collect()
            except BaseException as error:
                self.check_closed(error)
                if self._group.outstanding:
                    self._interrupted(error, command)
                raise
            finally:
                self._is_waiting = was_waiting
            decoded = self._decoded.get(None, replies) if own_error is None else None
            if decoded is not None:
                self._steps.forget()
                self._ledger.delivered()
                self._ledger.n_failures -= 1
                results = decoded.copy()
                results[self._group.master_rank] = result
                return results
            results = self._received(replies)
            results[self._group.master_rank] = result
            failed = first_failure(results, self._group.master_rank, self._ahead)
            if failed is not None:
                outcome = self.finish_step(command)
                self._group.sync.reset()
                cause = own_error if failed == self._group.master_rank else None
                device = self._group.devices[failed]
                raise worker_error(command, self._replica.describe, failed, device, results, cause, outcome)
            assert replies.count(None) <= 1  # other nodes leave replies out only if a rank has failed
            self._steps.forget()
            self._ledger.n_failures -= 1
            results = [self._read(rank, one, isinstance(command, InOrder)) for rank, one in enumerate(results)]
            decoded = results.copy()
            decoded[self._group.master_rank] = None
            if sum(len(reply) for reply in replies if reply is not None) <= MOST_CACHED_BYTES:
                self._decoded.put(None, replies, decoded)
            return results

    def check_closed(self, error: BaseException) -> None:
        """Raise `SessionError` if a call failed because a signal handler closed the session during the call."""
        is_own = isinstance(error, Exception) and not isinstance(error, SessionError)
        if self.state is State.CLOSED and is_own and interrupt_behind(error) is None:
            raise SessionError(CLOSED_WITHIN) from error

    def _read(self, rank: int, result: Any, in_order: bool) -> Any:
        """Return a rank's result, with arrays as views of shared memory."""
        if in_order:
            return [self._read_part(rank, part, one) for part, one in enumerate(result)]
        return self._read_part(rank, 0, result)

    def _read_part(self, rank: int, part: int, result: Any) -> Any:
        return self._replica.read((rank, part), result) if isinstance(result, Arrays) else result

    def _received(self, replies: list[bytes | None]) -> list[Any]:
        results = []
        is_prepared = True
        for decoder, reply in zip(self._decoders, replies):
            result = None if reply is None else decoder.loads(reply)
            is_prepared = is_prepared and not (isinstance(result, Failure) and result.unprepared)
            results.append(result)
        if is_prepared:
            self._ledger.delivered()
        return results

    def _take_up(self) -> None:
        """Clean up after an unfinished command, before another one is sent."""
        if self._is_waiting:  # a signal handler or finalizer made this call during that command
            raise SessionError(BUSY)
        # both the command and its clean-up were interrupted
        self._is_waiting = True
        try:
            self._interrupted(SessionError("interrupted during the clean-up after an interrupt"), None)
        finally:
            self._is_waiting = False
        self.check_usable()

    def _interrupted(self, error: BaseException, command: Command | None) -> None:
        """Clean up after a command that ended early.

        A worker has died or does not reply, or a signal handler has raised an exception (``error``). Restart workers if
        possible; otherwise, unless all ranks settle in time, break the session.
        """
        if self.state is not State.USABLE:  # the signal handler has closed the session
            return
        lost = isinstance(error, (WorkerDied, WorkerTimeout))
        if lost:
            error.args = (f"{error} (in {self._describe(command)})",)
        cause = summarize(error)
        found: list[Outcome] = []
        second: BaseException | None = None
        unreplaced = ""  # why a dead worker could not be replaced
        try:
            self._group.sync.abort()
            if isinstance(error, WorkerDied) and self._restore is not None and not isinstance(error, NodeLost):
                unreplaced = self._restart(error, command, found)
            elif not lost and self._settled(command):
                return
        except WorkerRestarted:
            raise
        except BaseException as another:  # such as a second Ctrl-C
            if not lost and not self._group.outstanding:
                raise
            second = another
            unreplaced = self._cause or summarize(another)  # `_cause` does not repeat how to continue
        if isinstance(error, WorkerDied) and unreplaced:
            error.args = (f"{error}; it could not be replaced: {unreplaced}",)
            cause = summarize(error)
        with deferred_interrupts():
            self.state, self._cause = State.BROKEN, cause
            self._group.stop(grace=0.0)
            outcome = found[0] if found else self.finish_step(command)
        if lost:
            error.args = ("; ".join(filter(None, (str(error), outcome.text, self._remedy()))),)
        log(logging.ERROR, "%s; %s", cause, self._remedy())
        if second is not None and not isinstance(second, Exception):
            raise second

    def _settled(self, command: Command | None) -> bool:
        """Wait shortly for the ranks to abort or finish their command; return whether the session is usable again.

        In a loop, each rank completes its step, which may take as long as the timeout; a second Ctrl-C ends this wait,
        and that of a step with collectives.
        """
        if take_end():
            return False
        if isinstance(command, _LONG) and not self._group.settle(self._timeout):
            return False
        with deferred_interrupts():
            if not self._group.settle(_INTERRUPT_SECONDS) or self._group.dead():
                return False
            self._group.sync.reset()
            outcome = self.finish_step(command)
            self._replica.forget(*self._ledger.sent)  # the interrupt may have come before `issue` did this
            self._received(self._group.collect())
            if isinstance(command, _LONG):  # what follows makes the replicas equal
                return True
            text = f", and {outcome.text}" if outcome.text else ""
            if outcome.updated is None and not text and not keeps_equal(command):
                text = f", but replicas may differ now: {MAKE_EQUAL}"
            log(logging.WARNING, "interrupted; the session is usable%s", text)
        return True

    def _restart(self, error: WorkerDied, command: Command | None, found: list[Outcome]) -> str:
        """Replace dead workers and raise `WorkerRestarted`, or return the reason why this is not possible.

        The result of `finish_step` is appended to ``found``.
        """
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            return f"{_MAX_RESTARTS} replacements in a row died before they were ready"
        if not self._group.settle(self._timeout):
            return f"other workers did not answer within {self._timeout} seconds"
        with deferred_interrupts():
            found.append(self.finish_step(command))
        ranks = tuple(self._group.dead())
        with deferred_interrupts():
            inherited = self._replica.segments.lent()  # the new workers keep this frame, and so these arrays
            self._replica.heap.share(self._group.replace, ranks)
            del inherited
        assert self._restore is not None
        try:
            lost = self._restore(ranks)
        except WorkerRestarted as another:
            ranks += another.ranks
            lost = another.lost
        self._restarts = 0
        log(logging.WARNING, "%s; it was replaced", error)
        names = ", ".join(f'"{var}"' for var in lost)
        state = (
            f", but its rows of {names} are lost; scatter or set them again"
            if lost
            else ", and the next call will work"
        )
        (outcome,) = found
        if (outcome.updated is False or keeps_equal(command)) and not outcome.text:
            state += ". This call was not completed."
        elif outcome.text:
            state += f". This call was not completed, but {outcome.text}."
        else:
            state += (
                f". This call was not completed, and ranks may differ: {MAKE_EQUAL}, except of scattered variables."
            )
        raise WorkerRestarted(f"{error}; it was replaced{state}", ranks, lost, updated=outcome.updated) from error

    def finish_step(self, command: Command | None = None) -> Outcome:
        """Complete the updates of a call that ended early, if a rank has begun to make them."""
        try:
            is_made = self._replica.finish_step()
        except TornUpdate as error:
            text = f"the values of {error} are incomplete, and must be set again"
            log(logging.ERROR, "%s: %s", text, error.__cause__)
            return Outcome(None, text)
        if isinstance(command, Call) and command.step is not None:
            return ALL_MADE if is_made else NONE_MADE
        return Outcome(None if command is None or self._replica.changes_variables(command) else False, "")

    def complete_step(self) -> None:
        """Complete the updates of the last call, if an interrupt has kept its end from doing so."""
        if self._steps.is_open and not self._group.outstanding:
            self.finish_step()

    def _describe(self, command: Command | None) -> str:
        return self._replica.describe(command) if isinstance(command, InOrder) else type(command).__name__

    def _remedy(self) -> str:
        """Return the message that says how to continue after the session is broken."""
        return LOST if self._group.is_lost else BROKEN

    def check_usable(self) -> None:
        """Raise `SessionError` if this session cannot execute commands."""
        if self.state is _USABLE and _n_forks == self._n_forks:  # members of an `Enum` are slow to find
            return
        if self.state is State.CLOSED:  # by another thread, while this one waited for the lock
            raise SessionError("the session was closed")
        if self.state is State.BROKEN:
            raise SessionError(f"{self._remedy()} (the cause: {self._cause})")
        raise SessionError("this process was forked from the controller; call synkhronos in the controller only")
