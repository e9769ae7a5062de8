"""Profiles of all ranks: times by category as a table, and trace events for Perfetto.

The table has the form of the tables in the paper on Synkhronos (arXiv:1710.04162).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

from synkhronos._backends import TITLE
from synkhronos._processes import CATEGORIES, Notes, convert_clock, spans
from synkhronos._rank import Record
from synkhronos._session.state import Session
from synkhronos._utils.display import html_table, public_names, text_table
from synkhronos.errors import SessionError, SynkhronosError

#: Number of phase changes that each rank keeps for a trace, of 16 bytes each; the oldest are overwritten.
_ROOM = 1_000_000

_NOTHING = "no times yet"

_ITEMS = dict(
    zip(
        CATEGORIES,
        (f"{TITLE} Function", "Shuffle", "Straggler Effect", "Collectives", "Transfers", "Control", "Outside of Calls"),
    )
)


class Profile:
    """Times of each rank by category, in seconds, as `profile` and `trace` return them.

    ``str()`` returns a table.

    Attributes
    ----------
    seconds : dict
        ``seconds[rank][category]``, with the categories ``"function"`` (compiled functions), ``"shuffle"`` (copying the
        rows of an index list), ``"straggling"`` (waiting for the slowest rank), ``"collectives"``, ``"transfers"``
        (copying inputs and results), ``"control"`` (the rest of a call) and ``"outside"`` (outside of calls). Empty
        until the block ends. Then it has every rank, or only the controller if the session broke within the block.
    total : dict
        ``total[category]``: the sum over the ranks.
    elapsed : dict
        ``elapsed[rank]``: the measured time, which is the sum of the rank's categories.
    hidden, exposed : dict
        On several nodes, for the rank that leads each node: seconds of exchanges of arrays with other nodes while the
        rank computed, and while it waited for them. Empty on one node. The exposed seconds belong to the categories
        ``"collectives"`` and ``"straggling"``, too.
    serial : dict or None
        The times of the serial program by category, as they were passed; ``"total"`` is the total time.
    sent : int
        Bytes of inputs, and of values for shared variables, that were sent to other nodes.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], x.mean())
    ...     with synk.profile() as times:
    ...         mean = f([1, 2, 6])
    >>> sorted(times.seconds), sorted(times.total)[:3]
    ([0, 1], ['collectives', 'control', 'function'])
    """

    def __init__(self, serial: Serial | None = None) -> None:
        self.serial = check_serial(serial)
        self.seconds: dict[int, dict[str, float]] = {}
        self.elapsed: dict[int, float] = {}
        self.hidden: dict[int, float] = {}
        self.exposed: dict[int, float] = {}
        self.sent = 0
        self._sent_before = 0
        self._notes: dict[int, Notes] = {}
        self._devices: list[str] = []
        self._ahead: list[list[int]] = []  # for a trace: how far each clock is ahead, at the start and at the end

    @property
    def total(self) -> dict[str, float]:
        return {name: sum(one[name] for one in self.seconds.values()) for name in CATEGORIES if self.seconds}

    def __repr__(self) -> str:
        return f"<synkhronos.Profile of {len(self.seconds)} ranks>"

    def __dir__(self) -> list[str]:
        return public_names(self)

    def __str__(self) -> str:
        return text_table(self._lines()) if self.seconds else _NOTHING

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return html_table(self._lines()) if self.seconds else f"<p>{_NOTHING}</p>"

    def _lines(self) -> list[list[str]]:
        """Return the rows of the table, each a list of cells."""
        n_ranks = len(self.seconds)
        mean = {"total": sum(self.elapsed.values()) / n_ranks}
        mean.update((name, seconds / n_ranks) for name, seconds in self.total.items())
        header = ["Time (s)", f"Synk-{len(self._devices)}", *(f"rank {rank}" for rank in self.seconds)]
        if self.serial is not None:
            header[1:1], header[3:3] = ["Serial"], ["Scaling"]
        lines = [header]
        for name, item in {"total": "Total", **_ITEMS}.items():
            of_ranks = [self.elapsed[rank] if name == "total" else one[name] for rank, one in self.seconds.items()]
            line = [item, *(f"{seconds:.3f}" for seconds in (mean[name], *of_ranks))]
            if self.serial is not None:
                serial = self.serial.get(name)
                scaling = "-" if not serial or not mean[name] else f"{serial / mean[name]:.1f}"
                line[1:1], line[3:3] = ["-" if serial is None else f"{serial:.3f}"], [scaling]
            lines.append(line)
        for item, of_leaders in (("Exchange, Hidden", self.hidden), ("Exchange, Exposed", self.exposed)):
            if of_leaders:
                mean_of_leaders = sum(of_leaders.values()) / len(of_leaders)
                cells = [f"{of_leaders[rank]:.3f}" if rank in of_leaders else "" for rank in self.seconds]
                lines.append([item, f"{mean_of_leaders:.3f}", *cells])
                if self.serial is not None:
                    lines[-1][1:1], lines[-1][3:3] = ["-"], ["-"]
        return lines

    def _take(self, notes: dict[int, Notes], devices: list[str]) -> None:
        self._notes, self._devices = notes, devices
        for rank, one in notes.items():
            self.seconds[rank] = {name: total / 1e9 for name, total in zip(CATEGORIES, one.totals)}
            self.elapsed[rank] = (one.stop - one.start) / 1e9
            if one.hidden or one.exposed:
                self.hidden[rank], self.exposed[rank] = one.hidden / 1e9, one.exposed / 1e9


#: Times of a serial program: its profile, or seconds by category and ``"total"``.
Serial = Union[Profile, Mapping[str, float]]


def check_serial(serial: Any) -> dict[str, float] | None:
    """Validate the times of a serial program; return seconds by category, or ``None`` for ``None``."""
    if serial is None:
        return None
    if isinstance(serial, Profile):
        if len(serial.seconds) != 1:
            raise ValueError(f"serial: got {serial!r}; expected the profile of one rank")
        return {**serial.total, "total": sum(serial.elapsed.values())}
    if not isinstance(serial, Mapping):
        raise TypeError(f"serial is {serial!r}; expected a Profile, or a dict of seconds by category")
    known = {"total", *CATEGORIES}
    for name, seconds in serial.items():
        if name not in known:
            raise ValueError(f"serial has the category {name!r}; expected some of {', '.join(sorted(known))}")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ValueError(f"serial[{name!r}] is {seconds!r}; expected a number of seconds")
    return {name: float(seconds) for name, seconds in serial.items()}


def begin(session: Session, profile: Profile, spans: bool = False) -> None:
    """Have every rank measure its times from now on; with ``spans``, also record each change of phase for a trace."""
    with session.lock:
        if session.profile is not None:
            raise SessionError("this session is already profiled; end that profile or trace first")
        if spans:
            profile._ahead = [session.report()[0]]
        session.run(Record(True, _ROOM if spans else 0))
        session.profile = profile
        profile._sent_before = session.n_shipped


def finish(session: Session) -> None:
    """End the current profile, if there is one, and fill it; only with the controller's times if the session broke."""
    with session.lock:
        profile, session.profile = session.profile, None
        if profile is None:
            return
        try:
            notes = dict(enumerate(session.run(Record(False))))
            if profile._ahead:
                profile._ahead.append(session.report()[0])
        except SynkhronosError:
            notes = {session.master_rank: session.timeline.stop()}
        profile._take(notes, session.devices)
        profile.sent = session.n_shipped - profile._sent_before


