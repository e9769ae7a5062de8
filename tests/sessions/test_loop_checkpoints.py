"""Checkpoints of training loops: a loop that was interrupted and resumed ends as one that was not."""

import functools

import numpy as np
import pytest
from backend import MRG_RandomStreams, RandomStreams, T, on_theano, theano

import synkhronos as synk
from synkhronos import rules
from synkhronos._api import run as api_run
from synkhronos._api.run import Saved
from synkhronos._rank import SaveLoop
from synkhronos.extensions import checkpoint

N_ROWS = 61

AVERAGES = [
    rules.LocalSGD(every=3, start=20),
    rules.Outer(every=4, delay=2, merge="delta"),
    rules.Outer(every=5, delay=4, merge="pull", start=3),
    rules.SlowMo(every=3, learning_rate=0.05),
    rules.BMUF(every=3, nesterov=True),
    rules.DiLoCo(every=7, delay=6, lr=0.5, momentum=0.5),
    rules.DASO(warmup=1, cooldown=1, every=4, delay=3),
    rules.Hierarchical(periods={2: "node", 6: "all"}),
]
PAIRS = [rules.ASGD(every=3), rules.EASGD(every=4), rules.GoSGD(probability=0.5)]


def by_name(rule):
    return rule.name


class Momentum:
    """A step of gradient descent with momentum, a counter and noise, so that ranks have further variables."""

    def __init__(self, dtype="float64"):
        draw = np.random.RandomState(0)
        self.rows = draw.rand(N_ROWS, 3).astype(dtype)
        self.targets = (self.rows @ np.arange(1.0, 4.0)).astype(dtype)
        self.w, self.m = (theano.shared(np.zeros(3, dtype), name) for name in "wm")
        self.count = theano.shared(np.int64(0), "count")
        x, t = T.matrix("x", dtype), T.vector("t", dtype)
        loss = T.sqr(T.dot(x, self.w) - t + 0.1 * RandomStreams(5).normal(size=t.shape)).mean()
        m = np.asarray(0.5, dtype) * self.m + T.grad(loss, self.w)
        updates = [(self.w, T.cast(self.w - 0.02 * m, dtype)), (self.m, T.cast(m, dtype)), (self.count, self.count + 1)]
        self.step = synk.function([x, t], [loss, self.count], updates=updates)
        self.random = [var for var in self.step.get_shared() if not hasattr(var.get_value(borrow=True), "dtype")]

    def train(self, rule, epochs=4, **options):
        self.w.set_value(np.zeros(3, self.w.dtype))
        self.m.set_value(np.zeros(3, self.m.dtype))
        self.count.set_value(0)
        data = [self.rows, self.targets]
        return synk.loop(self.step, data, params=[self.w], batch_size=2, epochs=epochs, rule=rule, **options)


make_model = functools.lru_cache(Momentum)  # compiled once for all tests


@pytest.fixture
def model(session):
    return make_model("float64")


