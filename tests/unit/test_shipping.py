"""Rows sent to another node with a command: all rows that its ranks read, and few others."""

import numpy as np
import pytest

from synkhronos._memory import ArrayRef, SegmentTable
from synkhronos._multinode.shipping import BLOCK, PIECE, Shipment, Shipping, put
from synkhronos._processes import World
from synkhronos._rank import Call, Flush, InOrder, Put, Source
from synkhronos._rank.results import RowViews
from synkhronos._utils.rendezvous import count_launched
from synkhronos._utils.rows import Rows, shares

WORLD = World((2, 1, 2), 0, 0)
NOTHING = Shipment([], [], [])
OURS = np.random.RandomState(0).rand(20, 3)


class OtherNode:
    """The memory of another node, filled with garbage at first."""

    def __init__(self):
        self.table = SegmentTable()
        self.excerpts = RowViews(self.table)

    def take(self, shipments):
        for shipment in shipments:
            self._take(shipment)

    def _take(self, shipment):
        for key, n_bytes in shipment.make:
            assert key not in self.table
            self.table.add(key, np.full(n_bytes, 255, np.uint8))
        for key, blocks, values in shipment.fill:
            put(self.table.view(ArrayRef(key, 0, (self.table.n_bytes(key),), "|u1")), blocks, values)


def controller_table(**arrays):
    table, refs = SegmentTable(), {}
    for key, array in arrays.items():
        table.add(key, array.reshape(-1).view(np.uint8))
        refs[key] = ArrayRef(key, 0, array.shape, array.dtype.str)
    return table, refs


def call(source, counts_of, **others):
    default = {
        "function": 0, "inputs": (source,), "n_scattered": 1, "shares": counts_of, "rows": (), "all_compute": False,
        "counts": tuple(map(len, counts_of)), "num_slices": 1, "output_modes": (None,), "output_subset": None,
        "updated": (), "update_modes": (),
    }  # fmt: skip
    return Call(**{**default, **others})


@pytest.mark.parametrize("kind", ["range", "list", "starts", "columns"])
@pytest.mark.parametrize("n", [0, 3, 12])
def test_the_rows_that_ranks_read_are_there(kind, n):
    data = OURS.T.copy() if kind == "columns" else OURS
    lists = np.random.RandomState(1).randint(0, 20, n)
    table, refs = controller_table(data=data, lists=lists, starts=np.array([5]))
    chosen = {"range": Rows(4, 4 + n), "list": refs["lists"], "starts": Rows(0, n), "columns": Rows(2, 2 + n)}[kind]
    source = Source(refs["data"], chosen, int(kind == "columns"))
    parts = tuple(shares(n, WORLD.n_ranks))
    starts = refs["starts"] if kind == "starts" else None
    command = InOrder((Flush(), call(source, parts, starts=starts)))
    shipping, ours = Shipping(table, WORLD), RowViews(table)
    for node in (1, 2):
        there = OtherNode()
        there.take(shipping.load(command, node))
        assert list(shipping.load(command, node)) == [NOTHING]  # the node has it already
        for rank in WORLD.ranks_of(node):
            first = 5 if starts else 0
            expected = ours.take(source, parts[rank], first=first)
            assert np.array_equal(there.excerpts.take(source, parts[rank], first=first), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_no_row_travels_twice_unless_it_was_written_to(axis):
    """Each node reads its rows of batches over several epochs; in between, some rows are written to."""
    data = np.random.RandomState(0).rand(*((200, 1, 300) if axis == 0 else (2, 200, 600)))
    table, refs = controller_table(data=data)
    shipping, ours, there = Shipping(table, WORLD), RowViews(table), OtherNode()

    def epoch(batches):
        before = shipping.n_bytes
        for batch in batches:
            source, parts = Source(refs["data"], batch, axis), tuple(shares(len(batch), WORLD.n_ranks))
            there.take(shipping.load(call(source, parts), 2))
            for rank in WORLD.ranks_of(2):
                assert np.array_equal(there.excerpts.take(source, parts[rank]), ours.take(source, parts[rank]))
        return shipping.n_bytes - before

    batches = [Rows(start, start + 50) for start in range(0, 200, 50)]
    first = epoch(batches)
    assert 0.4 * data.nbytes <= first < 0.5 * data.nbytes
    assert epoch(batches) == 0
    data[(slice(None),) * axis + (slice(140, 150),)] += 1  # rows of that node
    assert 0 < epoch(batches) < 0.1 * data.nbytes
    assert epoch(batches) == 0
    data[(slice(None),) * axis + (slice(100, 110),)] += 1  # rows of no rank of that node
    data[(slice(None),) * axis + (slice(140, 150),)] -= 1
    assert epoch([*batches, Rows(90, 150)]) > 0
    assert epoch([Rows(90, 150), *batches]) == 0
    shipping.forget(["data"])
    there.table.release("data")
    assert epoch(batches) == first


def test_a_rank_without_rows_receives_the_row_that_it_borrows():
    table, refs = controller_table(data=OURS)
    source = Source(refs["data"], Rows(7, 8))
    parts = tuple(shares(1, WORLD.n_ranks))
    there = OtherNode()
    there.take(Shipping(table, WORLD).load(call(source, parts, has_collectives=True), 2))
    assert np.array_equal(there.excerpts.take(source, Rows(0, 1)), OURS[7:8])


def test_large_data_are_sent_in_pieces():
    data = np.random.RandomState(0).rand(5000, 1000)
    table, refs = controller_table(data=data)
    shipping, there, before = Shipping(table, WORLD), OtherNode(), 0
    for shipment in shipping.load(Put((0,), (Source(refs["data"], None),)), 1):
        there.take([shipment])
        assert shipping.n_bytes - before < 2 * PIECE * BLOCK
        before = shipping.n_bytes
    assert before == data.nbytes and np.array_equal(there.table.view(refs["data"]), data)


def test_values_are_sent_only_to_nodes_whose_ranks_are_set():
    table, refs = controller_table(data=OURS)
    shipping = Shipping(table, WORLD)
    command = Put((0,), (Source(refs["data"], None),), ranks=(2,))
    assert list(shipping.load(command, 2)) == [NOTHING]
    there = OtherNode()
    there.take(shipping.load(command, 1))
    assert np.array_equal(there.table.view(refs["data"]), OURS)
    shipping.forget(["data"])
    assert next(shipping.load(command, 1)).make == [("data", OURS.nbytes)]


def test_a_node_that_failed_to_store_values_receives_them_again():
    table, refs = controller_table(data=OURS)
    shipping, command = Shipping(table, WORLD), Put((0,), (Source(refs["data"], None),))
    [first] = shipping.load(command, 1)
    list(shipping.load(command, 2))
    shipping.assume_missing(1)
    [again] = shipping.load(command, 1)
    assert again.make == first.make and np.array_equal(again.fill[0][2], first.fill[0][2])
    assert list(shipping.load(command, 2)) == [NOTHING]


@pytest.mark.parametrize(
    ("environment", "n"),
    [
        ({}, 1),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "3"}, 3),
        ({"SLURM_NTASKS": "3"}, 1),  # in sbatch's script, not started by srun
    ],
)
def test_launchers_say_how_many_processes_there_are(environment, n):
    assert count_launched(environment) == n
