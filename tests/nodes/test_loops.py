"""Training loops over several nodes: the same values as on one node, interrupts, and losses of ranks."""

import numpy as np
import pytest
from mpi_jobs import RANKS_OF_NODES, needs_mpi, output_of

from synkhronos import rules

pytestmark = needs_mpi

PROGRAM = f"""{RANKS_OF_NODES}
    n = synk.fork(use_gpu=False, timeout=float(os.environ.get("TIMEOUT", 60)), restart_workers="RESTART" in os.environ,
                  wire_dtype=os.environ.get("WIRE_DTYPE"))
    draw = np.random.RandomState(0)
    X = draw.rand(97, 40)
    Y = X.dot(draw.rand(40, 300))
    w = theano.shared(np.zeros((40, 300)), "w")
    x, y = T.dmatrix("x"), T.dmatrix("y")
    loss = T.sqr(x.dot(w) - y).mean()
    f = synk.function([x, y], loss, updates=[(w, w - 10 * T.grad(loss, w))])

    def train(rule, **options):
        w.set_value(np.zeros((40, 300)))
        run = synk.loop(f, [X, Y], params=[w], batch_size=3, rule=rule, **options)
        assert all((value == run.params[0]).all() for value in synk.gather(w))
        return run
"""

ROUNDED = """
    rounded, v = theano.shared(np.full(300_000, 1 / 3, "float32"), "rounded"), T.fvector("v")
    g = synk.function([v], v.sum(), updates=[(rounded, rounded + np.float32(1e-4))])
    run = synk.loop(g, [np.ones(2 * n, "float32")], params=[rounded], batch_size=1, steps=32,
                    rule=rules.LocalSGD(every=1))
    print(abs(run.params[0] - (1 / 3 + 32e-4)).max() < 2e-5)
    synk.close()
"""

RULES = """
    for rule in (rules.LocalSGD(every=3), rules.DiLoCo(every=4, delay=2), rules.DASO(warmup=1, cooldown=1),
                 rules.SlowMo(every=3, learning_rate=10.0)):
        run = train(rule, epochs=4)
        print(*run.steps, *run.staleness, ";", *run.params[0][0, :5], *run.losses[-3:])
    def batches(rank, n_ranks, epoch, rng):
        while True:
            yield X[rank : rank + 4], Y[rank : rank + 4]
    w.set_value(np.zeros((40, 300)))
    run = synk.loop(f, batches, params=[w], batch_size=4, steps=6, rule=rules.LocalSGD(every=2))
    print(*run.steps, ";", *run.params[0][0, :5], *run.losses)
    synk.close()
"""


def run(*sources, ranks, **environment):
    return output_of(PROGRAM, *sources, n=len(ranks), RANKS=" ".join(map(str, ranks)), **environment).splitlines()


@pytest.mark.parametrize("ranks", [(1, 2), (2, 2), (1, 1, 1)], ids=str)
def test_averages_are_those_of_one_node(ranks):
    lines, alone = run(RULES, ranks=ranks), run(RULES, ranks=(sum(ranks),))
    assert len(lines) == len(alone) == 5
    for line, other in zip(lines, alone):
        (steps, values), (steps_alone, values_alone) = line.split(";"), other.split(";")
        assert steps == steps_alone
        np.testing.assert_allclose(np.fromstring(values, sep=" "), np.fromstring(values_alone, sep=" "), rtol=1e-9)


def test_parameters_are_not_rounded_to_the_wire_dtype():
    assert run(ROUNDED, ranks=(1, 1), WIRE_DTYPE="bfloat16") == ["True"]


def test_an_interrupt_with_rounded_values_between_nodes():
    lines = run(
        """
        v, one = theano.shared(np.full(300_000, 1 / 3, "float32"), "v"), T.fvector("one")
        g = synk.function([one], v[0] + one.sum() * 0, updates=[(v, v + np.float32(1e-4))])
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        run = synk.loop(g, [np.ones(2 * n, "float32")], params=[v], batch_size=1, steps=10**6,
                        rule=rules.LocalSGD(every=1))
        values = synk.gather(v, nd_up=1)
        expected = 1 / 3 + 1e-4 * np.mean(run.steps)
        print(run.interrupted, (values == values[0]).all(), abs(values[0] - expected).max() < 1e-3)
        synk.close()
        """,
        ranks=(1, 1),
        WIRE_DTYPE="bfloat16",
    )
    assert lines == ["True True True"]


