"""Training rules with a centre or mailboxes on each of several nodes, whose leaders exchange with each other."""

import pytest
from mpi_jobs import needs_mpi
from test_loops import run

from synkhronos import rules

pytestmark = needs_mpi

#: A step that adds 1 to each of many parameters, so that centres which add all changes count the steps of their ranks.
COUNT = """
    SIZE = int(os.environ.get("SIZE", 150_000))
    dtype = os.environ.get("DTYPE", "float64")
    v, one = theano.shared(np.zeros(SIZE, dtype), "v"), T.vector("one", dtype)
    g = synk.function([one], v[0] + one.sum() * 0, updates=[(v, v + np.asarray(1, dtype))])

    def count(rule, rows=None, **options):
        v.set_value(np.zeros(SIZE, dtype))
        rows = [np.zeros(40 * n, dtype)] if rows is None else rows
        run = synk.loop(g, rows, params=[v], batch_size=1, rule=rule, **{"epochs": 2, **options})
        assert all((value == run.params[0]).all() for value in synk.gather(v, nd_up=1))
        return run
"""

REPLAY = """
    from rule_simulator import replay_centres, replay_gossip

    p, u, t, row = theano.shared(np.ones(3), "p"), T.dmatrix("u"), T.dvector("t"), T.dvector("row")
    error = T.sqr(u.dot(p) - t).mean()
    h = synk.function([u, t, row], [error, row.mean()], updates=[(p, p - 0.05 * T.grad(error, p))])
    rows, targets = draw.rand(61, 3), draw.rand(61)
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    leaders, in_epoch = [nodes.index(node) for node in range(len(sizes))], -(-61 // n)

    def follow(rule, replay):
        p.set_value(np.ones(3))
        data = [rows, targets, np.arange(61.0)]
        run = synk.loop(h, data, params=[p], batch_size=1, epochs=4, rule=rule, seed=1)
        taken = [one[:, 1].round().astype(int) for one in run.outputs]

        def step(rank, x, number):
            i = taken[rank][number - 1]
            return x - 0.05 * 2 * (rows[i] @ x - targets[i]) * rows[i]

        expected, conserved = replay(rule, step, np.ones(3), nodes, run.steps, run.order)
        np.testing.assert_allclose(run.params[0], expected, rtol=1e-12)
        assert all((value == run.params[0]).all() for value in synk.gather(p, nd_up=1))
        wanted = [np.random.default_rng([1, epoch]).permutation(61) for epoch in range(4)]
        wanted = np.concatenate([np.resize(one, in_epoch * n) for one in wanted])
        assert sorted(np.concatenate(taken)) == sorted(wanted)  # each batch was used once
        of_nodes = [sum(run.steps[rank] for rank in range(n) if nodes[rank] == node) for node in range(len(sizes))]
        assert of_nodes == [4 * in_epoch * size for size in sizes]
        return run, conserved

    def count(run, *kinds):
        return [sum(rank == one[1] and one[2] in kinds for one in run.order) for rank in range(n)]
"""

CENTRES = """
    for rule in (rules.EASGD(2, nodes_every=3), rules.ASGD(3, nodes_every=4), rules.EAMSGD(1, nodes_every=10)):
        run, changes = follow(rule, replay_centres)
        number = 4 * in_epoch // rule.nodes_every
        np.testing.assert_allclose(changes, np.zeros((number, 3)), atol=1e-14)
        assert count(run, "send") == count(run, "merge") == [number * (rank in leaders) for rank in range(n)]
        assert run.exchanges == count(run, "meet", "send")
        print("followed")
    synk.close()
"""

