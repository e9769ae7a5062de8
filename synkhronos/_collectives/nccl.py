"""Collectives of device arrays over NCCL, through `pygpu.collectives`, and reductions on one GPU.

NCCL checks little and cannot be interrupted. Therefore the ranks first compare shapes, at a barrier, which also shows
that all ranks are alive. Each collective then runs in its own thread, while the calling thread checks the other ranks.
If a rank dies, the calling thread ends the collective with ``ncclCommAbort`` and raises the error of its check.

Reductions on a GPU are element-wise kernels of pygpu, for the ops and dtypes for which the result is the same as that
of `reductions`. All other values are copied to the host and reduced there.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from synkhronos._collectives.reductions import OPS, check_equal_shapes, result_dtype
from synkhronos._collectives.transport import ShapesDiffer, Workspace
from synkhronos._native import native
from synkhronos._utils.interrupts import Background

if TYPE_CHECKING:
    from synkhronos._processes import Barrier


def make_clique(context: Any) -> bytes:
    """Return the identifier of a new communicator; one rank calls this and sends the result to the others."""
    from pygpu import collectives

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this node, so NCCL need not listen elsewhere
    return bytes(collectives.GpuCommCliqueId(context=context).comm_id)


def connect(context: Any, clique: bytes, n_ranks: int, rank: int) -> Any:
    """Join a communicator. All ranks call this at the same time, because it waits for all of them.

    Parameters
    ----------
    context : pygpu.gpuarray.GpuContext
    clique : bytes
        Identifier from `make_clique`.
    n_ranks, rank : int

    Returns
    -------
    pygpu.collectives.GpuComm
    """
    from pygpu import collectives

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if "NCCL_HOSTID" in os.environ:  # set by users who run several ranks on one GPU: NCCL needs different ids then
        os.environ["NCCL_HOSTID"] += f"-{rank}"
    return collectives.GpuComm(collectives.GpuCommCliqueId(context=context, comm_id=bytearray(clique)), n_ranks, rank)


def abort(comm: Any) -> None:
    """Call ``ncclCommAbort`` for a communicator of pygpu 0.7.6, which has no method for it.

    The layout of its structures is ``GpuComm {PyObject_HEAD; gpucomm *c}`` and ``gpucomm {context; ncclComm_t}``.
    """
    pointer = ctypes.c_void_p
    library = ctypes.CDLL("libnccl.so")
    inner = pointer.from_address(id(comm) + object.__basicsize__).value
    assert inner is not None
    handle = pointer.from_address(inner + ctypes.sizeof(pointer)).value
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))  # its destructor would free the communicator a second time
    library.ncclCommAbort(pointer(handle))


_logger = logging.getLogger("synkhronos")

#: Dtypes that NCCL supports through pygpu.
_DTYPES = frozenset(map(np.dtype, ("int8", "int32", "int64", "uint64", "float16", "float32", "float64")))
_MAX_ELEMENTS = 2**31 - 1  # of one collective in pygpu
_POLL = 0.05  # seconds between two checks of the other ranks
_ABORT_SECONDS = 5.0  # time that an aborted collective may take to end


def nccl_reduces(dtype: np.dtype, op: str, widen: bool) -> bool:
    """Return whether NCCL can reduce arrays with the same result as the host.

    Parameters
    ----------
    dtype : dtype
        Dtype of the arrays.
    op : str
        Key of `OPS`.
    widen : bool
        Whether the result must have the dtype `result_dtype`, instead of ``dtype``.
    """
    if dtype not in _DTYPES or OPS[op].nccl is None or (OPS[op].weighted and dtype.kind != "f"):
        return False
    if dtype == np.float16 and op not in ("max", "min"):  # NCCL rounds every partial sum
        return False
    return not widen or result_dtype(dtype, op) == dtype


def nccl_moves(dtype: np.dtype) -> bool:
    """Return whether NCCL can broadcast and gather arrays of ``dtype``."""
    return dtype in _DTYPES


class NcclTransport:
    """Transport of one rank over NCCL, for device arrays of the dtypes that NCCL supports.

    Parameters
    ----------
    comm : pygpu.collectives.GpuComm
        Communicator of all ranks.
    workspace : Workspace
        Shared memory of the session, in which ranks compare shapes.
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
        """Bring the ranks in step. Every rank calls it at the start of a command."""
        self._turn = 0

    def agree(self, arrays: Sequence[Any]) -> None:
        """Wait for all ranks, and check that their arrays have the same shapes.

        Calls use two rows of signatures alternately. A rank that writes to a row again has passed the barrier of the
        call in between, so all other ranks have read that row.

        Raises
        ------
        RuntimeError
            If an earlier collective failed.
        ShapesDiffer
            On every rank, if the shapes differ.
        """
        if self._failed:
            raise RuntimeError("NCCL cannot be used after a failed collective; pass nccl=False")
        signatures = self._signatures[self._turn]
        self._turn ^= 1
        signatures[self._rank] = hash(tuple(tuple(array.shape) for array in arrays))
        self._barrier()
        if (signatures != signatures[self._rank]).any():
            raise ShapesDiffer("the shapes differ between ranks")

    def all_reduce(self, arrays: Sequence[Any], op: str, weights: Sequence[float] | None) -> bool:
        """Reduce arrays over the ranks, in place.

        Parameters
        ----------
        arrays : sequence of device array
            Arrays with the same shapes and dtypes on every rank; those that are not C-contiguous are copied.
        op : str
            Key of `OPS`.
        weights : sequence of float, or None
            Weight of each rank, for a weighted op. ``None``: equal weights.

        Returns
        -------
        bool
            Whether all arrays were reduced without a copy.

        Raises
        ------
        ShapesDiffer
            On every rank, before any array changes, if shapes differ between ranks.
        """
        works = [_contiguous(array) for array in arrays]
        self._begin(works, op, weights, arrays)
        self._run_chunks(lambda chunk: self._comm.all_reduce(chunk, OPS[op].nccl, chunk), works)
        for array, done in zip(arrays, works):
            if done is not array:
                array[...] = done
        return all(done is array for array, done in zip(arrays, works))

    def reduce(self, arrays: Sequence[Any], op: str, weights: Sequence[float] | None, root: int) -> list[Any]:
        """Reduce arrays over the ranks into new arrays on rank ``root``; return an empty list on other ranks."""
        works = [array.copy() for array in arrays]
        self._begin(works, op, weights, works)
        is_root = root == self._rank
        self._run_chunks(lambda chunk: self._comm.reduce(chunk, OPS[op].nccl, chunk if is_root else None, root), works)
        return works if is_root else []

    def broadcast(self, arrays: Sequence[Any], root: int) -> None:
        """Copy C-contiguous arrays of rank ``root`` into those of all other ranks, which have the same shapes."""
        self.agree(arrays)
        self._run_chunks(lambda chunk: self._comm.broadcast(chunk, root), arrays)

    def all_gather(self, arrays: Sequence[Any]) -> list[Any]:
        """Concatenate the arrays of all ranks along axis 0; shapes must be equal on all ranks."""
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

    # -- steps of a collective

    def _begin(self, works: Sequence[Any], op: str, weights: Sequence[float] | None, arrays: Sequence[Any]) -> None:
        """Compare shapes with the other ranks; for an average, multiply this rank's arrays by its share of the weights.

        The arrays are scaled before the sum, so that the sum does not overflow.
        """
        self.agree(arrays)
        if OPS[op].weighted:
            factor = native.normalized(weights if weights is not None else (1.0,) * self._n_ranks)[self._rank]
            for array in works:
                scale(array, factor)

    def _chunks(self, arrays: Sequence[Any], times: int = 1) -> list[Any]:
        """Return 1-d views of arrays, each of at most ``_MAX_ELEMENTS // times`` elements."""
        flat = [array.reshape((array.size,)) for array in arrays]
        step = _MAX_ELEMENTS // times
        return [one[start : start + step] for one in flat for start in range(0, one.size, step)]

    def _run_chunks(self, work: Callable[[Any], None], arrays: Sequence[Any]) -> None:
        """Run a collective on the chunks of arrays; see `_run`."""

        def work_on_all() -> None:
            for chunk in self._chunks(arrays):
                work(chunk)

        self._run(work_on_all, arrays)

    def _run(self, work: Callable[[], None], arrays: Sequence[Any]) -> None:
        """Run a collective in a separate thread until ``arrays`` are complete, and check the other ranks meanwhile."""

        def run() -> None:
            work()
            for array in arrays:
                array.sync()  # releases the GIL

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
        """Abort the collective, so that the device is usable again.

        If the collective hangs all the same, ensure that this process can exit.
        """
        try:
            abort(self._comm)
        except (OSError, AttributeError) as error:
            _logger.warning("cannot abort NCCL: %s", error)
        if not collective.wait(_ABORT_SECONDS):
            _logger.error("a collective hangs on this process's GPU, which is unusable from now on")
            atexit.register(os._exit, 1)  # the interpreter would hang when it frees memory of that GPU


