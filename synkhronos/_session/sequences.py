"""`sequence`: calls and collectives that go to the ranks as one message, at the end of a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from synkhronos._session.lifecycle import current
from synkhronos._session.submission import Recorder
from synkhronos.errors import SessionError

__all__ = ["sequence"]


@contextlib.contextmanager
def sequence() -> Iterator[None]:
    """Send calls of functions and collectives as one message, at the end of a ``with`` block.

    In the block they are checked and prepared, and NumPy inputs are copied; a call returns a `Future`. At its end the
    ranks carry out one part after the other, each when all ranks have completed the one before, and answer once.

    What acts on the master at once (`Data` that is written to, a variable's own ``set_value`` and ``get_value``) comes
    before all that the block records. What needs an answer of the ranks (reading a variable, `all_gather`, `broadcast`
    of what the master holds) can be the first in the block, or stand outside. If the block is left by an exception,
    nothing of it is sent. The calls of other threads are not recorded.

    Raises
    ------
    SessionError
        Without a session, or in another sequence.
    WorkerError
        At the end, if a rank fails: the message tells in which part, and which are complete on all ranks. The others
        are not made up for.

    Examples
    --------
    >>> x, total = T.dvector("x"), theano.shared(0.0)
    >>> with synk.session(2):
    ...     add = synk.function([x], x.mean(), updates=[(total, total + x.sum())])
    ...     with synk.sequence():
    ...         mean = add([1, 2, 6])
    ...         synk.all_reduce(total, op="sum")
    ...     print(mean.result(), total.get_value())
    3.0 9.0
    """
    session = current("sequence")
    sequencer = session.sequencer
    if sequencer.recording is not None:
        raise SessionError("synkhronos.sequence: this is in the block of a sequence already, and they do not nest")
    session.check_usable()
    with sequencer.one_at_a_time:
        recorder = Recorder()
        try:
            sequencer.recorder = recorder
            try:
                yield
            except BaseException as error:
                recorder.drop(error)
                raise
            with session.lock, session.timeline.call("sequence"):  # from here on no handler of a signal can call
                sequencer.recorder = None
                recorder.send(session)
        finally:
            sequencer.recorder = None
