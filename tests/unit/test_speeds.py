"""Times on another machine by the roofline: formulas against values computed by hand, and files of numbers."""

import json
import re
from types import SimpleNamespace

import pytest
from made_up_costs import CONSTANTS

from synkhronos._api import step_measurements
from synkhronos._costs import Curve, Product, Work
from synkhronos._costs.kernels import (
    RowTimes,
    Speeds,
    contention_on,
    reduction_on,
    speeds_from,
    speeds_of,
    times_on,
    write_speeds,
)
from synkhronos._rank import call

#: Two products of 2 million operations and 140 kB each, and 1500 bytes of passes.
WORK = Work((Product(100, 200, 50, "float32", 2),), passes=(1000.0,), divided=(500.0,))
HERE = Speeds({"float32": 1e9, "float64": 5e8}, memory=1e8, memory_of_all=1.5e8, cores=2, command=1e-3, meeting=1e-5)
NUMBERS = {"products": {"float32": 1e9}, "memory": 1e8, "memory_of_all": 1.5e8, "cores": 2}


def other(**changed):
    """Return the same machine with some other numbers."""
    return Speeds(**{**vars(HERE), **changed})


def test_each_kernel_takes_the_longer_of_arithmetic_and_memory():
    assert HERE.seconds(WORK) == pytest.approx(2 * 2e-3 + 15e-6)  # memory would take 1.4 ms
    assert other(memory=5e7).seconds(WORK) == pytest.approx(2 * 2.8e-3 + 30e-6)
    assert HERE.seconds(WORK, 2) == pytest.approx(2 * 2e-3 + 20e-6)  # with 75 MB/s for each of two ranks, 1.87 ms
    assert HERE.seconds(WORK, 8) == HERE.seconds(WORK, 2)  # there are two cores
    assert other(memory_of_all=1e8).seconds(WORK, 2) == pytest.approx(2 * 2.8e-3 + 30e-6)


def test_the_same_numbers_leave_times_as_they_are():
    times = RowTimes((10.0, 20.0, 40.0), (2.0, 3.0, 7.0), 1.0)
    found = times_on(times, [WORK] * 3, HERE, other())
    assert (found.rows, found.seconds, found.constant) == (times.rows, times.seconds, pytest.approx(1.0))
    assert times_on(RowTimes((1.0,), (2.0,), 2.0), [WORK], HERE, other()) == RowTimes((1.0,), (2.0,), 2.0)
    contention = Curve((1.0, 2.0, 1e6), (1.0, 1.3, 1.3))
    assert contention_on(contention, WORK, HERE, other()) == contention
    reduction = Curve((8.0, 1e6), (2e-5, 1e-2))
    assert reduction_on(reduction, HERE, other()) == reduction


def test_half_of_the_arithmetic_doubles_the_time_of_products():
    products = Work((Product(100, 200, 50, "float32"),))
    times = RowTimes((10.0, 20.0), (2.0, 3.0), 1.0)
    assert times_on(times, [products] * 2, HERE, other(products={"float32": 5e8})).seconds == (4.0, 6.0)
    passes = Work(passes=(1e6,))
    assert times_on(times, [passes] * 2, HERE, other(products={"float32": 5e8})) == times


def test_each_number_of_rows_has_its_own_limit():
    """With few rows, the weights are read as fast as memory allows, which is the same there."""
    works = [Work((Product(m, 1000, 1000, "float32"),)) for m in (1, 10_000)]
    slow = other(products={"float32": 5e7})
    # 1 row: 40 ms, both by 4,008,000 bytes and by 2e6 / 5e7; 10,000 rows: 20 s by arithmetic here, 400 s there
    found = times_on(RowTimes((1.0, 10_000.0), (0.05, 30.0), 0.0), works, HERE, slow)
    assert found.seconds == pytest.approx((0.05 * 0.040080 / 0.040080, 30 * 20.0))


def test_more_bandwidth_removes_the_contention_for_memory():
    passes = Work(passes=(1e6,))  # 10 ms for one rank, 13.3 ms for each of two
    contention = Curve((1.0, 2.0, 1e6), (1.0, 1.4, 1.4))
    found = contention_on(contention, passes, HERE, other(memory_of_all=8e8, cores=16))
    assert found.sizes == (1, 2, 4, 8, 16, 1e6)
    assert found.seconds == pytest.approx((1.0, 1.05, 1.05, 1.05, 2.1, 2.1))  # 1.4 / 1.333; 16 ranks have half of B
    assert contention_on(contention, WORK, HERE, other(memory_of_all=1e12)).seconds[1] == pytest.approx(1.4, rel=0.01)


def test_all_reduces_take_a_meeting_at_least():
    reduction = Curve((8.0, 1e6), (2e-5, 1e-2))  # 1e6 bytes at 150 MB/s: 6.67 ms
    found = reduction_on(reduction, HERE, other(meeting=3e-5, memory_of_all=3e8))
    assert found.seconds == pytest.approx((6e-5, 5e-3))
    assert reduction_on(reduction, HERE, other(meeting=None)) == reduction


