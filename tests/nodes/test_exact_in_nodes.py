"""Training loops whose steps are exact within each node, with averages between nodes: simulations, and faults."""

import pytest
from mpi_jobs import RANKS_OF_NODES, ends_well, hear, needs_mpi, output_of, start_until_ready

pytestmark = needs_mpi

#: The simulation in NumPy has one member for each node, which makes the step of the serial program on the node's rows.
PROGRAM = f"""{RANKS_OF_NODES}
    from rule_simulator import simulate
    from synkhronos.extensions.train import make_train_function

    n, n_nodes = synk.fork(use_gpu=False, timeout=60), len(sizes)
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    shape, rate, size, n_rows = (20, int(os.environ.get("COLUMNS_OF_W", 30))), 0.05, 3, 97
    draw = np.random.RandomState(0)
    X = draw.rand(n_rows, shape[0])
    Y = X.dot(draw.rand(*shape))
    w = theano.shared(np.ones(shape), "w")
    x, y = T.matrix("x", "float64"), T.matrix("y", "float64")

    def loss_of(x):
        return T.sqr(x.dot(w) - y).sum(axis=1).mean()

    # with centred rows, the step of a node is not the mean of the steps of its ranks
    losses = {{"exact": loss_of(x - x.mean(axis=0)), "collectives": loss_of(x)}}
    grads = {{kind: T.grad(loss, w) for kind, loss in losses.items()}}
    steps = {{
        "exact": synk.function([x, y], losses["exact"], updates=[(w, w - rate * grads["exact"])], exact=True),
        "collectives": synk.function(
            [x, y], losses["collectives"], updates=[(w, w - rate * synk.averaged(grads["collectives"]))]
        ),
    }}
    in_epoch = -(-n_rows // (size * n))

    class Serial:
        def __init__(self, kind, seed=0):
            self.kind, self.seed, self.losses = kind, seed, [[] for _ in sizes]

        def step(self, node, flat, step):
            epoch, place = divmod(step - 1, in_epoch)
            order = np.random.default_rng([self.seed, epoch]).permutation(n_rows)
            of_step = np.resize(order, in_epoch * n * size).reshape(in_epoch, n, size)[place]
            rows = of_step[[rank for rank in range(n) if nodes[rank] == node]].reshape(-1)
            a, b = X[rows], Y[rows]
            a = a - a.mean(axis=0) if self.kind == "exact" else a
            error = a @ flat.reshape(shape) - b
            self.losses[node].append(np.sum(error**2) / len(rows))
            return flat - rate * 2 * (a.T @ error).reshape(-1) / len(rows)

    def reset():
        w.set_value(np.ones(shape))

    def train(kind, rule, epochs=4, step=None, **options):
        reset()
        run = synk.loop(step or steps[kind], [X, Y], params=[w], batch_size=size, epochs=epochs, rule=rule, **options)
        assert all((value == run.params[0]).all() for value in synk.gather(w))
        return run

    def compare(kind, rule, run, epochs=4):
        serial, options = Serial(kind), {{}}
        if isinstance(rule, rules.DASO):
            of_epochs = run.losses.reshape(epochs, -1).mean(axis=1).tolist()
            options = {{"steps_per_epoch": in_epoch, "losses": of_epochs}}
        simulated = simulate(rule, serial.step, np.ones(shape).reshape(-1), n_nodes, epochs * in_epoch, **options)
        np.testing.assert_allclose(run.params[0].reshape(-1), np.mean(simulated.x, axis=0), rtol=1e-9)
        for rank in range(n):
            np.testing.assert_allclose(run.outputs[rank][:, 0], serial.losses[nodes[rank]], rtol=1e-9)
        assert run.staleness == [age for kind, _, age in simulated.log if kind == "merge"]
        return len(run.staleness)
"""


def run(*sources, ranks=(2, 2), **environment):
    return output_of(PROGRAM, *sources, n=len(ranks), RANKS=" ".join(map(str, ranks)), **environment).splitlines()


