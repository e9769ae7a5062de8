"""Prediction of training steps: formulas against values computed by hand, properties, and published measurements."""

import itertools
import math
import statistics
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_costs import CONSTANTS
from published_steps import (
    DGX1,
    DGX1_COPIES,
    DGX1_FUNCTION,
    IMAGES,
    K80,
    K80_BUS,
    K80_SOCKET,
    PARAMETERS,
    VGG16_OF_16_ROWS,
    dgx1,
    published,
)

from synkhronos._costs import Curve
from synkhronos._costs.kernels import (
    KernelRegressor,
    Operand,
    Roofline,
    RowTimes,
    Spread,
    expected_slowest,
    fit_row_times,
    held_out_errors,
    rescaled,
)
from synkhronos._costs.predict import (
    Cluster,
    Link,
    Rule,
    Workload,
    bytes_sent,
    centre_saturates,
    centre_step,
    cluster_of,
    delayed_step,
    exchange_seconds,
    predict_step,
    predict_steps,
    smallest_delay,
    verdict,
)

LINK = Link(latency=0.001, bandwidth=1e6)  # bytes take 1 µs, a message 1 ms more
FAST = Link(latency=0.0, bandwidth=1e8)
#: 0.01 s, and 1 ms for each row; a million bytes are all-reduced.
WORKLOAD = Workload((RowTimes((10.0, 100.0), (0.02, 0.11), 0.01),), n_bytes=1e6)
CLUSTER = Cluster(LINK, FAST)

# Kernels


def test_times_are_interpolated_and_extended_on_straight_lines():
    times = RowTimes((10.0, 20.0, 40.0), (2.0, 3.0, 7.0), 1.0)
    assert times.at(0) == 1.0  # the constant part
    assert times.at(5) == 1.5  # half-way between 1 at 0 rows and 2 at 10
    assert times.at(15) == 2.5
    assert times.at(30) == 5.0
    assert times.at(60) == 11.0  # 7 + 20 (7 - 3) / (40 - 20)
    assert times.scaled(2) == RowTimes((10.0, 20.0, 40.0), (4.0, 6.0, 14.0), 2.0)


def test_a_point_at_nearly_the_largest_number_of_rows_does_not_determine_the_extension():
    times = RowTimes((10.0, 39.0, 40.0), (2.0, 5.0, 5.0), 1.0)
    assert times.at(50) == 6.0  # 5 + 10 (5 - 2) / (40 - 10)


def test_one_point_is_extended_in_proportion():
    times = fit_row_times([32], [4.0])
    assert (times.constant, times.at(8), times.at(64)) == (0.0, 1.0, 8.0)


def test_delayed_measurements_are_pooled_with_later_ones():
    times = fit_row_times([4, 1, 8, 2], [3.0, 1.0, 6.0, 5.0])
    assert times.rows == (1, 2, 4, 8)
    assert times.seconds == (1, 4, 4, 6)  # 5 and 3 become their mean
    assert times.constant == 0.0  # a line from (1, 1) to (2, 4) would be at -2


def test_repeated_measurements_enter_with_their_median():
    assert fit_row_times([1, 2, 2, 2], [1.0, 2.0, 9.0, 2.5]).seconds == (1, 2.5)


def test_the_constant_part_is_the_intercept():
    assert fit_row_times([10, 12, 20], [3.0, 3.1, 4.0]).constant == pytest.approx(2.0)  # slope 0.1, from 10 and 20 rows
    assert fit_row_times([10, 20], [3.0, 3.0]).constant == 3.0


@pytest.mark.parametrize(("rows", "seconds"), [([], []), ([0, 1], [1.0, 2.0]), ([1], [1.0, 2.0])])
def test_measurements_without_rows_are_refused(rows, seconds):
    with pytest.raises(ValueError, match="expected as many positive rows as seconds"):
        fit_row_times(rows, seconds)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-6, 10)), min_size=1, max_size=7))
