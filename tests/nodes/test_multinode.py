"""Results of sessions on several nodes, compared with plain Theano; nodes are hosts in network namespaces."""

import sys
import textwrap

import pytest
from mpi_jobs import HELPERS, assert_nothing_left

PRELUDE = f"""
    import os, signal, sys, time
    import numpy as np
    sys.path.insert(0, {str(HELPERS)!r})
    from backend import T, theano
    import synkhronos as synk
    n = synk.fork(int(os.environ["RANKS"]), use_gpu=False, timeout=60)
    X = np.random.RandomState(0).rand(13, 3).astype(theano.config.floatX)
    x = T.matrix("x")
"""


def run(hosts, source, ranks=1, before=""):
    """Run a program on both hosts, with some lines before the fork, and return the lines that it printed."""
    begin = textwrap.dedent(PRELUDE).replace("n = synk.fork", textwrap.dedent(before) + "n = synk.fork")
    job = hosts.start(sys.executable, "-c", begin + textwrap.dedent(source), RANKS=str(ranks))
    out, err = job.communicate(timeout=280)
    assert job.returncode == 0, out + err
    assert_nothing_left(hosts)
    return out.splitlines()


@pytest.mark.parametrize("ranks", [1, 2])
def test_functions_and_collectives(hosts, ranks):
    lines = run(
        hosts,
        """
        hosts = ["hosta"] * (n // 2) + ["hostb"] * (n // 2)
        w = theano.shared(np.ones((2, 3), X.dtype), "w")
        outputs = [x.sum(0), x, (x * x).max(0), x.min(0), x.prod(0) , x.mean(0)]
        ops = ["sum", "gather", "max", "min", "prod", "avg"]
        f = synk.function([x], list(zip(outputs, ops)), updates=[(w, w + x.sum())])
        plain = theano.function([x], outputs)
        data = synk.data(X)
        for rows in [None, slice(1, 12), [4, 2, 0, 6, 6, 1, 12]]:
            for num_slices in (1, 2):
                chosen = X if rows is None else X[rows]
                for one, other in zip(f(data, batch=rows, num_slices=num_slices), plain(chosen)):
                    assert np.allclose(one, other, rtol=1e-5), (rows, one, other)
        for one, other in zip(f(X), plain(X)):
            assert np.allclose(one, other, rtol=1e-5)
        data[3] = 5
        assert np.allclose(f(data)[0], data[:].sum(0))
        every = synk.gather(w)
        synk.all_reduce(w)
        assert np.allclose(synk.gather(w), every.mean(0))

        size = 50_000  # too large to be sent with the votes
        v = theano.shared(np.zeros(size, "float32"), "v")
        values = np.random.RandomState(1).randn(n, size).astype("float32")
        for op, expected in [("sum", values.sum(0)), ("max", values.max(0)), ("min", values.min(0)),
                             ("prod", values.prod(0)), ("avg", values.mean(0))]:
            for rank in range(n):
                synk.set_value(rank, v, values[rank])
            assert np.allclose(synk.reduce(v, op, in_place=False), expected, atol=1e-5)
            synk.all_reduce(v, op)
            got = synk.gather(v)
            assert np.allclose(got[0], expected, atol=1e-5) and (got == got[0]).all()
        weights = np.arange(n) % 3
        for rank in range(n):
            synk.set_value(rank, v, values[rank])
        synk.all_reduce(v, weights=weights)
        assert np.allclose(synk.get_value(n - 1, v), np.average(values, 0, weights), atol=1e-5)
        i = theano.shared(np.zeros(size, "int32"), "i")
        for rank in range(n):
            synk.set_value(rank, i, np.full(size, rank * rank, "int32"))
        synk.all_reduce(i)
        assert (synk.gather(i) == np.rint(np.mean(np.arange(n) ** 2))).all()
        synk.broadcast(v, values[0])
        assert (synk.gather(v) == values[0]).all()
        synk.scatter(w, np.arange(30, dtype=X.dtype).reshape(10, 3))
        synk.all_gather(w)
        assert (synk.gather(w) == np.arange(30).reshape(10, 3)).all()
        synk.set_value(0, v, np.zeros(3, "float32"))
        try:
            synk.all_reduce(v)
            raise SystemExit("no error")
        except ValueError as error:
            assert "(3,), (50000,)" in str(error)
        print(n, "fine")
        """,
        ranks,
    )
    assert lines[-1] == f"{2 * ranks} fine"


def test_collectives_inside_and_exact_functions(hosts):
    lines = run(
        hosts,
        """
        w = theano.shared(np.ones(3, X.dtype), "w")
        cost = T.sqr(T.dot(x, w)).mean()
        step = synk.function([x], [synk.averaged(cost)], updates=[(w, w - 0.1 * synk.averaged(T.grad(cost, w)))])
        other = theano.shared(np.ones(3, X.dtype))
        cost = T.sqr(T.dot(x, other)).mean()
        plain = theano.function([x], [cost], updates=[(other, other - 0.1 * T.grad(cost, other))])
        data = synk.data(X)
        for start in (0, 3, 5, 12):
            assert np.allclose(step(data, batch=slice(start, 13)), plain(X[start:]), rtol=1e-5)
            assert np.allclose(synk.gather(w), other.get_value(), rtol=1e-5)
        assert np.allclose(step(data, num_slices=2), plain(X), rtol=1e-5)
        assert np.allclose(synk.gather(w), other.get_value(), rtol=1e-5)
        gathered = synk.function([x], [synk.gathered(x).sum(0)])
        assert np.allclose(gathered(X), X.sum(0))
        normal = (x - x.mean(0)) / x.std(0)
        exact = synk.function([x], [normal, T.sort(x, axis=0)], exact=True)
        for one, serial in zip(exact(X), theano.function([x], [normal, T.sort(x, axis=0)])(X)):
            assert np.allclose(one, serial, atol=1e-5)
        with synk.sequence():
            futures = [step(data, batch=slice(0, 7)), step(data, batch=slice(7, 13))]
        for future, rows in zip(futures, (X[:7], X[7:])):
            assert np.allclose(future.result(), plain(rows), rtol=1e-5)
        synk.close()
        assert synk.fork(1, use_gpu=False) == 2
        assert np.allclose(gathered(data), X.sum(0))
        print("fine")
        """,
        2,
    )
    assert lines[-1] == "fine"


