"""Choice of plans by cost: with constants that are made up, so that it is known, and with measured ones."""

import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import types

import numpy as np
import pytest
from backend import T, on_theano, theano
from comparison import close
from interrupts import Interrupt, handled_by, interrupt
from scripts import run_script

import synkhronos as synk
from synkhronos._api.calibration import name_of_machine
from synkhronos._api.choice import seconds_of
from synkhronos._costs import Curve, Estimate, Grid, Machine, Rates, Store
from synkhronos._graph import Graph
from synkhronos._session import held

#: With these constants, the controller is faster for less than about 20 kB: a command takes 10 ms, a pass over memory
#: 1 µs for each byte, and half of that for each byte if all ranks compute.
PASSES = Curve((1.0, 1e9), (1e-6, 1e3))
GRID = Grid((1, 2), (1, 2), (1, 2), (1e-9,) * 8)
RATES = Rates({"float32": GRID, "float64": GRID}, PASSES, 0.0, 0.0)
FREE = Curve((1.0, 2.0), (0.0, 0.0))
CONSTANTS = Machine(RATES, RATES, 0.0, 0.01, 0.0, FREE, FREE, Curve((1.0, 1e9), (0.2, 0.2)))


@pytest.fixture
def costs(tmp_path, monkeypatch):
    """Return the path of a file of costs for this test. Costs count as measured while the cores were free."""
    for module in ("calibration", "choice"):
        monkeypatch.setattr(f"synkhronos._api.{module}.busy", lambda: 0.0)
    path = tmp_path / "costs.json"
    monkeypatch.setenv("SYNKHRONOS_COSTS", str(path))
    return path


@pytest.fixture
def automatic(costs, no_session):
    """Return a function that makes a session of some ranks with the made-up constants, and the default plan."""

    def fork(n_ranks, **options):
        synk.fork(n_ranks, use_gpu=False, plan="auto", **options)
        Store(str(costs)).put("machines", name_of_machine(held(), synk.__version__), value=CONSTANTS)
        return n_ranks

    return fork


def stored(path, kind="functions"):
    """Return the entries of a kind in the file, over all machines."""
    entries = json.loads(path.read_text())["1"].get(kind, {})
    return [one for found in entries.values() for one in found.values()] if kind == "functions" else entries


def values(n):
    return np.random.RandomState(n).randn(n, 3)


def by(function):
    """Return the plan of a function's last call, from the data points of each rank."""
    return "controller" if function.counts[1:] == (0,) * (len(function.counts) - 1) else "rows"


def trained(build, **options):
    """Return a variable and a function that updates it."""
    x, total = T.dmatrix("x"), theano.shared(np.zeros(3), "total")
    function = build([x], T.exp(x).sum(), updates=[(total, 0.9 * total + x.sum(axis=0))], **options)
    return total, function


@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_the_plan_depends_on_the_number_of_rows(automatic, n_ranks):
    automatic(n_ranks)
    x = T.dmatrix("x")
    function = synk.function([x], T.exp(x).sum(), exact=True)
    for n in (6, 2000, 6, 40, *[2000] * 4, *[6] * 4, *[5000] * 3, *[6] * 3):
        close(function(values(n)), np.exp(values(n)).sum())
        assert by(function) == ("controller" if n <= 40 else "rows")
        assert sum(function.counts) == n


def test_alternating_sizes_give_the_serial_results_on_all_ranks(automatic):
    automatic(3)
    (ours, function), (theirs, serial) = trained(synk.function, exact=True), trained(theano.function)
    plans = []
    for n in (6, 6, 4000, 4000, 4000, 6, 6, 6, 6, 6, 9, 3, 1, 2000, 6000, 2):
        close(function(values(n)), serial(values(n)))
        plans.append(by(function))
        if n == 9:
            close(synk.gather(ours, nd_up=1), [theirs.get_value()] * 3)
    close(ours, theirs)
    assert not synk.check_replicas()
    assert {*plans} == {"rows", "controller"}


def test_a_broadcast_of_stale_values_is_counted(automatic):
    """Each call of 1,000 rows takes less time by rows, but a broadcast pays off only for many of them."""
    automatic(2)
    _, function = trained(synk.function, exact=True)
    synk.distribute()  # variables that only the controller has are not stale
    function(values(6))
    plans = []
    for _ in range(30):
        function(values(1000))
        plans.append(by(function))
    assert plans[0] == "controller"
    assert plans[-1] == "rows"
    assert plans == sorted(plans)


