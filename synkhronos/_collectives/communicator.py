"""NCCL communicators, as pygpu makes them: meeting, and giving up."""

from __future__ import annotations

import ctypes
import os
from typing import Any

__all__ = ["abort", "connect", "make_clique"]


def make_clique(context: Any) -> bytes:
    """A new identifier, by which ranks find each other; made by one of them for all."""
    from pygpu import collectives

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine: listen nowhere else
    return bytes(collectives.GpuCommCliqueId(context=context).comm_id)


def connect(context: Any, clique: bytes, n_ranks: int, rank: int) -> Any:
    """Join the ranks; every rank calls this at the same time. Returns a `pygpu.collectives.GpuComm`."""
    from pygpu import collectives

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if "NCCL_HOSTID" in os.environ:  # set by the user to have several ranks on one GPU
        os.environ["NCCL_HOSTID"] += f"-{rank}"
    return collectives.GpuComm(collectives.GpuCommCliqueId(context=context, comm_id=bytearray(clique)), n_ranks, rank)


def abort(comm: Any) -> None:
    """``ncclCommAbort`` for a communicator of pygpu 0.7.6, which has no way to do it.

    Its layout: ``GpuComm {PyObject_HEAD; gpucomm *c}``, ``gpucomm {context; ncclComm_t}``.
    """
    pointer = ctypes.c_void_p
    library = ctypes.CDLL("libnccl.so")
    inner = pointer.from_address(id(comm) + object.__basicsize__).value
    assert inner is not None
    handle = pointer.from_address(inner + ctypes.sizeof(pointer)).value
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))  # its destructor would free the communicator once more
    library.ncclCommAbort(pointer(handle))
