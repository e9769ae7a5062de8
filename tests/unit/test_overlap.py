"""Exchange between nodes while gradients are computed, and the link between them: formulas against hand-made values."""

from dataclasses import replace

import pytest
from backend import T, theano

from synkhronos import averaged
from synkhronos._api.step_measurements import _together
from synkhronos._backends import Mode, ops, timed_machine
from synkhronos._costs import Link, link_through
from synkhronos._costs.kernels import Operand, RowTimes
from synkhronos._costs.predict import Cluster, Workload, from_first, overlapped, predict_step
from synkhronos._graph.ops import times_of_operands

#: 0.01 s, and 1 ms for each row.
WORKLOAD = Workload((RowTimes((10.0, 100.0), (0.02, 0.11), 0.01),), n_bytes=1e6)
#: Bytes take 1 µs between nodes, a message 1 ms more.
CLUSTER = Cluster(Link(latency=0.001, bandwidth=1e6), Link(latency=0.0, bandwidth=1e8))


def test_overlap():
    at_4 = [(one.part, one.at(1)) for one in from_first(0.4)]
    assert at_4 == [(1.0, 0.4), (0.0, 1.0)]
    assert overlapped(10.0, 5.0, [(0.4, 1.0), (1.0, 0.0)]) == 10.0  # max(t, t_first + t_x): hidden
    assert overlapped(10.0, 9.0, [(0.4, 1.0), (1.0, 0.0)]) == 13.0
    assert overlapped(10.0, 1.0, [(1.0, 1.0)]) == overlapped(10.0, 1.0, []) == 11.0  # without overlap


def test_gradients_are_exchanged_one_after_the_other():
    # gradients after 4 and 8 of 10 s, updates in the last 2 s
    half = [(0.4, 0.5), (0.8, 0.5)]
    assert overlapped(10.0, 4.0, half) == 8 + 2 + 2  # the first is exchanged from 4 to 6, the second from 8 to 10
    assert overlapped(10.0, 12.0, half) == 4 + 12 + 2  # the link is never idle
    assert overlapped(10.0, 0.0, half) == 10
    # a quarter of the bytes is exchanged at another time: 1 s
    assert overlapped(10.0, 4.0, [(0.4, 0.5), (0.8, 0.25)]) == 8 + 1 + 2 + 1


def test_when_gradients_exist_depends_on_rows():
    one = Operand(0.5, (10.0, 30.0), (0.2, 0.6))
    assert [one.at(rows) for rows in (1, 10, 20, 30, 99)] == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])


def test_small_gradients_are_exchanged_in_one_piece():
    """Those of up to 256 KiB share a piece of up to 1.5 MiB, which begins when the last of them exists."""
    parts = [0.25, 0.5, 0.125, 0.125]
    given = [Operand(part, (1.0,), (k / 10,)) for k, part in enumerate(parts)]
    assert [(one.part, one.until) for one in _together(given, 4 << 18)] == [
        (0.25, (0.0,)),
        (0.5, (0.1,)),
        (0.25, (0.3,)),
    ]
    assert [(one.part, one.until) for one in _together(given, 1 << 18)] == [(1.0, (0.3,))]
    assert len(_together([Operand(1 / 16, (1.0,), (0.5,))] * 16, 4 << 20)) == 3


def test_a_gradient_that_is_ready_early_hides_exchange():
    work = replace(WORKLOAD, operands=from_first(0.5), n_bytes=1e4)
    step = predict_step(work, CLUSTER, 2, 1, 40)  # 30 ms, and 12 ms of exchange after 15 ms
    assert (step.seconds, step.exposed) == pytest.approx((0.03, 0.0))


def test_what_hides_no_exchange():
    """A command, and the exchange within nodes."""
    work = replace(WORKLOAD, operands=from_first(0.5), n_bytes=2e4)  # 22 ms between 2 nodes, 0.2 ms of 2 ranks
    step = predict_step(work, replace(CLUSTER, command=0.5), 2, 1, 40)
    assert (step.seconds, step.on_link) == pytest.approx((0.5 + 0.015 + 0.022, 0.007))
    step = predict_step(work, CLUSTER, 2, 2, 80)
    assert (step.seconds, step.exposed, step.on_link) == pytest.approx((0.0372, 0.0072, 0.007))


def test_latency_and_bandwidth_are_those_of_the_shortest_and_the_longest_message():
    sizes = [8, 1024, 2**20, 2**23]
    link = link_through(sizes, [1e-4 + size / 1e8 for size in sizes])
    assert (link.latency, link.bandwidth) == pytest.approx((1e-4, 1e8))
    assert link.deviation == pytest.approx(0, abs=1e-9)
    # 1 ms and 1 µs for each byte; a buffer holds the message between, which takes 3 ms in place of 5
    link = link_through([1000, 4000, 9000], [0.002, 0.003, 0.01])
    assert (link.latency, link.bandwidth, link.deviation) == pytest.approx((0.001, 1e6, 0.4))
    assert link_through([1e6, 2e6], [0.9, 2.0]).latency == 0
    with pytest.raises(ValueError, match="expected longer ones to take longer"):
        link_through([1.0, 2.0], [2.0, 0.5])


def test_operands_exist_when_all_that_they_depend_on_is_computed():
    """Each of three sorts counts 1 s, and all else nothing: one before each operand, and one that nothing needs."""
    x = T.dvector("x")
    few = T.sort(x)
    many = T.sort(T.concatenate([T.exp(few), x]))
    f = theano.function([x], [averaged(many), averaged(few), T.sort(2 * x)])
    f([3.0, 1.0, 2.0])
    nodes = f.maker.fgraph.toposort()
    seconds = {node: float(isinstance(node.op, ops.SortOp)) for node in nodes}
    assert sum(seconds.values()) == 3
    times = times_of_operands(f, seconds)
    assert [one for pair in times for one in pair] == pytest.approx([1 / 3, 24 / 72, 2 / 3, 48 / 72])
    assert times_of_operands(theano.function([x], few), {}) == []


def test_which_functions_time_their_apply_nodes():
    x = T.dvector("x")
    f = theano.function([x], T.sort(x))
    vm = timed_machine(f)
    vm.time_thunks = True
    f([2.0, 1.0])
    assert sum(vm.call_counts) == len(vm.nodes) > 0
    assert len(vm.call_times) == len(vm.nodes)
    f.profile = "a profile, to which the times belong"
    assert timed_machine(f) is None
    assert timed_machine(theano.function([x], T.sort(x), mode=Mode(linker="py"))) is None