def events(profile: Profile) -> dict[str, Any]:
    """Convert a profile to the JSON object format of Chrome's trace events, with times on the controller's clock."""
    found: list[dict[str, Any]] = []
    ahead = list(zip(profile._ahead[0], profile._ahead[-1]))
    every = {rank: convert_clock(notes, *ahead[rank]) for rank, notes in profile._notes.items()}
    zero = min((notes.start for notes in every.values()), default=0)
    for rank, notes in every.items():
        place = {"pid": rank, "tid": rank}
        labels = {
            "process_name": {"name": f"rank {rank} ({profile._devices[rank]})"},
            "process_labels": {"labels": f"pid {notes.pid}"},
            "process_sort_index": {"sort_index": rank},
            "thread_name": {"name": f"rank {rank}"},
        }
        found += [{"ph": "M", "name": name, "args": args, **place} for name, args in labels.items()]
        found += [
            {
                "ph": "X",
                "name": span.name,
                "cat": "command" if span.category is None else "phase",
                "ts": (span.start - zero) / 1e3,
                "dur": (span.stop - span.start) / 1e3,
                **place,
            }
            for span in spans(notes)
        ]
        found += [
            {"ph": ph, "id": f"{rank}.{i}", "name": "exchange", "cat": "exchange", "ts": (when - zero) / 1e3, **place}
            for i, piece in enumerate(notes.exchanges.tolist())
            for ph, when in zip("be", piece)
        ]
    lost = {f"rank {rank}": notes.lost for rank, notes in profile._notes.items() if notes.lost}
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"changes lost": lost}}