def test_fitted_times_never_decrease(points):
    times = fit_row_times(*zip(*points))
    predicted = [times.at(rows) for rows in range(0, 2500, 50)]
    assert all(a <= b * (1 + 1e-12) for a, b in zip(predicted, predicted[1:]))
    assert 0 <= times.constant <= times.seconds[0]


def test_roofline():
    roofline = Roofline(flops=1e9, memory=1e8)
    assert roofline.seconds(2e9, 1e8) == 2.0  # arithmetic: 2 s, memory: 1 s
    assert roofline.seconds(1e9, 3e8) == 3.0


def test_kernels_on_another_processor_stay_as_far_from_the_roofline():
    measured, other = Roofline(1e9, 1e8), Roofline(4e9, 1e8)
    # 2 s at best here, and 1 s there, where memory is the limit
    assert rescaled(3.0, 2e9, 1e8, measured, other) == pytest.approx(1.5)


#: Lengths of products (m, n, k), and of others between them.
LENGTHS, BETWEEN = (8, 32, 128, 512, 2048), (20, 90, 350, 1500)

GRID_OF_PRODUCTS = list(itertools.product(LENGTHS, repeat=3))


def seconds_of_product(m, n, k):
    """Return seconds at 10 GFLOP/s or 5 GB/s, whichever is slower, and 1 µs of start."""
    return 1e-6 + Roofline(1e10, 5e9).seconds(2 * m * n * k, 4 * (m * k + k * n + m * n))


def test_regressors_predict_products_that_were_not_measured():
    """Median errors of these made-up kernels are small; the largest ones are where arithmetic meets memory."""
    held_out = list(itertools.product(BETWEEN, repeat=3))
    seconds, expected = ([seconds_of_product(*one) for one in sizes] for sizes in (GRID_OF_PRODUCTS, held_out))
    errors = held_out_errors((LENGTHS,) * 3, seconds, held_out, expected)
    regressor, interpolation = ([abs(one) for one in found] for found in (errors.regressor, errors.interpolation))
    assert statistics.median(regressor) < 0.03
    assert max(regressor) < max(interpolation) == pytest.approx(0.163, abs=0.001)


def test_regressors_of_passes_over_memory():
    sizes = [2**i for i in range(10, 25)]
    regressor = KernelRegressor([[size] for size in sizes], [1e-6 + size / 1e10 for size in sizes])
    assert regressor.at(3e6) == pytest.approx(3.01e-4, rel=0.05)


def test_a_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.neural_network", None)
    with pytest.raises(ImportError, match=r"KernelRegressor needs scikit-learn: pip install 'synkhronos\[plan\]'"):
        KernelRegressor([[1.0]], [1.0])


# Collectives


def test_collectives_of_a_ring():
    # 4 processes, 40000 bytes: 3 messages of 10000 bytes, 11 ms each; and as many in the all-gather
    assert LINK.reduce_scatter(40000, 4) == pytest.approx(0.033)
    assert LINK.all_reduce(40000, 4) == pytest.approx(0.066)
    assert LINK.all_reduce(40000, 4) == pytest.approx(2 * 3 * 0.001 + 2 * 3 / 4 * 40000 * 1e-6)
    assert bytes_sent(40000, 4) == 60000
    assert LINK.all_reduce(40000, 1) == LINK.all_reduce(4, 1) == 0


def test_few_bytes_are_gathered_by_all():
    # 5 processes: 3 rounds of 1 ms, in which each receives the 4 arrays of the others
    assert LINK.all_reduce(100, 5) == pytest.approx(0.0034)
    assert LINK.all_reduce(0, 64) == pytest.approx(0.006)


