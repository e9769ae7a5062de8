"""Predicted steps of training rules with exact steps within nodes, and with rows by index: values computed by hand."""

import math
from dataclasses import replace

import pytest

from synkhronos._costs import Cluster, Curve, Link, RowTimes, Rule, Workload, predict_step, to_hide
from synkhronos._costs.kernels import Spread

#: Bytes take 1 µs between nodes, and a message 1 ms more; within nodes, they take 0.01 µs.
CLUSTER = Cluster(Link(latency=0.001, bandwidth=1e6), Link(latency=0.0, bandwidth=1e8))
#: 0.01 s, and 1 ms for each row. The ranks of a node all-reduce 1 MB by two collectives in each step, in 0.01 s for two
#: ranks. An average of 2 MB takes these 0.02 s, and two nodes 2.002 s.
WORKLOAD = Workload((RowTimes((10.0, 100.0), (0.02, 0.11), 0.01),), n_bytes=2e6, in_nodes=(1e6, 2))


def predicted(rule, nodes=2, work=WORKLOAD, cluster=CLUSTER):
    """Return the prediction for two ranks on each node, each with 20 rows."""
    return predict_step(work, cluster, nodes, 2, 40 * nodes, rule)


def test_averages_without_a_delay():
    step = predicted(Rule("local", 4))
    assert (step.compute, step.waiting) == pytest.approx((0.03, 0.0))
    assert (step.exposed, step.on_link) == pytest.approx((0.01 + 2.022 / 4, 2.002 / 4))
    assert step.seconds == pytest.approx(0.03 + 0.01 + 2.022 / 4)
    assert step.link_bytes == 2e6 / 4


def test_delayed_averages():
    step = predicted(Rule("delayed", 10, delay=5))  # five steps of 0.04 s
    assert (step.exposed, step.on_link) == pytest.approx((0.01 + 0.02 / 10 + 1.802 / 10, 1.802 / 10))
    step = predicted(Rule("delayed", 100))
    assert (step.exposed, step.on_link, step.delay_to_hide) == pytest.approx((0.01 + 0.02 / 100, 0.0, 51))


def test_a_delay_that_hides_averages_is_chosen():
    step = predicted(Rule("auto"))
    assert step.delay_to_hide == 52 == to_hide(2.022, 0.04)
    assert (step.exposed, step.on_link) == pytest.approx((0.01 + 0.02 / 104, 0.0))
    assert step.link_bytes == 2e6 / 104
    alone = predict_step(WORKLOAD, CLUSTER, 2, 1, 40, Rule("auto"))
    assert (alone.exposed, alone.delay_to_hide) == (0, 68)  # 2.002 / 0.03, and one step more


@pytest.mark.parametrize("rule", [Rule("local", 4), Rule("delayed", 4), Rule("auto")])
def test_nothing_is_averaged_on_one_node(rule):
    step = predicted(rule, nodes=1)
    assert (step.seconds, step.exposed) == pytest.approx((0.04, 0.01))
    assert (step.on_link, step.link_bytes, step.delay_to_hide) == (0, 0, 0)


def test_a_loop_calls_an_exact_function_for_each_step_on_one_node():
    call = replace(WORKLOAD, n_bytes=1e6, n_collectives=2, divided=0.02, in_nodes=None)
    cluster = replace(CLUSTER, command=0.005)
    step = predicted(Rule("auto"), nodes=1, work=replace(WORKLOAD, on_one_node=call), cluster=cluster)
    assert (step.compute, step.exposed, step.rule) == (pytest.approx(0.03 + 0.02 / 2 + 0.005), 0.01, Rule("auto"))
    several = [
        predicted(Rule("auto"), work=replace(WORKLOAD, on_one_node=one), cluster=cluster) for one in (call, None)
    ]
    assert several[0] == several[1]


def test_ranks_wait_in_each_step_and_nodes_in_averages():
    of_two = 1 / math.sqrt(math.pi)  # standard deviations
    step = predicted(Rule("local", 4), work=replace(WORKLOAD, spread=Spread(0.2)))
    assert step.compute + step.waiting == pytest.approx(0.03 * (1 + 0.2 * of_two) * (1 + 0.1 * of_two), rel=1e-4)
    slow = predicted(Rule("local", 4), cluster=replace(CLUSTER, slow=(5.0,)))
    assert (slow.compute, slow.waiting) == pytest.approx((0.06, 0.09))


@pytest.mark.parametrize("rule", [Rule(), Rule("local", 4), Rule("centre", 4)])
def test_ranks_copy_rows_that_an_index_picks(rule):
    copies = RowTimes((10.0, 40.0), (0.002, 0.008), 0.0)
    cluster = replace(CLUSTER, contention=Curve((1.0, 2.0), (1.0, 3.0)))
    steps = [predicted(rule, work=replace(WORKLOAD, picks=one), cluster=cluster) for one in (copies, None)]
    assert steps[0].compute - steps[1].compute == pytest.approx(3 * 0.004)  # 20 rows of each rank
    assert steps[0].undivided == steps[1].undivided


def test_ranks_alone_exchange_nothing_between_averages():
    step = predicted(Rule("local", 4), work=replace(WORKLOAD, in_nodes=None))
    assert step.exposed == pytest.approx(2.022 / 4)
