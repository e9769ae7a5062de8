"""Times of functions and constants of the machine, which the choice of plans needs."""

import concurrent.futures
import json
import logging
import os
import signal

import numpy as np
import pytest
from backend import T, on_theano, theano
from comparison import close
from interrupts import Interrupt, handled_by, interrupt
from made_up_costs import by, stored, trained, values
from scripts import run_script

import synkhronos as synk
from synkhronos._costs import Store


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
                signal.setitimer(signal.ITIMER_REAL, 0)
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