def test_speeds_of_a_measured_machine():
    found = speeds_of(CONSTANTS, 2)
    assert found.products == pytest.approx({"float32": 16e9, "float64": 16e9})  # 2 x 2 x 2 in 1 ns
    assert (found.memory, found.memory_of_all, found.cores) == pytest.approx((1e6, 2e6, 2))
    assert (found.command, found.meeting) == (0.01, 0.0)


def test_files_are_read_as_they_were_written(tmp_path):
    for speeds in (HERE, speeds_from(NUMBERS)):
        write_speeds(speeds, tmp_path / "machine.json")
        assert speeds_from(tmp_path / "machine.json") == speeds_from(str(tmp_path / "machine.json")) == speeds
    assert speeds_from(speeds) is speeds


MISTAKES = [
    ({**NUMBERS, "memry": 1}, "got a machine with the keys ['cores', 'memory', 'memory_of_all', 'memry', 'products']"),
    (
        {"products": {"float32": 1e9}},
        "got a machine with the keys ['products']; expected products, memory, memory_of_all",
    ),
    ({**NUMBERS, "memory": 0}, "got memory=0 of a machine; expected a positive number"),
    ({**NUMBERS, "memory_of_all": "fast"}, "got memory_of_all='fast' of a machine; expected a positive number"),
    ({**NUMBERS, "command": None}, "got command=None of a machine; expected a positive number"),
    ({**NUMBERS, "memory": float("nan")}, "got memory=nan of a machine; expected a positive number"),
    ({**NUMBERS, "cores": True}, "got cores=True of a machine; expected a positive number"),
    ({**NUMBERS, "cores": 2.5}, "got cores=2.5 of a machine; expected an int of at least 1"),
    ({**NUMBERS, "products": {"float32": -1}}, "got float32=-1 of a machine; expected a positive number"),
    ({**NUMBERS, "products": {}}, "got products={} of a machine; expected FLOP/s by dtype"),
    ({**NUMBERS, "products": 1e9}, "got products=1000000000.0 of a machine; expected FLOP/s by dtype"),
    ({**NUMBERS, "products": {"int8": 1}}, "got products={'int8': 1} of a machine; expected FLOP/s by dtype"),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES)
def test_wrong_numbers_are_named(tmp_path, given, message):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(given))
    for one in (given, path):
        with pytest.raises(ValueError, match=re.escape(message)):
            speeds_from(one)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "which cannot be read: No such file or directory; expected a file of JSON"),
        ("{'a': 1}", "which is not JSON: Expecting property name"),
        ("[1]", "which has [1]; expected one object of JSON"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, text, message):
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"^machine is {re.escape(repr(str(path)))}, {re.escape(message)}"):
        speeds_from(path)


def test_other_values_are_no_machines():
    with pytest.raises(TypeError, match="machine is 3; expected a dict, or the path of a file of JSON"):
        speeds_from(3)


# Time that measurements take


@pytest.fixture
def clock(monkeypatch):
    """Return the list of seconds that calls take in turn; the last entry is that of all further ones."""
    now, times = [0.0], []
    time = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (step_measurements, call):
        monkeypatch.setattr(module, "time", time)

    def pass_time():
        now[0] += times.pop(0) if len(times) > 1 else times[0]
        return now[0]

    return SimpleNamespace(times=times, call=pass_time, now=now)


@pytest.mark.parametrize(("seconds", "n_calls"), [(0.001, 200), (0.04, 3), (0.2, 2), (0.7, 1), (100.0, 1)])
def test_long_calls_are_timed_less_often(clock, seconds, n_calls):
    clock.times[:] = [seconds]
    assert len(call._seconds(clock.call, 0.06 if seconds > 0.01 else 1.0, 3)) == n_calls


@pytest.mark.parametrize(("seconds", "n_rounds"), [(1.0, 3), (6.6, 3), (7.0, 2), (10.0, 2), (11.0, 1), (1e4, 1)])
def test_rounds_end_before_their_time_is_over(clock, seconds, n_rounds):
    clock.times[:] = [seconds]
    assert len(step_measurements._in_rounds(clock.call, 20.0)) == n_rounds


@pytest.mark.parametrize(("seconds", "n_steps"), [(1 / 64, 25), (0.3, 10), (1.0, 4), (2.0, 2), (100.0, 2)])
def test_long_steps_are_measured_less_often(clock, seconds, n_steps):
    clock.times[:] = [seconds]
    step = SimpleNamespace(step_of=lambda batch: clock.call)
    assert step_measurements._seconds_of_step(step, 8, 4.0 if seconds >= 1 else 10.0) == pytest.approx(seconds)
    assert round(clock.now[0] / seconds) == n_steps
