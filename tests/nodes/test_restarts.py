"""Replacement of dead workers on several nodes by `fork(restart_workers=True)`, and sessions one after the other."""

import time

from mpi_jobs import ends_well, hear, start, start_until_ready, until_nothing_is_left
from process_state import wait_for_end

BEGIN = """
    import warnings
    from deadline import wait_for
    from every_function import built, build, check_everything
    from fault_ops import KILL, SEGFAULT

    n = synk.fork(2, use_gpu=False, timeout=60, restart_workers=True)
    f, fault = build()
    check_everything(n)

    def call():
        try:
            f(np.ones(10))
        except synk.WorkerRestarted as error:
            say(error.ranks, error)
        else:
            say("nobody died")
"""


def test_workers_of_any_node_are_replaced(hosts, tmp_path):
    job = start(
        hosts,
        BEGIN,
        f"""
        for dies in [(3,), (1,), (1, 3), (3,)]:
            for rank in dies:
                synk.set_value(rank, fault, KILL if len(dies) == 1 else SEGFAULT)
            call()
            check_everything(n)
        say("idle")
        wait_for(lambda: os.path.exists({str(tmp_path / "killed")!r}), "the death of a worker")
        call()
        check_everything(n)
        for values in built["random"]():
            assert len(np.unique(values)) == len(values) == 4 * n, values
        say("fine")
        """,
    )
    for ranks in ["(3,)", "(1,)", "(1, 3)", "(3,)"]:
        text = hear(job)[1]
        assert text.startswith(ranks + " ")
        assert "it was replaced" in text
        assert ("node 1 (hostb), as rank 3 of all" in text) == (ranks == "(3,)") or ranks == "(1, 3)"
    assert hear(job)[1] == "idle"
    (worker,) = hosts.leader("hostb").children()
    worker.kill()
    wait_for_end([worker.pid])
    (tmp_path / "killed").touch()
    assert hear(job)[1].startswith("(3,) ")
    assert hear(job)[1] == "fine"
    ends_well(hosts, job)


def test_the_death_of_a_leader_ends_the_job(hosts):
    job = start_until_ready(hosts, BEGIN, "say('ready')\nsynk.set_value(2, fault, KILL)\ncall()")
    since = time.monotonic()
    out, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "says" not in out
    until_nothing_is_left(hosts, since, limit=10, of_mpi=True)


def test_sessions_in_a_row_and_one_that_goes_on_from_a_checkpoint(hosts, tmp_path):
    """Sessions leak no resources, and all ranks continue from a checkpoint, in another program, too."""
    train = f"""
        from deadline import wait_for
        from synkhronos.extensions import checkpoint
        path = {str(tmp_path / "run.npz")!r}
        n = synk.fork(2, use_gpu=False, timeout=60)
        X = np.random.RandomState(0).rand(40, 3)
        x, w, count = T.dmatrix("x"), theano.shared(np.zeros(3), "w"), theano.shared(np.zeros(1), "count")
        cost = T.sqr(T.dot(x, w) - 1).mean()
        step = synk.function([x], [cost], updates=[(w, w - 0.3 * T.grad(cost, w)), (count, count + x.shape[0])])
        data = synk.data(X)

        def epochs(many):
            for _ in range(many):
                for start in range(0, 40, 8):
                    step(data, batch=slice(start, start + 8))
                synk.all_reduce(w)
    """
    job = start(
        hosts,
        train,
        """
        epochs(2)
        checkpoint.save(path, [w, count])
        epochs(2)
        expected = synk.gather(w), synk.gather(count)
        np.save(path + ".npy", expected[0])
        for each in (1, 2, 1, 2):
            synk.close()
            assert synk.fork(each, use_gpu=False, timeout=60) == 2 * each
            epochs(1)
            say(each)
            wait_for(lambda: os.path.exists(path + ".seen"), "the test")
            os.remove(path + ".seen")
        checkpoint.load(path, [w, count])
        epochs(2)
        for one, other in zip(expected, (synk.gather(w), synk.gather(count))):
            np.testing.assert_array_equal(one, other)
        synk.close()
        """,
    )
    held = []
    for each in (1, 2, 1, 2):
        assert hear(job)[1] == str(each)
        leaders = [hosts.leader(name) for name in hosts.names]
        held.append([(one.num_fds(), len(one.children(recursive=True))) for one in leaders])
        tmp_path.joinpath("run.npz.seen").touch()
    assert held[:2] == held[2:]
    ends_well(hosts, job)
    job = start(
        hosts,
        train,
        """
        synk.distribute()
        checkpoint.load(path, [w, count])
        epochs(2)
        np.testing.assert_array_equal(synk.gather(w), np.load(path + ".npy"))
        """,
    )
    ends_well(hosts, job)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.npz", "run.npz.npy"]


