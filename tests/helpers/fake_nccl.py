"""A stand-in for `pygpu.collectives` without NCCL: NCCL's rules on device arrays of any kind.

It accepts the dtypes and ops that NCCL accepts through pygpu, and C-contiguous arrays of at most `MAX_ELEMENTS`. It
raises errors where NCCL does not: for another memory layout, which NCCL does not detect, and for ranks that call
different collectives or pass different numbers of elements, which hang in NCCL. As in NCCL, a rank whose peer is dead
waits until `abort` is called.
"""

import mmap
import os
import tempfile
import time

import numpy as np

DTYPES = ("int8", "int32", "int64", "uint64", "float16", "float32", "float64")
OPS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
MAX_ELEMENTS = 50
BUFFER_BYTES = 8 * 1024
ID_BYTES = 128

#: Functions that a rank calls before its next collective, for tests of failures: ``{rank: function}``.
before = {}
#: Number of collectives of each kind that this rank has executed.
done = {}


class Aborted(Exception):
    """Raised by a collective after `abort`."""


class GpuCommCliqueId:
    """Identifier of a communicator: the path of the file that its ranks map."""

    def __init__(self, context=None, comm_id=None):
        if comm_id is None:
            fd, path = tempfile.mkstemp(prefix="nccl-stand-in-")
            os.close(fd)
            comm_id = bytearray(path.encode().ljust(ID_BYTES, b"\0"))
        assert isinstance(comm_id, bytearray)
        assert len(comm_id) == ID_BYTES
        self.comm_id, self.context = comm_id, context


class GpuComm:
    """The communicator of one rank."""

    def __init__(self, cid, ndev, rank):
        self.count, self.rank, self.aborted = ndev, rank, False
        path = bytes(cid.comm_id).rstrip(b"\0").decode()
        with open(path, "r+b") as file:
            file.truncate(4096 + ndev * BUFFER_BYTES)
            self._map = mmap.mmap(file.fileno(), 0)
        counters = np.frombuffer(self._map, np.int64, 2 * ndev)
        self._arrived, self._calls = counters[:ndev], counters[ndev:]
        self._buffers = np.frombuffer(self._map, np.uint8, ndev * BUFFER_BYTES, offset=4096).reshape(ndev, BUFFER_BYTES)
        self._meet()
        if rank == 0:
            os.unlink(path)

    def _meet(self):
        self._arrived[self.rank] += 1
        mine = self._arrived[self.rank]
        while (self._arrived < mine).any():
            if self.aborted:
                raise Aborted
            time.sleep(0.0005)

    def _exchange(self, kind, src, op="sum"):
        """Return the arrays of all ranks, in rank order."""
        if self.rank in before:
            before.pop(self.rank)()
        if op not in OPS:
            raise ValueError(f"Invalid reduce operation: {op}")
        self._check(src)
        done[kind] = done.get(kind, 0) + 1
        value = np.asarray(src)
        self._calls[self.rank] = hash((kind, op, value.size, value.dtype.num))
        self._buffers[self.rank, : value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
        self._meet()
        assert len(set(self._calls.tolist())) == 1, "the ranks are in different collectives: NCCL would hang"
        values = [buffer[: value.nbytes].view(value.dtype).reshape(value.shape).copy() for buffer in self._buffers]
        self._meet()
        return values

    @staticmethod
    def _check(array):
        assert array.flags["C_CONTIGUOUS"], "NCCL would take the wrong bytes"
        if str(array.dtype) not in DTYPES:
            raise TypeError(f"NCCL has no {array.dtype}")
        if not 0 < array.size <= MAX_ELEMENTS:
            raise ValueError(f"{array.size} elements are too many, or none")

    def _write(self, dest, value):
        assert dest.dtype == value.dtype
        assert dest.flags["C_CONTIGUOUS"]
        dest.write(value.reshape(dest.shape))

    def all_reduce(self, src, op, dest=None):
        assert dest.shape == src.shape
        values = self._exchange("all_reduce", src, op)
        self._write(dest, _reduce(values, op))

    def reduce(self, src, op, dest=None, root=-1):
        values = self._exchange(f"reduce to {root}", src, op)
        assert (dest is None) == (root != self.rank)
        if root == self.rank:
            self._write(dest, _reduce(values, op))

    def broadcast(self, array, root=-1):
        self._write(array, self._exchange(f"broadcast from {root}", array)[root])

    def all_gather(self, src, dest=None, nd_up=1):
        assert dest.size == self.count * src.size
        self._write(dest, np.concatenate(self._exchange("all_gather", src)))


def abort(comm):
    """Abort the collective that a communicator is waiting in."""
    comm.aborted = True


def _reduce(values, op):
    result = values[0]
    for value in values[1:]:
        result = OPS[op](result, value, dtype=result.dtype)
    return result


def install():
    """Make synkhronos use this module as NCCL, in this process and those forked from it."""
    import pygpu.collectives

    from synkhronos._collectives import nccl
    from synkhronos._session import devices as gpus

    pygpu.collectives.GpuComm, pygpu.collectives.GpuCommCliqueId = GpuComm, GpuCommCliqueId
    gpus.may_use_nccl = lambda devices: True
    nccl._MAX_ELEMENTS = MAX_ELEMENTS
    nccl.abort = abort