def test_exchange_is_hierarchical():
    work = replace(WORKLOAD, n_bytes=4e6, n_collectives=2)
    cluster = Cluster(LINK, FAST, barrier=0.5)
    # within: 2 (2·3/4·2 MB / 100 MB/s + 0.5); between 2 nodes: 2 (2·1 ms + 2 MB / 1 MB/s)
    assert exchange_seconds(work, cluster, 2, 4) == pytest.approx((2 * (0.03 + 0.5), 2 * (0.002 + 2.0)))
    # bfloat16 halves the bytes on the link, and nothing within nodes
    cluster = replace(cluster, wire_dtype="bfloat16")
    assert exchange_seconds(work, cluster, 2, 4) == pytest.approx((1.06, 2 * (0.002 + 1.0)))
    measured = replace(cluster, within=Curve((1e6, 4e6), (0.1, 0.4)))
    assert exchange_seconds(work, measured, 1, 4) == pytest.approx((2 * (0.2 + 0.5), 0.0))


def test_one_process_exchanges_nothing():
    assert exchange_seconds(WORKLOAD, CLUSTER, 1, 1) == (0, 0)
    assert exchange_seconds(replace(WORKLOAD, n_bytes=0), CLUSTER, 8, 8) == (0, 0)


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 64), st.integers(1, 8))
def test_more_bytes_never_take_less_time(first, second, nodes, ranks):
    less, more = sorted((first, second))
    steps = [predict_step(replace(WORKLOAD, n_bytes=one), CLUSTER, nodes, ranks, 512) for one in (less, more)]
    assert steps[0].seconds <= steps[1].seconds * (1 + 1e-12)


# Waiting


@pytest.mark.parametrize(
    ("n_ranks", "expected"),
    [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (4, 1.0294), (8, 1.4236), (16, 1.7660)],
)
def test_expected_maximum_of_normal_values(n_ranks, expected):
    # tables of the expected largest of n standard normal values
    assert expected_slowest((1.0,) * n_ranks, Spread(0.1)) == pytest.approx(1 + 0.1 * expected, abs=1e-5)


def test_expected_maximum_of_measured_values():
    spread = Spread.measured([1.0, 1.0, 1.0, 5.0])
    assert spread.samples == (0.5, 0.5, 0.5, 2.5)
    # of two ranks, both are fast with probability 9/16
    assert expected_slowest((1.0, 1.0), spread) == pytest.approx(0.5 * 9 / 16 + 2.5 * 7 / 16)
    # a rank of factor 3 takes 1.5 or 7.5; the other one's 2.5 counts only in 3/4 of the cases in which it takes 1.5
    expected = 7.5 / 4 + 3 / 4 * (2.5 / 4 + 1.5 * 3 / 4)
    assert expected_slowest((1.0, 3.0), spread) == pytest.approx(expected)


def test_without_spread_the_slowest_rank_determines_the_step():
    assert expected_slowest((1.0, 5.0, 1.0), Spread()) == 5.0


def test_a_rank_that_is_always_the_slowest_determines_the_step():
    assert expected_slowest((1.0, 5.0), Spread(0.01)) == pytest.approx(5.0, abs=1e-5)


def test_the_deviation_of_a_sum_grows_with_the_root_of_its_terms():
    assert Spread(0.5).of_sum(4) == Spread(0.25)
    assert Spread(samples=(0.5, 1.5)).of_sum(4) == Spread(0.25)
    assert Spread(samples=(0.5, 1.5)).of_sum(1) == Spread(samples=(0.5, 1.5))


# Rules


def test_local_steps_share_an_exchange():
    assert delayed_step(1.0, 6.0, 4, delay=0) == 2.5


def test_delayed_averages():
    assert delayed_step(2.0, 6.0, 4) == 2.0  # 6 / 4 is hidden
    assert delayed_step(2.0, 12.0, 4) == 3.0  # 12 / 4
    assert smallest_delay(2.0, 6.0) == 3
    assert smallest_delay(2.0, 6.1) == 4
    assert delayed_step(2.0, 6.0, 4, delay=3) == 2.0
    assert delayed_step(2.0, 6.0, 4, delay=1) == 3.0  # 4 s of waiting in each 4 steps
    assert delayed_step(2.0, 12.0, 4, delay=4) == delayed_step(2.0, 12.0, 4)


