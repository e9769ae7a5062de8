"""`synk.plan`: predictions of steps from measurements, of which no trace is left."""

import csv
import functools
import io
import json
import re

import numpy as np
import pytest
from backend import MRG_RandomStreams, T, on_theano, theano
from comparison import close
from made_up_costs import CONSTANTS, GRID

import synkhronos as synk
from synkhronos._api import plans, step_measurements
from synkhronos._api.calibration import name_of_machine
from synkhronos._backends import machine
from synkhronos._costs import Cluster, Curve, Link, Rates, RowTimes, Rule, Store, Workload, predict_steps
from synkhronos._costs.predict import input_seconds
from synkhronos._session import held
from synkhronos.extensions import train


@pytest.fixture
def forked(no_session, monkeypatch):
    """Return a function that makes a session of some ranks, in which measurements are short."""
    monkeypatch.setattr(step_measurements, "_SECONDS", 0.001)
    monkeypatch.setattr(step_measurements, "_REPETITIONS", 2)
    return functools.partial(synk.fork, use_gpu=False)


X = np.random.RandomState(0).randn(48, 3)
TARGETS = X @ [1.0, 2.0, 3.0]


def regression():
    """Return the inputs, the loss, which draws random numbers, and the updated variables of a regression."""
    w, total, x, t = theano.shared(np.ones(3), "w"), theano.shared(0.0, "total"), T.dmatrix("x"), T.dvector("t")
    noise = MRG_RandomStreams(3).normal(size=t.shape)
    return [x, t], T.sqr(x.dot(w) - t + 0.1 * noise).mean(), [w, total]


def build(**options):
    inputs, loss, (w, total) = regression()
    updates = [(w, w - 0.1 * T.grad(loss, w)), (total, total + inputs[0].sum())]
    return synk.function(inputs, loss, updates=updates, **options)


def tensors(f):
    return [var for var in f.get_shared() if hasattr(var.get_value(), "dtype")]


def state(f):
    """Return the values of all variables of a function on all ranks, and those of random states on the controller."""
    values = [np.array(synk.get_value(rank, var)) for var in tensors(f) for rank in range(2)]
    return values, [str(var.get_value().bit_generator.state) for var in f.get_shared() if var not in tensors(f)]


def check_same(one, other):
    for a, b in zip(one[0], other[0]):
        np.testing.assert_array_equal(a, b)
    assert one[1] == other[1]


@pytest.mark.parametrize("exact", [True, False])
def test_no_trace_is_left_in_variables_and_random_states(forked, exact):
    forked(2)
    f = build(exact=exact)
    f(X, TARGETS)
    held_by_program = tensors(f)[0].get_value(borrow=True)
    before, counts = state(f), f.counts
    table = synk.plan(f, X, TARGETS, batch=[24, 48])
    check_same(state(f), before)
    assert f.counts == counts
    assert tensors(f)[0].get_value(borrow=True) is held_by_program
    assert [(step.ranks, step.batch) for step in table.table.steps] == [(1, 24), (1, 48), (2, 24), (2, 48)]
    assert [(one.ranks, one.batch) for one in table.checks] == [(2, 24), (2, 48)]


def test_later_steps_are_those_without_a_plan(forked):
    """Also where large variables are updated by slices, and the workers view the controller's values."""
    found = []
    for asks in (False, True):
        forked(2)
        w, x = theano.shared(np.ones((3, 100_000), np.float32), "w"), T.fmatrix("x")
        f = synk.function([x], x.dot(w).sum(), updates=[(w, w - np.float32(1e-3) * x.T.dot(x.dot(w)))], exact=True)
        given = X.astype("float32")
        f(given)
        if asks:
            synk.plan(f, given)
        found.append([f(given), f(given), *synk.gather(w, nd_up=1)])
        synk.close()
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("place", ["measure_machine", "check_steps"])
def test_no_trace_is_left_after_an_exception(forked, monkeypatch, error, place):
    forked(2)
    f = build()
    f(X, TARGETS)
    before, inner = state(f), getattr(plans, place)

    def fail(*args, **kwargs):
        inner(*args, **kwargs)
        raise error("by the test")

    monkeypatch.setattr(plans, place, fail)
    with pytest.raises(error, match="by the test"):
        synk.plan(f, X, TARGETS)
    check_same(state(f), before)
    f(X, TARGETS)


