"""Training loops with a collective in every step: the same results in one command as by a call for each step."""

import json

import numpy as np
import pytest
from backend import T, theano

import synkhronos as synk
from synkhronos import rules
from synkhronos.extensions import checkpoint
from synkhronos.extensions.train import make_train_function

N_ROWS = 61


class Model:
    def __init__(self):
        draw = np.random.RandomState(0)
        self.rows = draw.rand(N_ROWS, 3)
        self.targets = self.rows @ np.arange(1.0, 4.0)
        self.w, self.m = theano.shared(np.zeros(3), "w"), theano.shared(np.zeros(3), "m")
        x, t = T.matrix("x", "float64"), T.vector("t", "float64")
        rate = T.scalar("rate", "float64")
        loss = T.sqr(T.dot(x, self.w) - t).mean()
        m = 0.5 * self.m + synk.averaged(T.grad(loss, self.w))
        outputs = [loss, (x.sum(), "sum"), (t.max(), "max"), (t.min(), "min")]
        updates = [(self.m, m), (self.w, self.w - rate * m)]
        self.step = synk.function([x, t], outputs, bcast_inputs=[rate], updates=updates)

    def train(self, f=None, **options):
        synk.broadcast([self.w, self.m], [np.zeros(3)] * 2)
        arguments = {"params": [self.w], "batch_size": 2, "epochs": 3, "schedule": {"rate": 0.05}, **options}
        return synk.loop(f or self.step, [self.rows, self.targets], **arguments)


@pytest.mark.parametrize("rule", [None, rules.BSP(), "local"])
def test_one_command_gives_the_results_of_calls(session, rule):
    model = Model()
    called = []

    def by_calls(*inputs, **keywords):
        called.append(1)
        return model.step(*inputs, **keywords)

    schedule = {"rate": lambda step: 0.05 / (1 + step / 10)}
    expected = model.train(by_calls, schedule=schedule)
    run = model.train(rule=rule, schedule=schedule)
    in_epoch = -(-N_ROWS // (2 * session))
    assert run.steps == expected.steps == [3 * in_epoch] * session and len(called) == 3 * in_epoch
    np.testing.assert_allclose(run.params[0], expected.params[0], rtol=1e-12)
    for outputs, of_calls in zip(run.outputs, expected.outputs):
        np.testing.assert_allclose(outputs, of_calls, rtol=1e-12)
    assert synk.check_replicas() == {}
    assert run.exchanges == run.bytes == [0] * session


def test_the_ranks_get_one_command_for_an_epoch(synchronize, tmp_path):
    synchronize(2)
    model, path = Model(), tmp_path / "trace.json"
    with synk.trace(path):
        model.train(epochs=2)
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert sum(name.startswith("Loop") for name in names) == 2 * 3  # one of them begins the loop
    assert not any(name.startswith("Call") for name in names)


def test_a_training_step_is_the_serial_step(session):
    draw = np.random.RandomState(1)
    x_data, y_data = draw.rand(40, 3), draw.rand(40)
    x, y = T.matrix("x", "float64"), T.vector("y", "float64")

    def made(**options):
        w = theano.shared(np.zeros(3), "w")
        loss = T.sqr(T.dot(x, w) - y).mean()
        return w, make_train_function(loss, [w], x, y, "adam", T.scalar("rate", "float64"), **options)

    def train(step):
        size = {"batch_size": 20 // session if session != 3 else 5}
        return step.loop(x_data, y_data, epochs=3, schedule={"rate": 0.01}, **size)

    values = []
    for options in ({}, {"exact": True}, {"rule": rules.BSP()}, {"rule": "local"}, {"rule": "local", "exact": True}):
        w, step = made(**options)
        run = train(step)
        values.append(w.get_value())
        np.testing.assert_array_equal(run.params[0], values[-1])
        assert len(run.losses) == run.steps[0]
        assert run.delay is None  # on one node, nothing is delayed
    np.testing.assert_allclose(values[0], values[1], rtol=1e-9)
    np.testing.assert_array_equal(values[0], values[2])
    np.testing.assert_array_equal(values[0], values[3])
    np.testing.assert_array_equal(values[1], values[4])
    assert synk.check_replicas() == {}


@pytest.mark.parametrize("rule", [None, rules.BSP()])
def test_other_variables_are_averaged_at_the_end(session, rule):
    draw = np.random.RandomState(1)
    x_data, y_data = draw.rand(12 * session, 3), draw.rand(12 * session)
    x, y = T.matrix("x", "float64"), T.vector("y", "float64")
    w, total = theano.shared(np.zeros(3), "w"), theano.shared(np.zeros(3), "total")
    last = theano.shared(np.int64(0), "last")
    loss = T.sqr(T.dot(x, w) - y).mean()
    of_own_rows = [(total, total + x.sum(axis=0)), (last, T.cast(1000 * x[0, 0], "int64"))]
    step = synk.function([x, y], loss, updates=[(w, w - 0.1 * synk.averaged(T.grad(loss, w))), *of_own_rows])
    synk.loop(step, [x_data, y_data], params=[w], batch_size=4, epochs=2, rule=rule)
    assert synk.check_replicas() == {}
    np.testing.assert_allclose(total.get_value(), 2 * x_data.sum(axis=0) / session, rtol=1e-12)


def test_a_loop_with_collectives_is_resumed(session, tmp_path):
    model, path = Model(), tmp_path / "run.npz"

    def save(run):
        if run.epoch == 1:
            checkpoint.save_run(path, run)

    expected = model.train(on_epoch=save)
    run = model.train(resume=checkpoint.load_run(path))
    np.testing.assert_array_equal(run.params[0], expected.params[0])
    np.testing.assert_array_equal(run.losses, expected.losses)


def test_on_another_number_of_ranks(synchronize):
    synchronize(2)
    model, states = Model(), []
    expected = model.train(batch_size=3, on_epoch=lambda run: states.append(run.state()))
    synk.close()
    synchronize(3)
    run = model.train(batch_size=2, resume=states[0])  # steps of as many rows are the same
    np.testing.assert_allclose(run.params[0], expected.params[0], rtol=1e-9)


def test_a_loop_by_calls_is_not_saved(synchronize):
    synchronize(2)
    model = Model()
    exact = synk.function([], model.w.sum(), exact=True)
    for options in ({"params": ()}, {"f": lambda *inputs, **keywords: exact()}):
        with pytest.raises(TypeError, match=r"run.state\(\) got a loop that calls its function for each step"):
            model.train(**options, on_epoch=lambda run: run.state())
        with pytest.raises(TypeError, match=r"resume got .*; expected a training rule, or params"):
            model.train(**options, resume={})


def test_an_error_of_a_step_ends_the_loop_on_all_ranks(session):
    w, x = theano.shared(np.zeros(2), "w"), T.ivector("x")
    table = theano.shared(np.ones(3), "table")
    f = synk.function([x], w.sum(), updates=[(w, w + synk.averaged(table[x[0]]))])
    rows = np.zeros(10 * session, "int32")
    rows[7] = 5
    with pytest.raises(synk.WorkerError, match="failed in Loop"):
        synk.loop(f, [rows], params=[w], batch_size=1, epochs=1)
    run = synk.loop(f, [np.zeros(4 * session, "int32")], params=[w], batch_size=1, epochs=1)
    assert run.steps == [4] * session
    assert synk.check_replicas() == {}
