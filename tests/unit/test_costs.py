"""Cost model of plans, compared with values that were computed by hand, and the file of measured costs."""

import fcntl
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from scripts import ROOT

from synkhronos import __version__
from synkhronos._api.choice import preferred
from synkhronos._backends import TITLE
from synkhronos._costs import (
    Curve,
    Estimate,
    Exchange,
    Grid,
    Machine,
    Product,
    Rates,
    Store,
    Work,
    along_rows,
    choose,
    describe_machine,
    most_rows_by_slices,
    path_of_store,
    seconds_by_rows,
    seconds_on_controller,
    typical,
)
from synkhronos._utils.resources import busy

CURVE = Curve((10.0, 1000.0), (1.0, 4.0))
GRID = Grid((1, 4), (2, 8), (2, 8), (1.0, 4.0, 2.0, 8.0, 4.0, 16.0, 8.0, 32.0))


def machine(together=1.0, command=1000.0, meeting=100.0):
    """Return constants with simple values; all ranks together compute ``together`` times as slowly as one."""
    alone = Rates({"float32": GRID}, CURVE, 0.5, 0.25)
    rates = Rates({"float32": GRID._replace(seconds=tuple(together * one for one in GRID.seconds))}, CURVE, 0.5, 0.25)
    return Machine(alone, rates, 7.0, command, meeting, Curve((1, 2), (3, 6)), Curve((1, 2), (5, 10)), CURVE)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (1, 1.0),  # below the least size
        (10, 1.0),
        (100, 2.0),  # the geometric mean of two sizes takes that of their seconds
        (1000, 4.0),
        (3000, 12.0),  # in proportion above the largest size
    ],
)
def test_curves(size, seconds):
    assert CURVE.at(size) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("lengths", "seconds"),
    [
        ((1, 2, 2), 1.0),
        ((1, 2, 8), 4.0),
        ((1, 8, 2), 2.0),
        ((4, 8, 8), 32.0),
        ((2, 2, 2), 2.0),  # half-way along one axis: the square root of 1 * 4
        ((2, 4, 4), math.sqrt(1.0 * 32.0)),  # the middle of all axes
        ((8, 8, 8), 64.0),  # twice the longest
        ((8, 16, 24), 32.0 * 2 * 2 * 3),
        ((1, 1, 1), 1.0),  # shorter than measured
    ],
)
def test_products(lengths, seconds):
    assert GRID.at(Product(*lengths, "float32")) == pytest.approx(seconds)


def test_seconds_of_the_plans():
    products = Product(4, 8, 8, "float32", times=2), Product(1, 2, 2, "float32")
    work = Work(products, (100.0, 1000.0), (1000.0,), 4.0, 8)
    computed = 2 * 32.0 + 1.0 + 2.0 + 4.0 + 4 * 0.5 + 8 * 0.25
    assert seconds_on_controller(work, machine(), 1) == pytest.approx(7.0 + computed + 4.0)
    assert seconds_on_controller(work, machine(), 10) == pytest.approx(7.0 + computed + 2.0)
    exchange = Exchange(staged=2.0, n_meetings=3, reduced=1.0, gathered=4.0)
    together = 3 * (2 * 32.0 + 1.0) + 2.0 + 4.0 + 4.0 + 4 * 0.5 + 8 * 0.25
    expected = 1000.0 + together + 3 * 100.0 + 6.0 + 5.0 + 12.0
    assert seconds_by_rows(work, exchange, machine(together=3.0), 2) == pytest.approx(expected)
    assert seconds_by_rows(Work(), Exchange(), machine(), 2) == 1000.0


@pytest.mark.parametrize(("m", "n", "rows"), [(300, 300, 50), (9216, 1024, 307), (1, 10**6, 0)])
def test_rows_of_products_in_slices(m, n, rows):
    assert most_rows_by_slices(m, n) == rows