@pytest.mark.parametrize("columns", ["30", "8000"])  # of 8,000, the ranks of a node have one copy between loops
def test_each_node_makes_the_serial_step_on_its_rows(columns):
    lines = run(
        """
        for rule in (rules.LocalSGD(every=3), rules.DiLoCo(every=4, delay=2, lr=0.5, momentum=0.5),
                     rules.Outer(every=5, delay=3, merge="delta"), rules.BMUF(every=3),
                     rules.DASO(warmup=1, cooldown=1, every=2)):
            for kind in steps:
                steps[kind](X[:4], Y[:4])  # the controller may compute a call of the exact function alone
                print(type(rule).__name__, compare(kind, rule, train(kind, rule)) > 5)
        synk.close()
        """,
        COLUMNS_OF_W=columns,
    )
    names = ("LocalSGD", "DiLoCo", "Outer", "BMUF", "DASO")
    assert lines == [f"{name} True" for name in names for _ in range(2)]


def test_nodes_of_one_rank():
    lines = run(
        """
        for kind in steps:
            compare(kind, rules.LocalSGD(every=3), train(kind, rules.LocalSGD(every=3)))
        print("equal")
        synk.close()
        """,
        ranks=(1, 1),
    )
    assert lines == ["equal"]


def test_nodes_count_by_their_ranks():
    """With an average after each step, the result is that of steps with the rows of all ranks."""
    lines = run(
        """
        expected = train("collectives", None)
        run = train("collectives", rules.LocalSGD(every=1))
        np.testing.assert_allclose(run.params[0], expected.params[0], rtol=1e-9)
        print(run.steps == expected.steps, run.staleness == [0] * len(run.losses))
        synk.close()
        """,
        ranks=(1, 2),
    )
    assert lines == ["True True"]


def test_ranks_of_a_node_stay_equal_and_nodes_differ_between_averages():
    lines = run(
        """
        seen = []
        def look(run):
            values = [synk.get_value(rank, w) for rank in range(n)]
            seen.append([bool((one == values[0]).all()) for one in values])
        for kind in steps:
            train(kind, rules.LocalSGD(every=1000), epochs=2, on_epoch=look)
        print(seen == [[True, True, False, False]] * 4, synk.check_replicas() == {})
        synk.close()
        """
    )
    assert lines == ["True True"]


def test_random_numbers_of_exact_steps_are_equal_on_all_nodes():
    lines = run(
        """
        from backend import RandomStreams
        noise = RandomStreams(3).uniform(low=0.0, high=1.0, size=(2 * size, shape[0]))
        step = synk.function([x, y], noise.sum() + 0 * y.sum(), updates=[(w, w + (noise * x).sum())], exact=True)
        run = train("exact", rules.LocalSGD(every=2), epochs=2, step=step)
        print(all((one == run.outputs[0]).all() for one in run.outputs), len({*run.outputs[0][:, 0]}) == run.steps[0])
        synk.close()
        """
    )
    assert lines == ["True True"]


def test_averages_go_on_while_the_ranks_of_a_node_have_collectives():
    lines = run(
        """
        from synkhronos._collectives.pipeline import Ticket
        from synkhronos._session import current

        seen, loops = [], current("test").loops

        def complete(self, of=Ticket.complete):
            seen.append(int(loops[0, 1]))  # steps that this rank has made
            of(self)

        Ticket.complete = complete
        for kind in steps:
            del seen[:]
            train(kind, rules.Outer(every=4, delay=3), epochs=1)
            print(sorted({*seen} - {0}))
        synk.close()
        """,
        COLUMNS_OF_W="3000",
    )
    # it is complete at its merge, after the 7th step; the next one is sent after the 8th, and ends with the epoch
    assert lines == ["[7, 8, 9]"] * 2