def test_schedules_reach_all_nodes():
    lines = run(
        """
        rate = theano.shared(0.0, "rate")
        g = synk.function([x], rate + x.sum() * 0, updates=[(w, w + rate)])
        run = synk.loop(g, [X], params=[w], batch_size=1, steps=9, rule=rules.LocalSGD(every=3),
                        schedule={rate: lambda step: step + 1.0})
        print([one[:, 0].tolist() for one in run.outputs])
        synk.close()
        """,
        ranks=(1, 1),
    )
    steps = [float(step + 1) for step in range(9)]
    assert lines == [str([steps, steps])]


def test_groups_of_one_node():
    """Between averages over all ranks, each node has parameters of its own."""
    lines = run(
        """
        seen = []
        def look(run):
            values = [synk.get_value(rank, w) for rank in range(n)]
            seen.append([bool(np.allclose(one, values[0], rtol=1e-12)) for one in values])
        train(rules.Hierarchical(periods={9: "node", 27: "all"}), epochs=3, on_epoch=look)
        print(seen)
        synk.close()
        """,
        ranks=(2, 2),
    )
    assert lines == ["[[True, True, False, False], [True, True, False, False], [True, True, True, True]]"]


INTERRUPTED = [
    rules.LocalSGD(every=5),
    rules.Outer(every=5, delay=3, merge="delta"),
    rules.EASGD(every=1, nodes_every=2),
    rules.GoSGD(0.5, nodes_every=2),
]


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("rule", INTERRUPTED, ids=str)
def test_ctrl_c(ranks, rule):
    lines = run(
        f"""
        rule = rules.{rule!r}
        train(rule, epochs=1)
        for seconds in (0.1, 0.3):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
            began = time.monotonic()
            run = train(rule, epochs=10**6)
            some = max if rule.engine in ("centre", "gossip") else min  # a rank may find all batches taken
            print(run.interrupted, some(run.steps) > 0, time.monotonic() - began < seconds + 5)
        print(train(rule, epochs=1).interrupted)
        synk.close()
        """,
        ranks=ranks,
    )
    assert lines == ["True True True"] * 2 + ["False"]


@pytest.mark.parametrize("rule", INTERRUPTED, ids=str)
@pytest.mark.parametrize("which", ["on the controller's node", "on the other node"])
def test_a_worker_is_killed_and_replaced(which, rule):
    lines = run(
        f"""
        class Dies:
            def __call__(self, rank, n_ranks, epoch, rng):
                for step in range(50):
                    if rank == {1 if "controller" in which else 3} and step == 20:
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield X[:4], Y[:4]
        rule = rules.{rule!r}
        try:
            synk.loop(f, Dies(), params=[w], batch_size=4, steps=50, rule=rule)
        except synk.WorkerRestarted as error:
            print(error.ranks)
        print(sum(train(rule, epochs=1).steps))
        synk.close()
        """,
        ranks=(2, 2),
        RESTART="1",
    )
    assert lines == [f"({1 if 'controller' in which else 3},)", "36"]


def test_a_loop_is_resumed_on_several_nodes(tmp_path):
    path = str(tmp_path / "run.npz")
    lines = run(
        f"""
        from synkhronos.extensions import checkpoint
        rule = rules.DiLoCo(every=4, delay=3)
        def save(run):
            if run.epoch == 2:
                checkpoint.save_run({path!r}, run)
        expected = train(rule, epochs=4, on_epoch=save)
        again = train(rule, epochs=4, resume=checkpoint.load_run({path!r}))
        print((again.params[0] == expected.params[0]).all(), again.steps == expected.steps)
        synk.close()
        """,
        ranks=(1, 2),
    )
    assert lines == ["True True"]


SINGLE = """
    from synkhronos.extensions import checkpoint
    data = X.astype("float32"), Y.astype("float32")
    v, p, q = theano.shared(np.zeros((40, 300), "float32"), "v"), T.fmatrix("p"), T.fmatrix("q")
    error = T.sqr(p.dot(v) - q).mean()
    h = synk.function([p, q], error, updates=[(v, v - np.float32(10) * T.grad(error, v))])

    def train(rule, **options):
        v.set_value(np.zeros((40, 300), "float32"))
        run = synk.loop(h, data, params=[v], batch_size=3, rule=rule, **options)
        assert all((value == run.params[0]).all() for value in synk.gather(v))
        return run
"""