def test_the_index_of_rows_is_made_before_steps_are_timed(forked, monkeypatch):
    forked(2)
    inner, draw, made = step_measurements._measured_calls, np.random.default_rng, []

    def timed(*args):
        with monkeypatch.context() as patch:
            patch.setattr(np.random, "default_rng", lambda *seed: made.append(seed) or draw(*seed))
            return inner(*args)

    monkeypatch.setattr(step_measurements, "_measured_calls", timed)
    assert synk.plan(build(exact=True), X, TARGETS, shuffled=True).checks
    assert made == []


def test_parts_of_a_step_add_up(forked):
    forked(2)
    options = {"batch": [24, 48], "line": "1Gbit", "slow": [3], "shuffled": True}
    table = synk.plan(build(exact=True), *map(synk.data, (X, TARGETS)), nodes=[1, 4], **options)
    for step in table.table.steps:
        close(step.compute + step.waiting + step.exposed, step.seconds)
        close(step.rows_per_second, step.batch / step.seconds)
        assert table.seconds(nodes=step.nodes, ranks=step.ranks, batch=step.batch) == step.seconds
        assert (step.link_bytes > 0) == (step.nodes > 1)
        assert step.memory > 0
    assert table.seconds(nodes=3, ranks=2, batch=30) > 0
    (alone,) = [one for one in table.checks if one.batch == 48]
    close(alone.error, alone.predicted / alone.measured - 1)
    lines = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [float(line["seconds"]) for line in lines] == [step.seconds for step in table.table.steps]
    text, html = str(table), table._repr_html_()
    assert f"{1e3 * table.table.steps[-1].seconds:.4g}" in text
    assert f"Verdict: {table.verdict}." in text
    assert "Error of the model at 2 measured sizes" in text
    assert "slow" not in text and "ms to copy 48 rows by index" in text
    assert html.count("<table>") == 3
    assert set(dir(table)) == {"checks", "notes", "plot", "seconds", "table", "to_csv", "verdict"}
    table.checks = table.checks[:1]
    assert "Error of the model at 1 measured size: median" in str(table)


def test_there_is_no_verdict_if_a_prediction_is_wrong(forked, monkeypatch):
    forked(2)
    monkeypatch.setattr(plans, "check_steps", lambda *arguments: [step_measurements.Check(2, 48, 0.5, 0.1, 0.2)])
    table = synk.plan(build(exact=True), X, TARGETS)
    assert table.verdict == "none, because a prediction is wrong by +400%; measure again while nothing else runs"


def test_the_bytes_are_those_of_the_gradients(forked):
    forked(2)
    for exact in (True, False):
        inputs, loss, (w, _) = regression()
        step = train.make_train_function(loss, [w], *inputs, "sgd", learning_rate=0.1, exact=exact)
        table = synk.plan(step, X, TARGETS, nodes=2, line="1Gbit")
        n_bytes = table.table.at(2, 2, 48).link_bytes  # on two nodes, each sends as many as are reduced
        assert n_bytes == 3 * 8 + (8 if exact else 0), "the loss is reduced by the controller if it is not exact"


@pytest.mark.parametrize("rule", ["sgd", "nesterov_momentum", "adam"])
def test_exact_steps_exchange_each_gradient_once(forked, rule):
    """The state of a rule is computed from all gradients in one vector, and parameters from its parts."""
    forked(2)
    inputs, loss, (w, _) = regression()
    step = train.make_train_function(loss, [w], *inputs, rule, learning_rate=0.1, exact=True)
    step(X, TARGETS)
    assert sorted(one.n_bytes for one in step.function.partition) == [8, 3 * 8]


def test_exact_steps_exchange_gradients_with_an_axis_of_length_1_once(forked):
    forked(2)
    x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.ones((3, 1)), "w")
    loss = T.mean((x.dot(w)[:, 0] - y) ** 2)
    step = train.make_train_function(loss, [w], x, y, "nesterov_momentum", learning_rate=0.1, exact=True)
    step(X, TARGETS)
    assert sorted(one.n_bytes for one in step.function.partition) == [8, 3 * 8]