def test_ctrl_c_and_an_error_of_a_step():
    lines = run(
        """
        from backend import RandomStreams
        from deadline import wait_for
        from synkhronos._backends import is_random_state
        from synkhronos._session import current

        made = current("test").loops[0]

        def interrupt(after):
            wait_for(lambda: made[1] >= after, "steps")
            os.kill(os.getpid(), signal.SIGINT)

        for kind in steps:
            for after in (12, 30):  # the first average was merged, so all nodes make steps
                made[1] = 0
                threading.Thread(target=interrupt, args=(after,)).start()
                interrupted = train(kind, rules.Outer(every=6, delay=4), epochs=10**6)
                print(interrupted.interrupted, min(interrupted.steps) > 0)
        # nodes have made different numbers of steps, so their random states differ until they get the controller's
        noise = RandomStreams(3).uniform(low=0.0, high=1.0, size=(2 * size, shape[0]))
        draws = synk.function([x, y], noise.sum() + 0 * y.sum(), updates=[(w, w + (noise * x).sum())], exact=True)
        made[1], stale, added = 0, current("test").stale, []
        of_stale = stale.add
        stale.add = lambda variables: (added.extend(variables), of_stale(variables))
        threading.Thread(target=interrupt, args=(12,)).start()
        stopped = train("exact", rules.LocalSGD(every=50), epochs=10**6, step=draws)
        (stream,) = [var for var in draws.get_shared() if is_random_state(var)]
        print(any(var is stream for var in added), stopped.interrupted)
        table = theano.shared(np.ones(3), "table")
        row = T.ivector("row")
        step = synk.function([row], w.sum(), updates=[(w, w + synk.averaged(table[row[0]]))])
        rows = np.zeros(40, "int32")
        rows[31] = 5
        try:
            synk.loop(step, [rows], params=[w], batch_size=1, epochs=1, rule=rules.LocalSGD(every=3))
        except synk.WorkerError as error:
            print("IndexError" in str(error), "Loop" in str(error))
        for kind in steps:
            compare(kind, rules.LocalSGD(every=3), train(kind, rules.LocalSGD(every=3)))
        print("equal")
        synk.close()
        """
    )
    assert lines == ["True True"] * 6 + ["equal"]


def test_what_is_refused():
    lines = run(
        """
        f = synk.function([x, y], losses["collectives"], updates=[(w, w - rate * grads["collectives"])])
        def batches(rank, n_ranks, epoch, rng):
            yield X[:3], Y[:3]
        local = rules.LocalSGD(every=2)
        update = w - rate * synk.averaged(grads["collectives"])
        gathers = synk.function([x, y], (losses["collectives"], "gather"), updates=[(w, update)])
        for step, rule, inputs in (
            (gathers, local, [X, Y]),
            (steps["exact"], rules.EASGD(), [X, Y]),
            (steps["collectives"], rules.EASGD(), [X, Y]),
            (steps["exact"], rules.Hierarchical(), [X, Y]),
            (steps["collectives"], rules.Hierarchical(), [X, Y]),
            (steps["exact"], local, batches),
            (steps["collectives"], local, batches),
            (f, "local", [X, Y]),
            (steps["exact"], "local", batches),
        ):
            length = {"steps": 2} if callable(inputs) else {"epochs": 1}
            try:
                synk.loop(step, inputs, params=[w], batch_size=3, rule=rule, **length)
            except (TypeError, ValueError) as error:
                print(str(error).splitlines()[0])
        averages = rules.Hierarchical(periods={3: "all", 9: "all"})
        print(train("exact", averages, epochs=1).exchanges)
        synk.close()
        """
    )
    *messages, exchanges = lines
    exact, collectives = "needs a function of synkhronos.function without exact=True", "a function without collectives"
    expected = [
        "has outputs with the ops",
        exact,
        collectives,
        exact,
        collectives,
        exact,
        collectives,
        *["rule is 'local' for"] * 2,
    ]
    assert len(messages) == len(expected)
    for message, words in zip(messages, expected):
        assert words in message
    assert exchanges == "[3, 3, 3, 3]"


# -- the delay that a loop chooses


