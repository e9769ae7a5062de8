"""Functions and variables on GPUs; `test_gpu.py` runs these tests in a new process, which can take GPUs once.

The environment variable SYNKHRONOS_DEVICES names the devices. With NCCL_STAND_IN=1, `fake_nccl` replaces NCCL.
"""

import os

import numpy as np
import pytest
import theano
import theano.tensor as T
from fault_ops import NOTHING, RAISE, Fault
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk
from synkhronos._graph import Variant
from synkhronos._rank import call as _slices
from synkhronos.extensions import train, updates

DEVICES = os.environ["SYNKHRONOS_DEVICES"].split(",")
STAND_IN = os.environ.get("NCCL_STAND_IN") == "1"
OPENCL = DEVICES[0].startswith("opencl")


@pytest.fixture(scope="module", autouse=True)
def n_ranks():
    if STAND_IN:
        import fake_nccl

        fake_nccl.install()
    n_ranks = synk.fork()
    yield n_ranks
    synk.close()


@pytest.fixture(scope="module")
def device_array():
    from pygpu.gpuarray import GpuArray

    return GpuArray


def rows(n, width=4, dtype="float32", seed=0):
    return np.random.RandomState(seed).rand(n, width).astype(dtype)


def close(got, wanted, rtol=2e-5):
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=rtol, atol=1e-6)


@pytest.fixture(scope="module")
def every_op(n_ranks):
    x, w = T.fmatrix("x"), theano.shared(rows(4, 3, seed=1), "w")
    y = T.dot(x, w)
    reduced = {"avg": y.mean(), "sum": y.sum(), "prod": y.prod(axis=1).sum(), "max": y.max(), "min": y.min()}
    ops = list(reduced)
    outputs = [(reduced[op], op) for op in ops] + [(reduced[op], f"c_{op}") for op in ops]
    outputs += [(y, "gather"), (y.sum(), None), y.mean().transfer(None), T.cast(y.max(), "int64"), (x.sum(0), "sum")]
    return ops, w, synk.function([x], outputs)


class TestFunctions:
    @pytest.mark.parametrize("num_slices", [1, 2, 3])
    @pytest.mark.parametrize("n", [15, 16, 7])
    def test_every_op(self, every_op, n_ranks, device_array, n, num_slices):
        ops, w, f = every_op
        x = rows(n)
        got = f(x, num_slices=num_slices)
        y = x @ w.get_value()
        parts = np.array_split(y, n_ranks)
        pieces = [piece for part in parts for piece in np.array_split(part, num_slices) if len(piece)]
        wanted = {
            "avg": y.mean(),
            "sum": y.sum(),
            "max": y.max(),
            "min": y.min(),
            "prod": np.prod([piece.prod(axis=1).sum() for piece in pieces]),
        }
        for op, value, on_host in zip(ops, got, got[len(ops) :]):
            close(value, wanted[op], rtol=1e-4)
            close(on_host, wanted[op], rtol=1e-4)
        gathered, own, on_device, whole, sums = got[2 * len(ops) :]
        close(gathered, y)
        slices = [piece for piece in np.array_split(parts[0], num_slices) if len(piece)]
        close(own, np.average([piece.sum() for piece in slices], weights=[len(piece) for piece in slices]), rtol=1e-4)
        assert isinstance(on_device, device_array)
        close(on_device, y.mean())
        assert whole.dtype == np.float64  # an average of integers
        close(sums, x.sum(0))
        assert all(type(value) is np.ndarray for value in (*got[: 2 * len(ops)], gathered, own, whole, sums))

    def test_some_outputs(self, every_op):
        ops, w, f = every_op
        x = rows(9)
        got = f(x, output_subset=[ops.index("max"), 2 * len(ops)])
        close(got[0], (x @ w.get_value()).max())
        close(got[1], x @ w.get_value())

    def test_fewer_points_than_ranks(self, every_op):
        ops, w, f = every_op
        x = rows(1)
        close(f(x)[ops.index("avg")], (x @ w.get_value()).mean())

    def test_plain_theano(self, every_op, device_array):
        _, w, f = every_op
        x = rows(6)
        got = f.as_theano(x)
        close(got[0], (x @ w.get_value()).mean())
        assert sum(isinstance(value, device_array) for value in got) == 1

    def test_shapes_that_cannot_be_reduced(self, n_ranks):
        x = T.fmatrix("x")
        f = synk.function([x], (x * 2, "sum"))
        if n_ranks > 1:
            with pytest.raises(ValueError, match="gather"):
                f(rows(5))
        close(f(rows(n_ranks)), 2 * rows(n_ranks).sum(0, keepdims=True))

    def test_an_error_on_a_rank(self, n_ranks):
        x, fault = T.fmatrix("x"), theano.shared(np.int64(NOTHING), "fault")
        f = synk.function([x], Fault()(x, fault).sum())
        f(rows(4))
        synk.set_value(n_ranks - 1, fault, RAISE)
        with pytest.raises(synk.WorkerError, match=f"rank {n_ranks - 1} .*{DEVICES[-1]}.*ZeroDivisionError"):
            f(rows(4))
        synk.set_value(n_ranks - 1, fault, NOTHING)
        f(rows(4))