def test_a_centre_saturates():
    assert not centre_saturates(1.0, 0.5, every=10, n_ranks=8)  # 4 s of 10
    assert centre_step(1.0, 0.5, every=10, n_ranks=8) == 1.05
    assert centre_saturates(1.0, 0.5, every=10, n_ranks=20)  # 10 s of 10
    assert centre_step(1.0, 0.5, every=10, n_ranks=40) == 2.0  # 40 exchanges in 20 s


# Steps


def test_a_step_of_bsp():
    step = predict_step(WORKLOAD, CLUSTER, nodes=2, ranks=2, batch=80)
    assert step.compute == pytest.approx(0.03)  # 20 rows
    assert step.undivided == pytest.approx(0.01)
    # 2·1/2·1 MB / 100 MB/s within nodes, 2 ms + 1 s between them
    assert step.exposed == pytest.approx(0.01 + 1.002)
    assert step.on_link == pytest.approx(1.002)
    assert step.seconds == pytest.approx(0.03 + 1.012)
    assert step.efficiency == pytest.approx(0.09 / (4 * 1.042))
    assert step.link_bytes == 1e6
    assert step.rows_per_second == pytest.approx(80 / 1.042)
    assert step.limit == "the link"


def test_rows_are_rounded_up():
    assert predict_step(WORKLOAD, CLUSTER, 1, 2, 81).compute == pytest.approx(0.051)


def test_commands_and_contention_slow_computation_down():
    cluster = replace(CLUSTER, command=0.5, contention=Curve((1, 2), (1, 3)))
    step = predict_step(WORKLOAD, cluster, 1, 2, 80)
    assert step.compute == pytest.approx(0.5 + 3 * 0.05)
    assert step.undivided == pytest.approx(0.5 + 3 * 0.01)
    assert predict_step(WORKLOAD, cluster, 1, 1, 80).compute == pytest.approx(0.09)


def test_ranks_wait_for_a_slow_one():
    cluster = replace(CLUSTER, slow=(5.0,))
    step = predict_step(WORKLOAD, cluster, 1, 4, 160)
    assert step.compute == pytest.approx(0.05 * (5 + 3) / 4)
    assert step.compute + step.waiting == pytest.approx(0.25)
    assert step.limit == "waiting for the slowest rank"


def test_centres_of_nodes_are_averaged_in_other_steps_than_those_of_ranks():
    steps = [predict_step(WORKLOAD, CLUSTER, 2, 1, 40, Rule("centre", 10, nodes_every=n)) for n in (None, 10, 100)]
    assert steps[0].link_bytes == steps[1].link_bytes == pytest.approx(10 * steps[2].link_bytes)
    assert steps[0].seconds == steps[1].seconds > steps[2].seconds


def test_no_rank_waits_for_a_slow_one_at_a_centre():
    cluster = replace(CLUSTER, slow=(5.0,))
    step = predict_step(WORKLOAD, cluster, 1, 4, 160, Rule("centre", 10))
    # three ranks make 20 steps in a second, one makes 4; a rank and the centre exchange in 10 ms
    assert step.compute == pytest.approx(4 / 64)
    assert step.waiting == 0
    assert step.exposed == pytest.approx(0.001)


def test_centres_of_nodes_are_averaged_in_the_background():
    step = predict_step(WORKLOAD, CLUSTER, 2, 4, 320, Rule("centre", 10))
    assert step.seconds == pytest.approx(1.002 / 10)  # 0.05 s are computed, and 0.001 s exchanged
    assert step.on_link == pytest.approx(0.1002 - 0.051)


