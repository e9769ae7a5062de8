"""Programs of tests on several nodes whose reductions begin before all operands exist."""

from mpi_jobs import HELPERS, output_of

#: The start of each program.
PRELUDE = f"""
    import os, signal, sys, threading, time, zlib
    import numpy as np
    sys.path.insert(0, {str(HELPERS)!r})
    from backend import T, ifelse, theano
    from fault_ops import Event, events
    import synkhronos as synk
    import synkhronos._session.lifecycle as lifecycle
    from synkhronos._collectives.hierarchical import HierarchicalTransport as Transport

    sizes = [int(size) for size in os.environ["RANKS"].split()]
    own, find_devices = sizes[int(os.environ["PMI_RANK"])], lifecycle.find_free_devices
    lifecycle.find_free_devices = lambda n_parallel, *others: find_devices(own, *others)
    if "LATE" in os.environ:
        Transport.divide = lambda self, kinds, reductions, order: None

    def record(name, describe):
        method = getattr(Transport, name)

        def call(self, early, *arguments):
            events.append(describe(early, *arguments))
            return method(self, early, *arguments)

        setattr(Transport, name, call)

    record("add", lambda early, array: array.shape)
    record("finish", lambda early, outs: "give up" if outs is None else "finish")

    restart, wire_dtype = "RESTART" in os.environ, os.environ.get("WIRE_DTYPE")
    n = synk.fork(use_gpu=False, timeout=60, restart_workers=restart, wire_dtype=wire_dtype)
    draw = np.random.RandomState(0)

    def weights(*shape):
        return theano.shared((draw.rand(*shape) - 0.5).astype("float32"))

    def by_axes(node):
        shards = [([synk.Shard(axis)], [synk.Shard(axis)]) for axis in range(node.inputs[0].ndim)]
        return [*shards, ([synk.Partial("sum")], [synk.Partial("sum")])]

    def crc(*variables):
        return [zlib.crc32(np.ascontiguousarray(var.get_value())) for var in variables]

    x = T.matrix("x", dtype="float32")
    X = draw.rand(8 * n, 300).astype("float32")
"""

#: A network of three layers. Operations in its backward pass record when they are executed.
NET = """
    layers = [weights(300, 400), weights(400, 500), weights(500, 7)]
    h = x
    for i, w in enumerate(layers):
        h = T.tanh(T.dot(Event(i)(h) if EVENTS else h, w))
    loss = T.sqr(h).mean()
    gradients = T.grad(loss, layers)
"""


def run(*sources, ranks=(1, 1), **environment):
    """Run a program with these numbers of ranks on the nodes, and return the lines that it printed."""
    environment |= {"RANKS": " ".join(map(str, ranks))}
    return output_of(PRELUDE, *sources, n=len(ranks), **environment).splitlines()


def run_both(*sources, ranks):
    """Run a program, assert that it prints the same without early reductions, and return the lines."""
    lines, late = run(*sources, ranks=ranks), run(*sources, ranks=ranks, LATE="1")
    early, late = ([line for line in some if not line.startswith("early")] for some in (lines, late))
    assert early == late
    return lines


FAULTY = """
    from fault_ops import Fault, NOTHING, RAISE, KILL, SHRINK
    fault = [theano.shared(np.int64(NOTHING), "fault%d" % i) for i in range(4)]
    layers = [weights(300, 400), weights(400, 500), weights(500, 7)]
    late = [Fault()(g, one) for g, one in zip(T.grad(T.sqr(T.tanh(T.dot(T.tanh(T.dot(T.tanh(T.dot(x, layers[0])),
            layers[1])), layers[2]))).mean(), layers), fault)]
    means = [synk.averaged(g) for g in late]
    means[0] = Fault()(means[0], fault[3])
    sums = [theano.shared(np.zeros(w.get_value().shape, "float32")) for w in layers]
    f = synk.function([x], [(one, None) for one in means], updates=[(s, s + one) for s, one in zip(sums, means)])
    expected = f(X)

    def totals():
        return [total.get_value() for total in sums]

    def works():
        before = totals()
        for _ in range(2):
            assert all((a == b).all() for a, b in zip(f(X), expected))
        for total, old, one in zip(totals(), before, expected):
            assert np.allclose(total, old + 2 * one, rtol=1e-5)
        assert synk.check_replicas() == {}
        assert events[-1] == "finish"

    works()
"""
