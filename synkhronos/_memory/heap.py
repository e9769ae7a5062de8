"""Keeping the memory that a computation frees, so that the next one need not have it zeroed by the kernel again.

Theano frees each intermediate result once it is used. glibc would hand arrays of some MiB straight back to the kernel,
and fault them in again, page by page, at the next call: a fifth of a training step, where they are many.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory", "return_freed_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024  # more is refused by glibc
_KEPT_BYTES = 512 * 1024 * 1024  # at the end of the heap
_DEFAULT = 128 * 1024


def keep_freed_memory() -> None:
    """Have this process keep up to 512 MiB that were freed; arrays beyond 32 MiB are given back as ever."""
    _set(_LARGEST_MMAP_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`, and give back what was kept."""
    libc = _set(_DEFAULT, _DEFAULT)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def _set(mmap_threshold: int, trim_threshold: int) -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not in every C library
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        libc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
    return libc