@pytest.mark.parametrize(
    ("points", "n_rows", "seconds"),
    [
        ([[16, 2.0], [1024, 65.0]], 16, 2.0),
        ([[16, 2.0], [1024, 65.0]], 520, 33.5),
        ([[16, 2.0], [1024, 65.0]], 2032, 128.0),
        ([[16, 2.0], [1024, 128.0]], 1, 1.0),  # the line is at 0.125 here; half of the smallest time is more
        ([[1, 3.0]], 7, 3.0),
        ([[4, 1.0], [32, 8.0], [1024, 10.0]], 18, 4.5),
        ([[4, 1.0], [32, 8.0], [1024, 10.0]], 528, 9.0),
        ([[4, 1.0], [32, 8.0], [1024, 10.0]], 2016, 12.0),
        ([[4, 1.0], [32, 8.0], [1024, 10.0]], 2, 0.5),
        ([[4, 3.0], [32, 8.0], [1024, 2.0]], 4096, 2.0),
        ([], 4, math.inf),
    ],
)
def test_seconds_along_rows(points, n_rows, seconds):
    assert along_rows(points, n_rows) == pytest.approx(seconds)


def chosen(calls, lead=None, stale=False):
    """Return the plans that are chosen for calls, as a string of r and c."""
    plans = ""
    for estimate in calls:
        alone, lead = choose(lead, stale, estimate)
        plans += "c" if alone else "r"
        stale = (stale or estimate.updates) if alone else False
    return plans


def of(rows, controller, broadcast=10.0, updates=True):
    return Estimate(rows, controller, broadcast, updates, "model")


def test_the_faster_plan_is_chosen():
    assert chosen([of(2.0, 1.0)] * 5) == "ccccc"
    assert chosen([of(1.0, 2.0)] * 5) == "rrrrr"
    assert chosen([of(1.0, math.inf)] * 5) == "rrrrr"


def test_a_broadcast_is_paid_once_calls_have_lost_half_of_it_on_each_side():
    """After calls on the controller, five calls of 2 s that would take 1 s by rows lose 5 s, and so do five more."""
    assert chosen([*[of(2.0, 1.0)] * 3, *[of(1.0, 2.0)] * 12]) == "ccc" + "c" * 9 + "rrr"
    assert chosen([*[of(2.0, 1.0)] * 3, *[of(1.0, 12.0)] * 2]) == "cccrr"


def test_a_call_whose_plan_must_be_made_counts_once():
    stale = SimpleNamespace(lead=1.0, keys={7})
    session = SimpleNamespace(stale=stale)
    assert preferred(session, of(1.0, 2.0), ["rows", None]) is None
    assert stale.lead == 1.0
    assert preferred(session, of(1.0, 2.0), ["rows", "controller"]) == "controller"
    assert stale.lead == 2.0


def test_alternating_calls_keep_their_plan():
    assert chosen([of(2.0, 1.0), of(1.0, 2.0)] * 10) == "c" * 20


def test_functions_without_updates_have_no_broadcast_to_pay():
    """Validation by rows is faster, and nothing is stale: it does not wait for losses."""
    assert chosen([of(1.0, 2.0, updates=False)]) == "r"
    assert chosen([of(1.0, 2.0, updates=False)], lead=-5.0) == "r"
    assert chosen([of(1.0, 2.0, updates=False)], lead=-5.0, stale=True) == "c"
    assert chosen([of(1.0, 2.0, broadcast=0.0)] * 2, lead=-5.0, stale=True) == "rr"


@pytest.mark.parametrize("seed", range(20))
def test_choices_take_at_most_three_times_as_long_as_the_best(seed):
    """The best sequence of plans is computed by dynamic programming, with the costs of all calls known."""
    import random

    rng = random.Random(seed)
    calls = [of(rng.choice([1.0, 3.0, 9.0]), rng.choice([1.0, 3.0, 9.0]), 10.0) for _ in range(200)]
    best = {"r": 0.0, "c": 0.0}
    for one in calls:
        best = {
            "r": one.rows + min(best["r"], best["c"] + one.broadcast),
            "c": one.controller + min(best.values()),
        }
    taken, before = 0.0, "r"
    for plan, one in zip(chosen(calls), calls):
        taken += one.rows + one.broadcast * (before == "c") if plan == "r" else one.controller
        before = plan
    assert min(best.values()) <= taken <= 3 * min(best.values()) + 20.0


