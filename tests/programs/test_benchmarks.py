"""The harness of the benchmarks: turns, medians and ratios, missing peers, the page, and one small figure."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import psutil
import pytest
from backend import theano_only
from page_programs import programs
from scripts import ROOT

sys.path.append(str(ROOT))

from benchmarks import call, figures, limits, readme, report, rules
from benchmarks.contestants.readme import FOR_PYMC, compiled_parts, without_synkhronos
from benchmarks.harness import Contest
from benchmarks.peers import missing
from benchmarks.processes import Contestant, ContestantFailed
from benchmarks.results import Result, load
from benchmarks.samples import Estimate, Sample, absolute, confidence, difference, ratio
from synkhronos._utils.resources import processor

CONTESTANT = """
    import json, os, sys
    from benchmarks.contestants._serve import compete, rank, timed

    def make(name, log="", trouble=""):
        if trouble == "at the start":
            raise ZeroDivisionError("no start")

        def run(numbers, **parameters):
            if trouble == "in a round":
                raise ZeroDivisionError("no round")
            if trouble == "end":
                os._exit(3)
            if log:
                with open(log, "a") as file:
                    print(name, parameters, file=file)
            return [number * (1 + rank()) for number in numbers]

        return run, {"name": name}

    compete(make)
"""


@pytest.fixture
def contestant(tmp_path):
    """Return a function that makes a contestant which does no work, records its turns and answers as requested."""
    (tmp_path / "some_contestant.py").write_text(textwrap.dedent(CONTESTANT))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])

    def make(name, processes=1, needs=(), peer=False, **arguments):
        arguments, environment = {"name": name, **arguments}, {"PYTHONPATH": path}
        return Contestant(name, "some_contestant", arguments, processes, 1, needs, peer=peer, environment=environment)

    before = psutil.Process().children()
    yield make
    new = [child for child in psutil.Process().children() if child not in before]
    assert not [child for child in new if child.status() != psutil.STATUS_ZOMBIE]


def test_medians_and_quartiles():
    sample = Sample([[3, 1, 2], [5, 4, 100]])
    assert (sample.median, sample.quartiles, sample.medians) == (3.5, (2.25, 4.75), [2, 5])
    assert sample.scaled(10).median == 35
    assert absolute(sample) == Estimate(3.5, 2.25, 4.75)


def test_ratios_and_differences_are_of_medians_with_the_spread_of_the_rounds():
    slow, fast = Sample([[4, 4, 40], [6, 6, 6], [9, 9, 9]]), Sample([[2, 2, 2], [2, 2, 2], [3, 3, 3]])
    assert ratio(slow, fast) == Estimate(6 / 2, 2.5, 3)  # ratios of the rounds: 2, 3 and 3
    assert difference(slow, fast) == Estimate(4, 3, 5)  # differences of the rounds: 2, 4 and 6


@pytest.mark.parametrize("n, rank", [(1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_bounds_of_a_median_ratio(n, rank):
    """The ranks are those of published tables of the sign test at 5 %."""
    ones, numbers = Sample([[1.0]] * n), np.random.RandomState(n).permutation(n) + 1.0
    assert confidence(Sample([[number] for number in numbers]), ones) == (rank, n + 1 - rank)


def test_contestants_have_turns_and_a_warm_up_that_does_not_count(contestant, tmp_path):
    log = tmp_path / "log"
    one, two = contestant("one", log=str(log)), contestant("two", log=str(log))
    with Contest([one, two]) as contest:
        samples = contest.run(2, contest.alike(numbers=[1, 2]))
        other = contest.run(1, {"again": (two, {"numbers": [7], "key": 1})}, warm_up=0)
    assert log.read_text().split("\n") == ["one {}", "two {}"] * 3 + ["two {'key': 1}", ""]
    assert samples == {"one": Sample([[1, 2]] * 2), "two": Sample([[1, 2]] * 2)}
    assert other == {"again": Sample([[7]])}
    assert contest.facts == {"one": {"name": "one"}, "two": {"name": "two"}}


def test_of_several_processes_the_slowest_counts(contestant):
    with Contest([contestant("both", processes=2)]) as contest:
        assert contest.run(1, contest.alike(numbers=[1, 2]))["both"] == Sample([[2, 4]])


def test_a_missing_peer_is_a_gap(contestant):
    assert missing(["json"]) is None
    assert missing(["json", "no.such.package"]) == "no.such.package is not installed"
    peer, ours = (contestant(name, needs=("no_such_package",), peer=name == "peer") for name in ("peer", "ours"))
    with Contest([peer, contestant("ours")]) as contest:
        assert set(contest.run(1, contest.alike(numbers=[1]))) == {"ours"}
    assert contest.gaps == {"peer": "no_such_package is not installed"}
    with pytest.raises(ContestantFailed, match="no_such_package is not installed"):
        Contest([ours]).__enter__()


def test_a_peer_that_does_not_start_is_a_gap_and_ours_a_failure(contestant):
    with Contest([contestant("peer", peer=True, trouble="at the start")]) as contest:
        assert contest.gaps == {"peer": "peer: ZeroDivisionError: no start"}
    with pytest.raises(ContestantFailed, match="ours: ZeroDivisionError: no start"):
        Contest([contestant("ours", trouble="at the start")]).__enter__()


@pytest.mark.parametrize("trouble, message", [("in a round", "ZeroDivisionError: no round"), ("end", "ended")])
def test_a_contestant_that_fails(contestant, trouble, message):
    failure = pytest.raises(ContestantFailed, match=f"ours: {message}")
    with Contest([contestant("ours", trouble=trouble)]) as contest, failure:
        contest.run(1, contest.alike(numbers=[1]))


def example():
    """Return a result with a row of each kind."""
    result = Result("example", "An example: of sorts", "What was done.", environment={"date": "today", "busy": 90})
    bounds = {"memory": Sample([[0.25, 0.5, 0.75]])}
    result.record("Time", "ms", {"Synkhronos": Sample([[1, 2, 3]])}, {"peer": "peer is not installed"}, bounds)
    result.kernels = {"some BLAS": ["Synkhronos", "Theano"]}
    result.add("good", "good one", Estimate(2, 1, 3), at_least=1.9)
    result.add("bad", "bad one", Estimate(200, 190, 210), "µs", at_most=100)
    result.add("worse", "unexplained one", Estimate(1, 1, 1), at_least=2)
    result.add("plain", "no target", Estimate(1, 1, 1))
    result.add("none", "against peer", "peer is not installed", at_least=1.3)
    return result


def test_verdicts():
    assert [row.verdict for row in example().rows] == ["reached", "missed", "missed", "", "gap"]


def test_a_saved_result_replaces_an_earlier_one(tmp_path):
    path, result, other = tmp_path / "all.json", example(), Result("another", "Another", "")
    assert load(path) == []
    for one in (Result("example", "An earlier one", ""), other, result):
        one.save(path)
    assert load(path) == [other, result]


def test_raw_data_are_saved_apart(tmp_path):
    result = example()
    result.facts = {"Synkhronos": {"parameters": 7}}
    result.save(tmp_path / "all.json")
    result.save_raw(tmp_path)
    raw = json.loads((tmp_path / "example.json").read_text())
    assert raw["samples"] == {"Time": {"Synkhronos": [[1, 2, 3]], "memory": [[0.25, 0.5, 0.75]]}}
    assert raw["facts"] == result.facts
    (saved,) = load(tmp_path / "all.json")
    assert not saved.samples and not saved.facts


def test_the_page_and_the_pictures_rest_on_the_same_results(tmp_path):
    page = tmp_path / "benchmarks.md"
    shutil.copy(figures.PAGE.with_suffix(".json"), tmp_path)
    report.write_page(page, list(figures.FIGURES))
    assert page.read_text() == figures.PAGE.read_text()
    for one in page.with_suffix("").glob("*.md"):
        assert one.read_text() == (figures.PAGE.with_suffix("") / one.name).read_text()
    for result in load(page.with_suffix(".json")):
        assert (report.folder_of(figures.PAGE, result.processor) / f"{result.name}.png").exists()


def test_the_page(tmp_path):
    page, one, two = tmp_path / "page.md", "One (family 1)", "Two (AVX2)"
    for processor_name in (one, two):
        result = example()
        result.environment["processor"] = processor_name
        result.save(page.with_suffix(".json"))
    failed = Result("another", "Another", "", environment={"processor": one}, failure="ours: ended")
    failed.save(page.with_suffix(".json"))
    report.write_page(page, ["example", "absent"])
    assert page.read_text().index("- [One (family 1)](page/one-family-1.md)") < page.read_text().index("[Two (AVX2)]")
    assert "](two-avx2/example.png)" in (tmp_path / "page" / "two-avx2.md").read_text()
    text = (tmp_path / "page" / "one-family-1.md").read_text()
    assert "](one-family-1/example.png)" in text
    assert "| good one | ≥ 1.90 × | 2.00 × (1.00–3.00) | reached |" in text
    assert "| bad one | ≤ 100 µs | 200 µs (190–210) | **missed** |" in text
    assert "| no target |  | 1.00 × (1.00–1.00) |  |" in text
    assert "| against peer | ≥ 1.30 × | peer is not installed | *gap* |" in text
    assert "| peer | *gap* | peer is not installed | |" in text
    assert "90 % busy" in text and "ours: ended | *failed*" in text
    assert "| *bound: memory* | 0.50 | 0.38–0.62 | 3 |" in text
    assert "Matrices are multiplied by some BLAS (Synkhronos, Theano)." in text
    assert text.index("| **An example: of sorts** |") < text.index("| **Another** |")


def test_questions_are_answered_by_the_latest_results(tmp_path):
    """By the times of groups, and by the ratios of rows; results that failed are left out."""
    page = tmp_path / "page.md"
    for date, times in (("2026-02-01", {"MPICH": 2.0, "gloo": 300.0}), ("2026-01-01", {"MPICH": 7.0})):
        environment = {"processor": f"Some {date[5:7]}", "date": date}
        result = Result("all_reduce", "All-reduce", environment=environment)
        result.groups = {
            "1 million": {"unit": "ms", "contestants": {who: [one, 0, 0, 1] for who, one in times.items()}}
        }
        result.save(page.with_suffix(".json"))
    failed = Result("call", "Calls", environment={"processor": "Some", "date": "2026-03-01"}, failure="ended")
    failed.save(page.with_suffix(".json"))
    plans = Result("plans", "Plans", environment={"processor": "Some", "date": "2026-01-01"})
    for key, value in (("mlp-4", 0.5), ("mlp-2048", 0.75), ("lstm-4", 1.0), ("right", 90.0)):
        plans.add(key, key, Estimate(value, value, value))
    plans.save(page.with_suffix(".json"))
    report.write_page(page)
    text = page.read_text()
    assert "|  | MPICH | gloo | DeepSpeed | Synkhronos, 2 ranks |\n| --- | ---: |" in text
    assert "| 1 million | 2.00 | 300 |  |  |" in text
    assert "[All-reduce](page/some-02.md#all-reduce). Measured on Some 02." in text
    assert "|  | 4 rows | 2,048 rows |" in text and "| mlp | 0.50 | 0.75 |" in text and "| lstm | 1.00 |  |" in text
    assert "What does a call cost?" not in text


def test_remarks_are_shown_where_a_target_is_missed():
    remarks = {"example/bad": "It sleeps.", "example/good": "Never shown."}
    text = report.make_details([example()], "some", remarks)
    assert "- bad one (200 µs (190–210)): It sleeps." in text
    assert "- unexplained one (1.00 × (1.00–1.00)): not yet explained." in text
    assert "Never shown." not in text


def test_the_remarks_belong_to_figures():
    remarks = json.loads(report.REMARKS.read_text())
    assert {key.split("/")[0] for key in remarks} <= set(figures.FIGURES)
    assert all(isinstance(text, str) and text.endswith(".") for text in remarks.values())


@theano_only("contestants in Theano's names")
def test_limits_of_the_machine_are_plausible():
    with Contest([], aside=[limits.LIMITS]) as contest:
        found = contest.run(1, limits.turns("copy", "add", "product", "flag"), warm_up=0)
        assert contest.alike(n=1) == {}
    assert contest.facts["limits"]["kernels"].startswith("openblas")
    gigabyte, gigaflop = limits.memory(found["add"], 1e9).median, limits.products(found["product"], 1e9).median
    assert 1e-3 < gigabyte < 10 and 1e-5 < gigaflop < 1
    assert 2e-8 < limits.round_trip(found["flag"]).median < 1e-2
    assert 0.1 < found["copy"].median / found["add"].median < 10


def test_processors_are_distinguished(tmp_path):
    text = "processor: 0\nvendor_id: A\ncpu family: 25\nmodel: 17\nmodel name: AMD EPYC\nflags: sse2 avx avx2 fma\n"
    (tmp_path / "cpuinfo").write_text(text + text.replace("0", "1"))
    assert processor(str(tmp_path / "cpuinfo")) == "AMD EPYC (family 25, model 17, AVX2)"
    assert processor()


@theano_only("contestants in Theano's names")
def test_the_call_figure_in_small(tmp_path):
    page, before = tmp_path / "page.md", set(psutil.Process().children())
    result = figures.measure("benchmarks.call", page, raw=tmp_path / "raw", rounds=1, apart=10, succession=10)
    report.write_page(page)
    assert not result.failure
    rows = {row.key: row for row in load(tmp_path / "page.json")[0].rows}
    assert set(rows) == {f"call/{case}{kind}" for case in call.CASES for kind in ("", "-numpy", "-many")}
    assert all(0 < row.value < 1e6 for row in rows.values())  # microseconds
    assert (tmp_path / "raw" / report.anchor(processor()) / "call.json").exists()
    assert (report.folder_of(page, processor()) / "call.png").read_bytes().startswith(b"\x89PNG")
    text = (report.folder_of(page, processor()).with_suffix(".md")).read_text()
    assert "## The overhead of a call" in text and result.environment["Theano"] == "1.0.5"
    assert f"](page/{report.anchor(processor())}.md#the-overhead-of-a-call)" in page.read_text()
    assert not set(psutil.Process().children()) - before


@theano_only("contestants in Theano's names")
def test_the_figure_of_readmes_program_in_small():
    result = Result("readme", "README")
    readme.measure(result, rounds=1)
    (panel,) = result.groups.values()
    assert set(panel["contestants"]) == {"Theano, 1 thread", "Theano, 2 threads", "Synkhronos, 2 ranks"}
    values = {row.key: row.value for row in result.rows}
    assert set(values) == {"readme/step-1", "readme/step-2"} and all(0 < value < 100 for value in values.values())


@pytest.mark.timeout(600)
def test_readmes_program_for_pymc_is_a_contestant():
    """With little data. Its serial form, which takes as long to compile, is only looked at."""
    pytest.importorskip("pymc")
    shorter = ("200_000", "2_000"), ("pm.sample()", "pm.sample(20, tune=20)")
    *_, ours = readme.contestants("PyMC", FOR_PYMC, ("pymc",), changes=shorter)
    with Contest([ours]) as contest:
        samples = contest.run(1, contest.alike(), warm_up=0)
    assert 0 < samples["Synkhronos, 2 ranks"].median < 600
    (code,) = [code for code, _, mark in programs(ROOT / "README.md", "README", False).values() if mark == FOR_PYMC]
    serial = without_synkhronos(code)
    assert "synk" not in serial and "parallel" not in serial
    assert serial.count("\n") == code.count("\n") and len(compiled_parts(serial)) == 2


@theano_only("contestants in Theano's names")
def test_the_speeds_next_to_a_slow_rank_in_small(monkeypatch):
    some = {name: rules.RULES[name] for name in (rules.COMPUTE, rules.STEPWISE, "ASGD", "GoSGD")}
    monkeypatch.setattr(rules, "RULES", some)
    monkeypatch.setattr(rules, "SMALL", 4)
    result = Result("rules", "Training rules")
    rules.measure_slow_rank(result, rounds=1, steps=20)
    values = {row.key.partition("/")[2]: row.value for row in result.rows}
    assert set(values) == {"slowness", *(f"slow-{name.replace(' ', '-')}" for name in rules.RULES)}
    assert values["slowness"] < 0.7  # nominally a fifth, on a machine without other load
    for group in ("Speed of the first rank", "Speed of the second rank"):
        assert set(result.groups[group]["contestants"]) == {
            f"{name}, {case}" for name in rules.RULES for case in (rules.ALONE, rules.SLOW_ONE)
        }


def test_the_page_of_training_rules_shows_their_results(tmp_path):
    """Twice the same results give the same page."""
    (tmp_path / "howto").mkdir()
    for name in ("draw_rules.py", "howto/local_training.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / name)
    scores = {"BSP()": {"scores": [0.9, 0.8], "exchanges": 0.0}, "BMUF(every=8)": {"scores": [0.5, -2], "exchanges": 7}}
    entry = {"epochs": 3, "batch_size": 25, "seeds": 2, "backend": "theano 1.0.5", "rules": scores}
    entries = [{"problem": problem, "ranks": ranks, **entry} for problem in ("dense", "cnn") for ranks in (4, 2)]
    (tmp_path / "convergence.json").write_text(json.dumps(entries))
    result = Result("rules", "Training rules", environment={"date": "today"})
    labels = [f"{name}, {case}" for name in ("every step", "ASGD") for case in (rules.ALONE, rules.SLOW_ONE)]
    for who in (rules.OTHER, rules.SLOW):
        result.record(f"Speed of {who}", "steps/s", {label: Sample([[1.0, 2.0]]) for label in labels})
    result.save(tmp_path / "benchmarks.json")
    pages = []
    for _ in range(2):
        subprocess.run([sys.executable, str(tmp_path / "draw_rules.py")], check=True, timeout=120)
        pages.append((tmp_path / "howto" / "local_training.md").read_text())
    titles = [f"{title}, {n} ranks" for n in (2, 4) for title in ("Digits, CNN", "Digits, dense network")]
    assert f"| rule | {' | '.join(titles)} | exchanges, 2 ranks | exchanges, 4 ranks |" in pages[0]
    assert f"| `BSP()` | {'85.0 ± 5.0 % | ' * 4}0 | 0 |" in pages[0]
    assert f"| `BMUF(every=8)` | {'diverges | ' * 4}7 | 7 |" in pages[0]
    assert "3 epochs, 25 rows in each step of a rank" in pages[0] and "](../slow_rank.svg)" in pages[0]
    assert pages[0] == pages[1]
    assert all((tmp_path / name).read_text().count("<svg") for name in ("slow_rank.svg", "convergence.svg"))