def test_errors_name_the_node_and_the_session_continues(hosts):
    lines = run(
        hosts,
        """
        y = T.vector("y")
        f = synk.function([x, y], [T.dot(x.T, y)])
        g = synk.function([x], [synk.averaged(1 / T.opt.Assert("no ones")(x, T.all(T.neq(x, 1))).sum())])
        bad = X.copy()
        bad[12] = 1
        for _ in range(2):
            try:
                g(bad)
                raise SystemExit("no error")
            except synk.WorkerError as error:
                print(error.rank, error)
            assert np.isfinite(g(X)).all()
        print("fine")
        """,
    )
    assert lines[-1] == "fine"
    assert any(line.startswith("1 rank 1 (node 1 (hostb): cpu) failed in Call") for line in lines), lines


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_variables_are_updated_by_slices(hosts, ranks):
    """Each node has one copy, which its ranks update; values are those of the serial program."""
    lines = run(
        hosts,
        """
        side = 80
        X = np.random.RandomState(0).randn(31, side)
        x = T.dmatrix("x")
        def build(compile, **kwargs):
            rng = np.random.RandomState(1)
            w, m, v = (theano.shared(rng.rand(side, side), name) for name in "wmv")
            b, turned = theano.shared(np.zeros(side), "b"), theano.shared(rng.rand(side, side), "turned")
            loss = T.sqr(T.tanh(x.dot(w)) + b).mean()
            g, of_b = T.grad(loss, [w, b])
            m_new, v_new = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
            updates = [(m, m_new), (v, v_new), (w, w - 0.01 * m_new / (T.sqrt(v_new) + 1e-8)), (b, b - of_b)]
            updates.append((turned, turned[::-1] * 0.5))
            variables = [w, m, v, b, turned]
            plain = compile([], [], updates=[(w, w + 1)])
            return variables, compile([x], loss, updates=updates, **kwargs), plain
        ours, step, plain = build(synk.function, exact=True)
        theirs, expected, plain_too = build(theano.function)
        def check():
            for one, other in zip(ours, theirs):
                for rank in range(n):
                    value = synk.get_value(rank, one)
                    assert np.allclose(value, other.get_value(), rtol=1e-9, atol=1e-9), (one, rank)
        for rows in (31, 31, 2, 1, 31):
            assert np.allclose(step(X[:rows]), expected(X[:rows]))
            check()
        shared = current("test").stale.shared
        assert shared.issuperset(current("test").keys(ours[:3]))
        print(len(step.partition.updates), {one.collective for one in step.partition})
        plain(), plain_too()
        synk.broadcast(ours[0])
        step(X), expected(X)
        check()
        ours[1].set_value(np.ones((side, side))), theirs[1].set_value(np.ones((side, side)))
        step(X), expected(X)
        check()
        for rank in range(n):
            synk.set_value(rank, ours[2], np.full((side, side), 1.0 + rank))
        synk.all_reduce(ours[2]), theirs[2].set_value(np.full((side, side), 1 + (n - 1) / 2))
        step(X), expected(X)
        check()
        try:
            step(np.ones((31, side + 1)))
        except synk.WorkerError as error:
            print(error.updated)
        step(X), expected(X)
        check()
        """,
        ranks,
        """
        from synkhronos._rank import steps
        from synkhronos._session import current
        from synkhronos._sharding import slices
        slices.LEAST_BYTES = 1
        own_update = steps.Steps._update
        def checked_update(this, one, *arguments):
            assert this._leads or not any(this._value(key).flags.writeable for key in one.variables), "a copy"
            return own_update(this, one, *arguments)
        steps.Steps._update = checked_update
        """,
    )
    assert lines == ["3 {'all-reduce (sum)'}", "False"]


def test_a_node_without_memory_for_values_of_others(hosts):
    """Each rank then has copies, and all ranks compute all updates."""
    lines = run(
        hosts,
        """
        X, x = np.random.RandomState(0).randn(13, 80), T.dmatrix("x")
        found = []
        for build, options in ((theano.function, {}), (synk.function, {"exact": True})):
            w = theano.shared(np.ones((80, 80)) / 80, "w")
            loss = T.sqr(x.dot(w)).sum()
            f = build([x], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], **options)
            found.append([f(X), f(X[:1]), f(X)])
        assert np.allclose(*found)
        for rank in range(n):
            assert np.array_equal(synk.get_value(rank, w), w.get_value())
        print(current("test").stale.shares, len(current("test").stale.shared))
        """,
        2,
        """
        from synkhronos._rank.collective_handlers import CollectiveHandlers
        from synkhronos._session import current
        from synkhronos._sharding import slices
        slices.LEAST_BYTES = 1
        CollectiveHandlers._places_on_leader = lambda this, variables, places: [None] * len(places)
        """,
    )
    assert lines == ["False 0"]