@pytest.mark.parametrize("way", ["profile", "list"])
def test_the_choice_does_not_depend_on_the_path_that_a_call_takes(automatic, way):
    """Some calls of one function leave the lead where only another function, with a smaller broadcast, has it."""
    small = Estimate(2e-4, 1e-4, 2e-5, True, "model")
    large, opposite = Estimate(2e-3, 1e-3, 1e-2, True, "model"), Estimate(1e-3, 2e-3, 1e-2, True, "model")
    plans = []
    for path in ("usual", way):
        automatic(2)
        functions = [trained(synk.function, exact=True)[1] for _ in range(3)]
        synk.distribute()
        for function, estimate in zip(functions, (small, large, opposite)):
            function._planner.chooser.estimate = lambda session, inputs, estimate=estimate: estimate
        given = values(4)
        for i, n_calls in ((1, 10), (0, 5), (1, 10)):
            for _ in range(n_calls):
                functions[i](given)
        with synk.profile() if path == "profile" else contextlib.nullcontext():
            for _ in range(5):
                functions[0](given.tolist() if path == "list" else given)
        found = []
        for _ in range(12):
            functions[2](given)
            found.append(by(functions[2]))
        plans.append(found)
        synk.close()
    assert plans[0] == plans[1]
    assert len({*plans[0]}) == 2


def test_the_report_has_the_predictions(automatic):
    automatic(2)
    x = T.dmatrix("x")
    function = synk.function([x], T.exp(x).sum(), exact=True)
    assert function.partition.plans == []
    function(values(6))
    function(values(2000))
    few, many = function.partition.plans
    assert (few.n_rows, few.source, many.source) == (6, "model", "model")
    assert few.controller < few.rows and many.rows < many.controller
    assert f"plan of 6 rows: controller; rows {1e3 * few.rows:.3g} ms" in repr(function.partition)
    assert "plan of 6 rows: controller" in function.partition._repr_html_()


@pytest.mark.parametrize("n_rows", [4, 5000])
@pytest.mark.parametrize("sorts", [False, True])
def test_functions_without_scattered_inputs(automatic, costs, n_rows, sorts):
    """Minibatches of shared data, as in Theano's tutorials: the model decides, or both plans are timed once."""
    automatic(2)
    index, results = T.lscalar("index"), []
    for build in (theano.function, synk.function):
        data, total = theano.shared(values(4 * n_rows), "data"), theano.shared(np.zeros(3), "total")
        rows = data[index * n_rows : (index + 1) * n_rows]
        rows = T.sort(rows, axis=0) if sorts else rows
        options = {"exact": True, "bcast_inputs": [index]} if build is synk.function else {}
        inputs = [index] if build is theano.function else []
        function = build(inputs, T.exp(rows).sum(), updates=[(total, 0.9 * total + rows[-1])], **options)
        results.append([[function(i) for i in (0, 1, 2, 3, np.int64(1), np.array(2), 0)], total.get_value()])
    close(results[1][0], results[0][0])
    close(results[1][1], results[0][1])
    (plan,) = function.partition.plans
    assert plan.source == ("timed" if sorts else "model")
    assert str(plan).startswith("plan: ")
    assert len(stored(costs)) == sorts
    if not sorts:
        assert (plan.controller < plan.rows) == (n_rows == 4)
    with pytest.raises(TypeError, match="index"):
        function(0.5)
    assert not synk.check_replicas()


@pytest.mark.parametrize("batch", [None, 5, slice(2, 9), [3, 1, 8]], ids=str)
def test_data_are_timed_as_data(automatic, costs, batch):
    n_ranks = automatic(3)
    x, weights, total = T.dmatrix("x"), T.dvector("weights"), theano.shared(np.zeros(3), "total")
    given, factors = values(12), np.arange(12.0)
    expression = T.sort(x, axis=0)[0] + (x * weights[:, None]).sum(axis=0)
    function = synk.function([x, weights], expression, updates=[(total, total + expression)], exact=True)
    rows = np.arange(12)[slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch]
    right = np.sort(given[rows], axis=0)[0] + (given[rows] * factors[rows][:, None]).sum(axis=0)
    shared = synk.data(given)
    for _ in range(3):
        close(function(shared, factors, batch=batch), right)
    close(total.get_value(), 3 * right)
    (times,) = stored(costs)
    assert [size for size, _ in times["rows"]] == [4, 32, 256]
    assert sum(function.counts) == len(rows) and len(function.counts) == n_ranks
    assert np.array_equal(shared, given)