def test_rounded_averages_are_resumed_and_looking_at_them_changes_nothing(tmp_path):
    path = str(tmp_path / "run.npz")
    lines = run(
        SINGLE,
        f"""
        rule = rules.Outer(every=4, delay=3, merge="pull")
        def save(run):
            if run.epoch == 2:
                checkpoint.save_run({path!r}, run)
        expected = train(rule, epochs=3).params[0]
        looked = train(rule, epochs=3, on_epoch=lambda run: run.params and None).params[0]
        saved = train(rule, epochs=3, on_epoch=save).params[0]
        again = train(rule, epochs=3, resume=checkpoint.load_run({path!r})).params[0]
        print([bool((one == expected).all()) for one in (looked, saved, again)])
        synk.close()
        """,
        ranks=(1, 2),
        WIRE_DTYPE="bfloat16",
    )
    assert lines == ["[True, True, True]"]


def test_a_state_of_a_session_without_a_wire_dtype_is_resumed_with_one(tmp_path):
    """Differences from values that are equal on all ranks are sent; such a state has none."""
    path = str(tmp_path / "run.npz")
    rule, save = "rules.LocalSGD(every=5)", f"lambda run: checkpoint.save_run({path!r}, run)"
    run(SINGLE, f"train({rule}, epochs=2, on_epoch={save}); synk.close()", ranks=(1, 2))
    resumed = f"""
        resumed = train({rule}, epochs=3, resume=checkpoint.load_run({path!r})).params[0]
        print(np.abs(resumed - train({rule}, epochs=3).params[0]).max() < 1e-2 * np.abs(resumed).max())
        synk.close()
    """
    assert run(SINGLE, resumed, ranks=(1, 2), WIRE_DTYPE="bfloat16") == ["True"]


def test_steps_with_collectives_are_those_of_one_node():
    source = """
        g = synk.function([x, y], loss, updates=[(w, w - 10 * synk.averaged(T.grad(loss, w)))])
        run = synk.loop(g, [X, Y], params=[w], batch_size=3, epochs=3)
        print(*run.steps, *run.params[0][0, :5], *run.losses[-3:], synk.check_replicas() == {})
        synk.close()
    """
    (line,), (alone,) = run(source, ranks=(1, 2)), run(source, ranks=(3,))
    *values, equal = line.split()
    np.testing.assert_allclose(np.array(values, float), np.array(alone.split()[:-1], float), rtol=1e-9)
    assert equal == "True"


def test_the_timeout_limits_a_step_and_not_the_time_between_averages():
    lines = run(
        """
        def batches(seconds):
            class Slow:
                def __call__(self, rank, n_ranks, epoch, rng):
                    for step in range(16):
                        time.sleep(seconds if rank == 1 else 0.0)
                        yield X[:4], Y[:4]
            return Slow()
        rule = rules.LocalSGD(every=16)
        print(synk.loop(f, batches(0.4), params=[w], batch_size=4, steps=16, rule=rule).steps)
        began = time.monotonic()
        try:
            synk.loop(f, batches(30.0), params=[w], batch_size=4, steps=16, rule=rule)
        except synk.WorkerTimeout as error:
            print("rank 1" in str(error), time.monotonic() - began < 25)
        synk.close()
        """,
        ranks=(1, 1),
        TIMEOUT="2.5",
    )
    assert lines == ["[16, 16]", "True True"]


def test_the_timeout_limits_the_batches_of_the_controller():
    lines = run(
        """
        def batches(rank, n_ranks, epoch, rng):
            for step in range(16):
                time.sleep(60 if step == 9 and not rank else 0)
                yield X[:4], Y[:4]
        try:
            synk.loop(f, batches, params=[w], batch_size=4, steps=16, rule=rules.Outer(every=4, delay=3, merge="delta"))
        except synk.WorkerError as error:
            print(error.rank, "no item for step 9 within 2.5 seconds" in str(error))
        print(train(rules.LocalSGD(every=3), epochs=1).steps)
        synk.close()
        """,
        ranks=(1, 2),
        TIMEOUT="2.5",
    )
    assert lines == ["0 True", "[11, 11, 11]"]