GOSSIP = """
    for rule in (rules.GoSGD(0.3, nodes_every=3), rules.GoSGD(1.0, nodes_every=5)):
        run, weights = follow(rule, replay_gossip)
        number = 4 * in_epoch // rule.nodes_every
        np.testing.assert_allclose(sum(weights), 1, rtol=1e-12)
        assert count(run, "nodes") == [number * (rank in leaders) for rank in range(n)]
        assert run.exchanges == count(run, "send", "nodes")
        print("followed")
    synk.close()
"""


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(("rule", "n"), [(CENTRES, 3), (GOSSIP, 2)], ids=["centre", "gossip"])
def test_exchanges_follow_the_recorded_order(ranks, rule, n):
    assert run(REPLAY, rule, ranks=ranks) == ["followed"] * n


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 1, 1)], ids=str)
def test_the_sum_of_the_centres_is_conserved_while_ranks_exchange_with_them(ranks):
    """Several parts and pieces: each centre counts the steps of its ranks, and all together count all steps."""
    lines = run(
        COUNT,
        """
        seen = []
        rule = rules.ASGD(every=1, scale=1.0, nodes_every=2)
        run = count(rule, on_epoch=lambda run: seen.append(run.params[0]))
        counted = [bool(np.abs(one * len(sizes) - 40 * n * (1 + i)).max() < 1e-9 * n) for i, one in enumerate(seen)]
        print(counted, np.abs(run.params[0] * len(sizes) - sum(run.steps)).max() < 1e-9 * n, sum(run.steps) == 80 * n)
        synk.close()
        """,
        ranks=ranks,
    )
    assert lines == ["[True, True] True True"]


def test_centres_that_are_rounded_between_nodes_are_equal_on_all():
    lines = run(
        COUNT,
        """
        run = count(rules.ASGD(every=1, scale=1.0, nodes_every=5), epochs=7)  # numbers of 256 and more are rounded
        print(sum(run.steps) == 840, np.abs(run.params[0] * 2 / 840 - 1).max() < 1e-3)
        synk.close()
        """,
        ranks=(2, 1),
        WIRE_DTYPE="bfloat16",
        DTYPE="float32",
    )
    assert lines == ["True True"]


#: With one rank on each node, the order of all exchanges is known beforehand.
SERIAL = """
    from synkhronos.extensions import checkpoint
"""