class TestValuesStay:
    @pytest.mark.parametrize("num_slices", [1, 3])
    def test_updates_never_visit_the_host(self, n_ranks, monkeypatch, num_slices):
        x, w = T.fmatrix("x"), theano.shared(rows(4, 3, seed=2), "w")
        loss = T.sqr(T.dot(x, w)).mean()
        f = synk.function([x], loss, updates=[(w, w - np.float32(0.1) * T.grad(loss, w))])
        data, before = rows(12), w.get_value()
        for accumulate in (False, True):
            graph = f._graph.compile(Variant(accumulate=accumulate, device=True)).maker.fgraph
            assert "HostFromGpu" not in {type(node.op).__name__ for node in graph.toposort()}
        monkeypatch.setattr(_slices, "Accumulator", None)  # only for arrays in host memory
        got = f(data, num_slices=num_slices)
        close(got, np.square(data @ before).mean())
        for rank, part in enumerate(np.array_split(data, n_ranks)):
            gradient = 2 * part.T @ (part @ before) / (len(part) * 3)
            close(synk.get_value(rank, w), before - 0.1 * gradient, rtol=1e-4)

    def test_variables_are_on_the_device(self, device_array, n_ranks):
        w = theano.shared(rows(3), "w")
        scalar, host = theano.shared(np.float32(2), "scalar"), theano.shared(rows(3), "host", target="cpu")
        f = synk.function([], [((w * scalar + host).sum(), "sum")])
        close(f()[0], n_ranks * 3 * rows(3).sum())
        assert isinstance(w.container.storage[0], device_array)
        assert isinstance(host.container.storage[0], np.ndarray)
        synk.all_reduce([w, scalar, host], "sum")
        close(synk.get_value(n_ranks - 1, w), n_ranks * rows(3))
        close(synk.gather(scalar), [2 * n_ranks] * n_ranks)
        close(host.get_value(), n_ranks * rows(3))


class TestVariables:
    def test_odd_layouts(self, n_ranks):
        w = theano.shared(rows(3, 5), "w")
        flip = synk.function([], updates=[(w, w.T)])
        for _ in range(2):
            flip()
            value = w.get_value()
            synk.all_reduce(w, "avg")
            close(synk.get_value(n_ranks - 1, w), value)
            synk.broadcast(w)
            close(synk.gather(w, 0), np.concatenate([value] * n_ranks))
            close(synk.reduce(w, "sum", in_place=False), n_ranks * value)

    def test_new_shapes(self, n_ranks):
        w = theano.shared(rows(3), "w")
        f = synk.function([], (w.sum(), "sum"))
        synk.scatter(w, rows(11))
        assert synk.get_lengths(w) == [len(part) for part in np.array_split(rows(11), n_ranks)]
        close(f(), rows(11).sum())
        synk.broadcast(w)
        assert len(set(synk.get_shapes(w))) == 1
        synk.scatter(w, rows(4 * n_ranks + 1))
        synk.all_gather(w)
        close(synk.get_value(n_ranks - 1, w), rows(4 * n_ranks + 1))
        if n_ranks > 1:
            synk.scatter(w, rows(n_ranks + 1))
            with pytest.raises(ValueError, match="w has the shapes"):
                synk.all_reduce(w)
            close(synk.gather(w, 0), rows(n_ranks + 1))

    def test_nothing_changes_if_any_shape_differs(self, n_ranks):
        w, counts = theano.shared(rows(3), "w"), theano.shared(np.arange(5, dtype="int32"), "counts")
        f = synk.function([], [(w.sum(), "sum"), (counts.sum(), "sum")])
        f()
        synk.set_value(0, w, rows(3, seed=9))
        synk.scatter(counts, np.arange(2 * n_ranks + 1, dtype="int32"))
        if n_ranks > 1:
            with pytest.raises(ValueError, match="counts has the shapes"):
                synk.all_reduce([w, counts])
        close(w.get_value(), rows(3, seed=9))
        assert synk.gather(counts, 0).tolist() == list(range(2 * n_ranks + 1))

    def test_sliceable_shared_variables(self, n_ranks):
        s, w = theano.shared(rows(3), "s"), theano.shared(np.ones(4, "float32"), "w")
        loss = T.dot(s, w).mean()
        f = synk.function([], loss, updates=[(w, w + s.mean(axis=0))], sliceable_shareds=[s])
        data = rows(9 * n_ranks, seed=3)
        synk.distribute()
        synk.scatter(s, data)
        for options, chosen in (
            ({}, slice(None)),
            ({"num_slices": 3}, slice(None)),
            ({"batch_s": slice(2, 7)}, slice(2, 7)),
            ({"batch_s": [8, 0, 3], "num_slices": 2}, [8, 0, 3]),
        ):
            synk.broadcast(w, np.ones(4, "float32"))
            parts = [part[chosen] for part in np.split(data, n_ranks)]
            close(f(**options), np.mean([part.sum(1).mean() for part in parts]))
            for rank, part in enumerate(parts):
                close(synk.get_value(rank, w), 1 + part.mean(0))