def _contiguous(array: Any) -> Any:
    return array if array.flags["C_CONTIGUOUS"] else array.copy("C")


def _empty(shape: tuple[int, ...], like: Any) -> Any:
    """Return a new device array with the dtype and context of another one."""
    import pygpu

    return pygpu.empty(shape, dtype=like.dtype, context=like.context)


# -- reductions on one GPU


def accumulates(dtype: np.dtype, op: str, wanted: np.dtype | None) -> bool:
    """Return whether slices' results can be reduced on the device.

    Averages of integers, sums that NumPy widens, half precision and booleans are reduced on the host.

    Parameters
    ----------
    dtype : dtype
        Dtype of the values.
    op : str
        Key of `OPS`, or ``"gather"``.
    wanted : dtype or None
        Dtype of the result; ``None``: that of `result_dtype`.
    """
    if op == "gather":
        return True
    if dtype.kind == "f":
        return dtype.itemsize >= 4 and wanted in (None, dtype)
    return (
        dtype.kind in "iu" and not OPS[op].weighted and (result_dtype(dtype, op) if wanted is None else wanted) == dtype
    )


@functools.cache
def _kernel(context: Any, expression: str, dtype: str) -> Any:
    """Return the (cached) kernel for a C expression in the elements ``a`` and ``b`` and the scalar ``s``."""
    from pygpu.elemwise import GpuElemwise, arg

    arguments = [arg("a", dtype, read=True, write=True)]
    if "b" in expression:
        arguments.append(arg("b", dtype, read=True))
    if "s" in expression:
        arguments.append(arg("s", "float64" if dtype == "float64" else "float32", scalar=True))
    return GpuElemwise(context, expression, arguments, convert_f16=True)