# ---------------------------------------------------------------- the file


def test_constants_are_read_as_they_were_written(tmp_path):
    path = str(tmp_path / "new" / "costs.json")
    Store(path).put("machines", "a", value=machine())
    Store(path).put("machines", "b", value=machine(2.0))
    Store(path).put("functions", "a", "graph", value={"rows": [[16, 1.5]], "controller": [[16, 2.5]]})
    store = Store(path)
    assert store.machines() == {"a": machine(), "b": machine(2.0)}
    assert store.times("a", "graph") == {"rows": [[16.0, 1.5]], "controller": [[16.0, 2.5]]}
    assert store.times("b", "graph") is None
    assert store.times("a", "other") is None
    assert sorted(os.listdir(tmp_path / "new")) == ["costs.json", "costs.json.lock"]


def test_the_other_programs_of_a_machine_keep_their_entries(tmp_path):
    path = str(tmp_path / "costs.json")
    first, second = Store(path), Store(path)
    first.put("machines", "a", value=machine())
    second.put("machines", "b", value=machine())
    assert sorted(second.machines()) == sorted(Store(path).machines()) == ["a", "b"]


def test_provisional_entries(tmp_path):
    path = str(tmp_path / "costs.json")
    store = Store(path)
    for is_provisional in (True, False, True):
        store.put("machines", "a", value=machine(), is_provisional=is_provisional)
        store.put("functions", "a", "g", value={"rows": [[1, 2]]}, is_provisional=not is_provisional)
        assert Store(path).is_provisional("machines", "a") == store.is_provisional("machines", "a") == is_provisional
        assert Store(path).is_provisional("functions", "a", "g") != is_provisional
    assert not store.is_provisional("machines", "b")


