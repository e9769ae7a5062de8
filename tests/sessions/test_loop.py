"""Training loops: values as in a simulation with the same rules, data, schedules, and what a program sees of them."""

import time

import numpy as np
import pytest
from backend import T, theano
from deadline import wait_for
from rule_simulator import simulate

import synkhronos as synk
from synkhronos import rules
from synkhronos._api.run import delayed
from synkhronos._costs import to_hide
from synkhronos._rank import MOST_BARRIERS, Loop
from synkhronos._session import current
from synkhronos.extensions.train import make_train_function

N_ROWS, N_COLUMNS, RATE = 61, 3, 0.05

AVERAGES = [
    rules.LocalSGD(every=3),
    rules.LocalSGD(every=4, start=2),
    rules.Outer(every=4, delay=2, merge="delta"),
    rules.Outer(every=5, delay=4, merge="pull", alpha=0.6),
    rules.SlowMo(every=3, learning_rate=RATE),
    rules.BMUF(every=3, nesterov=True),
    rules.DiLoCo(every=4),
    rules.DiLoCo(every=4, delay=3),
    rules.DASO(warmup=1, cooldown=1, every=2),
    rules.Hierarchical(periods={2: "node", 6: "all"}),
]
PAIRS = [rules.ASGD(every=3), rules.EASGD(every=2), rules.EAMSGD(every=4), rules.GoSGD(probability=0.3)]


class Regression:
    """A linear regression whose step also returns the mean of the numbers of its rows."""

    def __init__(self, dtype):
        draw = np.random.RandomState(0)
        self.rows = draw.rand(N_ROWS, N_COLUMNS).astype(dtype)
        self.targets = (self.rows @ np.arange(1.0, N_COLUMNS + 1) + 0.1 * draw.randn(N_ROWS)).astype(dtype)
        self.numbers = np.arange(N_ROWS).astype(dtype)
        self.w = theano.shared(np.ones(N_COLUMNS, dtype), "w")
        x, t, number = T.matrix("x", dtype), T.vector("t", dtype), T.vector("number", dtype)
        loss = T.sqr(T.dot(x, self.w) - t).mean()
        updates = [(self.w, self.w - np.asarray(RATE, dtype) * T.grad(loss, self.w))]
        self.step = synk.function([x, t, number], [loss, number.mean()], updates=updates)

    @property
    def data(self):
        return [self.rows, self.targets, self.numbers]

    def after_step(self, w, rows):
        """Return the parameters after a step in NumPy, from the formula of the gradient."""
        error = self.rows[rows] @ w - self.targets[rows]
        return w - RATE * 2 * (error @ self.rows[rows]) / np.asarray(len(rows), w.dtype)


@pytest.fixture
def regression(session, dtype):
    return Regression(dtype)


def close(dtype):
    return {"rtol": 2e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-12}


def shuffled(seed, epoch, n):
    return np.resize(np.random.default_rng([seed, epoch]).permutation(N_ROWS), n)


