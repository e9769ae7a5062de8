"""Reductions in functions over nodes, which begin while later operands are still computed.

Each process that mpiexec starts is a node. A program is run twice: once as for users, and once so that no reduction
begins early. It must print the same.
"""

import pytest
from backend import on_theano, theano
from early_reductions import FAULTY, NET, PRELUDE, run, run_both
from mpi_jobs import needs_mpi, output_of, run_processes

pytestmark = needs_mpi


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1, 2)], ids=str)
def test_the_exchange_of_a_gradient_begins_when_it_exists(ranks):
    """The gradients of the last layer are exchanged before the backward pass reaches the layer before it."""
    lines = run_both(
        "EVENTS = True",
        NET,
        """
        updates = [(w, w - np.float32(0.1) * synk.averaged(g)) for w, g in zip(layers, gradients)]
        step = synk.function([x], (loss, "avg"), updates=updates)
        for _ in range(4):
            print(float(step(X)), crc(*layers))
        del events[:]
        step(X)
        if events:
            print("early", [one for one in events if one != ()])
        assert synk.check_replicas() == {}
        """,
        ranks=ranks,
    )
    order = [(500, 7), 2, (400, 500), 1, (300, 400), "finish"]
    assert lines[-1] == f"early {[f'forward {i}' for i in range(3)] + order}"


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 1, 2, 1), (2, 2), (3, 2)], ids=str)
def test_exact_functions(ranks):
    """If all nodes have several ranks, each has one copy of the large layers, which its ranks update by slices."""
    lines = run_both(
        "EVENTS = False",
        NET,
        """
        from synkhronos._session import current
        from synkhronos._sharding import slices
        slices.LEAST_BYTES = 1
        updates = [(w, w - np.float32(0.1) * g) for w, g in zip(layers, gradients)]
        step = synk.function([x], loss, updates=updates, exact=True, plan="rows")
        for rows in (8 * n, 8 * n, 8 * n, 5 * n + 1, n - 1, 8 * n, 1, 8 * n, 8 * n):  # some ranks have no rows
            print(float(step(X[:rows])), crc(*layers))
        if "LATE" not in os.environ:
            print("early", {one.n_bytes: one.pieces for one in step.partition}, "pieces" in repr(step.partition))
            print("early", [one for one in events if one != ()][-4:], events.count("finish"))
        assert synk.check_replicas() == {}
        shared = current("test").stale.shared
        print("early", len(step.partition.updates), shared.issuperset(current("test").keys(layers[:2])))
        """,
        ranks=ranks,
    )
    assert lines.pop() == ("early 2 True" if min(ranks) > 1 else "early 0 False")
    assert lines[-2] == "early {4: (0,), 14000: (0,), 800000: (1,), 480000: (2,)} True"
    assert lines[-1] == "early [(500, 7), (400, 500), (300, 400), 'finish'] 8"


#: Networks of three layers, whose last is dense.
NETWORKS = {
    "convolutions": """
        layers = [weights(32, 1, 3, 3), weights(64, 32, 7, 7), weights(4096, 50)]
        h = normalised(T.nnet.conv2d(x[:, :256].reshape((x.shape[0], 1, 16, 16)), layers[0]), (0, 2, 3))
        h = normalised(T.nnet.conv2d(Event(1)(h), layers[1]), (0, 2, 3))
        h = Event(2)(h.flatten(2)).dot(layers[2])
    """,
    "batch normalisation": """
        layers = [weights(300, 400), weights(400, 500), weights(500, 200)]
        h = normalised(x.dot(layers[0]), (0,))
        h = Event(2)(normalised(Event(1)(h).dot(layers[1]), (0,))).dot(layers[2])
    """,
    "LSTM": """
        layers = [weights(20, 1600), weights(400, 1600), weights(400, 500)]
        def cell(row, before, memory):
            gates = T.dot(row, layers[0]) + T.dot(before, layers[1])
            keep, write, read = [T.nnet.sigmoid(gates[:, 400 * i : 400 * (i + 1)]) for i in range(3)]
            memory = keep * memory + write * T.tanh(gates[:, 1200:])
            return read * T.tanh(memory), memory
        rows = x.reshape((x.shape[0], 15, 20)).dimshuffle(1, 0, 2)
        (states, _), _ = theano.scan(cell, rows, [T.zeros((x.shape[0], 400), dtype="float32")] * 2)
        h = Event(2)(states[-1]).dot(layers[2])
    """,
    "condition": """
        layers = [weights(300, 400), weights(400, 500), weights(500, 200)]
        chosen, h = theano.shared(np.float32(1), "chosen"), x
        for i, w in enumerate(layers):
            h = (Event(i)(h) if i else h).dot(w)
            h = ifelse(T.gt(chosen, 0), T.tanh(h), h / 2)
    """,
}