@pytest.mark.parametrize(
    ("rule", "others"),
    [*((rule, "local") for rule in AVERAGES), (AVERAGES[0], "average"), (AVERAGES[1], "reset")],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_resumed_loop_ends_as_an_uninterrupted_one(model, session, rule, others, tmp_path):
    def save(run):
        checkpoint.save_run(tmp_path / f"{run.epoch}.npz", run)

    expected = model.train(rule, on_epoch=save, others=others)
    moments = synk.gather(model.m)
    for epoch in (1, 3, 4):
        state = checkpoint.load_run(tmp_path / f"{epoch}.npz")
        run = model.train(rule, resume=state, others=others)
        np.testing.assert_array_equal(run.params[0], expected.params[0])
        np.testing.assert_array_equal(synk.gather(model.m), moments)
        for outputs, others_outputs in zip(run.outputs, expected.outputs):
            np.testing.assert_array_equal(outputs, others_outputs)
        assert (run.epoch, run.exchanges, run.bytes) == (4, expected.exchanges, expected.bytes)
        assert run.staleness == expected.staleness


@pytest.mark.parametrize("rule", [*AVERAGES, *PAIRS], ids=by_name)
def test_saving_changes_nothing_on_one_rank_and_any_rule_resumes_exactly(synchronize, rule):
    synchronize(1)
    model, states = make_model("float32"), []
    start = [var.get_value() for var in model.random]
    assert start
    expected = model.train(rule)
    for var, value in zip(model.random, start):
        var.set_value(value)
    again = model.train(rule, on_epoch=lambda run: states.append(run.state()))
    np.testing.assert_array_equal(again.params[0], expected.params[0])
    for state in states:
        run = model.train(rule, resume=state)
        np.testing.assert_array_equal(run.params[0], expected.params[0])
        assert run.steps == expected.steps and run.order == expected.order


def test_a_large_state_is_returned_in_parts(session, monkeypatch):
    """A command returns 2 MiB of each rank."""
    size, starts, saved = 700_001, [], []
    monkeypatch.setattr(api_run, "SaveLoop", lambda *args: starts.append(args[-1]) or SaveLoop(*args))
    w, x = theano.shared(np.zeros(size), "w"), T.vector("x", "float64")
    f = synk.function([x], x.sum(), updates=[(w, w + x.sum())])
    options = {"params": [w], "batch_size": 1, "rule": rules.GoSGD(probability=1.0)}

    def save(run):
        saved.extend([run.state(), synk.gather(w, nd_up=1)])

    expected = synk.loop(f, [np.arange(4.0 * session)], epochs=1, on_epoch=save, **options).params[0]
    state, values = saved
    assert starts == list(range(0, starts[-1] + 1, 2 << 20)) and len(starts) > 2
    for rank in range(session):
        np.testing.assert_array_equal(state[f"{rank}/variables/0"], values[rank])
        assert state[f"{rank}/engine/messages"].shape == (len(state[f"{rank}/engine/senders"]), size)
    run = synk.loop(f, [np.arange(4.0 * session)], epochs=1, resume=state, **options)
    np.testing.assert_allclose(run.params[0], expected, rtol=1e-12)


class Sum(rules.Centre):
    """A rule whose centre adds up the changes of all ranks."""

    def begin(self, x, n_members):
        return {"last": x.copy()}

    def meet(self, x, centre, state):
        new = centre + x - state["last"]
        state["last"][...] = new
        return new.copy(), new


def test_a_centre_keeps_what_the_ranks_have_done(session):
    """The centre counts all steps, also those that a rank had not yet added when the state was saved."""
    w, x = theano.shared(np.zeros(5), "w"), T.vector("x", "float64")
    f = synk.function([x], w[0] + x.sum(), updates=[(w, w + 1)])
    options = {"params": [w], "batch_size": 1, "rule": Sum(every=7)}
    states = []
    synk.loop(f, [np.zeros(60)], epochs=2, on_epoch=lambda run: states.append(run.state()), **options)
    w.set_value(np.zeros(5))
    run = synk.loop(f, [np.zeros(60)], epochs=4, resume=states[0], **options)
    assert sum(run.steps) == 240
    np.testing.assert_array_equal(run.params[0], np.full(5, 240.0))
    turns = [turn for turn, *_ in run.order]
    assert turns == list(range(len(turns)))


def test_messages_on_their_way_are_saved(session):
    """The weighted mean of the ranks, messages included, is conserved by gossip: here it does not change at all."""
    w, x = theano.shared(np.zeros(3), "w"), T.vector("x", "float64")
    f = synk.function([x], w[0] + x.sum(), updates=[(w, w + 0 * x.sum())])
    rule, states = rules.GoSGD(probability=1.0), []
    options = {"params": [w], "batch_size": 1, "rule": rule}
    synk.loop(f, [np.zeros(40)], epochs=1, on_epoch=lambda run: states.append(run.state()), **options)
    state = states[0]
    ranks = range(session)
    on_their_way = [state[f"{rank}/engine/weights"] for rank in ranks]
    assert session == 1 or sum(map(len, on_their_way)) > 0
    total = sum(float(state[f"{rank}/engine/weight"]) for rank in ranks) + sum(map(np.sum, on_their_way))
    np.testing.assert_allclose(total, 1, rtol=1e-12)
    for rank in ranks:  # as if the ranks had different parameters
        state[f"{rank}/variables/0"] = np.full(3, float(rank))
        state[f"{rank}/engine/messages"] = np.full_like(state[f"{rank}/engine/messages"], 10.0)
    weighed = sum(rank * float(state[f"{rank}/engine/weight"]) for rank in ranks)
    expected = weighed + 10 * sum(map(np.sum, on_their_way))
    run = synk.loop(f, [np.zeros(40)], epochs=3, resume=state, **options)
    np.testing.assert_allclose(run.params[0], expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [*((rule, (3, 2)) for rule in [*AVERAGES, *PAIRS]), (AVERAGES[0], (1, 2)), (PAIRS[2], (2, 3))],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_another_number_of_ranks_starts_from_the_mean_or_the_centre(synchronize, rule, ranks, tmp_path):
    before, after = ranks
    synchronize(before)
    model, seen = make_model("float64"), []

    def save(run):
        if run.epoch == 2:
            checkpoint.save_run(tmp_path / "run.npz", run)
            seen.append(run.params[0])
            seen.append(np.mean([synk.get_value(rank, model.m) for rank in range(before)], axis=0))

    model.train(rule, on_epoch=save)
    synk.close()
    synchronize(after)
    state = checkpoint.load_run(tmp_path / "run.npz")
    run = model.train(rule, epochs=2, resume=state)  # no epoch is left
    np.testing.assert_allclose(run.params[0], seen[0], rtol=1e-12)
    np.testing.assert_allclose(synk.get_value(after - 1, model.m), seen[1], rtol=1e-12)
    run = model.train(rule, epochs=60, resume=state)
    in_epoch = -(-N_ROWS // (2 * after))
    assert run.epoch == 60 and sum(run.steps) == 58 * in_epoch * after
    assert run.losses[-5:].mean() < 0.5


def test_daso_continues_its_schedule_on_another_number_of_ranks(synchronize):
    synchronize(2)
    model, states = make_model("float64"), []
    rule = rules.DASO(warmup=0, cooldown=0, every=4, delay=3)
    model.train(rule, epochs=8, on_epoch=lambda run: states.append(run.state()))
    saved = states[-1]
    synk.close()
    synchronize(1)
    model.train(rule, epochs=9, resume=saved, on_epoch=lambda run: states.append(run.state()))
    assert states[-1]["0/rule/epoch"] == saved["0/rule/epoch"] + 1
    assert states[-1]["0/rule/n_members"] == 1


def test_batches_of_a_callable_by_epoch(session):
    w, x = theano.shared(0.0, "w"), T.vector("x", "float64")
    f = synk.function([x], x.sum(), updates=[(w, 0.9 * w + x.sum())])
    seen, states = [], []

    def batches(rank, n_ranks, epoch, rng):
        for _ in range(6):
            yield [np.full(1, epoch + rng.random())]

    options = {"params": [w], "batch_size": 1, "rule": rules.LocalSGD(every=4), "steps": 5}
    run = synk.loop(f, batches, epochs=3, on_epoch=lambda run: states.append(run.state()), **options)
    assert run.steps == [15] * session and run.epoch == 3
    for outputs in run.outputs:
        assert outputs[:, 0].astype(int).tolist() == [0] * 5 + [1] * 5 + [2] * 5
    again = synk.loop(f, batches, epochs=3, resume=states[0], on_epoch=lambda run: seen.append(run.epoch), **options)
    assert seen == [2, 3]
    np.testing.assert_array_equal(again.params[0], run.params[0])


def test_what_cannot_be_resumed_is_refused(synchronize, tmp_path):
    synchronize(2)
    model, states = make_model("float64"), []
    rule = rules.LocalSGD(every=3)
    run = model.train(rule, on_epoch=lambda run: states.append(run.state()))
    state = states[0]
    with pytest.raises(synk.SessionError, match="after the end of the loop"):
        run.state()
    other = {name: one for name, one in state.items() if name != "1/variables/0"}
    newer = {**state, "about": np.array(str(state["about"]).replace('"version": 1', '"version": 99'))}
    for bad, error, match in [
        ({"resume": "run.npz"}, TypeError, "resume is str; expected what run.state"),
        ({"resume": {"w": np.zeros(3)}}, TypeError, "resume is dict; expected what"),
        ({"resume": other}, ValueError, "resume has no '1/variables/0'"),
        ({"resume": newer}, ValueError, "the version 99; expected 1"),
        ({"rule": rules.LocalSGD(every=4)}, ValueError, r"rule = 'LocalSGD\(every=3, start=0\)'"),
        ({"others": "average"}, ValueError, "others = 'local'"),
        ({"seed": 1}, ValueError, "seed = 0"),
    ]:
        with pytest.raises(error, match=match):
            model.train(**{"rule": rule, "resume": state, **bad})
    v, x = theano.shared(np.zeros(4), "v"), T.vector("x", "float64")
    f = synk.function([x], x.sum(), updates=[(v, v + 1)])
    options = {"params": [v], "rule": rule}
    with pytest.raises(ValueError, match=r"params = \[\['float64', \[3\]\]\]"):
        synk.loop(f, [np.ones(9)], batch_size=1, epochs=3, resume=state, **options)
    synk.loop(f, [np.ones(8)], batch_size=1, steps=6, on_epoch=lambda run: states.append(run.state()), **options)
    with pytest.raises(ValueError, match="steps_per_epoch = 4, and this loop has 2"):
        synk.loop(f, [np.ones(8)], batch_size=2, epochs=9, resume=states[-2], **options)
    with pytest.raises(ValueError, match="2 steps of the last epoch; expected 4"):
        synk.loop(f, [np.ones(8)], batch_size=1, steps=10, resume=states[-1], **options)
    assert synk.loop(f, [np.ones(8)], batch_size=1, steps=6, resume=states[-1], **options).steps == [6, 6]


class Words(rules.Average):
    def begin(self, x, n_members):
        return {"words": ["a", object()]}


def test_numbers_of_numpy_are_saved(synchronize, tmp_path):
    model = make_model("float64")
    options = {"seed": np.int64(3), "rule": rules.LocalSGD(every=np.int64(2))}
    model.train(epochs=np.int64(1), on_epoch=lambda run: checkpoint.save_run(tmp_path / "run.npz", run), **options)
    assert model.train(epochs=2, resume=checkpoint.load_run(tmp_path / "run.npz"), **options).epoch == 2


@pytest.mark.skipif(not on_theano, reason="PyTensor's random states are no tensors")
def test_streams_begin_again_on_another_number_of_ranks(synchronize):
    """Ranks do not draw the same numbers afterwards."""
    w, x, states = theano.shared(0.0, "w"), T.dvector("x"), []
    draw = MRG_RandomStreams(7).uniform(size=(1,))
    f = synk.function([x], [draw.sum(), x.sum()], updates=[(w, w + 1)])
    options = {"params": [w], "batch_size": 1, "rule": rules.LocalSGD(every=2)}
    synchronize(2)
    synk.loop(f, [np.ones(8)], epochs=1, on_epoch=lambda run: states.append(run.state()), **options)
    synchronize(3)
    run = synk.loop(f, [np.ones(9)], epochs=2, resume=states[0], **options)
    last = [one[-1, 0] for one in run.outputs]
    assert len(set(last)) == 3


@pytest.mark.parametrize("about", ["[]", "{}", "no JSON", '{"version": 1, "names": 3}'])
def test_a_state_whose_facts_are_damaged_is_refused(about):
    with pytest.raises(ValueError, match="about of resume is damaged; expected what"):
        Saved({"about": np.array(about)})


def test_a_state_that_needs_pickling_is_refused(synchronize):
    synchronize(2)
    model = make_model("float64")
    with pytest.raises(synk.WorkerError, match=r"rule/words of Words.* expected a number or an array"):
        model.train(Words(every=2), on_epoch=lambda run: run.state())


def test_damaged_files_are_refused(synchronize, tmp_path):
    synchronize(1)
    model, path = make_model("float64"), tmp_path / "run.npz"
    model.train(rules.LocalSGD(every=3), epochs=1, on_epoch=lambda run: checkpoint.save_run(path, run))
    contents = path.read_bytes()
    middle = bytearray(contents)
    middle[len(contents) // 3] ^= 0xFF
    for damaged in (contents[:-100], bytes(middle), b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged, or not a checkpoint"):
            checkpoint.load_run(path)
    checkpoint.save(path, [model.w])
    with pytest.raises(ValueError, match="not the complete state of a training loop"):
        checkpoint.load_run(path)
    with pytest.raises(FileNotFoundError):
        checkpoint.load_run(tmp_path / "none.npz")
    assert not list(tmp_path.glob("*.partial"))