def _apply(expression: str, array: Any, *operands: Any) -> None:
    """Run a kernel on ``array``, in place; pygpu's kernels do not take 0-d arrays, so these are reshaped."""
    if array.size:
        flat = [x.reshape((1,)) if getattr(x, "shape", None) == () and not np.isscalar(x) else x for x in operands]
        target = array.reshape((1,)) if array.shape == () else array
        _kernel(array.context, expression, str(array.dtype))(target, *flat)


def scale(array: Any, factor: float) -> None:
    """Multiply a floating-point device array by a number, in place; a factor of 0 also sets NaNs to 0."""
    if factor == 0:
        _apply("a = 0", array)
    elif factor != 1:
        _apply("a = a * s", array, factor)


class DeviceAccumulator:
    """Reduce the results of a rank's slices on the device, one slice at a time.

    The parameters are those of `Accumulator`, its counterpart on the host.
    """

    def __init__(self, op: str, total: int, what: str) -> None:
        self._op = op
        self._total = total
        self._what = what
        self._parts: list[Any] = []

    def add(self, value: Any, count: int) -> None:
        """Add the result of one slice of ``count`` data points."""
        share = count / self._total if self._total else 1.0
        if self._op == "gather":
            self._parts.append(value.reshape((1,)) if value.shape == () else value)
        elif not self._parts:
            self._parts.append(value.copy())
            if OPS[self._op].weighted:
                scale(self._parts[0], share)
        else:
            check_equal_shapes([self._parts[0].shape, value.shape], self._op, self._what)
            operands = (value, share) if OPS[self._op].weighted else (value,)
            _apply(OPS[self._op].on_device, self._parts[0], *operands)

    def result(self) -> Any:
        """Return the reduction, as a device array."""
        if self._op == "gather":
            import pygpu

            return pygpu.concatenate(self._parts, 0, context=self._parts[0].context)
        return self._parts[0]
