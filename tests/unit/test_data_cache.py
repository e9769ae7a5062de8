"""Cache of the controller's data on another node: its size, and files that exist on both nodes."""

import os

import numpy as np
import pytest
from test_shipping import NOTHING, OURS, WORLD, call, controller_table

from synkhronos._memory import ArrayRef, SegmentTable, find_part, open_part, segment_of_file
from synkhronos._memory import descriptors as anonymous
from synkhronos._multinode.shipping import BLOCK, SegmentCache, Shipping
from synkhronos._rank import Put, Source
from synkhronos._utils.rows import Rows, shares


def size_of(cache):
    """Return the bytes of memory that a cache occupies."""
    return sum(512 * os.fstat(one.fileno()).st_blocks for one in cache.new)


def test_a_cache_occupies_no_more_memory_than_the_rows_received():
    data = np.random.RandomState(0).rand(2000, 1000)
    table, refs = controller_table(data=data)
    cache = SegmentCache(SegmentTable())
    shipping = Shipping(table, WORLD)
    parts = tuple(shares(len(data), WORLD.n_ranks))
    for shipment in shipping.load(call(Source(refs["data"], Rows(0, len(data))), parts), 1):
        cache.take(shipment, ())
    assert cache.new[0].ref.size == data.nbytes
    assert data.nbytes // 5 <= size_of(cache) < data.nbytes // 5 + 2 * BLOCK
    rows = np.arange(0, 2000, 100)
    table.add("rows", rows.view(np.uint8))
    chosen = Source(refs["data"], ArrayRef("rows", 0, rows.shape, rows.dtype.str))
    [shipment] = shipping.load(call(chosen, (Rows(0, 20),) * 5), 1)
    cache.take(shipment, ())
    assert shipment.fill == []  # the cache has all these rows already
    assert size_of(cache) < data.nbytes // 5 + (3 * 20 + 10) * BLOCK
    assert np.array_equal(cache.new[0].array(data.shape, data.dtype)[rows], data[rows])
    cache.take(NOTHING, ["data", "rows"])
    assert cache.new == []
    cache.close()


def test_a_file_that_the_node_has_is_opened_and_otherwise_its_rows_are_sent(tmp_path):
    here, there = tmp_path / "ours", tmp_path / "theirs"
    for folder in (here, there):
        folder.mkdir()
        np.save(folder / "x.npy", OURS)
        os.utime(folder / "x.npy", (1, 2))

    table, cache = SegmentTable(), SegmentCache(SegmentTable())
    values = np.load(here / "x.npy", mmap_mode="r")[5:]
    segment = segment_of_file(values)
    table.lend("data", segment.bytes)
    table.files["data"] = segment.path, segment.ref.offset
    ref = ArrayRef("data", 0, values.shape, values.dtype.str)
    shipping, command = Shipping(table, WORLD), Put((0,), (Source(ref, None),))

    def send():
        """Send the data to the other node, whose file has another path, and return the array that its ranks read."""
        wanted = shipping.files(command)
        theirs = {key: part._replace(path=part.path.replace("/ours/", "/theirs/")) for key, part in wanted.items()}
        shipping.found(1, wanted, [cache.open(key, part) for key, part in theirs.items()])
        [shipment] = shipping.load(command, 1)
        files = [part._replace(path=part.path.replace("/ours/", "/theirs/")) for part in shipment.files]
        cache.take(shipment._replace(files=files), ())
        return cache.new[-1].array(values.shape, values.dtype)

    assert np.array_equal(send(), values) and shipping.n_bytes == 0
    first = cache.new[0]
    assert np.array_equal(send(), values) and cache.new == [first] and shipping.files(command) == {}
    np.save(there / "x.npy", OURS + 1)  # replaces the file
    with pytest.raises(OSError, match=r"theirs/x.npy was changed on this node while it was used"):
        send()
    assert cache.lacks
    shipping.assume_missing(1)
    assert np.array_equal(send(), values) and shipping.n_bytes == values.nbytes and cache.replaced == {"data"}
    assert np.array_equal(send(), values) and shipping.n_bytes == values.nbytes
    np.lib.format.open_memmap(here / "x.npy", "r+")[7] = 3
    assert np.array_equal(send(), values) and values[2, 0] == 3 and shipping.n_bytes > values.nbytes
    sent = shipping.n_bytes
    np.save(there / "x.npy", np.load(here / "x.npy"))
    for folder in (here, there):
        os.utime(folder / "x.npy", (1, 3))
    assert np.array_equal(send(), values) and shipping.n_bytes == sent
    os.rename(here / "x.npy", here / "y.npy")
    assert np.array_equal(send(), values) and shipping.n_bytes == sent + values.nbytes
    cache.take(NOTHING, ["data"])
    assert cache.new == []


def test_files_that_differ_in_a_compared_page_are_different_files(tmp_path):
    values = np.random.RandomState(0).rand(100_000)
    for name in ("x", "y", "z"):
        values.tofile(tmp_path / name)
    with open(tmp_path / "y", "r+b") as file:
        file.write(b"y")
    with open(tmp_path / "z", "ab") as file:
        file.write(b"z")
    for name in ("x", "y", "z"):
        os.utime(tmp_path / name, (1, 2))
    mapped = np.memmap(tmp_path / "x", np.float64, "r", offset=80)
    segment = segment_of_file(mapped)
    part = find_part(segment.path, segment.ref.offset, segment.bytes)
    assert np.array_equal(open_part(part, "key").array(mapped.shape, float), values[10:])
    assert open_part(part._replace(path=str(tmp_path / "z")), "key") is None
    assert open_part(part._replace(path=str(tmp_path / "none")), "key") is None
    assert open_part(part._replace(path=str(tmp_path / "y")), "key") is not None  # the changed byte is not in the part
    mapped = np.memmap(tmp_path / "x", np.float64, "r")
    part = find_part(str(tmp_path / "x"), 0, segment_of_file(mapped).bytes)
    assert open_part(part._replace(path=str(tmp_path / "y")), "key") is None
    assert segment_of_file(np.memmap(tmp_path / "x", np.float64, "r+")).path is None
    assert find_part(str(tmp_path / "y"), 0, segment_of_file(mapped).bytes) is None


def test_a_node_without_memory_raises_an_error_and_stores_the_data_later(monkeypatch):
    data = np.random.RandomState(0).rand(2000, 1000)
    table, refs = controller_table(data=data)
    cache, shipping = SegmentCache(SegmentTable()), Shipping(table, WORLD)
    command = Put((0,), (Source(refs["data"], None),))
    with monkeypatch.context() as patch:
        patch.setattr(anonymous, "free_memory", lambda: [(1000, "here")])
        with pytest.raises(MemoryError, match=r"1,572,864 bytes of shared memory: 1,000 bytes are free here"):
            cache.take(next(shipping.load(command, 1)), ())
    assert cache.lacks
    shipping.assume_missing(1)
    for shipment in shipping.load(command, 1):
        cache.take(shipment, ())
    assert not cache.lacks and len(cache.new) == 1
    assert np.array_equal(cache.new[0].array(data.shape, data.dtype), data)
    cache.close()
