"""Collectives over NCCL, through `pygpu.collectives`: device arrays, from GPU to GPU.

NCCL checks little and cannot be interrupted, so the ranks agree on shapes first, at a barrier that also shows that all
are alive; and each collective runs in a thread of its own, while this one watches the other ranks. If one dies, NCCL is
told to give up (`ncclCommAbort`), and the error of the watch is raised.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from synkhronos._background import Background
from synkhronos._collectives import communicator
from synkhronos._collectives.arithmetic import result_dtype
from synkhronos._collectives.on_device import scale
from synkhronos._collectives.ops import OPS
from synkhronos._collectives.shared_memory import ShapesDiffer
from synkhronos._collectives.workspace import Workspace
from synkhronos._native import native

if TYPE_CHECKING:
    from synkhronos._team import Barrier

__all__ = ["NcclTransport", "nccl_moves", "nccl_reduces"]

_logger = logging.getLogger("synkhronos")

#: What NCCL can move, by pygpu.
_DTYPES = frozenset(map(np.dtype, ("int8", "int32", "int64", "uint64", "float16", "float32", "float64")))
_MAX_ELEMENTS = 2**31 - 1
_POLL = 0.05
_ABORT_SECONDS = 5.0


def nccl_reduces(dtype: np.dtype, op: str, widen: bool) -> bool:
    """Whether NCCL can reduce arrays of ``dtype``; with ``widen`` to the dtype that NumPy would return."""
    if dtype not in _DTYPES or OPS[op].nccl is None or (OPS[op].weighted and dtype.kind != "f"):
        return False
    if dtype == np.float16 and op not in ("max", "min"):  # NCCL rounds every partial sum
        return False
    return not widen or result_dtype(dtype, op) == dtype


def nccl_moves(dtype: np.dtype) -> bool:
    """Whether NCCL can broadcast and gather arrays of ``dtype``."""
    return dtype in _DTYPES


class NcclTransport:
    """One rank's end of NCCL. All arrays are device arrays with a dtype that NCCL knows.

    Parameters
    ----------
    comm : pygpu.collectives.GpuComm
    workspace : Workspace
    rank : int
    barrier : Barrier
    """

    def __init__(self, comm: Any, workspace: Workspace, rank: int, barrier: Barrier) -> None:
        self._comm = comm
        self._rank = rank
        self._n_ranks = workspace.nccl_signatures.shape[1]
        self._signatures = workspace.nccl_signatures
        self._barrier = barrier
        self._failed = False
        self._turn = 0

    def restart(self) -> None:
        """Every rank calls this at the start of a command, so that all begin with the same signatures."""
        self._turn = 0

    def agree(self, arrays: Sequence[Any]) -> None:
        """Meet all ranks, and make sure that they bring the same shapes.

        Two rows of signatures take turns: nobody can write to a row again before all others have read it.
        """
        if self._failed:
            raise RuntimeError("NCCL cannot be used any more after a collective that failed; use nccl=False")
        signatures = self._signatures[self._turn]
        self._turn ^= 1
        signatures[self._rank] = hash(tuple(tuple(array.shape) for array in arrays))
        self._barrier()
        if (signatures != signatures[self._rank]).any():
            raise ShapesDiffer("the shapes differ between ranks")

    def all_reduce(self, arrays: Sequence[Any], op: str, weights: Sequence[float] | None) -> None:
        """Reduce arrays over the ranks, in place; arguments and errors as of `SharedMemoryTransport.all_reduce`."""
        works = [_contiguous(array) for array in arrays]
        self._begin(works, op, weights, arrays)

        def work() -> None:
            for chunk in self._chunks(works):
                self._comm.all_reduce(chunk, OPS[op].nccl, chunk)

        self._run(work, works)
        for array, done in zip(arrays, works):
            if done is not array:
                array[...] = done

    def reduce(self, arrays: Sequence[Any], op: str, weights: Sequence[float] | None, root: int) -> list[Any]:
        """Reduce arrays to new ones on rank ``root``; returns an empty list on the other ranks."""
        works = [array.copy() for array in arrays]
        self._begin(works, op, weights, works)

        def work() -> None:
            for chunk in self._chunks(works):
                self._comm.reduce(chunk, OPS[op].nccl, chunk if root == self._rank else None, root)

        self._run(work, works)
        if root != self._rank:
            return []
        return works

    def broadcast(self, arrays: Sequence[Any], root: int) -> None:
        """Fill C-contiguous arrays, of the same shapes on every rank, with those of rank ``root``."""
        self.agree(arrays)

        def work() -> None:
            for chunk in self._chunks(arrays):
                self._comm.broadcast(chunk, root)

        self._run(work, arrays)

    def all_gather(self, arrays: Sequence[Any]) -> list[Any]:
        """The concatenations, on axis 0, of all ranks' arrays, which have equal shapes."""
        works = [_contiguous(array) for array in arrays]
        self.agree(works)
        gathered = [_empty((self._n_ranks, array.size), array) for array in works]

        def work() -> None:
            for array, out in zip(works, gathered):
                start = 0
                for chunk in self._chunks([array], self._n_ranks):
                    part = _empty((self._n_ranks * chunk.size,), chunk)
                    self._comm.all_gather(chunk, part)
                    out[:, start : start + chunk.size] = part.reshape((self._n_ranks, chunk.size))
                    start += chunk.size

        self._run(work, gathered)
        return [out.reshape((self._n_ranks * array.shape[0], *array.shape[1:])) for array, out in zip(works, gathered)]

    # -- the steps

    def _begin(self, works: Sequence[Any], op: str, weights: Sequence[float] | None, arrays: Sequence[Any]) -> None:
        """Agree with the other ranks, and weight this rank's arrays: before they are added, lest the sum overflow."""
        self.agree(arrays)
        if OPS[op].weighted:
            factor = native.normalized(weights if weights is not None else (1.0,) * self._n_ranks)[self._rank]
            for array in works:
                scale(array, factor)

    def _chunks(self, arrays: Sequence[Any], times: int = 1) -> list[Any]:
        """Flat views of arrays, no larger than NCCL takes."""
        flat = [array.reshape((array.size,)) for array in arrays]
        step = _MAX_ELEMENTS // times
        return [one[start : start + step] for one in flat for start in range(0, one.size, step)]

    def _run(self, work: Callable[[], None], arrays: Sequence[Any]) -> None:
        """Carry out a collective, and watch the other ranks meanwhile."""

        def run() -> None:
            work()
            for array in arrays:
                array.sync()  # lets other threads run

        collective = Background(run, "synkhronos-nccl", daemon=True)
        try:
            collective.start()
            while not collective.wait(_POLL):
                self._barrier.check()
        except BaseException:
            self._failed = True
            self._abort(collective)
            raise
        try:
            collective.outcome()
        except BaseException:
            self._failed = True
            raise

    def _abort(self, collective: Background) -> None:
        """Have NCCL give up, so that the device can be used again; else see to it that this process can end."""
        try:
            communicator.abort(self._comm)
        except (OSError, AttributeError) as error:
            _logger.warning("NCCL could not be told to give up: %s", error)
        if not collective.wait(_ABORT_SECONDS):
            _logger.error("a collective hangs on this process's GPU, which cannot be used any more")
            atexit.register(os._exit, 1)  # run before the interpreter frees what is on that GPU, which would hang


def _contiguous(array: Any) -> Any:
    return array if array.flags["C_CONTIGUOUS"] else array.copy("C")


def _empty(shape: tuple[int, ...], like: Any) -> Any:
    import pygpu

    return pygpu.empty(shape, dtype=like.dtype, context=like.context)
