"""The routines of a BLAS that Theano's C code calls, tried as it calls them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["SYMBOLS", "TABLE", "file_of", "load", "load_table", "objection"]

#: Routines of levels 1 to 3 that the C code written by Theano calls by these names.
SYMBOLS = ("sdot_", "ddot_", "sgemv_", "dgemv_", "sger_", "dger_", "sgemm_", "dgemm_")

#: The name under which a module holds the addresses of `SYMBOLS`, as the compiler and the loader have resolved them.
TABLE = "synkhronos_blas"

_N = 8
_MATRIX = [float(i * 7 % 5 - 1) for i in range(_N * _N)]  # column after column


def load(library: str, prefix: str = "") -> dict[str, int]:
    """Load a BLAS.

    Loading it also lets threadpoolctl see it before Theano's first compiled module needs it.

    Parameters
    ----------
    library : str
        A path, or a bare file name that the loader looks for.
    prefix : str
        Of its symbols.

    Returns
    -------
    dict
        The address of each of `SYMBOLS`.

    Raises
    ------
    OSError
        If it cannot be loaded, or lacks one of them; the text is what the user is told.
    """
    blas = ctypes.CDLL(library)
    for symbol in SYMBOLS:
        if not hasattr(blas, prefix + symbol):
            raise OSError(f"it has no routine {prefix}{symbol}")
    return {symbol: ctypes.cast(blas[prefix + symbol], ctypes.c_void_p).value or 0 for symbol in SYMBOLS}


def load_table(module: str) -> dict[str, int]:
    """Load a module that was linked to a BLAS; returns and raises what `load` does."""
    addresses = (ctypes.c_void_p * len(SYMBOLS)).in_dll(ctypes.CDLL(module), TABLE)
    return {symbol: address or 0 for symbol, address in zip(SYMBOLS, addresses)}


def objection(routines: Mapping[str, int]) -> str:
    """Say why Theano must not be linked to a BLAS; empty if it may.

    Its integers must have 32 bits, and what it overwrites may hold anything, NaN too: Theano passes memory that was
    never written. (Theano has a check of its own for that, whose C code lacks a parenthesis.)

    Parameters
    ----------
    routines : mapping
        The addresses of `SYMBOLS`.
    """
    little = sys.byteorder == "little"
    seen = _elements_seen(routines["ddot_"], little)
    if seen == (0 if little else _N):
        layer = os.environ.get("MKL_INTERFACE_LAYER", "")
        because = f" (MKL_INTERFACE_LAYER is {layer})" if "ILP64" in layer.upper() else ""
        return f"its integers have 64 bits, and those that are passed have 32{because}"
    if seen != (_N if little else 0):
        return "its dot products are wrong"
    if not _multiplies(routines):
        return "its products are wrong, or keep what was in the memory that they overwrite"
    return ""


def _elements_seen(ddot: int, little: bool) -> float:
    """How long ``ddot`` takes vectors to be whose length is `_N` for one width of integers, and none for the other.

    The 64 bits at that address are ``_N - 2**32``, a negative number, in little-endian order, where their first half is
    `_N`; in the other order they are `_N`, and their first half is 0. So neither reads beyond the vectors.
    """
    size, step = ctypes.c_int64(_N - 2**32 if little else _N), ctypes.c_int64(1)
    ones = (ctypes.c_double * _N)(*[1.0] * _N)
    function = ctypes.CFUNCTYPE(ctypes.c_double)(ddot)
    return float(function(ctypes.byref(size), ones, ctypes.byref(step), ones, ctypes.byref(step)))


def _multiplies(routines: Mapping[str, int]) -> bool:
    """Whether ``y = 0 * y + A x`` forgets a NaN in ``y`` and is right, for a vector and its transpose, and a matrix."""
    size, step = ctypes.c_int(_N), ctypes.c_int(1)
    zero, one = ctypes.c_double(0.0), ctypes.c_double(1.0)
    matrix = (ctypes.c_double * len(_MATRIX))(*_MATRIX)
    gemv, gemm = (ctypes.CFUNCTYPE(None)(routines[name]) for name in ("dgemv_", "dgemm_"))
    sizes, factor, term = [ctypes.byref(size)] * 3, ctypes.byref(one), ctypes.byref(zero)
    rows = [_MATRIX[i::_N] for i in range(_N)]
    columns = [_MATRIX[i * _N : (i + 1) * _N] for i in range(_N)]
    for transpose, lines in ((b"N", rows), (b"T", columns)):
        y: Any = (ctypes.c_double * _N)(*[float("nan")] * _N)
        gemv(transpose, *sizes[:2], factor, matrix, sizes[0], matrix, ctypes.byref(step), term, y, ctypes.byref(step))
        if list(y) != [_dot(line, columns[0]) for line in lines]:
            return False
    z: Any = (ctypes.c_double * len(_MATRIX))(*[float("nan")] * len(_MATRIX))
    gemm(b"N", b"N", *sizes, factor, matrix, sizes[0], matrix, sizes[0], term, z, sizes[0])
    return list(z) == [_dot(row, column) for column in columns for row in rows]


def _dot(x: list[float], y: list[float]) -> float:
    return sum(map(float.__mul__, x, y))


class _Symbol(ctypes.Structure):
    _fields_ = tuple(zip(("file", "base", "name", "address"), 2 * (ctypes.c_char_p, ctypes.c_void_p)))


def file_of(address: int) -> str:
    """The file that a routine was loaded from."""
    symbol = _Symbol()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
    return symbol.file.decode(errors="replace") if found else ""