RULES = [rules.EASGD(every=2, nodes_every=7), rules.GoSGD(nodes_every=7)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_looking_at_the_centre_and_resuming_change_nothing(tmp_path, rule):
    path = str(tmp_path / "run.npz")
    lines = run(
        SERIAL,
        f"""
        rule = rules.{rule!r}
        expected = train(rule, epochs=3)
        looked = train(rule, epochs=3, on_epoch=lambda run: run.params and None)
        saved = train(rule, epochs=3, on_epoch=lambda run: checkpoint.save_run({path!r}, run) if run.epoch == 2 else 0)
        again = train(rule, epochs=3, resume=checkpoint.load_run({path!r}))
        print([bool((one.params[0] == expected.params[0]).all()) for one in (looked, saved, again)])
        print(again.steps == expected.steps, again.order == expected.order, again.exchanges == expected.exchanges)
        synk.close()
        """,
        ranks=(1, 1),
    )
    assert lines == ["[True, True, True]", "True True True"]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_state_of_other_nodes_is_resumed_from_the_mean(tmp_path, rule):
    path = str(tmp_path / "run.npz")
    resumed = f"""
        rule = rules.{rule!r}
        state = checkpoint.load_run({path!r})
        over = train(rule, epochs=2, resume=state)
        print(np.abs(over.params[0] - state["params/0"]).max() < 1e-12, over.steps)
        print(sum(train(rule, epochs=3, resume=state).steps) == 33 and state["params/0"].any())
        synk.close()
    """
    run(
        SERIAL,
        f"train(rules.{rule!r}, epochs=2, on_epoch=lambda run: checkpoint.save_run({path!r}, run)); synk.close()",
        ranks=(1, 2),
    )
    for ranks in ((3,), (2, 1)):
        assert run(SERIAL, resumed, ranks=ranks) == ["True [0, 0, 0]", "True"]


def test_batches_that_end_early_do_not_hold_up_other_nodes():
    lines = run(
        COUNT,
        """
        def batches(rank, n_ranks, epoch, rng):
            for _ in range(6 + 9 * rank):
                yield [np.zeros(1)]

        run = count(rules.ASGD(every=2, scale=1.0, nodes_every=3), batches, epochs=None, steps=50)
        sent = [one for one in run.order if one[2] == "send"]
        print(run.steps, len(sent), np.abs(run.params[0] * 2 - sum(run.steps)).max() < 1e-9)
        synk.close()
        """,
        ranks=(2, 1),
        SIZE="1000",
    )
    assert lines == ["[6, 15, 24] 32 True"]


#: Batches of which some ranks wait or fail.
ACTS = """
    class Acts:
        def __init__(self, act):
            self.act = act
        def __call__(self, rank, n_ranks, epoch, rng):
            for step in range(40):
                self.act(rank, step)
                yield [np.zeros(1)]
"""


def test_only_the_leader_waits_for_another_node(tmp_path):
    """The rank next to it takes the batches that it leaves. Node 1 makes no step before that rank has made 10."""
    lines = run(
        COUNT,
        ACTS,
        """
        path = os.environ["FILE"]

        def act(rank, step):
            if rank == 1 and step == 10:
                open(path, "w").close()
            while rank == 2 and not os.path.exists(path):
                time.sleep(0.01)

        run = count(rules.ASGD(every=1, scale=1.0, nodes_every=4), Acts(act), epochs=None, steps=10)
        print(run.steps[1] >= 10, sum(run.steps) == 30, np.abs(run.params[0] * 2 - 30).max() < 1e-9)
        synk.close()
        """,
        ranks=(2, 1),
        SIZE="1000",
        FILE=str(tmp_path / "file"),
    )
    assert lines == ["True True True"]


@pytest.mark.parametrize(
    ("ranks", "failing", "step", "slow"), [((2, 1), 1, 9, 2), ((1, 2), 2, 9, 0), ((2, 2), 2, 2, None)], ids=str
)
def test_a_step_that_fails_while_a_leader_waits_for_an_average(ranks, failing, step, slow):
    """The leader that waits is that of the failing rank's node. In the last case, it waits for the failing leader."""
    lines = run(
        COUNT,
        ACTS,
        f"""
        def act(rank, step):
            if rank == {slow} and step == 0:
                time.sleep(20)
            if rank == {failing} and step == {step}:
                time.sleep(1)
                raise OSError("the file is gone")

        rule = rules.ASGD(every=1, scale=1.0, nodes_every=5)
        began = time.monotonic()
        try:
            count(rule, Acts(act), epochs=None, steps=15)
        except synk.WorkerError as error:
            print("rank {failing} " in str(error), "the file is gone" in str(error), time.monotonic() - began < 15)
        print(sum(count(rule, epochs=1).steps))
        synk.close()
        """,
        ranks=ranks,
        SIZE="1000",
    )
    assert lines == ["True True True", str(40 * sum(ranks))]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_that_hangs_is_detected(rank):
    lines = run(
        COUNT,
        ACTS,
        f"""
        def act(rank, step):
            if rank == {rank} and step == {1 if rank == 2 else 5}:  # a leader waits for others, and makes few steps
                time.sleep(60)

        began = time.monotonic()
        try:
            count(rules.EASGD(every=1, nodes_every=2), Acts(act), epochs=None, steps=20)
        except synk.WorkerTimeout as error:
            print("rank {rank}" in str(error), time.monotonic() - began < 30)
        synk.close()
        """,
        ranks=(2, 2),
        SIZE="1000",
        TIMEOUT="2",
    )
    assert lines == ["True True"]


def test_weights_of_gossip_with_messages_on_their_way_and_rounded_exchanges():
    lines = run(
        COUNT,
        """
        from rule_simulator import replay_gossip

        def look(run):
            state = run.state()
            names = [f"{rank}/engine/{name}" for rank in range(n) for name in ("weight", "weights")]
            totals.append(sum(float(np.sum(state[name])) for name in names))

        totals, rule = [], rules.GoSGD(0.5, nodes_every=3)
        run = count(rule, epochs=4, on_epoch=look)
        expected, _ = replay_gossip(rule, lambda rank, x, step: x + 1, np.zeros(1), [0, 0, 1], run.steps, run.order)
        print(np.abs(np.array(totals) - 1).max() < 1e-12, np.abs(run.params[0] / expected - 1).max() < 5e-3)
        synk.close()
        """,
        ranks=(2, 1),
        WIRE_DTYPE="bfloat16",
        DTYPE="float32",
    )
    assert lines == ["True True"]


def test_shares_are_those_of_a_node():
    lines = run(
        """
        try:
            train(rules.EASGD(beta=1.5), epochs=1)
        except ValueError as error:
            print(error)
        synk.close()
        """,
        ranks=(2, 1),
    )
    assert "beta is 1.5 with 1 ranks; expected at most the number of ranks" in lines[0]