def test_a_step_of_local_updates():
    step = predict_step(replace(WORKLOAD, spread=Spread(0.2)), CLUSTER, 2, 2, 80, Rule("local", 4))
    assert step.waiting == pytest.approx(0.03 * 0.1 * 1.0294, rel=1e-4)  # of sums of four steps
    assert step.exposed == pytest.approx(1.012 / 4)
    assert step.link_bytes == 1e6 / 4


def test_a_step_of_delayed_averages():
    """The ranks of a node average before an exchange between nodes, and only the latter is hidden."""
    step = predict_step(WORKLOAD, CLUSTER, 2, 2, 80, Rule("delayed", 50))
    assert (step.seconds, step.exposed, step.on_link) == pytest.approx((0.0302, 0.0002, 0.0))
    assert step.delay_to_hide == 34  # 1.002 / 0.03
    step = predict_step(WORKLOAD, CLUSTER, 2, 2, 80, Rule("delayed", 50, delay=10))
    assert (step.exposed, step.on_link) == pytest.approx(((1.012 - 0.3) / 50, (1.002 - 0.3) / 50))


RULES = st.sampled_from(
    [Rule(), Rule("local", 4), Rule("delayed", 4), Rule("delayed", 4, 1), Rule("auto"), Rule("centre", 4)]
)
#: Bytes and collectives of exact steps within nodes.
IN_NODES = st.sampled_from([None, (1e5, 3)])
#: Up to four arrays in the order in which they exist.
OPERANDS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.25)), max_size=4).map(
    lambda found: tuple(Operand(part, (1.0,), (until,)) for until, part in sorted(found))
)


@given(RULES, st.integers(1, 32), st.integers(1, 8), st.integers(1, 4096), st.floats(0, 0.3), OPERANDS, IN_NODES)
def test_a_step_is_never_faster_than_its_computation(rule, nodes, ranks, batch, deviation, operands, in_nodes):
    work = replace(WORKLOAD, spread=Spread(deviation), operands=operands, in_nodes=in_nodes)
    step = predict_step(work, CLUSTER, nodes, ranks, batch, rule)
    assert step.seconds >= step.compute >= work.compute(batch / (nodes * ranks)) * (1 - 1e-12)
    assert step.seconds == pytest.approx(step.compute + step.waiting + step.exposed)
    assert min(step.waiting, step.exposed, step.on_link) >= 0
    assert step.on_link <= step.exposed * (1 + 1e-12)


@given(RULES, st.integers(1, 4096))
def test_one_rank_on_one_node_neither_waits_nor_exchanges(rule, batch):
    step = predict_step(replace(WORKLOAD, spread=Spread(0.2)), replace(CLUSTER, command=1.0), 1, 1, batch, rule)
    assert step.seconds == pytest.approx(WORKLOAD.compute(batch))
    assert (step.exposed, step.link_bytes) == (0, 0)
    assert step.efficiency == pytest.approx(1)


@given(RULES, st.integers(1, 8), st.integers(1, 4096))
def test_one_node_sends_nothing_on_the_link(rule, ranks, batch):
    fast, slow = (
        predict_step(WORKLOAD, replace(CLUSTER, link=link), 1, ranks, batch, rule) for link in (FAST, Link(1.0, 1.0))
    )
    assert fast == slow
    assert (fast.on_link, fast.link_bytes) == (0, 0)


def test_a_table_has_all_combinations():
    table = predict_steps(WORKLOAD, CLUSTER, nodes=[1, 2], ranks=[1, 4], batches=[80, 160])
    assert len(table.steps) == 8
    assert table.at(nodes=2, ranks=4, batch=160) == predict_step(WORKLOAD, CLUSTER, 2, 4, 160)
    assert table.seconds(nodes=1, ranks=1, batch=80) == pytest.approx(0.09)
    with pytest.raises(KeyError, match="got nodes=3, ranks=1, batch=80"):
        table.at(nodes=3, ranks=1, batch=80)