def test_a_chosen_delay_gives_the_simulation_with_this_delay():
    lines = run(
        """
        n_rows = 1201
        X = draw.rand(n_rows, shape[0])
        Y = X.dot(draw.rand(*shape))
        in_epoch = -(-n_rows // (size * n))
        loss = losses["collectives"]
        made = make_train_function(loss, [w], x, y, "sgd", rate, rule="local")
        made_exact = make_train_function(losses["exact"], [w], x, y, "sgd", rate, rule="local", exact=True)
        for kind, step in [*steps.items(), ("collectives", made), ("exact", made_exact)]:
            delays = []
            def note(run):
                delays.append(run.delay)
            if hasattr(step, "loop"):
                reset()
                run = step.loop(X, Y, batch_size=size, epochs=4, on_epoch=note)
            else:
                run = train(kind, "local", on_epoch=note)
            rule = rules.Outer(every=2 * run.delay, delay=run.delay, start=6)
            assert compare(kind, rule, run) >= 6
            assert run.delay >= 2 and delays == [run.delay] * 4
            print(f"a delay of {run.delay} steps" in repr(run))
        synk.close()
        """
    )
    assert lines == ["True"] * 4


def test_the_measured_exchange_is_that_of_the_link(hosts):
    """Two hosts with two ranks each; a step adds 1 to each parameter."""
    hosts.limit("80mbit")
    job = start_until_ready(
        hosts,
        """
        from synkhronos._api import loops

        measured, to_hide = [], loops.to_hide
        def note(*seconds):
            measured.extend(seconds)
            return to_hide(*seconds)
        loops.to_hide = note
        n = synk.fork(2, use_gpu=False, timeout=60)
        w, x = theano.shared(np.zeros(500_000, "float32"), "w"), T.fvector("x")
        step = synk.function([x], x.sum(), updates=[(w, w + synk.averaged(x.mean()))])
        say("ready")
        options = {"batch_size": 1, "epochs": 10**4, "on_epoch": lambda run: run.delay not in run.staleness}
        run = synk.loop(step, [np.ones(40 * n, "float32")], params=[w], rule="local", **options)
        exchange, seconds = measured
        say(exchange > 0.15, seconds < exchange, run.delay == to_hide(exchange, seconds), run.staleness[:6])
        say((run.params[0] == run.steps[0]).all(), len({*run.steps}))
        synk.close()
        """,
    )
    try:
        assert hear(job)[1] == "True True True [0, 0, 0, 0, 0, 0]"
        assert hear(job)[1] == "True 1"
        ends_well(hosts, job)
    finally:
        hosts.limit(None)


def test_a_delay_is_chosen_in_the_first_epoch_and_kept_by_a_resumed_loop():
    lines = run(
        """
        states = []
        expected = train("exact", "local", epochs=5, on_epoch=lambda run: states.append(run.state()))
        again = train("exact", "local", epochs=5, resume=states[1])
        print((again.params[0] == expected.params[0]).all(), again.delay == expected.delay, again.steps)
        synk.close()
        """
    )
    assert lines == ["True True [45, 45, 45, 45]"]


def test_the_first_step_is_not_measured_if_an_epoch_has_a_single_one():
    lines = run(
        """
        size, in_epoch, delays = 25, 1, []
        made = train("exact", "local", epochs=3, on_epoch=lambda run: delays.append(run.delay))
        print([delay is None for delay in delays], made.delay >= 2, made.steps)
        synk.close()
        """
    )
    assert lines == ["[True, False, False] True [3, 3, 3, 3]"]


def test_a_state_is_resumed_on_other_nodes(tmp_path):
    path = str(tmp_path / "run.npz")
    train = f"""
        from synkhronos.extensions import checkpoint
        def save(run):
            if run.epoch == 2:
                checkpoint.save_run({path!r}, run)
        run = train("collectives", "local", epochs=EPOCHS, OPTION)
        print(run.epoch, run.losses[-1] < run.losses[0])
        synk.close()
    """
    run(train.replace("EPOCHS", "2").replace("OPTION", "on_epoch=save"))
    resumed = train.replace("EPOCHS", "30").replace("OPTION", f"resume=checkpoint.load_run({path!r})")
    for ranks in ((4,), (1, 3), (1, 1), (1,)):
        assert run(resumed, ranks=ranks) == ["30 True"]