@pytest.mark.parametrize("n_rows", [6, 20_000])
@pytest.mark.parametrize("sorts", [False, True])
def test_scattered_variables_of_which_the_controller_has_all_rows(automatic, costs, monkeypatch, n_rows, sorts):
    """The model decides, or both plans are timed; calls by rows that take long are not compared."""
    automatic(2)
    compiled = []
    usual = Graph.compile
    monkeypatch.setattr(Graph, "compile", lambda self, *args: compiled.append(self) or usual(self, *args))
    given, total, part = values(n_rows), theano.shared(np.zeros(3), "total"), theano.shared(np.zeros((0, 3)), "part")
    factor = T.dscalar("factor")
    rows = T.sort(part, axis=0) if sorts else part
    function = synk.function(
        [],
        T.exp(factor * rows).sum(),
        bcast_inputs=[factor],
        updates=[(total, total + factor * part.sum(axis=0))],
        sliceable_shareds=[part],
        whole={part: given},
        exact=True,
    )
    synk.scatter(part, given)
    for factor_now in (1.0, 0.5, 0.1):
        close(function(factor_now), np.exp(factor_now * given).sum())
    close(total.get_value(), 1.6 * given.sum(axis=0))
    (plan,) = function.partition.plans
    assert (plan.source, len(stored(costs))) == (("timed", 1) if sorts else ("model", 0))
    if not sorts:
        assert by(function) == ("controller" if n_rows == 6 else "rows")
    if by(function) == "controller":
        assert function.counts == (n_rows, 0)
    close(function(2.0, batch_s=slice(0, 2)), np.exp(2 * given[[0, 1, n_rows // 2, n_rows // 2 + 1]]).sum())
    assert by(function) == "rows"
    function.copy()(1.0)
    assert not synk.check_replicas()
    assert len({*compiled}) == (2 if n_rows == 6 else 1 + sorts)


def test_a_long_call_on_scattered_variables_is_not_compared(automatic, costs, monkeypatch):
    """The function of the controller is not even compiled, and a later program reads the same from the file."""
    automatic(2)
    monkeypatch.setattr("synkhronos._api.choice._CLEAR", 1e-9)
    compiled, usual = [], Graph.compile
    monkeypatch.setattr(Graph, "compile", lambda self, *args: compiled.append(self) or usual(self, *args))
    part, given = theano.shared(np.zeros((0, 3)), "part"), values(8)
    for _ in range(2):
        compiled.clear()
        options = {"sliceable_shareds": [part], "whole": {part: given}, "exact": True}
        function = synk.function([], T.sort(part, axis=0).sum(), **options)
        synk.scatter(part, given)
        close(function(), given.sum())
        assert (by(function), len({*compiled})) == ("rows", 1)
        assert "rows; rows" in repr(function.partition)
        (times,) = stored(costs)
        assert times["controller"] == [] and len(times["rows"]) == 1


def test_what_is_refused_with_whole(automatic):
    automatic(2)
    part, other = theano.shared(np.zeros((4, 3)), "part"), theano.shared(np.zeros((4, 3)), "other")
    for whole in ({}, {part: values(4), other: values(4)}, {other: values(4)}):
        with pytest.raises(ValueError, match="an entry for each of sliceable_shareds"):
            synk.function([], part.sum(), sliceable_shareds=[part], exact=True, whole=whole)
    with pytest.raises(ValueError, match="whole has 1 dimensions for part; expected 2"):
        synk.function([], part.sum(), sliceable_shareds=[part], exact=True, whole={part: values(4)[0]})
    for own in (part, 2 * other):
        whole, variables = {part: own, other: values(4)}, [part, other]
        with pytest.raises(ValueError, match=r"whole has the rows of part from (part|other), of which the controller"):
            synk.function([], part.sum() + other.sum(), sliceable_shareds=variables, exact=True, whole=whole)
    with pytest.raises(ValueError, match="exact=True"):
        synk.function([], part.sum(), sliceable_shareds=[part], whole={part: values(4)})
    with pytest.raises(ValueError, match="all data"):
        synk.function([], part.sum(), sliceable_shareds=[part], exact=True, plan="controller")


def summed_parts(plan, whole, **options):
    """Return a variable with the scattered rows of `values(11)`, and a function of the sum of its columns."""
    part = theano.shared(np.zeros((0, 3)), "part")
    synk.scatter(part, values(11))
    options = {"sliceable_shareds": [part], "whole": {part: whole}, "plan": plan, **options}
    return part, synk.function([], part.sum(axis=0), exact=True, **options)


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("plan", ["controller", "auto"])
def test_other_rows_than_those_of_the_ranks(automatic, n_ranks, plan):
    """The result is that of the scattered rows, or an error; also after calls on the short path."""
    automatic(n_ranks)
    rows = theano.shared(values(11), "rows")
    wholes = {"variable": rows, "transposed": theano.shared(values(11).T.copy(), "columns").T, "computed": rows + 0.0}
    for whole in wholes.values():
        part, function = summed_parts(plan, whole)
        for _ in range(4):
            close(function(), values(11).sum(axis=0))
        synk.scatter(part, values(20))
        with pytest.raises(ValueError, match="whole has 11 rows of part, and the ranks have 20"):
            function()
    part, function = summed_parts(plan, rows)
    for _ in range(4):
        function()
    rows.set_value(values(20))
    with pytest.raises(ValueError, match="whole has 20 rows of part, and the ranks have 11"):
        function()
    synk.scatter(part, values(20))
    close(function(), values(20).sum(axis=0))
    if n_ranks > 1:
        synk.scatter(rows, values(20))
        with pytest.raises(ValueError, match="rows was scattered; expected a variable that is equal on all ranks"):
            function()
    x = T.dmatrix("x")
    function = synk.function(
        [x], (x + part).sum(), sliceable_shareds=[part], whole={part: values(20)}, exact=True, plan=plan
    )
    with pytest.raises(ValueError, match="the scattered inputs have 7 rows, and part 20"):
        function(values(7))


def test_an_array_of_all_rows_is_copied(automatic):
    automatic(2)
    whole = values(11)
    _, function = summed_parts("controller", whole)
    whole[:] = 0
    close(function(), values(11).sum(axis=0))


def test_a_copy_with_other_rows(automatic):
    """The controller does not know the rows of another variable."""
    automatic(2)
    part, function = summed_parts(None, values(11))
    function()
    other = theano.shared(np.zeros((0, 3)), "other")
    synk.scatter(other, 5 * values(11))
    again = function.copy(swap={part: other})
    for _ in range(3):
        close(again(), 5 * values(11).sum(axis=0))
        close(function(), values(11).sum(axis=0))
    _, function = summed_parts("controller", values(11))
    with pytest.raises(ValueError, match="the controller alone does not have all data"):
        function.copy(swap={function._graph.sliceable_shareds[0]: other})


def test_a_variable_of_another_shape_is_another_choice(automatic, monkeypatch):
    automatic(2)
    submitted, usual = [], held().submit
    monkeypatch.setattr(held(), "submit", lambda *args, **options: submitted.append(args) or usual(*args, **options))
    data = theano.shared(values(8), "data")
    x = data[:]
    function = synk.function([], T.exp(x).sum(), shard={x: 0}, exact=True)
    for n_rows, n_commands in ((8, 0), (40_000, 4), (8, 0)):
        submitted.clear()
        data.set_value(values(n_rows))
        for _ in range(4):
            close(function(), np.exp(values(n_rows)).sum())
        assert len(submitted) == n_commands
    assert len(function.partition.plans) == 2


@pytest.mark.parametrize("warm_up, seconds, n_calls", [(0.0, 0.02, 1 + 3), (0.1, 0.001, 1 + 4 + 50)])
def test_the_first_calls_are_not_timed(monkeypatch, warm_up, seconds, n_calls):
    now, durations = [0.0], [0.03, *[0.02] * 4, *[0.001] * 50]
    monkeypatch.setattr("synkhronos._api.choice.time", types.SimpleNamespace(perf_counter=lambda: now[-1]))
    found = seconds_of(lambda: now.append(now[-1] + durations[len(now) - 1]), 0.05, 3, 50, warm_up)
    assert found == pytest.approx(seconds)
    assert len(now) - 1 == n_calls


def test_calls_that_have_no_choice(automatic):
    automatic(2)
    _, function = trained(synk.function, exact=True)
    with synk.sequence():
        function(values(6))
    assert by(function) == "rows"
    function(values(6), num_slices=2)
    assert by(function) == "rows"
    x = T.dmatrix("x")
    assert synk.function([x], x.sum(), exact=True)(np.zeros((0, 3))) == 0


@pytest.fixture
def sorting():
    """Return the arguments of a function for which the model has no term, and the variable that it updates."""
    x, total = T.dmatrix("x"), theano.shared(np.arange(3.0), "total")
    ordered = T.sort(x * total, axis=0)
    return [x], ordered[0] + x.sum(), total, [(total, 0.5 * total + x.mean(axis=0))]


def serial_of(given, n):
    total = np.arange(3.0)
    return np.sort(given * total, axis=0)[0] + given.sum(), 0.5 * total + given.mean(axis=0)


def test_an_operation_without_a_term_is_timed_once(automatic, costs, sorting, monkeypatch):
    """Timing undoes all updates, and a later program with the same graph reads the times from the file."""
    automatic(3)
    inputs, output, total, updates = sorting
    function = synk.function(inputs, output, updates=updates, exact=True)
    synk.distribute()
    borrowed = total.get_value(borrow=True)
    right, new = serial_of(values(30), 30)
    close(function(values(30)), right)
    close(total, new)
    close(synk.gather(total, nd_up=1), [new] * 3)
    assert borrowed.shape == (3,)
    (times,) = stored(costs)
    assert sorted(times) == ["controller", "rows"]
    assert [rows for rows, _ in times["rows"]] == [rows for rows, _ in times["controller"]]
    (plan,) = function.partition.plans
    assert plan.source == "timed"

    def refuse(*arguments):
        raise AssertionError("timed again")

    monkeypatch.setattr("synkhronos._api.choice.Chooser.time", refuse)
    again = synk.function(inputs, output, updates=updates, exact=True)
    again(values(30))
    assert again.partition.plans == [plan]


def test_the_times_on_file_decide(automatic, costs, sorting):
    automatic(2)
    inputs, output, _, updates = sorting
    function = synk.function(inputs, output, updates=updates, exact=True)
    function(values(30))
    content = json.loads(costs.read_text())
    for faster, slower in (("rows", "controller"), ("controller", "rows")):
        for entries in content["1"]["functions"].values():
            for name in entries:
                entries[name] = {faster: [[16, 1e-3], [1024, 1e-3]], slower: [[16, 5.0], [1024, 5.0]]}
        costs.write_text(json.dumps(content))
        synk.close()
        synk.fork(2, use_gpu=False, plan="auto")
        function(values(30))
        assert by(function) == faster


def test_costs_of_a_busy_machine_are_measured_again_when_it_is_free(costs, no_session, sorting, monkeypatch):
    """Until then they are used, so that each program does not measure them."""
    inputs, output, _, updates = sorting
    seen = []
    for part in (0.9, 0.9, 0.0, 0.0):
        for module in ("calibration", "choice"):
            monkeypatch.setattr(f"synkhronos._api.{module}.busy", lambda part=part: part)
        synk.fork(2, use_gpu=False, plan="auto")
        synk.function(inputs, output, updates=updates, exact=True)(values(30))
        synk.close()
        seen.append([stored(costs, name) for name in ("machines", "functions")])
    assert seen[1] == seen[0]
    assert seen[2][0] != seen[0][0]
    assert seen[2][1] != seen[0][1]
    assert seen[3] == seen[2]


class Counting(theano.Op):
    """An operation of the program's own in Python, which counts its calls on the controller."""

    __props__ = ()
    n_calls = 0

    @classmethod
    def note(cls):
        cls.n_calls += 1

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        Counting.n_calls += 1
        outputs[0][0] = inputs[0].copy()


if on_theano:

    class CountingScalar(theano.scalar.UnaryScalarOp):
        """Operation on numbers, in Python, with an effect."""

        def impl(self, x):
            Counting.n_calls += 1
            return x


def test_operations_with_effects_are_not_computed_for_times(automatic):
    automatic(2)
    x = T.dmatrix("x")
    Counting.n_calls = 0
    function = synk.function([x], Counting()(T.sort(x, axis=0)).sum(), exact=True)
    close(function(values(8)), values(8).sum())
    assert Counting.n_calls == 1
    assert [one.source for one in function.partition.plans] == ["unknown"]
    assert by(function) == "rows"
    assert "times are unknown" in repr(function.partition)


def printing(x):
    return theano.printing.Print("x", global_fn=lambda op, value: Counting.note())(x)


def printing_in_a_loop(x):
    steps, _ = theano.scan(lambda row: printing(row).sum(), sequences=[x.T])
    return steps.sum() + x


def applied_to_parts(x):
    if on_theano:
        return T.Elemwise(CountingScalar(theano.scalar.upgrade_to_float, name="counting"))(x)
    return T.blockwise.Blockwise(Counting(), signature="(n)->(n)")(x)


@pytest.mark.parametrize("build", [printing, printing_in_a_loop, applied_to_parts])
def test_functions_with_effects_in_other_operations_are_not_timed(automatic, costs, build):
    automatic(2)
    x = T.dmatrix("x")
    function = synk.function([x], T.sort(build(x), axis=0).sum(), exact=True)
    function(values(8))
    assert [one.source for one in function.partition.plans] == ["unknown"]
    assert stored(costs) == []


def test_updates_of_other_threads_are_kept_while_plans_are_timed(automatic):
    automatic(2)
    x, total, other = T.dmatrix("x"), theano.shared(0.0, "total"), theano.shared(0.0, "other")
    function = synk.function([x], T.sort(x * total, axis=0).sum(), updates=[(total, total + 1)], exact=True)
    count = synk.function([x], x.sum(), updates=[(other, other + 1)], exact=True, plan="rows")
    synk.distribute()

    def call():
        for _ in range(50):
            function(values(8))
            count(values(8))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for one in [pool.submit(call) for _ in range(3)]:
            one.result()
    close([total.get_value(), other.get_value()], [150.0, 150.0])
    close(synk.gather([total, other], nd_up=1), [[150.0, 150.0]] * 2)


def test_an_exception_of_a_handler_while_plans_are_timed_undoes_the_updates(automatic):
    automatic(2)
    x, states = T.dmatrix("x"), [theano.shared(np.zeros(200_000), f"s{i}") for i in range(3)]
    updates = [(one, one + x.sum()) for one in states]
    total = T.sort(x, axis=0).sum()
    n_raised = 0
    for delay in (0.002, 0.01, 0.03, 0.05, 0.1, 0.2):
        function = synk.function([x], total + T.constant(delay), updates=updates, exact=True)
        before = states[0].get_value(borrow=True)[0]
        with handled_by(interrupt):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                function(values(8))
            except Interrupt:
                n_raised += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        after = synk.gather(states, nd_up=1)
        allowed = (before, before + values(8).sum())
        assert any(all(np.allclose(part, one) for value in after for part in value) for one in allowed)
    assert n_raised


def test_memory_limits_the_rows_that_are_timed(automatic, costs, sorting, monkeypatch):
    """Three copies of a row of 24 bytes are counted. With less memory than for four rows, nothing is timed."""
    automatic(2)
    inputs, output, total, updates = sorting
    for room, n_points in ((8 * 24 * 3 * 1000, 3), (8 * 24 * 3 * 10, 1), (8 * 24, 0)):
        monkeypatch.setattr("synkhronos._api.choice.free_memory", lambda room=room: [(room, "here")])
        costs.write_text(json.dumps({"1": {"machines": stored(costs, "machines")}}))
        synk.close()
        synk.fork(2, use_gpu=False, plan="auto")
        function = synk.function(inputs, output, updates=updates, exact=True)
        function(values(30))
        assert [len(one["rows"]) for one in stored(costs)] == [n_points] * bool(n_points)
    close(total, serial_updates(3))


def serial_updates(n_calls):
    total = np.arange(3.0)
    for _ in range(n_calls):
        total = 0.5 * total + values(30).mean(axis=0)
    return total


def test_a_slow_function_is_timed_with_few_rows(automatic, costs, monkeypatch):
    monkeypatch.setattr("synkhronos._api.choice._MOST_SECONDS", 1e-6)
    automatic(2)
    x = T.dmatrix("x")
    function = synk.function([x], T.sort(x, axis=0).sum(), exact=True)
    close(function(values(30)), values(30).sum())
    (times,) = stored(costs)
    assert [rows for rows, _ in times["rows"]] == [4]


@pytest.mark.parametrize("flag", ["compute_test_value=raise", "mode=FAST_COMPILE", "warn_float64=raise"])
def test_flags_that_refuse_the_functions_that_are_measured(costs, flag):
    """Workers refuse float64 in the last case, so nothing can be measured; the function works all the same."""
    code = """
        x = T.fmatrix("x")
        x.tag.test_value = np.ones((2, 2), "float32")
        synk.fork(2)
        f = synk.function([x], x.sum(), exact=True)
        print([float(f(np.ones((n, 3), "float32"))) for n in (4, 5)])
        """
    if not on_theano and "test_value" in flag:
        pytest.skip("PyTensor computes no test values")
    names = ("THEANO_FLAGS", "PYTENSOR_FLAGS")
    flags = {name: ",".join(filter(None, [os.environ.get(name), flag])) for name in names}
    out, err = run_script(code, environment={**flags, "SYNKHRONOS_PLAN": "auto"})
    assert out.strip() == "[12.0, 15.0]"
    assert ("cannot measure this machine" in err) == (flag == "warn_float64=raise")
    assert costs.exists() != (flag == "warn_float64=raise")


def test_a_measurement_that_fails_leaves_the_plan_by_rows(costs, no_session, monkeypatch, caplog):
    def fail(call):
        raise ValueError("no time")

    monkeypatch.setattr("synkhronos._api.calibration._seconds", fail)
    synk.fork(2, use_gpu=False, plan="auto", check_replicas=1)
    x = T.dmatrix("x")
    function = synk.function([x], x.sum(), exact=True)
    for _ in range(2):
        close(function(values(6)), values(6).sum())
    assert by(function) == "rows"
    assert caplog.text.count("cannot measure this machine, so exact functions have the plan rows: no time") == 1


def test_checks_of_replicas_do_not_see_measurements(costs, no_session, recwarn):
    synk.fork(2, use_gpu=False, plan="auto", check_replicas=1)
    total, function = trained(synk.function, exact=True)
    function(values(6))
    close(total, values(6).sum(axis=0))
    assert not [one for one in recwarn if "replicas" in str(one.message)]


def test_a_function_that_fails_with_more_rows_is_not_timed_again(automatic, costs):
    automatic(2)
    x, total = T.dmatrix("x"), theano.shared(0.0, "total")
    few = theano.tensor.opt.Assert("at most 12 rows")(x, T.le(x.shape[0], 12))
    function = synk.function([x], T.sort(few, axis=0)[-1], updates=[(total, total + x.sum())], exact=True)
    for _ in range(2):
        close(function(values(10)), values(10).max(axis=0))
    close(total.get_value(), 2 * values(10).sum())
    (times,) = stored(costs)
    assert times == {}
    assert [one.source for one in function.partition.plans] == ["unknown"]


def test_constants_are_measured_once_for_each_number_of_ranks(costs, no_session, caplog):
    caplog.set_level(logging.INFO, "synkhronos")
    for n_ranks in (2, 2, 3):
        synk.fork(n_ranks, use_gpu=False, plan="auto")
        (ours, function), (theirs, serial) = trained(synk.function, exact=True), trained(theano.function)
        close(function(values(50)), serial(values(50)))
        close(ours, theirs)
        synk.close()
    assert caplog.text.count("measuring this machine") == 2
    machines = Store(str(costs)).machines()
    assert len(machines) == 2
    for one in machines.values():
        assert 0 < one.meeting < one.command + one.meeting
        assert one.alone.passes.seconds[-1] > one.alone.passes.seconds[0]
        assert one.alone.products["float32"].seconds[-1] > one.alone.products["float32"].seconds[0]


def test_the_environment_pins_the_plan():
    code = """
        x = T.dmatrix("x")
        synk.fork(2)
        f = synk.function([x], x.sum(), exact=True)
        f(np.ones((4, 2)))
        print(f.counts)
    """
    for plan, counts in (("rows", "(2, 2)"), ("controller", "(4, 0)")):
        assert run_script(code, environment={"SYNKHRONOS_PLAN": plan})[0].strip() == counts