def test_a_table_as_text():
    titles, row = str(predict_steps(WORKLOAD, CLUSTER, nodes=[2], ranks=[2], batches=[80])).splitlines()
    words = "nodes ranks batch step ms compute waiting exchange efficiency sent MB rows/s"
    assert titles.split() == words.split()
    assert row.split() == ["2", "2", "80", "1042", "30", "0", "1012", "2%", "1", "76.78"]


def test_constants_of_a_measured_machine():
    together = CONSTANTS.together._replace(passes=Curve((1.0, 1e9), (1e-6, 2e3)))  # twice as long as alone
    cluster = cluster_of(CONSTANTS._replace(together=together, meeting=0.25), 4, LINK)
    assert (cluster.within, cluster.barrier, cluster.command) == (CONSTANTS.reduction, 0.25, 0.01)
    assert (cluster.contention.at(1), cluster.contention.at(2), cluster.contention.at(4)) == pytest.approx(
        (1, math.sqrt(2), 2)
    )


def test_updates_that_ranks_divide_and_copies_of_inputs():
    work = replace(WORKLOAD, divided=0.08, row_bytes=1000, memory=(5e6, 1e3))
    cluster = replace(CLUSTER, copy=Curve((1.0, 1e9), (1e-8, 10.0)))  # 10 ns for each byte
    assert predict_step(work, cluster, 1, 1, 80).seconds == pytest.approx(0.09 + 0.08)
    step = predict_step(work, cluster, 1, 4, 80)
    assert step.compute == pytest.approx(0.03 + 0.08 / 4 + 60e3 * 1e-8)  # the other ranks have 60 of 80 rows
    assert step.undivided == pytest.approx(0.01 + 0.08 / 4 + 60e3 * 1e-8)
    assert step.memory == 5e6 + 20e3
    step = predict_step(work, cluster, 2, 1, 80)
    assert step.compute == pytest.approx(0.05 + 0.08 + 40e3 * 1e-8 + 40e3 / LINK.bandwidth)


def test_a_table_of_several_rules():
    local = replace(WORKLOAD, n_bytes=2e6)
    rules = [(WORKLOAD, Rule()), (local, Rule("local", 4))]
    table = predict_steps(WORKLOAD, CLUSTER, nodes=[2], ranks=[1], batches=[80], rules=rules)
    assert [step.link_bytes for step in table.steps] == [1e6, 2e6 / 4]
    assert table.at(2, 1, 80, rule="local every=4") is table.steps[1]
    assert "local every=4" in str(table)
    titles, first, _ = table.to_csv().splitlines()
    assert dict(zip(titles.split(","), first.split(",")))["seconds"] == repr(table.steps[0].seconds)


# The verdict


def test_the_verdict_names_the_link_and_what_helps():
    work = Workload((RowTimes((100.0,), (0.1,), 0.0),), n_bytes=1e5)
    # 2 nodes compute 0.128 s and exchange 0.1 s; 3 nodes compute 0.086 s and exchange 0.133 s, 8 nodes 0.032 s and
    # 0.175 s, or 0.0875 s in bfloat16: 0.207 / 0.1195 = 1.7; 0.175 / 128 is less than 5 % of a step
    cluster = Cluster(Link(0.0, 1e6), FAST)
    sizes = {"nodes": [1, 2, 3, 4, 8], "ranks": 1, "batch": 256}
    assert verdict(work, cluster, **sizes) == (
        "the link is the limit from 3 nodes on; bfloat16 gives 1.7×; every=128 hides it"
    )
    assert verdict(work, replace(cluster, wire_dtype="bfloat16"), **sizes) == (
        "the link is the limit from 4 nodes on; every=64 hides it"
    )
    assert verdict(work, cluster, **sizes, rule=Rule("local", 128)) == "compute is the limit up to 8 nodes"