def test_updates_by_slices_are_made_completely_or_not_at_all(hosts, tmp_path):
    """Workers of both nodes kill themselves before and within the update."""
    job = start(
        hosts,
        f"""
        from synkhronos._rank import steps
        from synkhronos._rank.call import Caller
        from synkhronos._sharding import slices

        slices.LEAST_BYTES = 1
        steps.PIECE = 2048
        side, trap = 120, {str(tmp_path / "trap")!r}
        own = {{name: getattr(steps.Steps, name) for name in ("prepare", "carry_out", "_note")}}
        in_steps = Caller._in_steps

        def at(point, this):
            if os.path.exists(trap) and open(trap).read() == f"{{this.of_all}} {{point}}":
                os.remove(trap)
                os.kill(os.getpid(), signal.SIGKILL)

        def prepare(this, *arguments):
            at("before", this)
            own["prepare"](this, *arguments)

        def carry_out(this):
            at("met", this)
            own["carry_out"](this)

        def note(this, notes, number, new):
            at(f"computed {{number}}", this)
            own["_note"](this, notes, number, new)
            at(f"noted {{number}}", this)

        def numbered(this, *arguments):
            this.steps.of_all = this._rank
            return in_steps(this, *arguments)

        Caller._in_steps = numbered
        steps.Steps.prepare, steps.Steps.carry_out, steps.Steps._note = prepare, carry_out, note
        n = synk.fork(3, use_gpu=False, timeout=60, restart_workers=True)
        """,
        """
        x, X = T.dmatrix("x"), np.random.RandomState(0).randn(17, side)

        def made(build, **kwargs):
            rng = np.random.RandomState(1)
            w, m, b = (theano.shared(value) for value in (rng.rand(side, side), rng.rand(side, side), 1.0))
            loss = T.sqr(T.tanh(x.dot(w)) + b).mean()
            g, of_b = T.grad(loss, [w, b])
            m_new = 0.9 * m + 0.1 * g
            return [w, m, b], build([x], loss, updates=[(m, m_new), (w, w - m_new), (b, b - of_b)], **kwargs)

        ours, step = made(synk.function, exact=True)
        theirs, expected = made(theano.function)

        def check():
            for one, other in zip(ours, theirs):
                for rank in range(n):
                    np.testing.assert_allclose(synk.get_value(rank, one), other.get_value(), 1e-9, 1e-9)

        for turn in range(2):
            step(X), expected(X)
        check()
        for rank in (1, 4, 5):
            for point in ("before", "met", "computed 1", "noted 2"):
                with open(trap, "w") as file:
                    file.write(f"{rank} {point}")
                try:
                    step(X)
                except synk.WorkerRestarted as error:
                    assert error.ranks == (rank,), error
                    assert error.updated is (point != "before"), (error, point)
                    if error.updated:
                        expected(X)
                else:
                    raise AssertionError("no worker died")
                check()
                step(X), expected(X)
                check()
        say("fine")
        """,
    )
    assert hear(job)[1] == "fine"
    ends_well(hosts, job)
