"""`sequence`: send calls and collectives of a ``with`` block to the ranks in one message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from synkhronos._session.lifecycle import current
from synkhronos._session.submission import Recorder
from synkhronos.errors import SessionError


@contextlib.contextmanager
def sequence() -> Iterator[None]:
    """Record the calls and collectives of a ``with`` block, and send them to the ranks in one message at its end.

    In the block each part is checked and prepared, NumPy inputs are copied into shared memory, and a call returns a
    `Future`. At the end of the block the ranks execute one part after the other, with a barrier in between, and reply
    once.

    Anything that acts on the controller at once (writes to `Data`, a variable's own ``set_value`` and ``get_value``)
    happens before all recorded parts. Anything that needs a reply of the ranks (reading a variable, `all_gather`,
    `broadcast` of the controller's values) must be the first part of the block, or stand outside. If the block is left
    by an exception, nothing of it is sent. Calls of other threads are not recorded.

    Yields
    ------
    None

    Raises
    ------
    SessionError
        Without a session, or in another sequence.
    WorkerError
        At the end, if a rank fails. The message names the part, and the parts that are complete on all ranks; the
        remaining parts are not executed.

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
        raise SessionError("synkhronos.sequence: another sequence is open, and they do not nest; close that one first")
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
            with session.lock, session.timeline.call("sequence"):  # signal handlers cannot call from here on
                sequencer.recorder = None
                recorder.send(session)
        finally:
            sequencer.recorder = None
