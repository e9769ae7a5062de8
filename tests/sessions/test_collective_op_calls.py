"""Collectives in the graph of a function: the optimizer, calls, checks, traces and profiles."""

import functools
import json
import logging
import pickle

import numpy as np
import pytest
from backend import MRG_RandomStreams, T, ifelse, theano, theano_only
from comparison import close, shares
from multinode_sessions import one_machine

import synkhronos as synk
from synkhronos._graph.ops.collective_op import Collective

N = 11


def collectives_of(function):
    return [node.op for node in function.maker.fgraph.toposort() if isinstance(node.op, Collective)]


# -- the optimizer


def test_equal_collectives_are_merged_and_independent_ones_joined_in_place(two):
    x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    first, again, sums = synk.averaged(T.exp(x[0])), synk.averaged(T.exp(x[0])), synk.summed(T.exp(x).sum(axis=0))
    second = synk.reduced(T.tanh(x[1]) * first, "max")
    f = synk.function([x], [(first + again + sums, None), (second, None)], updates=[(w, synk.averaged(w))])
    one, other = collectives_of(f)
    assert sorted(one.ops) == ["avg", "avg", "sum"] and other.ops == ("max",)
    assert one.number < other.number and other.inplace == (0,)
    (inputs,) = [node.inputs for node in f.maker.fgraph.toposort() if node.op == one]
    assert [inputs[i].owner is None for i in range(3)].count(True) == 1  # w itself, which must keep its value
    assert all(inputs[i].owner is not None for i in one.inplace) and len(one.inplace) >= 1
    data = np.random.RandomState(0).randn(4, 3)
    total, largest = f(data)
    halves = data[:2], data[2:]
    mean = np.mean([np.exp(half[0]) for half in halves], axis=0)
    np.testing.assert_allclose(total, 2 * mean + np.exp(data).sum(axis=0))
    np.testing.assert_allclose(largest, np.max([np.tanh(half[1]) * mean for half in halves], axis=0))


def test_inputs_with_other_uses_are_not_overwritten(session):
    x = T.dmatrix("x")
    value = T.exp(x[0])
    flat = value.reshape((3, 1))
    mean, total = synk.averaged(value), synk.summed(flat)
    outputs = [value, flat.sum(), mean, total, synk.summed(x[:1]), synk.reduced(value, "max")]
    f = synk.function([x], [(output, None) for output in outputs])
    data = np.random.RandomState(0).randn(N, 3)
    firsts = np.exp([data[start] for start, _ in shares(N, session)])
    counts = [stop - start for start, stop in shares(N, session)]
    for _ in range(2):
        own, own_sum, average, sums, of_input, largest = f(data)
        np.testing.assert_allclose(own, firsts[0])
        np.testing.assert_allclose(own_sum, firsts[0].sum())
        np.testing.assert_allclose(average, np.average(firsts, axis=0, weights=counts))
        np.testing.assert_allclose(sums[:, 0], firsts.sum(axis=0))
        np.testing.assert_allclose(largest, firsts.max(axis=0))
        np.testing.assert_allclose(of_input[0], np.log(firsts).sum(axis=0))


MODES = ["FAST_COMPILE", "FAST_RUN", "DebugMode", "py"]


@pytest.mark.parametrize("mode", [*MODES[:3], theano.Mode("py", None)], ids=MODES)
def test_modes(two, mode):
    x = T.dmatrix("x")
    mean = synk.averaged(x.mean(axis=0))
    f = synk.function([x], [(synk.summed(T.sqr(x - mean).sum()), None), (synk.gathered(x[:, 0]), None)], mode=mode)
    data = np.random.RandomState(0).randn(N, 3)
    total, column = f(data)
    np.testing.assert_allclose(total, np.square(data - data.mean(axis=0)).sum())
    np.testing.assert_array_equal(column, data[:, 0])


# -- outside of a call of all ranks