@pytest.mark.parametrize(("exact", "n_bytes"), [(True, 3 * 8 + 8), (False, 3 * 8)])
def test_exact_steps_within_nodes_have_averages_between_them(forked, exact, n_bytes):
    """The delay that the loop would choose is predicted, too."""
    forked(2)
    inputs, loss, (w, _) = regression()
    step = train.make_train_function(loss, [w], *inputs, "sgd", learning_rate=0.1, rule="local", exact=exact)
    before = w.get_value()
    table = synk.plan(step, X, TARGETS, nodes=[1, 4], ranks=2, line="1Mbit")
    np.testing.assert_array_equal(w.get_value(), before)
    workload, delay = table._rules[0][0], table.table.steps[1].delay_to_hide
    assert (workload.in_nodes, workload.on_one_node is not None) == ((n_bytes, 1), exact)
    one, four = table.table.steps
    assert (one.link_bytes, one.delay_to_hide, four.on_link) == (0, 0, 0)
    close(four.link_bytes, 2 * 3 / 4 * 3 * 8 / (2 * delay))
    assert 0 < one.exposed <= four.exposed
    text = f"delayed auto: a loop chooses a delay of {delay} steps, and an average begins after every {2 * delay} steps"
    assert text in str(table)


def test_a_step_with_gradients_in_a_function_of_their_own_is_exact_by_a_delay_that_is_chosen(forked):
    """Such a loop has one function of the step, with an all-reduce of the gradients. With other rules it has none."""
    forked(2)
    inputs, loss, (w, _) = regression()
    step = train.make_train_function(loss, [w], *inputs, "sgd", learning_rate=0.1)
    table = synk.plan(step, X, TARGETS, rule=["delayed:auto", "local:4"], nodes=4, ranks=2, line="1Mbit")
    assert [work.in_nodes for work, _ in table._rules] == [(3 * 8, 1), None]
    assert table.table.steps[0].exposed > 0
    assert "whose ranks make exact steps together" in str(table) and "each rank makes steps alone" in str(table)


def weighted_step():
    inputs, loss, (w, _) = regression()
    return train.make_train_function(loss, [w], *inputs, "sgd", learning_rate=0.1, weights=inputs[1].sum())


@pytest.mark.parametrize(
    ("make", "rule", "expected"),
    [
        (build, "delayed:auto", "a function with exact=True or collectives"),
        (
            weighted_step,
            "delayed:auto",
            "a function with exact=True or collectives, or a step of train without weights",
        ),
        (
            functools.partial(build, exact=True),
            synk.rules.Hierarchical({2: "node", 4: "all"}),
            "averages of all ranks alone",
        ),
    ],
)
def test_rules_by_which_no_loop_makes_steps_are_refused(forked, make, rule, expected):
    forked(2)
    with pytest.raises(ValueError, match=f"^rule is .*; expected {expected}"):
        synk.plan(make(), X, TARGETS, rule=rule)


def test_a_step_with_a_training_rule_copies_rows_by_index_also_if_another_rule_is_asked(forked):
    forked(2)
    inputs, loss, (w, _) = regression()
    step = train.make_train_function(loss, [w], *inputs, "sgd", learning_rate=0.1, rule=synk.rules.LocalSGD(every=5))
    assert "ms to copy 48 rows by index" in str(synk.plan(step, X, TARGETS, rule="bsp"))


def test_rules_and_hyperparameters(forked):
    forked(2)
    inputs, loss, (w, _) = regression()
    step = train.make_train_function(loss, [w], *inputs, "sgd", learning_rate=T.dscalar("rate"))
    rules = ["bsp", "local:4", synk.rules.Average(every=4, delay=2), synk.rules.EASGD(every=8)]
    table = synk.plan(step, X, TARGETS, rate=0.1, rule=rules, nodes=2, ranks=2, line="1Gbit")
    named = [str(one.rule) for one in table.table.steps]
    assert named == ["bsp", "local every=4", "delayed every=4 delay=2", "centre every=8"]
    assert "local every=4" in str(table)
    local = train.make_train_function(loss, [w], *inputs, "sgd", learning_rate=0.1, rule=synk.rules.LocalSGD(every=5))
    before = w.get_value()
    table = synk.plan(local, X, TARGETS)
    assert (str(table.table.steps[0].rule), table.checks) == ("local every=5", [])
    np.testing.assert_array_equal(w.get_value(), before)


def test_functions_of_other_kinds(forked):
    """A function of `parallelize`, with inputs in another order, and one with rows in shared variables."""
    forked(2)
    w, x, rate = theano.shared(np.ones(3), "w"), T.dmatrix("x"), T.dscalar("rate")
    with synk.parallelize():
        f = theano.function([rate, x], (rate * x.dot(w)).sum())
    assert len(synk.plan(f, 2.0, X, batch=[48]).checks) == 1
    rows = theano.shared(np.zeros((0, 3)), "rows")
    g = synk.function([], rows.sum(), sliceable_shareds=[rows], exact=True)
    synk.scatter(rows, X)
    table = synk.plan(g)
    assert [(one.ranks, one.batch) for one in table.checks] == [(2, 48)]
    assert synk.get_lengths(rows) == [24, 24]


