"""Profiles and traces: sums of times, waits for the slowest rank, and trace files."""

import json
import os
import re
import types

import numpy as np
import pytest
from backend import T, theano
from fault_ops import KILL, NOTHING, RAISE, SLEEP, Fault
from multinode_sessions import one_machine

import synkhronos as synk
from synkhronos._backends import TITLE
from synkhronos._processes import timeline as _timeline
from synkhronos._processes.timeline import CATEGORIES, CONTROL, FUNCTION, OUTSIDE, STRAGGLING, Timeline, spans
from synkhronos._session.profiles import check_serial

_built = {}


def make():
    """Return a function, a variable that orders a fault on a rank, and a variable that the function updates."""
    if not _built:
        x = T.dmatrix("x")
        fault, seen = theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.zeros(2), "seen")
        f = synk.function([x], [(Fault()(x, fault).sum(), "sum")], updates=[(seen, seen + x.sum())], name="train")
        _built.update(f=f, fault=fault, seen=seen)
    synk.distribute()
    synk.broadcast(_built["fault"], np.int64(NOTHING))
    return _built["f"], _built["fault"], _built["seen"]


ROWS = np.ones((12, 3))


def work(f, seen):
    f(ROWS, batch=np.arange(12)[::-1])
    f(ROWS, num_slices=2)
    synk.all_reduce(seen)
    synk.gather(seen)
    synk.get_value(0, seen)


def check(profile, ranks):
    """Check that the categories of each rank add up to its time, and the ranks to the total."""
    assert list(profile.seconds) == list(ranks)
    for rank, seconds in profile.seconds.items():
        assert tuple(seconds) == CATEGORIES
        assert min(seconds.values()) >= 0
        assert sum(seconds.values()) == pytest.approx(profile.elapsed[rank], rel=1e-9)
    for name in CATEGORIES:
        assert profile.total[name] == pytest.approx(sum(one[name] for one in profile.seconds.values()))