def test_outside_of_calls_collectives_are_the_identity(two):
    x = T.fmatrix("x")
    y = [synk.averaged(x), synk.summed(x), synk.reduced(x, "max"), synk.gathered(x), synk.gathered(x.sum())]
    data = np.random.RandomState(0).randn(4, 3).astype("float32")
    plain = theano.function([x], y)
    f = synk.function([x], [(one, None) for one in y])
    for values in (plain(data), f.as_theano(data), [one.eval({x: data}) for one in y]):
        np.testing.assert_equal(values[:4], [data] * 4)
        np.testing.assert_allclose(values[4], [data.sum()], rtol=1e-5)
    count = synk.averaged(T.constant(np.array([1, 2], "int8")))
    assert count.dtype == "float64" and synk.summed(T.constant(np.array([1, 2], "int8"))).dtype == "int64"
    assert not any(node.op.do_constant_folding(node) for node in [count.owner])
    total = synk.summed(T.constant(2.0))  # the optimizer must not compute it in one process
    assert collectives_of(synk.function([], (total, None)))
    assert synk.function([], (total, None))() == 4
    assert total.eval() == 2


@theano_only("compute_test_value")
def test_outside_of_calls_with_test_values(no_session):
    with theano.change_flags(compute_test_value="raise"):
        x = T.dmatrix("x")
        x.tag.test_value = np.arange(6.0).reshape(2, 3)
        np.testing.assert_array_equal(synk.summed(x).tag.test_value, x.tag.test_value)
        np.testing.assert_array_equal(T.grad(synk.averaged(T.sqr(x).sum()), x).tag.test_value, 2 * x.tag.test_value)


def test_outside_of_calls_pickled_and_without_a_session(no_session):
    x = T.dmatrix("x")
    again = pickle.loads(pickle.dumps(theano.function([x], synk.averaged(x) * 2)))
    np.testing.assert_array_equal(again(np.ones((1, 2))), [[2, 2]])


@pytest.mark.parametrize("make", [synk.averaged, synk.summed, synk.gathered, synk.reduced])
def test_inputs_that_are_not_tensors_are_refused(make):
    with pytest.raises((TypeError, ValueError, NotImplementedError, theano.tensor.AsTensorError)):
        make("text")
    with pytest.raises(ValueError, match="got op 'mean'"):
        synk.reduced(T.scalar(), "mean")


# -- calls


def test_outputs_that_are_equal_on_all_ranks(session):
    x = T.dmatrix("x")
    rows, mean = synk.gathered(x), synk.averaged(x.mean())
    f = synk.function([x], [mean, rows, (mean, None), (rows * mean, "avg"), (rows, "max")])
    data = np.random.RandomState(0).randn(2 * session, 3)
    for _ in range(2):
        got = f(data, check_against_theano=True)
        np.testing.assert_allclose(got[0], data.mean())
        np.testing.assert_allclose(got[1], data)  # each rank has all rows, so that an average mixes none
    for op in ("sum", "prod"):
        with pytest.raises(ValueError, match=f'output 1 of .* is equal on all ranks.*"{op}" would count'):
            synk.function([x], [x.mean(), (mean, op)])
    mixed = synk.function([x], x - mean)
    if session > 1:
        with pytest.raises(ValueError, match="a row for each data point"):
            mixed(data)


def test_the_check_against_theano_finds_deviations(two):
    x = T.dmatrix("x")
    right = synk.function([x], [T.sqrt(synk.averaged(T.sqr(x).mean())), (x - synk.averaged(x.mean(axis=0)), "gather")])
    data = np.random.RandomState(0).randn(N, 3)
    right(data, check_against_theano=True)
    wrong = synk.function([x], synk.averaged(x.std()))
    with pytest.raises(ValueError, match=r"differs from what .* gives"):
        wrong(data, check_against_theano=True)