def test_repeated_measurements_are_combined():
    """The median of each constant counts. A product that was always delayed is as fast as a larger one."""
    fast, slow = machine(), machine(together=50.0, command=9e9)
    assert typical([fast, slow, fast]) == fast
    delayed = GRID._replace(seconds=(1.0, 100.0, 2.0, 8.0, 4.0, 16.0, 8.0, 32.0))
    one = fast._replace(
        alone=fast.alone._replace(products={"float32": delayed}, passes=Curve((1, 2, 3), (9.0, 1.0, 2.0)))
    )
    found = typical([one, one]).alone
    assert found.products["float32"].seconds == (1.0, 8.0, 2.0, 8.0, 4.0, 16.0, 8.0, 32.0)
    assert found.passes.seconds == (1.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("after", "part"),
    [
        ("cpu0 150 0 0 950 0 0 0 0\ncpu1 100 0 0 900 0 0 0 0\n", 0.25),
        ("cpu0 100 0 0 1000 0 0 0 0\ncpu1 900 0 0 900 0 0 0 0\n", 0.0),
        ("cpu0 100 0 0 900 0 0 0 0\n", 0.0),
        ("cpu0 x\n", 0.0),
        ("", 0.0),
    ],
)
def test_the_load_of_the_cores(tmp_path, monkeypatch, after, part):
    """Core 0 is this process's; the load of core 1 does not count."""
    stat = tmp_path / "stat"
    stat.write_text("cpu 1 1 1\ncpu0 100 0 0 800 0 0 0 0\ncpu1 100 0 0 900 0 0 0 0\nintr 5\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr("time.sleep", lambda seconds: stat.write_text(after))
    assert busy(stat=str(stat)) == pytest.approx(part)
    assert busy(stat=str(tmp_path / "missing")) == 0.0


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"1": 0}', '{"1": {"machines": [1], "functions": 3}}', b"\xff\xfe"],
)
def test_a_damaged_file_counts_as_empty(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    store = Store(str(path))
    assert store.machines() == {}
    assert store.times("a", "graph") is None
    store.put("machines", "a", value=machine())
    assert Store(str(path)).machines() == {"a": machine()}


@pytest.mark.parametrize("damage", [None, 3, [], [1, 2, 3, 4, 5, 6, 7, 8], {"alone": 1}])
def test_a_damaged_entry_is_left_out(tmp_path, damage):
    path = tmp_path / "costs.json"
    entries = {"machines": {"a": damage}, "functions": {"a": {"g": damage or 1}}}
    path.write_text(json.dumps({"1": entries}))
    assert Store(str(path)).machines() == {}
    assert Store(str(path)).times("a", "g") is None


@pytest.mark.parametrize(
    "damaged",
    [
        machine(command=-1.0),
        machine(command=math.nan),
        machine()._replace(copy=Curve((1,), (1,))),
        machine()._replace(copy=Curve((1, 2), (1,))),
        machine()._replace(alone=machine().alone._replace(products={"float32": GRID._replace(seconds=())})),
    ],
)
def test_wrong_numbers_are_left_out(tmp_path, damaged):
    path = str(tmp_path / "costs.json")
    Store(path).put("machines", "a", value=damaged)
    assert Store(path).machines() == {}


def test_links_modes_and_other_versions_are_kept(tmp_path):
    path, link = tmp_path / "costs.json", tmp_path / "link.json"
    path.write_text('{"2": {"machines": 5}}')
    path.chmod(0o644)
    link.symlink_to(path)
    Store(str(link)).put("machines", "a", value=machine())
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o644
    assert json.loads(path.read_text())["2"] == {"machines": 5}
    assert Store(str(path)).machines() == {"a": machine()}


def test_costs_without_a_file():
    store = Store("")
    store.put("machines", "a", value=machine())
    assert store.machines() == {"a": machine()}


def test_a_file_that_cannot_be_written_is_reported_and_not_needed(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = Store(str(tmp_path / "file" / "costs.json"))
    store.put("machines", "a", value=machine())
    assert "cannot keep measured costs" in caplog.text
    assert store.machines() == {"a": machine()}


def test_the_path_of_the_file():
    assert path_of_store({"HOME": "/home/me"}) == "/home/me/.cache/synkhronos/costs.json"
    assert path_of_store({"HOME": "/home/me", "XDG_CACHE_HOME": "/caches"}) == "/caches/synkhronos/costs.json"
    assert path_of_store({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}).startswith("/home/me/.cache")
    assert path_of_store({"HOME": "~"}) == ""
    assert path_of_store({"SYNKHRONOS_COSTS": "/here/mine.json", "HOME": "/home/me"}) == "/here/mine.json"


def test_info_shows_the_constants(tmp_path):
    path = str(tmp_path / "costs.json")
    environment = {**os.environ, "SYNKHRONOS_COSTS": path}
    command = [sys.executable, "-m", "synkhronos", "info"]

    def info():
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout

    assert "not measured yet" in info()
    fast = machine()._replace(command=3.5e-5, meeting=9e-6)
    for backend in ("Theano", "PyTensor"):
        name = f"2 ranks; {backend} 1.0; Synkhronos {__version__}"
        Store(path).put("machines", name, value=fast)
    text = info()
    assert "command 35 µs, meeting 9 µs" in text
    assert f"of 2 ranks; {TITLE} 1.0" in text
    assert describe_machine(fast)[0] == "command 35 µs, meeting 9 µs"


def test_a_lock_that_is_not_released_is_not_waited_for(tmp_path, monkeypatch, caplog):
    """Another process may be stopped while it holds the lock."""
    monkeypatch.setattr("synkhronos._costs.store._LOCK_SECONDS", 0.1)
    path = str(tmp_path / "costs.json")
    with open(f"{path}.lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store = Store(path)
        store.put("machines", "a", value=machine())
    assert "cannot keep measured costs" in caplog.text
    assert store.machines() == {"a": machine()}
    assert not os.path.exists(path)


def test_a_path_that_is_no_file(tmp_path):
    """Reading a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    assert Store(str(tmp_path / "pipe")).machines() == {}