# code of numba computes what other operations need before it adds a gradient
_BACKWARD = [2, (500, 200), 1, (400, 500)] if theano.config.linker == "numba" else [(500, 200), 2, (400, 500), 1]
_DENSE = ["forward 1", "forward 2", *_BACKWARD, (300, 400), "finish"]
#: In which order the controller computes `Event`s and their gradients, and adds large gradients to the exchange.
ORDERS = {
    "convolutions": ["forward 1", "forward 2", (4096, 50), 2, (64, 32, 7, 7), 1, "finish"],
    "batch normalisation": _DENSE,
    "LSTM": ["forward 2", (400, 500), 2, (400, 1600), "finish"],
    "condition": _DENSE,
}


@pytest.mark.numba
@pytest.mark.parametrize("is_read", [False, True], ids=["", "read"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_exchange_begins_before_the_backward_pass_goes_on(network, is_read):
    """With ``is_read``, the norm of all gradients is an output, and limits the step.

    With two ranks on each node, these update the layers by slices.
    """
    if network == "convolutions" and not on_theano:
        pytest.skip("PyTensor has no conv2d for several channels")
    lines = run_both(
        """
        from synkhronos._sharding import slices
        synk.register_sharding(Event)(by_axes)

        def normalised(h, axes):
            h = h - h.mean(axes, keepdims=True)
            return T.tanh(h / T.sqrt(T.sqr(h).mean(axes, keepdims=True) + np.float32(1e-3)))
        """,
        NETWORKS[network],
        f"""
        loss = T.sqr(h).mean()
        gradients = T.grad(loss, layers)
        norm = T.sqrt(sum(T.sqr(g).sum() for g in gradients))
        rate = np.float32(0.1) / T.maximum(1, norm) if {is_read} else np.float32(0.1)
        updates = [(w, w - rate * g) for w, g in zip(layers, gradients)]
        slices.LEAST_BYTES = 1
        step = synk.function([x], [loss, norm] if {is_read} else loss, updates=updates, exact=True, plan="rows")
        for _ in range(4):
            print(step(X), crc(*layers))
        del events[:]
        step(X)
        print("early", [one for one in events if not isinstance(one, tuple) or np.prod(one) > 50_000])
        print("early", bool(step.partition.updates))
        assert synk.check_replicas() == {{}}
        """,
        ranks=(2, 1 if is_read else 2),
    )
    assert lines[-2:] == [f"early {ORDERS[network]}", f"early {not is_read}"]


#: A step of training with a rule, with or without one vector of all gradients, and the same step in this process alone.
STEP = """
    from synkhronos.extensions import train

    synk.register_sharding(Event)(by_axes)
    y, rate = T.vector("y", dtype="float32"), T.scalar("rate", dtype="float32")
    Y = draw.rand(8 * n).astype("float32")
"""


@pytest.mark.parametrize(("exact", "ranks"), [(False, (2, 1)), (True, (1, 1)), (True, (2, 2))], ids=str)
def test_training_steps(exact, ranks):
    """The parts of a flat gradient are exchanged early, and the steps are those of one process."""
    lines = run_both(
        f"EVENTS, EXACT = True, {exact}",
        STEP,
        NET,
        """
        loss = T.sqr(h.sum(1) - y).mean()
        start = [w.get_value() for w in layers]
        for rule in ("sgd", "sgd_nonflat", "adam"):
            step = train.make_train_function(loss, layers, x, y, rule, rate, exact=EXACT)
            serial = train.make_train_function_theano(loss, layers, x, y, rule, rate)
            found = []
            for make in (step, serial):
                for w, value in zip(layers, start):
                    synk.broadcast(w, value)
                sizes = [8 * n, 8 * n, 8 * n, 5 * n + 1, n - 1]
                found.append([make(X[:rows], Y[:rows], rate=np.float32(0.001)) for rows in sizes])
                if make is step:
                    print("early", [one for one in events if one not in ((), (1,))][-6:])
                    assert synk.check_replicas() == {}
                    if not EXACT and rule != "sgd_nonflat":
                        print(crc(*layers), synk.gather(step.grad_shared, nd_up=1).std(0).max())
                    ours = [w.get_value() for w in layers]
            np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
            for one, w in zip(ours, layers):
                np.testing.assert_allclose(one, w.get_value(), rtol=1e-3, atol=1e-6)
        """,
        ranks=ranks,
    )
    flat = f"early {[(3500,), 2, (200000,), 1, (120000,), 'finish']}"
    apart = f"early {[(500, 7), 2, (400, 500), 1, (300, 400), 'finish']}"
    assert [line for line in lines if line.startswith("early")] == [flat, apart, flat]


def test_training_steps_with_weights_slices_and_hyperparameters():
    run_both(
        """
        from synkhronos.extensions import train

        w = weights(300)
        y, m = T.vector("y", dtype="float32"), T.vector("m", dtype="float32")
        Y, M = draw.rand(8 * n).astype("float32"), (draw.rand(8 * n) > 0.5).astype("float32")
        decay, rate = T.scalar("decay", dtype="float32"), T.scalar("rate", dtype="float32")
        loss = (m * T.sqr(x.dot(w) - y)).sum() / m.sum() + decay * T.sqr(w).sum()
        values = {"rate": np.float32(0.01), "decay": np.float32(0.1)}
        step = train.make_train_function(loss, [w], [x, m], y, "adam", rate, weights=m.sum())
        serial = train.make_train_function_theano(loss, [w], [x, m], y, "adam", rate)
        start, found = w.get_value(), []
        for make in (step, serial):
            synk.broadcast(w, start)
            losses = [make([X, M], Y, **values) for _ in range(3)]
            if make is step:
                before = w.get_value(), synk.gather(step.grad_shared, nd_up=1)
                for rows, sign in [(0, 1), (None, -1), (None, 0)]:
                    try:
                        step([X[:rows], M[:rows] * np.float32(sign)], Y[:rows], **values)
                    except ValueError as error:
                        print(error)
                    else:
                        raise AssertionError(f"a step with {rows} rows and weights of sign {sign}")
                np.testing.assert_array_equal(before[0], w.get_value())
                losses.append(step([X, M], Y, num_slices=3, **values))
                print(step, losses, crc(w), step.gradient, step.update)
                assert synk.check_replicas() == {}
            else:
                losses.append(serial([X, M], Y, **values))
            found += [losses, w.get_value()]
        np.testing.assert_allclose(found[0], found[2], rtol=1e-5)
        np.testing.assert_allclose(found[1], found[3], rtol=1e-4, atol=1e-6)
        try:
            step([X, M], Y, rate=np.float32(0.01))
        except TypeError as error:
            print(error)
        """,
        ranks=(1, 2),
    )


def test_other_graphs():
    """A loop, a condition, gradients that others read and change, several reductions, and arrays that change shape."""
    lines = run_both(
        """
        w, u, k = weights(300, 300), weights(300, 300), theano.shared(np.float32(1), "k")
        def cell(row, before):
            return T.tanh(T.dot(row, w) + T.dot(before, u))
        states, _ = theano.scan(cell, sequences=x.reshape((x.shape[0] // 4, 4, 300)).dimshuffle(1, 0, 2),
                                outputs_info=T.zeros((x.shape[0] // 4, 300), dtype="float32"))
        loss = T.sqr(states[-1]).mean()
        dw, du = T.grad(loss, [w, u])
        aw, au = synk.averaged(dw), synk.averaged(du)
        norm = T.sqrt(T.sqr(aw).sum() + T.sqr(au).sum())
        clipped = synk.averaged(du / norm)  # depends on another reduction
        chosen = ifelse(T.gt(k, 0), synk.averaged(dw * 2), synk.averaged(dw * 3 + du))
        spread = synk.averaged(T.inc_subtensor(dw[:5], 1))  # changes a copy of a gradient
        updates = [(w, w - aw - np.float32(0.01) * chosen), (u, u - au - clipped), (k, -k)]
        f = synk.function([x], [(loss, "avg"), (dw.sum(), "sum"), (spread, None)], updates=updates)
        for _ in range(5):
            out = f(X)
            print(float(out[0]), float(out[1]), float(out[2].sum()), crc(w, u))
        print("early", events.count("finish"))

        v = weights(400, 300)
        sums = [synk.summed(T.dot(v, x.T).sum(axis=1)[:, None] * v), synk.summed(2 * v)]
        g = synk.function([x], [(one, None) for one in sums])
        for rows in (400, 400, 500, 500, 90, 90, 400):
            v.set_value(np.ones((rows, 300), "float32"))
            synk.broadcast(v)
            print([float(one.sum()) for one in g(X)])
        """,
        ranks=(2, 1),
    )
    assert lines[5] == "early 8"  # two in each call but the first


def test_collectives_between_the_begin_and_the_end():
    """A loop whose steps gather and reduce runs when some operands exist; other ops, dtypes and empty arrays."""
    lines = run_both(
        """
        w, u, e = weights(300, 300), weights(400, 300), weights(0, 7)
        def cell(row):
            return synk.gathered(row[None, :]).sum(axis=0) + synk.averaged(row)
        rows, _ = theano.scan(cell, sequences=x)
        count = theano.shared(np.arange(90_000).reshape(300, 300))
        means = [synk.averaged(w * x.sum()), synk.averaged(T.dot(T.dot(u, w), w) * rows.sum()), synk.averaged(e)]
        others = [synk.summed(count * 2), synk.averaged(T.dot(count, count) + T.cast(rows.sum(), "int64"))]
        f = synk.function([x], [(one, None) for one in [*means, *others]])
        g = synk.function([x], [(synk.summed(T.dot(x.T, x)), None), (synk.summed(T.dot(T.tanh(x.T), x)), None)])
        for i in range(6):
            print(*[zlib.crc32(one) for one in f(X)])
            print(*[zlib.crc32(one) for one in g(X, num_slices=1 + i % 3)])
        print("early", events.count("finish"))
        """,
        ranks=(1, 1),
    )
    assert int(lines[-1].split()[1]) >= 5


def test_collectives_of_operands_between_the_begin_and_the_end():
    """A collective of an operand, or of an array like it, is not taken for the reduction that is under way."""
    lines = run_both(
        """
        w, v, k = weights(300, 300), weights(300, 300), theano.shared(np.float32(1), "k")
        g, total = T.dot(v, w), synk.summed(x.sum())
        part = g[: T.cast(T.minimum(T.sqr(total) + 300, 300), "int64")]  # all of it, in the same memory
        branch = ifelse(T.gt(k, 0), T.cast(synk.summed(part).sum(), "float32"), k)
        between = [synk.summed(x.sum()), synk.gathered(part).sum(), branch, synk.summed(T.sqr(synk.summed(g)).sum())]
        functions = []
        for one in between:
            for first in (w, g):
                means = [synk.averaged(first), synk.averaged(T.dot(g * T.cast(one, "float32"), w))]
                outputs = [(each, None) for each in [*means, synk.averaged(T.tanh(T.dot(x.T, x))), synk.gathered(x)]]
                functions.append(synk.function([x], outputs, updates=[(k, -k)], on_unused_input="ignore"))
        means = [synk.averaged(one) for one in (g, T.dot(g, w))]  # none of them needs a collective, nor does the gather
        functions.append(synk.function([x], [(one, None) for one in [*means, synk.gathered(x)]]))
        for f in functions:
            del events[:]
            for _ in range(5):
                print(*[zlib.crc32(np.ascontiguousarray(one)) for one in f(X)])
            print("early", events.count("finish"))
        """,
        ranks=(2, 1),
    )
    counts = [int(line.split()[1]) for line in lines if line.startswith("early")]
    assert min(counts) >= 3 and counts[-1] == 4  # in each call but the first


def test_small_arrays_are_not_rounded_for_the_wire():
    """With a wire dtype, early reductions round what others round, so that all calls have the same results."""
    lines = run(
        "EVENTS = False",
        NET,
        """
        bias = theano.shared(draw.rand(400).astype("float32"), "bias")
        means = [synk.averaged(g) for g in (*gradients, T.tanh(x.sum()) * T.dot(x[:1], x.T).sum() * bias)]
        f = synk.function([x], [(one, None) for one in means])
        for _ in range(3):
            print(*[zlib.crc32(one) for one in f(X)])
        print(events.count("finish"))
        """,
        ranks=(2, 1),
        WIRE_DTYPE="bfloat16",
    )
    assert len(set(lines[-4:-1])) == 1 and lines[-1] == "2"


def test_an_operand_that_changes_its_shape():
    """Early pieces are given up where a later operand has another shape than before, on all ranks."""
    lines = run_both(
        """
        v, w = weights(400, 300), weights(500, 300)
        changing = T.dot(T.dot(w, w.T), w) * x.sum()
        f = synk.function([x], [(synk.summed(2 * v), None), (synk.summed(changing), None)])
        for rows in (500, 500, 500, 700, 700, 500, 90, 90):
            w.set_value(np.ones((rows, 300), "float32"))
            synk.broadcast(w)
            del events[:]
            print([float(one.sum()) for one in f(X)])
            print("early", events)
        """,
        ranks=(2, 1),
    )
    assert sum("give up" in line for line in lines) >= 2


def test_pieces_are_exchanged_while_a_rank_computes():
    """A thread completes the pieces that have begun, while the graph computes the last operand."""
    lines = run(
        FAULTY,
        """
        from fault_ops import SLEEP
        seen, add = [], Transport.add

        def look(self, early, array):
            if len(early.arrays) == 2:
                seen.append({piece.is_complete for piece in early.between._under_way})
            return add(self, early, array)

        Transport.add = look
        for rank in range(n):
            synk.set_value(rank, fault[0], SLEEP)
        f(X)
        print(seen)
        """,
        ranks=(1, 1),
    )
    assert lines[-1] == "[{True}]"


def test_an_mpi_for_one_thread():
    """If the program has initialized MPI for calls from one thread, no other thread advances the exchange."""
    initialized = """
        import logging, mpi4py
        logging.basicConfig(level=logging.INFO)
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        MPI.Init_thread(MPI.THREAD_FUNNELED)
    """
    steps = """
        updates = [(w, w - np.float32(0.1) * g) for w, g in zip(layers, gradients)]
        step = synk.function([x], loss, updates=updates, exact=True, plan="rows")
        for _ in range(4):
            print(float(step(X)), crc(*layers))
        print(events.count("finish"))
    """
    program = [PRELUDE, "EVENTS = False", NET, steps]
    code, out, err = run_processes(initialized, *program, RANKS="2 1")
    assert (code, out) == (0, output_of(*program, RANKS="2 1")), err
    assert out.splitlines()[-1] == "3"
    assert err.count("MPI allows calls from one thread only") == 2  # the leaders


def test_profiles_and_traces():
    lines = run(
        FAULTY,
        """
        import json, tempfile
        from fault_ops import SLEEP
        for rank in range(n):
            synk.set_value(rank, fault[0], SLEEP)
        with synk.profile() as times:
            f(X)
        print(sorted(times.hidden), sorted(times.exposed), all(0 < one < 0.5 for one in times.hidden.values()))
        print(*[line for line in str(times).splitlines() if "Exchange" in line], sep="\\n")
        with tempfile.TemporaryDirectory() as folder:
            with synk.trace(folder + "/trace.json"):
                f(X)
            found = json.load(open(folder + "/trace.json"))["traceEvents"]
        exchanges = [(one["pid"], one["ph"]) for one in found if one.get("cat") == "exchange"]
        print(sorted(set(exchanges)), len(exchanges))
        """,
        ranks=(2, 1),
    )
    assert lines[-4] == "[0, 2] [0, 2] True"
    assert [line.split()[:2] for line in lines[-3:-1]] == [["Exchange,", "Hidden"], ["Exchange,", "Exposed"]]
    assert lines[-1] == "[(0, 'b'), (0, 'e'), (2, 'b'), (2, 'e')] 12"