@pytest.mark.parametrize("master_rank", [0, pytest.param(2, marks=one_machine("the controller is on the first node"))])
def test_ranks_without_data_points(synchronize, master_rank):
    synchronize(3, master_rank=master_rank)
    x, scale = T.dmatrix("x"), T.dscalar("scale")
    same, own = theano.shared(np.zeros(3), "same"), theano.shared(np.zeros(3), "own")
    total = synk.summed(x.sum(axis=0)) * scale
    outputs = [(total, None), (x.sum(), None), (x.sum(), "sum"), (synk.gathered(x), None)]
    outputs += [(x[:, 0] - total[0], "gather")]
    f = synk.function([x], outputs, bcast_inputs=[scale], updates=[(same, same + total), (own, own + x.sum(axis=0))])
    data = np.random.RandomState(0).randn(2, 3)
    for step in (1, 2):
        sums, local, all_sums, rows, column = f(data, 2.0)
        assert f.counts == (1, 1, 0)
        np.testing.assert_allclose(sums, 2 * data.sum(axis=0))
        assert (local is None) == (master_rank == 2)
        np.testing.assert_allclose(all_sums, data.sum())
        np.testing.assert_array_equal(rows, data)
        np.testing.assert_allclose(column, data[:, 0] - sums[0])
        np.testing.assert_allclose(synk.gather(same), [step * sums] * 3)
        np.testing.assert_allclose(synk.gather(own), [step * data[0], step * data[1], np.zeros(3)])
    (sums, *_, rows, column) = f(np.zeros((0, 3)), 2.0)  # all ranks compute on empty arrays
    assert not sums.any() and rows.shape == (0, 3) and column.shape == (0,)
    synk.broadcast([same, own])


def test_rows_of_shared_variables(three):
    data = theano.shared(np.arange(12.0).reshape(6, 2), "data")
    w = theano.shared(np.zeros(2), "w")
    mean = synk.averaged(data.mean(axis=0))
    f = synk.function([], (mean, None), updates=[(w, mean)], sliceable_shareds=[data])
    largest = synk.function([], (synk.reduced(data.max(axis=0), "max"), None), sliceable_shareds=[data])
    synk.scatter(data, np.arange(12.0).reshape(6, 2))
    np.testing.assert_allclose(f(), [5, 6])
    np.testing.assert_allclose(f(batch_s=[[0], [0, 1], [0]]), np.mean([[0, 1], [4, 5], [6, 7], [8, 9]], axis=0))
    np.testing.assert_allclose(f(batch_s=slice(0, 1), num_slices=2), np.mean([[0, 1], [4, 5], [8, 9]], axis=0))
    for none in ([], slice(0, 0), np.zeros(2, bool)):  # a rank that selects none of its rows
        np.testing.assert_allclose(f(batch_s=[[0], none, [0]]), np.mean([[0, 1], [8, 9]], axis=0))
        np.testing.assert_allclose(largest(batch_s=[[0, 1], [0], none]), [4, 5])
        np.testing.assert_allclose(largest(batch_s=[slice(0, 2), none, slice(0, 0)]), [2, 3])
    assert synk.check_replicas([w]) == {}


def test_in_a_loop(session):
    x, w = T.dmatrix("x"), theano.shared(np.array([0.3, -0.2]), "w")
    states, _ = theano.scan(
        lambda state: T.tanh(w * synk.averaged((x * state).mean(axis=0))), None, T.ones(2), n_steps=3
    )
    cost = T.sqr(states).sum()
    f = synk.function([x], [(cost, None), (synk.averaged(T.grad(cost, w)), None)])
    data = np.random.RandomState(0).randn(N, 2) + 1
    close(f(data), f.as_theano(data), rtol=1e-9, atol=0)
    if session > 3:
        with pytest.raises(ValueError, match=f"3 data points for {session} ranks; a function with collectives in a l"):
            f(data[:3])


def test_dropout_and_sequences(two):
    x, w = T.dmatrix("x"), theano.shared(np.zeros(3), "w")
    streams = MRG_RandomStreams(3)
    noisy = x * streams.binomial(x.shape, p=0.5, dtype="float64")
    f = synk.function(
        [x], [(synk.averaged(noisy.mean()), None), noisy.mean()], updates=[(w, synk.summed(noisy.sum(0)))]
    )
    inside, outside = f(np.ones((N, 3)))
    np.testing.assert_allclose(inside, outside)
    assert synk.check_replicas([w]) == {}


# -- traces, logs and profiles