def network(**options):
    """Return an exact function with gradients of 480 and 240 KB, and its rows."""
    draw = np.random.RandomState(0)
    layers = [theano.shared(draw.randn(*shape), f"w{i}") for i, shape in enumerate([(200, 300), (300, 100)])]
    x = out = T.dmatrix("x")
    for w in layers:
        out = T.tanh(out.dot(w))
    loss = T.sqr(out).mean()
    updates = [(w, w - 0.1 * g) for w, g in zip(layers, T.grad(loss, layers))]
    return synk.function([x], loss, updates=updates, exact=True, **options), draw.randn(64, 200)


@pytest.mark.parametrize("ranks", [1, 2])
def test_times_of_apply_nodes_show_when_gradients_exist(forked, ranks):
    """The last layer's gradient is exchanged first. All that the measurement changes is restored."""
    forked(ranks)
    f, x = network()
    f(x)
    vm, values = machine(f._theano), [w.get_value() for w in f.get_shared()]
    before = vm.time_thunks, list(vm.call_times), list(vm.call_counts)
    table = synk.plan(f, x, nodes=[1, 2], ranks=[1], batch=[64], line="100Mbit")
    assert (vm.time_thunks, vm.call_times, vm.call_counts) == before
    for w, value in zip(f.get_shared(), values):
        np.testing.assert_array_equal(w.get_value(), value)
    later, last = operands = table._workload.operands
    assert [round(720_008 * one.part) for one in operands] == [240_008, 480_000], "the loss is in the first piece"
    assert len(last.rows) >= 3
    for one, other in zip(later.until, last.until):
        assert 0 < one < other <= 1
    workload, cluster = table._workload, table._cluster
    step, exchange = table.table.at(2, 1, 64), cluster.link.all_reduce(workload.n_bytes, 2)
    compute = step.compute + step.waiting - cluster.command - input_seconds(workload, cluster, 2, 1, 64)
    close(step.exposed, workload.exposed(compute, exchange, 32))
    assert step.exposed < exchange
    (text,) = [note for note in table.notes if "gradient" in note]
    shown = re.match(r"Measured: with (\d+) rows, .* after (\d+%) of a step, the last one after (\d+%);", text)
    assert shown.groups() == (f"{last.rows[-1]:g}", f"{later.until[-1]:.0%}", f"{last.until[-1]:.0%}")


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_the_gradients_of_training_steps_exist_one_by_one_on_several_nodes(forked, exact):
    """On this node, they are reduced as one vector, or by slices."""
    forked(2)
    draw, (x, y, rate) = np.random.RandomState(0), (T.dmatrix("x"), T.dvector("y"), T.dscalar("rate"))
    layers = [theano.shared(draw.randn(*shape), f"w{i}") for i, shape in enumerate([(200, 300), (300, 100)])]
    loss = T.sqr(T.tanh(T.tanh(x.dot(layers[0])).dot(layers[1])).sum(axis=1) - y).mean()
    step = train.make_train_function(loss, layers, x, y, "adam", rate, exact=exact)
    given, values = (draw.randn(64, 200), draw.randn(64)), [w.get_value() for w in layers]
    table = synk.plan(step, *given, rate=0.1, nodes=[1, 2], ranks=[1], batch=[64], line="100Mbit")
    later, last = table._workload.operands
    assert [round(one.part * table._workload.n_bytes) // 1000 for one in (later, last)] == [240, 480]
    assert all(0 < one < other <= 1 for one, other in zip(later.until, last.until))
    assert any(note.startswith("Measured: with") for note in table.notes)
    for w, value in zip(layers, values):
        np.testing.assert_array_equal(w.get_value(), value)
    assert synk.check_replicas() == {}


def check_assumption(table, reason):
    assert table._workload.operands == ()
    assert f"Assumed: exchange between nodes begins when all gradients exist, because {reason}" in table.notes


def test_without_times_of_apply_nodes_exchange_does_not_overlap(forked, monkeypatch):
    forked(2)
    monkeypatch.setattr("synkhronos._rank.call.timed_machine", lambda function: None)
    f, x = network()
    f(x)
    check_assumption(synk.plan(f, x, nodes=2, line="1Gbit"), "no times of single Apply nodes show it")
    f, values = build(exact=True), (X, TARGETS)
    check_assumption(synk.plan(f, *values, nodes=2, line="1Gbit"), "they have fewer than 256 KiB")
    assert "gradients exist" not in str(synk.plan(f, *values)), "one node"


@pytest.mark.numba
@pytest.mark.skipif(on_theano, reason="Theano has no numba")
def test_code_of_numba_has_no_times_of_apply_nodes(forked):
    forked(2)
    f, x = network(mode="NUMBA")
    f(x)
    table = synk.plan(f, x, nodes=[1, 2], ranks=[1], line="100Mbit")
    check_assumption(table, "no times of single Apply nodes show it")
    exchange = table._cluster.link.all_reduce(table._workload.n_bytes, 2)
    close(table.table.at(2, 1, 64).exposed, exchange)


def test_one_rank_says_what_is_assumed(forked):
    forked(1)
    table = synk.plan(build(exact=True), X, TARGETS, ranks=[1, 2])
    assert table.checks == []
    assert "this node has one rank" in str(table)


@pytest.fixture
def same_measurements(forked, monkeypatch, costs):
    """Make a session on a machine of made-up speeds, in which arithmetic is the limit; the first measurement counts."""
    forked(2)
    rates = Rates({"float32": GRID, "float64": GRID}, Curve((1.0, 1e9), (1e-18, 1e-9)), 0.0, 0.0)
    machine = CONSTANTS._replace(alone=rates, together=rates, meeting=1e-6)
    Store(str(costs)).put("machines", name_of_machine(held(), synk.__version__), value=machine)
    for name in ("measure_function", "measure_machine"):
        monkeypatch.setattr(plans, name, functools.partial(only_once, getattr(plans, name), []))


def only_once(inner, found, *args):
    """Return the result of the first call."""
    found.extend([] if found else [inner(*args)])
    return found[0]


def test_this_machine_by_its_own_numbers_is_no_other_machine(same_measurements, tmp_path):
    path, f = tmp_path / "here.json", build(exact=True)
    ask = functools.partial(synk.plan, f, X, TARGETS, batch=[24, 48], nodes=[1, 2], line="10Gbit")
    here = ask(machine_out=path)
    there = ask(machine=path)
    for one, other in zip(here.table.steps, there.table.steps):
        close(other.seconds, one.seconds, 1e-9)
        close(other.compute, one.compute, 1e-9)
    assert len(here.table.steps) == len(there.table.steps) == 8
    text = str(there)
    assert "Assumed, not measured: a machine with 2 cores, each with 16 GFLOP/s of float32, 16 GFLOP/s of" in text
    assert "Error of the model of the machine that was measured at 2 measured sizes" in text
    assert "Not counted, and assumed to be scaled like the rest: " in text, "random numbers"
    assert "Assumed, not measured" not in str(here)


def test_a_machine_of_half_the_arithmetic_computes_twice_as_long(same_measurements, tmp_path):
    path, f = tmp_path / "here.json", build()
    here = synk.plan(f, X, TARGETS, batch=[24, 48], machine_out=path)
    numbers = json.loads(path.read_text())
    numbers["products"]["float64"] /= 2
    numbers["cores"] = 8
    there = synk.plan(f, X, TARGETS, batch=[24, 48], machine=numbers)
    assert [one.ranks for one in there.table.steps] == [1, 1, 2, 2, 4, 4, 8, 8]
    for batch in (24, 48):
        close(there.seconds(ranks=1, batch=batch), 2 * here.seconds(ranks=1, batch=batch), 1e-6)
    one, other = (table.table.at(1, 2, 48) for table in (here, there))
    close(other.compute - one.compute, here._cluster.contention.at(2) * here._workload.compute(24), 1e-6)
    close(other.exposed, one.exposed, 1e-6)
    measured = [re.search(r"one rank takes .*, ([\d.]+) ms with .*, 48 rows", str(table))[1] for table in (here, there)]
    assert measured[0] == measured[1], "the times of the other machine are not measured"
    with pytest.raises(ValueError, match="got a machine with products of float32; expected also float64, which"):
        synk.plan(f, X, TARGETS, machine={**numbers, "products": {"float32": 1e9}})


def test_rules_have_no_delay_of_every_steps_or_more():
    """A step takes 30 ms, and an average 1.002 s: it needs a delay of 34 steps."""
    work = Workload((RowTimes((10.0, 100.0), (0.02, 0.11), 0.01),), n_bytes=1e6)
    cluster = Cluster(Link(0.001, 1e6), Link(0.0, 1e8))

    def steps(*rules):
        return predict_steps(work, cluster, nodes=[2], ranks=[1], batches=[40], rules=[(work, rule) for rule in rules])

    table = steps(Rule("delayed", 10), Rule("delayed", 35), Rule("local", 10))
    close(table.steps[0].exposed, (1.002 - 9 * 0.03) / 10)
    close(table.steps[1].exposed, 0.0)
    assert plans._notes_on_delays(table) == [
        "delayed every=10: averages take up to 34 steps, and a delay must be less than every, so ranks wait; every=35 "
        "hides them"
    ]
    for every, delay in ((1, None), (4, 4), (4, 9)):
        with pytest.raises(ValueError, match=f"rule is 'delayed every={every}.*; expected a delay of at least 1"):
            Rule("delayed", every, delay)


def test_plots_have_the_measured_points(forked, tmp_path):
    pytest.importorskip("matplotlib")
    forked(2)
    figure = synk.plan(build(exact=True), X, TARGETS, batch=[48]).plot(tmp_path / "plan.png")
    predicted, measured = figure.axes[0].lines
    assert (list(predicted.get_xdata()), list(measured.get_xdata())) == ([1, 2], [2])
    assert (tmp_path / "plan.png").stat().st_size > 1000


MISTAKES = [
    ({"ranks": 0}, "ranks has 0; expected ints of at least 1"),
    ({"batch": []}, "batch is empty; expected at least one int"),
    ({"nodes": 2}, "expected also line"),
    ({"line": "fast"}, "line is 'fast'; expected such as"),
    ({"line": ("a", 1)}, "line is ('a', 1); expected such as"),
    ({"slow": [5, 0]}, "slow is [5, 0]; expected a list of positive numbers"),
    ({"slow": 5}, "slow is 5; expected a list of positive numbers"),
    ({"rule": []}, "rule is []; expected at least one training rule"),
    ({"rule": "often"}, "rule is 'often'; expected"),
    ({"rule": synk.rules.GoSGD()}, "gossip has no model"),
    ({"rule": "delayed:1"}, "rule is 'delayed every=1'; expected a delay of at least 1 and less than every"),
    ({"machine": "none.json"}, "machine is 'none.json', which cannot be read"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes(forked, options, message):
    forked(2)
    with pytest.raises(ValueError, match=re.escape(message)):
        synk.plan(build(), X, TARGETS, **options)


def test_functions_without_rows_are_refused(forked):
    forked(2)
    with pytest.raises(ValueError, match="has no scattered inputs and no sliceable shared variables; expected some"):
        synk.plan(synk.function([], theano.shared(1.0) * 2))
    with pytest.raises(TypeError, match="expected a function of synkhronos, or a step of train"):
        synk.plan(np.sum, X)


@pytest.mark.parametrize(("ranks", "nodes", "most"), [([8], [4], 64), ([1, 8], [1], 2048)])
def test_one_rank_is_measured_with_no_more_rows_than_ranks_have_or_steps_are_checked_with(forked, ranks, nodes, most):
    forked(2)
    table = synk.plan(build(), X, TARGETS, ranks=ranks, nodes=nodes, batch=[2048], line="10Gbit")
    assert table._workload.kernels[0].rows[-1] == most
    assert any("Assumed: efficiencies" in note for note in table.notes) == (most < 2048)
    with pytest.raises(ValueError, match="ranks has 0; expected ints of at least 1"):
        table.seconds(ranks=0, batch=8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_wire_dtype_counts_for_results_of_functions_without_updates(forked, dtype):
    forked(2)
    x = T.matrix("x", dtype=dtype)
    table = synk.plan(synk.function([x], T.sqr(x).sum(), exact=True), X.astype(dtype))
    assert table._workload.is_float32 == (dtype == "float32")


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_ranks_than_those_of_the_session_have_its_exchange(forked, ranks):
    forked(3)
    notes = synk.plan(build(), X, TARGETS, ranks=[ranks, 3]).notes
    assert any(note.startswith("Assumed: with fewer ranks than 3, exchange") for note in notes) == (ranks == 2)