def test_ranks_draw_random_numbers_of_their_own(n_ranks):
    x = T.fmatrix("x")
    mask = MRG_RandomStreams(7).binomial((20,), p=0.5, dtype="float32")
    f = synk.function([x], [(mask, "gather"), (x.sum(), "sum")])
    first = f(rows(8))[0].reshape(n_ranks, 20)
    second = f(rows(8), num_slices=1)[0].reshape(n_ranks, 20)
    assert len({tuple(mask) for mask in (*first, *second)}) == 2 * n_ranks


@pytest.mark.parametrize("rule", ["sgd", "nesterov_momentum", "adam"])
def test_training_follows_the_serial_run(n_ranks, rule):
    def build(make, name):
        x, y = T.dmatrix("x"), T.dmatrix("y")
        params = [
            theano.shared(rows(6, 5, "float64", 4), f"v{name}"),
            theano.shared(rows(5, 2, "float64", 5), f"w{name}"),
        ]
        loss = T.sqr(T.dot(T.tanh(T.dot(x, params[0])), params[1]) - y).mean()
        return params, make(loss, params, x, y, getattr(updates, rule), learning_rate=0.05)

    data, target = rows(23, 6, "float64", 6), rows(23, 2, "float64", 7)
    ours, step = build(train.make_train_function, "n")
    serial, serial_step = build(train.make_train_function_theano, "1")
    x, y = synk.data(data), synk.data(target)
    for seed in range(6):
        batch = np.random.RandomState(seed).permutation(23)[: 23 - seed]
        close(step(x, y, batch=batch), serial_step(data[batch], target[batch]), rtol=1e-9)
    for one, other in zip(ours, serial):
        np.testing.assert_allclose(one.get_value(), other.get_value(), rtol=1e-8)
        np.testing.assert_array_equal(synk.get_value(n_ranks - 1, one), one.get_value())


# Operations that Theano 1.0.5 compiles for GPUs but cannot execute on OpenCL; docs/gpu.md lists them.
def cross_entropy():
    x, y = T.fmatrix("x"), T.lvector("y")
    return [x, y], T.nnet.categorical_crossentropy(T.nnet.softmax(x), y).mean(), (rows(6), np.arange(6) % 4)


def scan():
    x = T.fmatrix("x")
    steps, _ = theano.scan(lambda row, total: 0.5 * total + row, sequences=x, outputs_info=T.zeros_like(x[0]))
    return [x], steps[-1].sum(), (rows(6),)


def cumulative_sum():
    x = T.fmatrix("x")
    return [x], T.cumsum(x, axis=0).sum(), (rows(6),)


@pytest.mark.parametrize(
    ("build", "op"),
    [
        (cross_entropy, "GpuCrossentropySoftmaxArgmax1HotWithBias"),
        (scan, "Scan on the GPU"),
        (cumulative_sum, "GpuCumOp"),
    ],
)
def test_operations_that_opencl_does_not_support(n_ranks, build, op):
    inputs, output, values = build()
    if OPENCL:
        with pytest.raises(Exception, match=r"clBuildProgram|for CUDA arrays|'perform'"):
            theano.function(inputs, output)(*values)
        pytest.skip(f"Theano cannot do {op} on OpenCL")
    f = synk.function(inputs, (output, "gather"))
    np.testing.assert_allclose(f(*values).sum(), f.as_theano(*values) if n_ranks == 1 else f(*values).sum())


@pytest.mark.parametrize("n", [1, 15])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_collectives_inside(n_ranks, n, num_slices):
    x, w = T.fmatrix("x"), theano.shared(np.ones(3, "float32"), "w")  # w is on the GPU
    start = np.random.RandomState(1).rand(4, 3).astype("float32")
    v = theano.shared(start, "v")
    hidden = T.nnet.sigmoid(T.dot(x, v)) * w
    loss = T.sqr(hidden).mean() + T.sqr(w).sum()
    grads = [synk.averaged(grad) for grad in T.grad(loss, [v, w])]
    steps = [(var, var - grad) for var, grad in zip([v, w], grads)]
    outputs = [synk.averaged(loss), hidden.sum(axis=1), synk.reduced(hidden.max(), "max")]
    f = synk.function([x], [(outputs[0], None), (synk.gathered(outputs[1]), None), (outputs[2], None)], updates=steps)
    got = f(rows(n), num_slices=num_slices)
    after = [var.get_value() for var in (v, w)]
    assert synk.check_replicas([v, w]) == {}
    synk.broadcast([v, w], [start, np.ones(3, "float32")])
    for one, wanted in zip(got, f.as_theano(rows(n))):
        close(one, wanted)
    for var, value in zip((v, w), after):
        close(value, var.get_value())


def test_gpus_can_be_had_once():
    with pytest.raises(synk.SessionError, match="close"):
        synk.fork()
    if STAND_IN:
        import fake_nccl

        assert any(kind.startswith("reduce") for kind in fake_nccl.done)