# -- one rank's timeline


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that stands still until a test sets it, and return it."""
    clock = types.SimpleNamespace(now=1000)
    monkeypatch.setattr(_timeline, "monotonic_ns", lambda: clock.now)
    return clock


def test_a_wait_is_straggling_until_the_slowest_rank_had_finished(clock):
    finished = np.zeros((2, 3), np.int64)
    timeline = Timeline(finished, 1)
    timeline.start(100)
    timeline.begin()
    timeline.name("a command")
    clock.now = 1010
    assert timeline.switch(FUNCTION) == CONTROL
    clock.now = 1100
    timeline.end()
    timeline.rest(7)
    assert finished[1].tolist() == [0, 1100, 0]
    finished[1] = [1500, 1100, 1300]
    clock.now = 2000
    timeline.resume(7, OUTSIDE)
    timeline.begin()
    clock.now = 2001
    notes = timeline.stop()
    assert dict(zip(CATEGORIES, notes.totals)) == {
        "function": 90, "shuffle": 0, "straggling": 400, "collectives": 0, "transfers": 0, "control": 11, "outside": 500
    }  # fmt: skip
    assert (notes.start, notes.stop, notes.lost) == (1000, 2001, 0)
    assert [tuple(span) for span in spans(notes)] == [
        ("a command", None, 1000, 1100),
        ("control", CONTROL, 1000, 1010),
        ("function", FUNCTION, 1010, 1100),
        ("straggling", STRAGGLING, 1100, 1500),
        ("control", CONTROL, 2000, 2001),
    ]


@pytest.mark.parametrize("others", [0, 10**18])
def test_straggling_is_at_most_the_wait(clock, others):
    finished = np.full((2, 2), others, np.int64)
    timeline = Timeline(finished, 0)
    timeline.start(0)
    clock.now = 1100
    timeline.rest(2)
    clock.now = 1250
    timeline.resume(2, CONTROL)
    clock.now = 1300
    notes = timeline.stop()
    assert notes.totals[STRAGGLING] == (150 if others else 0)
    assert sum(notes.totals) == 300
    assert len(notes.marks) == 0


def test_a_timeline_that_is_off_records_nothing():
    finished = np.zeros((2, 1), np.int64)
    timeline = Timeline(finished, 0)
    with timeline.call("a call"):
        assert timeline.switch(FUNCTION) == timeline.switch(_timeline.COLLECTIVES) == OUTSIDE
        timeline.rest(1)
        timeline.resume(1, CONTROL)
    assert not finished.any()
    timeline.start(0)
    notes = timeline.stop()
    assert sum(notes.totals) == notes.totals[CONTROL] == notes.stop - notes.start


def test_new_changes_replace_the_oldest_ones(clock):
    timeline = Timeline(np.zeros((2, 1), np.int64), 0)
    timeline.start(6)
    for number in range(20):
        with timeline.call(f"call {number}"):
            clock.now += 10
    notes = timeline.stop()
    assert notes.lost > 0
    assert len(notes.marks) == 12
    times = notes.marks[1::2].tolist()
    assert times == sorted(times)
    assert times[-1] == notes.stop
    assert [span.name for span in spans(notes) if span.category is None] == ["call 19"]
    assert sum(notes.totals) == 200


def test_commands_nest_and_phases_end_with_them(clock):
    timeline = Timeline(np.zeros((2, 1), np.int64), 0)
    timeline.start(100)
    timeline.switch(OUTSIDE)
    with timeline.call("outer"):
        clock.now += 10
        with timeline.call("inner"):
            clock.now += 10
        clock.now += 10
    assert timeline.switch(OUTSIDE) == OUTSIDE
    found = [(span.name, span.start - 1000, span.stop - 1000) for span in spans(timeline.stop())]
    assert found == [
        ("outer", 0, 30), ("control", 0, 10), ("inner", 10, 20), ("control", 10, 20), ("control", 20, 30)
    ]  # fmt: skip


# -- profiles


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_categories_make_up_the_time(session):
    f, _, seen = make()
    with synk.profile() as profile:
        assert profile.seconds == profile.total == profile.elapsed == {}
        assert str(profile) == "no times yet"
        assert profile._repr_html_() == "<p>no times yet</p>"
        work(f, seen)
    check(profile, range(session))
    for seconds in profile.seconds.values():
        assert all(seconds[name] > 0 for name in ("function", "shuffle", "collectives", "control"))
    assert f(ROWS)[0] == 36  # the session stays usable


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_keeps_the_others_waiting(three, slow):
    f, fault, _ = make()
    synk.set_value(slow, fault, np.int64(SLEEP))
    with synk.profile() as profile:
        f(ROWS)
    check(profile, range(3))
    assert profile.seconds[slow]["function"] >= 1.0
    for rank in {0, 1, 2} - {slow}:
        assert profile.seconds[rank]["straggling"] > 0.5
        assert profile.seconds[rank]["function"] < profile.seconds[slow]["function"]


def test_a_rank_that_fails(two):
    f, fault, seen = make()
    synk.set_value(1, fault, np.int64(RAISE))
    with synk.profile() as profile:
        with pytest.raises(synk.WorkerError):
            f(ROWS)
        synk.broadcast(fault, np.int64(NOTHING))
        work(f, seen)
    check(profile, range(2))
    synk.set_value(1, fault, np.int64(RAISE))
    with pytest.raises(synk.WorkerError), synk.profile() as profile:
        f(ROWS)
    check(profile, range(2))
    make()


@one_machine("a leader that dies ends the job")
def test_a_rank_that_dies(two, tmp_path):
    f, fault, _ = make()
    synk.set_value(1, fault, np.int64(KILL))
    with pytest.raises(synk.WorkerDied), synk.trace(tmp_path / "trace.json") as profile:
        f(ROWS)
    check(profile, [0])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0}
    assert "train" in {event["name"] for event in events}
    with pytest.raises(synk.SessionError), synk.profile():
        pass


@one_machine("a leader that dies ends the job")
def test_a_rank_that_is_replaced(synchronize):
    synchronize(2, restart_workers=True)
    f, fault, seen = make()
    with synk.profile() as profile:
        synk.set_value(1, fault, np.int64(KILL))
        with pytest.raises(synk.WorkerRestarted):
            f(ROWS)
        synk.broadcast([fault, seen])
        work(f, seen)
    check(profile, range(2))
    assert profile.elapsed[1] < profile.elapsed[0]  # it started later
    assert profile.seconds[1]["function"] > 0


def test_out_of_order(synchronize, no_session, tmp_path):
    for measuring in (synk.profile(), synk.trace(tmp_path / "a")):
        with pytest.raises(synk.SessionError, match=r"call synkhronos.fork\(\) first"), measuring:
            pass
    assert not os.listdir(tmp_path)
    synchronize(2)
    with synk.profile() as profile:
        for measuring in (synk.profile(), synk.trace(tmp_path / "a")):
            with pytest.raises(synk.SessionError, match="already"), measuring:
                pass
        synk.distribute()
    check(profile, range(2))
    with synk.profile() as profile:
        synk.close()
        check(profile, range(2))
        n_ranks = synk.fork(1)
    check(profile, range(2))
    with pytest.raises(FileNotFoundError), synk.trace(tmp_path / "none" / "a"):
        pass
    with synk.profile() as profile:
        pass
    check(profile, range(n_ranks))


# -- the table


def test_the_table(synchronize):
    synchronize(1)
    f, _, seen = make()
    with synk.profile() as serial:
        work(f, seen)
    synchronize(2)
    f, _, seen = make()
    with synk.profile(serial) as profile:
        work(f, seen)
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in str(profile).splitlines()]
    assert rows[0] == ["Time (s)", "Serial", "Synk-2", "Scaling", "rank 0", "rank 1"]
    html = profile._repr_html_()  # the same table
    assert re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", html) == [cell for row in rows for cell in row]
    assert html.count("<tr>") == len(rows)
    items = [f"{TITLE} Function", "Shuffle", "Straggler Effect", "Collectives", "Transfers", "Control"]
    assert [row[0] for row in rows[1:]] == ["Total", *items, "Outside of Calls"]
    mean = sum(profile.elapsed.values()) / 2
    total = sum(serial.elapsed.values())
    assert rows[1][1:4] == [f"{total:.3f}", f"{mean:.3f}", f"{total / mean:.1f}"]
    for row, name in zip(rows[2:], CATEGORIES):
        assert row[1] == f"{serial.total[name]:.3f}"
        assert row[2] == f"{profile.total[name] / 2:.3f}"
        assert row[4:] == [f"{profile.seconds[rank][name]:.3f}" for rank in range(2)]
    with synk.profile({"total": 395.1, "function": 382.5}) as profile:
        f(ROWS)
    rows = [line.split() for line in str(profile).splitlines()]
    assert rows[1][:2] == ["Total", "395.100"]
    assert rows[2][:3] == [TITLE, "Function", "382.500"]
    assert rows[3][1] == "-"
    with synk.profile() as profile:
        f(ROWS)
    assert str(profile).splitlines()[0].split() == ["Time", "(s)", "Synk-2", "rank", "0", "rank", "1"]
    assert len({len(line) for line in str(profile).splitlines()}) == 1
    assert repr(profile) == "<synkhronos.Profile of 2 ranks>"


WRONG = [{"theano": 1.0}, {"total": -1.0}, {"total": True}, {"function": "1"}, synk.Profile()]


@pytest.mark.parametrize(("serial", "error"), [(3.0, TypeError), *((one, ValueError) for one in WRONG)])
def test_invalid_serial_times_are_refused(serial, error):
    with pytest.raises(error, match="serial"):
        check_serial(serial)


def test_a_profile_from_fork_to_close(no_session, capsys):
    with pytest.raises(TypeError, match="serial"):
        synk.fork(2, profile=3)
    for given, column in ((True, "Synk-2"), ({"total": 5}, "Serial")):
        synk.fork(2, profile=given)
        f, _, seen = make()
        work(f, seen)
        with pytest.raises(synk.SessionError, match="already"), synk.profile():
            pass
        synk.close()
        table = capsys.readouterr().err.splitlines()
        assert column in table[0]
        assert len(table) == 2 + len(CATEGORIES)
        assert float(table[1].split()[-1]) > 0
    synk.fork(1)
    synk.close()
    assert capsys.readouterr().err == ""


# -- traces


def test_a_trace_that_cannot_begin_leaves_an_existing_file(two, tmp_path):
    path = tmp_path / "trace.json"
    with synk.trace(path):
        pass
    before = path.read_bytes()
    with synk.profile(), pytest.raises(synk.SessionError, match="already profiled"), synk.trace(path):
        pass
    assert path.read_bytes() == before
    with synk.trace(path):
        pass
    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.numba
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_trace(session, tmp_path):
    f, _, seen = make()
    path = tmp_path / "trace.json"
    with synk.trace(path) as profile:
        work(f, seen)
    check(profile, range(session))
    written = json.loads(path.read_text())
    assert written["otherData"] == {"changes lost": {}}
    of_ranks = [events_of_rank(written["traceEvents"], rank) for rank in range(session)]
    assert sum(map(len, of_ranks)) == sum(event["ph"] == "X" for event in written["traceEvents"])
    for rank, events in enumerate(of_ranks):
        check_nesting(events)
        phases = [event for event in events if event["cat"] == "phase"]
        for name in set(CATEGORIES) - {"outside"}:
            seconds = sum(event["dur"] for event in phases if event["name"] == name) / 1e6
            assert seconds == pytest.approx(profile.seconds[rank][name], abs=1e-6)
    commands = [[e for e in events if e["cat"] == "command" and e["name"][0].isupper()] for events in of_ranks]
    names = [event["name"] for event in commands[0]]
    assert names == [event["name"] for event in commands[-1]]
    assert sum(name.startswith("Call train") for name in names) == 2
    assert {"AllReduce", "Get"} <= set(names)
    for together in zip(*commands):  # one clock: each command overlaps the controller's
        first = together[0]
        for event in together:
            assert event["ts"] < first["ts"] + first["dur"]
            assert first["ts"] < event["ts"] + event["dur"]
    calls = [event["name"] for event in of_ranks[0] if event["cat"] == "command" and event["name"][0].islower()]
    assert calls == ["train", "train", "all_reduce", "gather", "get_value"]


def events_of_rank(events, rank):
    """Return the complete events of a rank, and check that their fields fit Chrome's format."""
    labels = {event["name"]: event["args"] for event in events if event["ph"] == "M" and event["pid"] == rank}
    assert set(labels) == {"process_name", "process_labels", "process_sort_index", "thread_name"}
    assert re.fullmatch(rf"rank {rank} \((node \d \(.*\): )?cpu\)", labels["process_name"]["name"])
    found = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
    for event in found:
        assert set(event) == {"ph", "name", "cat", "ts", "dur", "pid", "tid"}
        assert event["cat"] in ("command", "phase")
        assert event["tid"] == rank
        assert min(event["ts"], event["dur"]) >= 0
        assert event["cat"] == "command" or event["name"] in CATEGORIES
    return found


def check_nesting(events):
    """Check that each event lies within the commands that it overlaps, and that phases do not overlap."""
    tolerance = 1e-3 / 2  # microseconds: half of the clock's resolution of 1 ns
    open_until = []
    for event in events:  # in the order of their starts, longer ones first
        start, stop = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1][0] <= start + tolerance:
            open_until.pop()
        if open_until:
            assert stop <= open_until[-1][0] + tolerance
            assert open_until[-1][1] == "command"
        open_until.append((stop, event["cat"]))
