"""Blocks of memory sent to another node: `take`, `put` and their digests."""

import numpy as np
import pytest

from synkhronos._memory import ArrayRef
from synkhronos._multinode.shipping import BLOCK, blocks_of, put, runs, take
from synkhronos._native import native
from synkhronos._utils.rows import Rows


@pytest.mark.parametrize("n_bytes", [1, 15, 4095, 4096, 4097, 5 * 4096, 5 * 4096 + 100])
def test_blocks_are_taken_and_put(n_bytes):
    random = np.random.RandomState(0)
    content = random.randint(0, 256, n_bytes).astype(np.uint8)
    n = -(-n_bytes // BLOCK)
    for _ in range(20):
        blocks = np.flatnonzero(random.rand(n) < 0.6)
        if not len(blocks):
            continue
        there = np.zeros(n_bytes, np.uint8)
        put(there, blocks, take(content, blocks))
        taken = np.isin(np.arange(n_bytes) // BLOCK, blocks)
        assert np.array_equal(there, np.where(taken, content, 0))
        assert [number for first, end in runs(blocks) for number in range(first, end)] == blocks.tolist()


@pytest.mark.parametrize("shape", [(7, 1000), (300, 5), (3, 50, 70), (2, 3, 4000), (5, 0)])
def test_the_blocks_of_an_array_are_those_of_its_bytes(shape):
    random = np.random.RandomState(0)
    ref = ArrayRef("", 640, shape, "<f4")
    places = 640 + 4 * np.arange(np.prod(shape)).reshape(shape)
    for axis in range(len(shape) - 1):
        for _ in range(5):
            start, stop = sorted(random.randint(0, shape[axis] + 1, 2))
            rows = np.unique(random.randint(0, shape[axis], 3))
            for chosen, taken in ((Rows(start, stop), np.arange(start, stop)), (rows, rows)):
                expected = np.unique(places.take(taken, axis) // BLOCK)
                assert np.array_equal(blocks_of(ref, axis, chosen), expected)
    assert np.array_equal(blocks_of(ref), np.unique(places // BLOCK))


@pytest.mark.parametrize("n_bytes", [8, 100, 4096, 4103])
def test_each_bit_counts_for_a_digest(n_bytes):
    key = np.random.RandomState(1).bytes(BLOCK + 16)
    content = np.random.RandomState(0).randint(0, 256, n_bytes).astype(np.uint8)
    blocks = np.arange(-(-n_bytes // BLOCK))

    def digests(key=key):
        out = np.empty((len(blocks), 4), np.uint64)
        native.hash_blocks(content, blocks, key, out)
        return out

    before = digests()
    assert np.array_equal(digests(), before) and not (digests(key[::-1]) == before).any()
    for byte in {0, 7, n_bytes // 2, n_bytes - 1}:
        for bit in range(8):
            content[byte] ^= 1 << bit
            differs = (digests() != before).any(axis=1)
            assert differs.tolist() == [block == byte // BLOCK for block in blocks]
            content[byte] ^= 1 << bit


def test_a_digest_is_that_of_the_paper():
    """A digest is two NH hashes: sums of products of pairs of words, each added to a word of the key."""
    content = np.random.RandomState(0).randint(0, 256, BLOCK + 40).astype(np.uint8)
    key = np.random.RandomState(1).bytes(BLOCK + 16)
    out = np.empty((2, 4), np.uint64)
    native.hash_blocks(content, np.arange(2), key, out)
    k = [int(one) for one in np.frombuffer(key, np.uint64)]
    for i, block in enumerate((content[:BLOCK], np.append(content[BLOCK:], np.zeros(8, np.uint8)))):
        m = [int(one) for one in block.view(np.uint64)]
        for p in range(2):
            products = [
                ((m[j] + k[j + 2 * p]) % 2**64) * ((m[j + 1] + k[j + 1 + 2 * p]) % 2**64) for j in range(0, len(m), 2)
            ]
            assert int(out[i, 2 * p]) + (int(out[i, 2 * p + 1]) << 64) == sum(products) % 2**128


@pytest.mark.parametrize(
    ("numbers", "key", "rows"), [([1], BLOCK + 16, 1), ([-1], BLOCK + 16, 1), ([0], BLOCK + 16, 2), ([0], 10, 1)]
)
def test_digests_of_blocks_that_do_not_exist_are_refused(numbers, key, rows):
    content, out = np.zeros(BLOCK, np.uint8), np.empty((rows, 4), np.uint64)
    with pytest.raises(ValueError, match=r"a block number is out of range|do not fit"):
        native.hash_blocks(content, np.array(numbers), b"k" * key, out)