def test_traces_and_logs_name_collectives(two, tmp_path, caplog):
    x = T.fmatrix("x")
    f = synk.function([x], (synk.averaged(x.mean(axis=0)) + synk.reduced(x.max(axis=0), "max"), None))
    data = np.ones((4, 5000), "float32")
    f(data)
    with synk.trace(tmp_path / "trace.json"), caplog.at_level(logging.DEBUG, "synkhronos"):
        f(data)
    assert "in a function, avg, max of 2 arrays, 40000 bytes" in caplog.text
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    inside = [event for event in events if event["name"] == "avg, max of 2 arrays, 40000 bytes"]
    assert sorted(event["pid"] for event in inside) == [0, 1] and all(event["dur"] > 0 for event in inside)
    with synk.profile() as profile:
        f(data)
    assert all(seconds["collectives"] > 0 and seconds["function"] > 0 for seconds in profile.seconds.values())
    for rank, seconds in profile.seconds.items():
        assert sum(seconds.values()) == pytest.approx(profile.elapsed[rank])


# -- gradients of collectives that need no collective themselves


@functools.cache
def of_sums():
    x, w = T.dmatrix("x"), theano.shared(np.array([0.5, -1.0, 2.0]), "w")
    total = theano.shared(np.zeros(3), "total")
    grad = T.grad(synk.summed((x * w).sum()), w)
    return total, synk.function([x], [grad, (grad, None)], updates=[(total, grad)], mode="FAST_COMPILE")


@pytest.mark.parametrize("n, num_slices", [(11, 1), (2, 1), (11, 2)])
def test_a_gradient_of_a_sum_without_a_collective(session, n, num_slices):
    data = np.random.RandomState(n).randn(n, 3)
    total, function = of_sums()
    synk.distribute()
    synk.broadcast(total, np.zeros(3))
    grad, own = function(data, num_slices=num_slices)
    np.testing.assert_allclose(grad, data.sum(axis=0))
    synk.all_reduce(total, weights=function.counts)
    np.testing.assert_allclose(total.get_value(), data.sum(axis=0))
    first = data[: function.counts[0]].sum(axis=0) * n / function.counts[0]
    np.testing.assert_allclose(own, first)


def test_slices_with_linkers_in_python(session):
    """Values of data points are combined over slices, and values that need no data points are computed once."""
    x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    penalty = synk.summed((w**2).sum())
    costs = [penalty, synk.averaged(T.grad(penalty, w)), synk.gathered(w), synk.averaged(w), synk.summed(x.sum(axis=0))]
    function = synk.function([x], [*((cost, None) for cost in costs), x.mean()], mode="FAST_COMPILE")
    data = np.random.RandomState(0).randn(6, 3)
    for num_slices in (1, 2, 3):
        *found, total, mean = function(data, num_slices=num_slices)
        np.testing.assert_equal(found, [3 * session, np.full(3, 2 * session), np.ones(3 * session), np.ones(3)])
        close([total, mean], [data.sum(axis=0), data.mean()])


# -- branches


@functools.cache
def of_branches():
    x, flag = T.dmatrix("x"), theano.shared(np.int8(0), "flag")
    inverse = synk.averaged(T.nlinalg.matrix_inverse(x[:1].repeat(3, axis=0)).sum())  # singular
    chosen = ifelse(flag, inverse, synk.summed(x.sum()))
    return flag, synk.function([x], [(chosen, None), (synk.averaged(x.mean()), None)])


def test_a_branch_that_is_not_chosen_is_not_computed(session):
    flag, function = of_branches()
    synk.distribute()
    synk.broadcast(flag, 0)
    data = np.random.RandomState(0).randn(7, 3)
    np.testing.assert_allclose(function(data), [data.sum(), data.mean()])
    np.testing.assert_allclose(function(data[:1]), [data[0].sum(), data[0].mean()])
    synk.broadcast(flag, 1)
    with pytest.raises((synk.WorkerError, np.linalg.LinAlgError), match="Singular"):
        function(data)


@pytest.mark.parametrize("inline", [False, True])
def test_an_op_from_a_graph_needs_a_data_point_on_each_rank(three, inline):
    x, row = T.dmatrix("x"), T.dvector("row")
    op = theano.OpFromGraph([row], [synk.averaged(row) * 2], inline=inline)
    function = synk.function([x], [(op(x.mean(axis=0)), None)], mode="FAST_COMPILE")
    data = np.random.RandomState(0).randn(7, 3)
    np.testing.assert_allclose(function(data)[0], 2 * data.mean(axis=0))
    with pytest.raises(ValueError, match="in an OpFromGraph, needs at least one on each rank"):
        function(data[:2])
