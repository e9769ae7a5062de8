"""Rows sent to another node with a command: all that its ranks read, and few others."""

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


class Machine:
    """The memory of another machine, in which there is garbage at first."""

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


def master(**arrays):
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
    table, refs = master(data=data, lists=lists, starts=np.array([5]))
    chosen = {"range": Rows(4, 4 + n), "list": refs["lists"], "starts": Rows(0, n), "columns": Rows(2, 2 + n)}[kind]
    source = Source(refs["data"], chosen, int(kind == "columns"))
    parts = tuple(shares(n, WORLD.n_ranks))
    starts = refs["starts"] if kind == "starts" else None
    command = InOrder((Flush(), call(source, parts, starts=starts)))
    shipping, ours = Shipping(table, WORLD), RowViews(table)
    for node in (1, 2):
        there = Machine()
        there.take(shipping.load(command, node))
        assert list(shipping.load(command, node)) == [NOTHING]  # it is there already
        for rank in WORLD.ranks_of(node):
            first = 5 if starts else 0
            expected = ours.take(source, parts[rank], first=first)
            assert np.array_equal(there.excerpts.take(source, parts[rank], first=first), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_no_row_travels_twice_unless_it_was_written_to(axis):
    """Epochs over batches of data of which each machine reads a part, and writes in between."""
    data = np.random.RandomState(0).rand(*((200, 1, 300) if axis == 0 else (2, 200, 600)))
    table, refs = master(data=data)
    shipping, ours, there = Shipping(table, WORLD), RowViews(table), Machine()

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
    data[(slice(None),) * axis + (slice(140, 150),)] += 1  # in a share of that machine
    assert 0 < epoch(batches) < 0.1 * data.nbytes
    assert epoch(batches) == 0
    data[(slice(None),) * axis + (slice(100, 110),)] += 1  # in nobody's there
    data[(slice(None),) * axis + (slice(140, 150),)] -= 1
    assert epoch([*batches, Rows(90, 150)]) > 0
    assert epoch([Rows(90, 150), *batches]) == 0
    shipping.forget(["data"])
    there.table.release("data")
    assert epoch(batches) == first


def test_a_rank_without_rows_finds_the_one_that_it_borrows():
    table, refs = master(data=OURS)
    source = Source(refs["data"], Rows(7, 8))
    parts = tuple(shares(1, WORLD.n_ranks))
    there = Machine()
    there.take(Shipping(table, WORLD).load(call(source, parts, has_collectives=True), 2))
    assert np.array_equal(there.excerpts.take(source, Rows(0, 1)), OURS[7:8])


def test_much_travels_in_pieces_and_is_copied_as_it_travels():
    data = np.random.RandomState(0).rand(5000, 1000)
    table, refs = master(data=data)
    shipping, there, before = Shipping(table, WORLD), Machine(), 0
    for shipment in shipping.load(Put((0,), (Source(refs["data"], None),)), 1):
        there.take([shipment])
        assert shipping.n_bytes - before < 2 * PIECE * BLOCK
        before = shipping.n_bytes
    assert before == data.nbytes and np.array_equal(there.table.view(refs["data"]), data)


def test_values_go_only_to_machines_whose_ranks_are_set():
    table, refs = master(data=OURS)
    shipping = Shipping(table, WORLD)
    command = Put((0,), (Source(refs["data"], None),), ranks=(2,))
    assert list(shipping.load(command, 2)) == [NOTHING]
    there = Machine()
    there.take(shipping.load(command, 1))
    assert np.array_equal(there.table.view(refs["data"]), OURS)
    shipping.forget(["data"])
    assert next(shipping.load(command, 1)).make == [("data", OURS.nbytes)]


def test_a_machine_that_could_not_take_in_what_came_gets_it_again():
    table, refs = master(data=OURS)
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
        ({"SLURM_NTASKS": "3"}, 1),  # in sbatch's script, which srun has not started
    ],
)
def test_launchers_say_how_many_processes_there_are(environment, n):
    assert count_launched(environment) == n