@pytest.mark.parametrize("rule", AVERAGES, ids=lambda rule: rule.name)
def test_averages_follow_the_simulation(regression, session, rule, dtype):
    size, epochs, n = 2, 3, session
    in_epoch = -(-N_ROWS // (size * n))
    batches = [shuffled(7, epoch, in_epoch * n * size).reshape(in_epoch, n, size) for epoch in range(epochs)]

    def gradient_step(rank, w, step):
        return regression.after_step(w, batches[(step - 1) // in_epoch][(step - 1) % in_epoch, rank])

    run = synk.loop(
        regression.step, regression.data, params=[regression.w], batch_size=size, epochs=epochs, rule=rule, seed=7
    )
    assert run.steps == [in_epoch * epochs] * n
    numbers = [one[:, 1].reshape(epochs, -1) for one in run.outputs]
    for epoch in range(epochs):
        for rank in range(n):
            np.testing.assert_allclose(numbers[rank][epoch], batches[epoch][:, rank].mean(axis=1), rtol=1e-6)
    losses = [one[:, 0].reshape(epochs, -1).mean(axis=1) for one in run.outputs]
    options = {"nodes": [0] * n}
    if isinstance(rule, rules.DASO):
        options |= {"steps_per_epoch": in_epoch, "losses": np.mean(losses, axis=0).tolist()}
    start = np.ones(N_COLUMNS, dtype)
    simulated = simulate(rule, gradient_step, start, n, in_epoch * epochs, **options)
    expected = np.mean(simulated.x, axis=0)
    np.testing.assert_allclose(run.params[0], expected, **close(dtype))
    for rank in range(n):
        np.testing.assert_array_equal(synk.get_value(rank, regression.w), run.params[0])
    assert run.staleness == [age for kind, _, age in simulated.log if kind == "merge"]
    sent = sum(kind == "send" for kind, *_ in simulated.log)
    assert run.exchanges == [sent] * n and run.bytes == [sent * start.nbytes] * n


@pytest.mark.parametrize("rule", PAIRS, ids=lambda rule: rule.name)
def test_a_centre_and_gossip_follow_the_recorded_order(regression, session, rule, dtype):
    n = session
    run = synk.loop(regression.step, regression.data, params=[regression.w], batch_size=1, epochs=4, rule=rule, seed=1)
    numbers = [one[:, 1].round().astype(int) for one in run.outputs]
    n_batches = -(-N_ROWS // n) * n
    assert sum(run.steps) == 4 * n_batches
    wanted = np.concatenate([shuffled(1, epoch, n_batches) for epoch in range(4)])
    assert sorted(np.concatenate(numbers)) == sorted(wanted)  # each batch was used once

    def gradient_step(rank, w, step):
        return w if step > run.steps[rank] else regression.after_step(w, numbers[rank][step - 1 : step])

    if rule.engine == "centre":
        order = [(rank, slice(None)) for _, rank, *_ in run.order]
    else:
        order = [(kind, rank, step, other) for _, rank, kind, step, other in run.order]
        sent = [rank for _, rank, kind, *_ in run.order if kind == "send"]
        assert run.exchanges == [sent.count(rank) for rank in range(n)]
    simulated = simulate(rule, gradient_step, np.ones(N_COLUMNS, dtype), n, max(run.steps), order=order)
    expected = simulated.centre
    if rule.engine == "gossip":
        np.testing.assert_allclose(sum(simulated.weights), 1, rtol=1e-12)
        expected = sum(weight * x for weight, x in zip(simulated.weights, simulated.x))
    np.testing.assert_allclose(run.params[0], expected, **close(dtype))
    for rank in range(n):
        np.testing.assert_array_equal(synk.get_value(rank, regression.w), run.params[0])


@pytest.mark.parametrize("rule", [rules.ASGD(every=2, scale=0.5), rules.EASGD(every=2)], ids=lambda rule: rule.name)
def test_a_centre_of_several_parts(synchronize, rule):
    synchronize(1)
    n = 3 * (1 << 16) + 5
    w, x = theano.shared(np.arange(float(n)), "w"), T.vector("x", "float64")
    step = synk.function([x], x.sum(), updates=[(w, 0.9 * w + x.mean())])
    run = synk.loop(step, [np.ones(7)], params=[w], batch_size=1, epochs=1, rule=rule)
    order = [(0, slice(None))] * 4  # the last one after the seventh step
    simulated = simulate(rule, lambda rank, w, step: 0.9 * w + 1, np.arange(float(n)), 1, 7, order=order)
    np.testing.assert_allclose(run.params[0], simulated.centre, rtol=1e-12)


SAME_ON_ONE_RANK = [
    rules.LocalSGD(every=3),
    rules.ASGD(every=3, scale=1.0),
    rules.GoSGD(probability=0.5),
    rules.Outer(every=4, delay=2, merge="delta"),
]


@pytest.mark.parametrize("rule", SAME_ON_ONE_RANK, ids=lambda rule: rule.name)
def test_one_rank_trains_as_the_serial_program(synchronize, rule):
    synchronize(1)
    regression = Regression("float64")
    run = synk.loop(regression.step, regression.data, params=[regression.w], batch_size=4, epochs=2, rule=rule)
    w = np.ones(N_COLUMNS)
    for epoch in range(2):
        for rows in shuffled(0, epoch, 64).reshape(16, 4):
            w = regression.after_step(w, rows)
    np.testing.assert_allclose(run.params[0], w, rtol=1e-12)


@pytest.mark.parametrize("rule", [None, rules.BSP()])
def test_a_collective_in_every_step_is_the_serial_training(session, rule):
    regression = Regression("float64")
    x, t = T.matrix("x", "float64"), T.vector("t", "float64")
    loss = T.sqr(T.dot(x, regression.w) - t).mean()
    rate = T.scalar("rate", "float64")
    updates = [(regression.w, regression.w - rate * T.grad(loss, regression.w))]
    step = synk.function([x, t], loss, bcast_inputs=[rate], updates=updates, exact=True)
    schedule = {"rate": lambda step: RATE / (1 + step)}
    run = synk.loop(step, [regression.rows, regression.targets], batch_size=3, epochs=2, rule=rule, schedule=schedule)
    w, made, n_rows = np.ones(N_COLUMNS), 0, 3 * session
    in_epoch = -(-N_ROWS // n_rows)
    for epoch in range(2):
        for rows in shuffled(0, epoch, in_epoch * n_rows).reshape(in_epoch, -1):
            w = w + (regression.after_step(w, rows) - w) / (1 + made)
            made += 1
    np.testing.assert_allclose(regression.w.get_value(), w, rtol=1e-10)
    assert run.steps == [made] * session and len(run.losses) == made


def test_the_loss_falls_on_each_rank_and_the_parameters_start_from_the_controllers(session):
    regression = Regression("float64")
    synk.distribute()
    for rank in range(session):
        synk.set_value(rank, regression.w, np.full(N_COLUMNS, float(rank)))
    rule = rules.LocalSGD(every=5)
    run = synk.loop(regression.step, regression.data, params=[regression.w], batch_size=4, epochs=1, rule=rule)
    for rank in range(session):
        rows = shuffled(0, 0, run.steps[0] * session * 4).reshape(-1, session, 4)[0, rank]
        first = np.mean(regression.targets[rows] ** 2)  # of the controller's parameters, zeros
        np.testing.assert_allclose(run.outputs[rank][0, 0], first, rtol=1e-12)
    assert run.losses[-3:].mean() < run.losses[:3].mean()


def test_data_in_shared_memory_on_disk_and_of_a_callable(session, tmp_path):
    regression = Regression("float64")

    def train(data, **length):
        regression.w.set_value(np.ones(N_COLUMNS))
        rule = rules.DiLoCo(every=3, delay=1)
        return synk.loop(regression.step, data, params=[regression.w], batch_size=2, rule=rule, **length)

    expected = train(regression.data, epochs=2)
    kept = [synk.data(one) for one in regression.data]
    np.testing.assert_array_equal(train(kept, epochs=2).params[0], expected.params[0])
    mapped = []
    for i, one in enumerate(regression.data):
        np.save(tmp_path / f"{i}.npy", one)
        mapped.append(np.load(tmp_path / f"{i}.npy", mmap_mode="r"))
    np.testing.assert_array_equal(train(mapped, epochs=2).params[0], expected.params[0])
    rows, targets, numbers = regression.data
    in_epoch = -(-N_ROWS // (2 * session))

    def batches(rank, n_ranks, epoch, rng):
        for step in range(2 * in_epoch):
            order = np.random.default_rng([0, step // in_epoch]).permutation(N_ROWS)
            chosen = np.resize(order, in_epoch * n_ranks * 2).reshape(in_epoch, n_ranks, 2)[step % in_epoch, rank]
            yield rows[chosen], targets[chosen], numbers[chosen]

    run = train(batches, steps=2 * in_epoch)
    np.testing.assert_array_equal(run.params[0], expected.params[0])
    for outputs, others in zip(run.outputs, expected.outputs):
        np.testing.assert_array_equal(outputs, others)


def test_h5py_datasets(two, tmp_path):
    h5py = pytest.importorskip("h5py")
    regression = Regression("float64")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        datasets = [file.create_dataset(str(i), data=one) for i, one in enumerate(regression.data)]
        rule = rules.LocalSGD(every=2)
        run = synk.loop(regression.step, datasets, params=[regression.w], batch_size=8, epochs=1, rule=rule)
    regression.w.set_value(np.ones(N_COLUMNS))
    again = synk.loop(regression.step, regression.data, params=[regression.w], batch_size=8, epochs=1, rule=rule)
    np.testing.assert_array_equal(run.params[0], again.params[0])


@pytest.fixture
def two(synchronize):
    return synchronize(2)


def test_inputs_that_are_not_in_memory_are_read_once(two):
    read = []
    dataset = type(
        "Dataset", (), {"__len__": lambda self: 8, "__array__": lambda *_, **__: read.append(1) or np.ones(8)}
    )
    x = T.vector("x", "float64")
    exact = synk.function([x], x.mean(), exact=True)
    assert synk.loop(exact, [dataset()], batch_size=2, epochs=2).steps == [4, 4]
    assert len(read) == 1  # and not in each step


def test_schedules_of_inputs_and_of_shared_variables(session):
    w, rate = theano.shared(np.zeros(2), "w"), theano.shared(0.0, "rate")
    x, decay, offset = T.vector("x", "float64"), T.scalar("decay", "float64"), T.scalar("offset", "float64")
    updates = [(w, w + rate * decay + offset)]
    step = synk.function([x], [x.sum(), rate * decay + offset], bcast_inputs=[decay, offset], updates=updates)
    schedule = {rate: lambda step: step + 1.0, "decay": lambda step: 0.5**step, offset: 3.0}
    rule = rules.LocalSGD(every=4)
    run = synk.loop(step, [np.ones(5 * session)], params=[w], batch_size=1, epochs=2, rule=rule, schedule=schedule)
    values = [(number + 1) * 0.5**number + 3 for number in range(10)]
    for outputs in run.outputs:
        np.testing.assert_allclose(outputs[:, 1], values, rtol=1e-12)
    np.testing.assert_allclose(w.get_value(), sum(values), rtol=1e-12)
    for given, words in (
        ({"decay": 1.0}, "schedule lacks offset"),
        ({**schedule, "rates": 1.0}, "schedule has the unknown 'rates'"),
        ({"decay": 1.0, "offsets": 1.0}, "schedule lacks offset and has the unknown 'offsets'"),
    ):
        with pytest.raises(TypeError, match=f"^{words}; expected values of the inputs decay, offset$"):
            synk.loop(step, [np.ones(5)], params=[w], batch_size=1, epochs=1, rule=rule, schedule=given)


def test_on_epoch_sees_the_mean_moves_no_rank_and_ends_the_loop(session):
    regression = Regression("float64")
    rule, seen = rules.LocalSGD(every=4), []

    def train(on_epoch):
        regression.w.set_value(np.ones(N_COLUMNS))
        data, params = regression.data, [regression.w]
        return synk.loop(regression.step, data, params=params, batch_size=2, epochs=6, rule=rule, on_epoch=on_epoch)

    def look(run):
        values = [synk.get_value(rank, regression.w) for rank in range(session)]
        seen.append(run.params[0])
        np.testing.assert_allclose(seen[-1], np.mean(values, axis=0), rtol=1e-12)
        for rank, value in enumerate(values):
            np.testing.assert_array_equal(synk.get_value(rank, regression.w), value)
        return run.epoch < 3

    undisturbed = train(lambda run: run.epoch < 3)
    run = train(look)
    assert run.epoch == 3 and len(seen) == 3 and "3 epochs" in repr(run)
    np.testing.assert_array_equal(run.params[0], undisturbed.params[0])
    np.testing.assert_array_equal(run.params[0], seen[-1])


def test_a_comparison_with_the_losses_ends_the_training(two):
    w, x = theano.shared(0.0, "w"), T.vector("x", "float64")
    step = synk.function([x], w + synk.averaged(x.mean()), updates=[(w, w - 1)])
    alone = synk.function([x], w + x.mean(), updates=[(w, w - 1)])
    options = {"params": [w], "batch_size": 1, "epochs": 4, "on_epoch": lambda run: run.losses[-1] > 0.5}
    for f, rule in ((step, None), (lambda x, batch: step(x, batch=batch), None), (alone, rules.LocalSGD(every=1))):
        synk.broadcast(w, 2.0)
        assert synk.loop(f, [np.zeros(2)], rule=rule, **options).epoch == 3
        assert synk.loop(f, [np.zeros(2)], rule=rule, **{**options, "on_epoch": lambda run: run.losses}).epoch == 4


def test_long_epochs_are_divided_into_commands(session, monkeypatch):
    regression = Regression("float64")
    rule = rules.DiLoCo(every=3, delay=1)

    def train():
        regression.w.set_value(np.ones(N_COLUMNS))
        return synk.loop(regression.step, regression.data, params=[regression.w], batch_size=1, epochs=2, rule=rule)

    expected = train()
    monkeypatch.setattr("synkhronos._api.loops.MOST_STEPS", 4)
    run = train()
    np.testing.assert_array_equal(run.params[0], expected.params[0])
    assert run.steps == expected.steps


@pytest.mark.parametrize(("size", "most"), [(10, 15), (1_000_000, 3)])
def test_a_loop_has_more_barriers_than_one_command_can_number(session, monkeypatch, size, most):
    """Each command begins to number them again; a rank would pass a barrier with a used number too early."""
    limit, n_steps, numbers = 1000, 600 if size < 100 else 12, current("test").replica._group.sync
    w, moment, x = theano.shared(0.0, "w"), theano.shared(np.zeros(size), "moment"), T.vector("x", "float64")
    step = synk.function([x], x.sum(), updates=[(w, w + 1), (moment, moment + 1)])
    made, run_command = [], current("test").run

    def run(command):
        result = run_command(command)
        if isinstance(command, Loop):
            made.append((command.n_batches // session, max(numbers.arrived) % MOST_BARRIERS))
        return result

    monkeypatch.setattr("synkhronos._api.loops.MOST_BARRIERS", limit)
    monkeypatch.setattr(current("test"), "run", run)
    options = {"rule": rules.LocalSGD(every=1), "others": "average"}
    synk.loop(step, [np.ones(n_steps * session)], params=[w], batch_size=1, epochs=1, **options)
    assert w.get_value() == n_steps and (moment.get_value() == n_steps).all()
    steps, barriers = zip(*made)
    assert max(steps) == most and max(barriers) < limit
    assert sum(barriers) > limit or size > 100


def test_constants_names_and_ends_of_batches(session):
    w, rate = theano.shared(np.zeros(2), "w"), theano.shared(0.0, "rate")
    x = T.vector("x", "float64")
    step = synk.function([x], x.sum() + rate, updates=[(w, w + rate)])

    def batches(rank, n_ranks, epoch, rng):
        for _ in range(6 + rank):
            yield [np.zeros(1)]

    run = synk.loop(
        step, batches, params=[w], batch_size=1, steps=6, rule=rules.LocalSGD(every=2), schedule={"rate": 2}
    )
    assert run.steps == [6] * session
    assert (run.losses == 2).all()
    run = synk.loop(step, batches, params=[w], batch_size=1, steps=50, rule=rules.GoSGD(probability=0.5))
    assert run.steps == [6 + rank for rank in range(session)]  # a rank without further batches is done
    assert [float(one) for one in synk.gather(rate)] == [2.0] * session


@pytest.mark.parametrize("rule", [rules.LocalSGD(every=2), rules.EASGD(every=2)])
def test_batches_may_reuse_an_array(session, rule):
    w, x = theano.shared(np.zeros(1), "w"), T.vector("x", "float64")
    step = synk.function([x], x.sum(), updates=[(w, w + 1)])

    def batches(rank, n_ranks, epoch, rng):
        buffer = np.zeros(200_000)
        for number in range(60):
            buffer[:] = number
            yield [buffer]

    run = synk.loop(step, batches, params=[w], batch_size=1, steps=20, rule=rule)
    for outputs in run.outputs:
        np.testing.assert_array_equal(outputs[:, 0], np.arange(len(outputs)) * 200_000.0)


def test_losses_of_nan_and_batches_of_more_rows_than_there_are(session):
    w, x = theano.shared(np.zeros(2), "w"), T.vector("x", "float64")
    step = synk.function([x], x.sum(), updates=[(w, w + 1)])
    run = synk.loop(step, [np.full(3, np.nan)], params=[w], batch_size=100, epochs=2, rule=rules.LocalSGD(every=1))
    assert run.steps == [2] * session
    assert np.isnan(run.losses).all()


@pytest.mark.parametrize("rule", [rules.EASGD(every=2), rules.GoSGD(probability=0.5), rules.LocalSGD(every=2)])
def test_integers_are_equal_at_the_end(session, rule):
    w, total = theano.shared(0.0, "w"), theano.shared(np.int64(0), "total")
    x = T.vector("x", "int64")
    step = synk.function([x], w + x.sum(), updates=[(w, w + 1), (total, total + x.sum())])
    synk.loop(step, [np.arange(1, 31)], params=[w], batch_size=2, epochs=2, rule=rule)
    assert len(set(synk.gather(total).tolist())) == 1
    assert synk.check_replicas() == {}


@pytest.mark.parametrize("others", ["local", "average", "reset"])
def test_other_variables(session, others):
    w, moment = theano.shared(0.0, "w"), theano.shared(1.0, "moment")
    x = T.vector("x", "float64")
    step = synk.function([x], moment, updates=[(w, w + 1), (moment, moment + x.mean())])

    def batches(rank, n_ranks, epoch, rng):
        while True:
            yield [np.full(2, float(rank))]

    rule = rules.LocalSGD(every=2)
    run = synk.loop(step, batches, params=[w], batch_size=2, steps=4, rule=rule, others=others)
    mean = (session - 1) / 2
    at = {
        "local": lambda rank: [1, 1 + rank, 1 + 2 * rank, 1 + 3 * rank],
        "average": lambda rank: [1, 1 + rank, 1 + 2 * mean, 1 + 2 * mean + rank],
        "reset": lambda rank: [1, 1 + rank, 1, 1 + rank],
    }[others]
    end = {"local": 1 + 4 * mean, "average": 1 + 4 * mean, "reset": 1.0}[others]
    for rank in range(session):
        np.testing.assert_allclose(run.outputs[rank][:, 0], at(rank), rtol=1e-12)
        np.testing.assert_allclose(synk.get_value(rank, moment), end, rtol=1e-12)
    assert w.get_value() == 4


@pytest.mark.parametrize("rule", [rules.LocalSGD(every=2), rules.EASGD(every=2)], ids=lambda rule: rule.name)
def test_training_steps_with_a_rule(session, rule):
    regression = Regression("float64")
    x, t = T.matrix("x", "float64"), T.vector("t", "float64")
    loss = T.sqr(T.dot(x, regression.w) - t).mean()
    step = make_train_function(loss, [regression.w], x, t, "adam", T.scalar("rate", "float64"), rule=rule)
    schedule = {"rate": 0.1}
    run = step.loop(regression.rows, regression.targets, batch_size=4, epochs=100, schedule=schedule)
    best = np.linalg.lstsq(regression.rows, regression.targets, rcond=None)[0]
    np.testing.assert_allclose(run.params[0], best, atol=0.15)
    assert "LocalTrainFunction" in repr(step) and "every=2" in repr(step)


def test_training_steps_without_a_rule_have_a_loop_too(session):
    regression = Regression("float64")
    x, t = T.matrix("x", "float64"), T.vector("t", "float64")
    loss = T.sqr(T.dot(x, regression.w) - t).mean()
    results = []
    for exact in (False, True):
        regression.w.set_value(np.ones(N_COLUMNS))
        step = make_train_function(loss, [regression.w], [x], t, "sgd", RATE, exact=exact)
        if not exact:
            synk.distribute()
            synk.broadcast(regression.w)
        run = step.loop([regression.rows], regression.targets, batch_size=4, epochs=2)
        results.append((run.losses, regression.w.get_value()))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-9)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-9)


class Halfway(rules.Average):
    def after(self, x, sent, received, age, state):
        return x + 0.5 * (received - x)


def test_a_rule_of_the_program(session):
    regression = Regression("float64")
    run = synk.loop(
        regression.step, regression.data, params=[regression.w], batch_size=2, epochs=1, rule=Halfway(every=3)
    )
    in_epoch = -(-N_ROWS // (2 * session))
    batches = shuffled(0, 0, in_epoch * session * 2).reshape(in_epoch, session, 2)

    def gradient_step(rank, w, step):
        return regression.after_step(w, batches[step - 1, rank])

    simulated = simulate(Halfway(every=3), gradient_step, np.ones(N_COLUMNS), session, in_epoch)
    np.testing.assert_allclose(run.params[0], np.mean(simulated.x, axis=0), rtol=1e-12)


@pytest.mark.parametrize(("exchange", "step", "delay"), [(0.43, 0.035, 14), (0.5, 0.25, 3), (1e-5, 1.0, 2)])
def test_a_delay_hides_the_exchange_and_one_step_until_it_begins(exchange, step, delay):
    assert to_hide(exchange, step) == delay
    assert (delay - 1) * step >= exchange > (delay - 2) * step
    rule = delayed(delay)
    assert [rule.delay_at(n) for n in range(1, 100) if rule.exchanges_at(n)][:8] == [0] * 6 + [delay] * 2


MADE = []


def noted_batches(rank, n_ranks, epoch, rng):
    MADE.clear()  # a worker may inherit those of an earlier session
    for step in range(6):
        MADE.append(step)
        time.sleep(0.1 * (rank == 1))
        yield [np.zeros(1)]


class AfterTheNextBatch(rules.Average):
    """It waits after each step, which increments x, until the next batch has begun to be made."""

    def before(self, x, state):
        wait_for(lambda: len(MADE) > min(x[0], 5), "the next batch")
        return x.copy()


def test_a_batch_is_prepared_during_the_step_before(session):
    w, x = theano.shared(np.zeros(1), "w"), T.vector("x", "float64")
    step = synk.function([x], x.sum(), updates=[(w, w + 1)])
    rule = AfterTheNextBatch(every=1)
    run = synk.loop(step, noted_batches, params=[w], batch_size=1, steps=6, rule=rule)
    assert run.steps == [6] * session
    if session > 1:  # all wait for rank 1
        assert run.waited[0] > 0.4


# -- invalid arguments


def test_what_is_refused(two):
    regression = Regression("float64")
    f, data, w, rule = regression.step, regression.data, [regression.w], rules.LocalSGD(every=2)
    x = T.vector("x", "float64")
    exact = synk.function([x], x.mean(), exact=True)
    vector = synk.function([x], (x, "gather"))
    collective = synk.function([x], synk.averaged(x.mean()))
    silent = synk.function([x], updates=[(regression.w, regression.w + x.sum())])
    good = {"params": w, "batch_size": 2, "epochs": 1, "rule": rule}
    for bad, error, match in [
        ({"epochs": None}, TypeError, "epochs=None and steps=None"),
        ({"steps": 2}, TypeError, "epochs=1 and steps=2"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"batch_size": 1.5}, ValueError, "batch_size is 1.5"),
        ({"rule": "easgd"}, TypeError, "expected a rule of synkhronos.rules, or 'local'"),
        ({"rule": rules.EASGD(beta=3.0)}, ValueError, "beta is 3.0 with 2 ranks"),
        (
            {"params": []},
            ValueError,
            r"params is empty; expected the .* that LocalSGD\(every=2.* combines",
        ),
        ({"params": [*w, *w]}, ValueError, "loop: got a variable twice"),
        ({"others": "mean", "rule": None}, ValueError, "others is 'mean'"),
        ({"others": "reset", "rule": rules.BSP()}, ValueError, r"with BSP\(\), which has no averages"),
        ({"f": silent, "inputs": [np.ones(4)], "rule": rules.DASO()}, TypeError, "expected the loss"),
        ({"on_epoch": lambda run: synk.loop(f, data, **good)}, synk.SessionError, "w is in another loop"),
        ({"params": [1]}, TypeError, "shared variables"),
        ({"others": "mean"}, ValueError, "others is 'mean'"),
        ({"schedule": {"rate": 1.0}}, TypeError, "^schedule has the unknown 'rate'; expected values of shared"),
        ({"batchsize": 2}, TypeError, "^synkhronos.loop has no argument 'batchsize'; did you mean batch_size"),
        ({"inputs": [data[0].astype("complex128"), *data[1:]]}, TypeError, f"^input {f._graph.input_names[0]}: got"),
        ({"others": "average", "rule": rules.EASGD()}, ValueError, "has no averages"),
        ({"inputs": [synk.data(np.zeros((4, 3), "float32")), *data[1:]]}, TypeError, "expected float64 data"),
        ({"f": exact}, TypeError, "without exact=True"),
        ({"rule": None}, TypeError, "on each rank alone"),
        ({"rule": "local"}, TypeError, "on each rank alone"),
        ({"f": lambda: None}, TypeError, "needs a function"),
        ({"f": vector, "inputs": [np.ones(4)]}, TypeError, "scalar outputs"),
        ({"f": collective, "inputs": [np.ones(4)]}, TypeError, "without collectives"),
        ({"inputs": data[:2]}, TypeError, "got 2 inputs; expected 3"),
        ({"inputs": [data[0], data[1][:5], data[2]]}, ValueError, "lengths"),
        ({"inputs": [one[:0] for one in data]}, ValueError, "at least 1"),
        ({"inputs": lambda *_: iter([])}, TypeError, "expected steps"),
    ]:
        arguments = {"f": f, "inputs": data, **good, **bad}
        with pytest.raises(error, match=match):
            synk.loop(**arguments)
    for one in (rule, None):
        with pytest.raises(synk.SessionError, match="in a sequence"), synk.sequence():
            synk.loop(f, data, **{**good, "rule": one})
    counts = theano.shared(np.zeros(2, "int64"), "counts")
    x = T.vector("x", "float64")
    count = synk.function([x], x.sum(), updates=[(counts, counts + 1)])
    with pytest.raises(TypeError, match="floating-point"):
        synk.loop(count, [np.ones(4)], **{**good, "params": [counts]})
    x, t = T.matrix("x", "float64"), T.vector("t", "float64")
    loss = T.sqr(T.dot(x, regression.w) - t).mean()
    with pytest.raises(TypeError, match=r"LocalSGD.*exact=True.*With exact=True, it needs a session on several nodes"):
        make_train_function(loss, w, x, t, "sgd", RATE, exact=True, rule=rule).loop(*data[:2], batch_size=2, epochs=1)
    with pytest.raises(ValueError, match=r"LocalSGD.*cannot be combined with weights"):
        make_train_function(loss, w, x, t, "sgd", RATE, weights=x.shape[0], rule=rule)
    before = regression.w.get_value()
    assert synk.loop(f, data, **good).steps == [16, 16]
    assert not np.array_equal(regression.w.get_value(), before)


def test_without_a_session(no_session):
    with pytest.raises(synk.SessionError):
        synk.loop(None, [], batch_size=1, epochs=1)
