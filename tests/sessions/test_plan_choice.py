"""Choice of plans by cost, with made-up constants."""

import contextlib
import types

import numpy as np
import pytest
from backend import T, theano
from comparison import close
from made_up_costs import by, stored, trained, values

import synkhronos as synk
from synkhronos._api.choice import seconds_of
from synkhronos._costs import Estimate
from synkhronos._graph import Graph
from synkhronos._session import held


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
    assert f"plan of about 6 rows: controller; rows {1e3 * few.rows:.3g} ms" in repr(function.partition)
    assert "plan of about 6 rows: controller" in function.partition._repr_html_()


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
