"""Reading arrays straight out of the memory of another process: ``process_vm_readv(2)``.

The kernel allows it between processes of one user that may trace each other. Where only descendants may be traced
(Yama), a process can say who else may: the ranks name the master, which stands for all that descend from it, and only
while a collective lasts. Where it is not allowed at all, `can_read` says so, and collectives go another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import numpy as np

from synkhronos._interrupts import let_interrupts_pass

__all__ = ["address_of", "can_read", "read", "readable_by"]

_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_read = getattr(_libc, "process_vm_readv", None)
if _read is not None:
    _read.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    _read.restype = ctypes.c_ssize_t


def address_of(array: np.ndarray) -> int:
    """Where the elements of an array lie in this process."""
    address: int = array.__array_interface__["data"][0]
    return address


def read(pid: int, address: int, out: np.ndarray) -> None:
    """Fill a C-contiguous array with what lies at an address of another process.

    Raises
    ------
    OSError
        If that is not allowed, or the process is gone, or has nothing there.
    """
    assert _read is not None
    to, done = address_of(out), 0
    while done < out.nbytes:
        here, there = _Range(to + done, out.nbytes - done), _Range(address + done, out.nbytes - done)
        n_bytes = _read(pid, here, 1, there, 1, 0)
        if n_bytes <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot read the memory of process {pid}: {os.strerror(number)}")
        done += n_bytes


def can_read(pid: int, address: int) -> bool:
    """Whether this process can read a byte at an address of another one."""
    try:
        read(pid, address, np.empty(1, np.uint8))
    except (OSError, AssertionError) as error:
        let_interrupts_pass(error)
        return False
    return True


@contextlib.contextmanager
def readable_by(pid: int) -> Iterator[None]:
    """Let a process and its descendants read the memory of this one, in the block."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(0), 0, 0, 0)