def test_averages_that_hide_the_link_leave_exact_steps_within_nodes():
    """Also if these take more than 5 % of a step, and if parameters have more bytes than gradients."""
    work = Workload((RowTimes((100.0,), (0.1,), 0.0),), n_bytes=1e5)
    averaged = replace(work, n_bytes=4e5, in_nodes=(1e5, 1))
    # on 8 nodes, a step takes 0.032 s, 0.01 s of exchange within nodes, and 0.7 s of each average
    sizes = {"nodes": [1, 2, 4, 8], "ranks": 2, "batch": 512}
    assert verdict(work, Cluster(Link(0.0, 1e6), Link(0.0, 1e7)), **sizes, averaged=averaged) == (
        "the link is the limit from 4 nodes on; bfloat16 gives 1.7×; every=512 hides it"
    )


@pytest.mark.parametrize(
    ("work", "cluster", "limit"),
    [
        (replace(WORKLOAD, n_bytes=1e5), Cluster(FAST, FAST), "work that is not divided is the limit from 16 nodes on"),
        (WORKLOAD, Cluster(FAST, FAST, slow=(9.0,)), "waiting for the slowest rank is the limit from 2 nodes on"),
        (WORKLOAD, Cluster(FAST, LINK), "the exchange within nodes is the limit up to 16 nodes"),
    ],
)
def test_the_verdict_names_other_limits(work, cluster, limit):
    assert verdict(work, cluster, nodes=[1, 2, 4, 8, 16], ranks=2, batch=160) == limit


def test_a_verdict_on_more_than_one_node_begins_with_the_least_number():
    assert verdict(WORKLOAD, CLUSTER, nodes=[2, 4], ranks=1, batch=64).startswith(
        "the link is the limit from 2 nodes on"
    )


# Published measurements


def error(predicted, measured):
    return predicted / measured - 1


@pytest.mark.parametrize(("n_ranks", "bus"), [(8, K80_BUS), (4, K80_SOCKET)])
def test_the_rates_of_the_bus_are_those_of_the_row_that_is_not_predicted(n_ranks, bus):
    n_bytes = bytes_sent(4 * PARAMETERS["VGG16"], n_ranks) * IMAGES / (16 * n_ranks)
    assert n_bytes / VGG16_OF_16_ROWS[n_ranks] == pytest.approx(bus, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "above", "step", "perfect"),
    [
        ("AlexNet", 0.03, 0.01, -0.21),
        ("GoogLeNet", 0.21, 0.02, -0.06),
        ("VGG16", 0.09, 0.02, -0.12),
        ("ResNet50", None, 0.02, -0.02),  # exchange is less than 5 % of a step, so rounding determines the error
    ],
)
def test_theano_mpi_on_eight_gpus(name, above, step, perfect):
    """The time above an eighth of one GPU's, and the step, have at most these errors."""
    _, alone, measured = K80[name]
    measured = sum(measured[8])
    predicted, exchange = published(name, 8, K80_BUS)
    excess = measured - alone / 8
    assert (excess > 0.05 * measured) == (above is not None)
    if above is not None:
        assert abs(error(exchange, excess)) <= above + 0.005 <= 0.3
    assert abs(error(predicted, measured)) <= step
    assert error(alone / 8, measured) == pytest.approx(perfect, abs=0.006)
    assert abs(error(predicted, measured)) < abs(perfect)


def test_latency_does_not_matter_on_eight_gpus():
    """The model assumes none; 14 messages of 20 µs would be less than 1 % of the shortest of 20 exchanges."""
    _, exchange = published("GoogLeNet", 8, K80_BUS)
    assert exchange / 20 > 100 * 14 * 20e-6


@pytest.mark.parametrize(
    ("name", "n_ranks", "above"),
    [
        ("AlexNet", 2, -0.23),
        ("AlexNet", 4, -0.06),
        ("GoogLeNet", 2, None),
        ("GoogLeNet", 4, None),
        ("VGG16", 2, None),
        ("VGG16", 4, -0.22),
        ("ResNet50", 2, None),
        ("ResNet50", 4, None),
    ],
)
def test_theano_mpi_on_one_socket(name, n_ranks, above):
    _, alone, measured = K80[name]
    measured = sum(measured[n_ranks])
    predicted, exchange = published(name, n_ranks, K80_SOCKET)
    excess = measured - alone / n_ranks
    assert (excess > 0.05 * measured) == (above is not None)
    assert abs(error(predicted, measured)) <= 0.02
    if above is not None:
        assert error(exchange, excess) == pytest.approx(above, abs=0.006)


@pytest.mark.parametrize(("name", "n_ranks", "above"), [("AlexNet", 2, 0.80), ("AlexNet", 4, 1.18), ("VGG16", 4, 0.82)])
def test_one_rate_for_one_and_two_sockets_misses_the_target(name, n_ranks, above):
    """With the rate of the bus between sockets, exchange on one socket is predicted to take twice as long as it did."""
    _, alone, measured = K80[name]
    _, exchange = published(name, n_ranks, K80_BUS)
    assert error(exchange, sum(measured[n_ranks]) - alone / n_ranks) == pytest.approx(above, abs=0.006)


def test_the_paper_on_a_dgx1_misses_the_target():
    """Of the 3.2 s above an eighth of one GPU's time, exchange by the nominal rate explains 0.19 s, 94 % too little.

    The run was 52.6 s long: the prediction is 5.7 % too short, perfect scaling 6.1 %. The paper's table has what is
    missing: ranks waited for the slowest one, and copies of inputs to eight GPUs at once took longer.
    """
    seconds, exchange = dgx1()
    excess = DGX1["eight"] - DGX1["alone"] / 8
    assert excess > 0.05 * DGX1["eight"]
    assert error(exchange, excess) == pytest.approx(-0.94, abs=0.005)
    assert error(exchange, DGX1["all-reduce"]) == pytest.approx(-0.58, abs=0.005)
    assert error(seconds, DGX1["eight"]) == pytest.approx(-0.057, abs=0.001)
    assert error(DGX1["alone"] / 8, DGX1["eight"]) == pytest.approx(-0.061, abs=0.001)


def test_the_paper_on_a_dgx1_with_its_own_spread_and_copies():
    """Given the published waiting and copies, which are no predictions, the time above is 34 % too short.

    The deviation that makes 8 ranks wait 1 s is 1.42 %. The part that copies take doubles from 1 GPU to 8.
    """
    n_steps = DGX1["alone"] * DGX1["steps per second"] / 8
    spread = Spread(DGX1["straggler"] / (DGX1["alone"] / 8) / 1.4236)
    assert spread.deviation == pytest.approx(0.0142, abs=1e-4)
    alone, eight = (part * whole for part, whole in zip(DGX1_COPIES, DGX1_FUNCTION))
    copies = fit_row_times([DGX1["rows"]], [(eight - alone / 8) / n_steps])
    seconds, _ = dgx1(spread, copies)
    excess = DGX1["eight"] - DGX1["alone"] / 8
    assert error(seconds - DGX1["alone"] / 8, excess) == pytest.approx(-0.34, abs=0.005)
    assert error(seconds, DGX1["eight"]) == pytest.approx(-0.021, abs=0.001)


def test_a_wire_dtype_shortens_float32_alone():
    work = Workload((RowTimes((1.0, 2.0), (1.0, 2.0), 0.0),), 8e6)
    cluster = Cluster(Link(0.0, 1e6), Link(0.0, math.inf), wire_dtype="bfloat16")
    seconds = [exchange_seconds(replace(work, is_float32=one), cluster, 2, 1)[1] for one in (True, False)]
    assert seconds == [pytest.approx(4.0), pytest.approx(8.0)]
    sent = [predict_step(replace(work, is_float32=one), cluster, 2, 1, 2).link_bytes for one in (True, False)]
    assert sent[1] == 2 * sent[0]
