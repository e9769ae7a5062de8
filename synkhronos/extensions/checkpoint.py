"""Saving every rank's values of shared variables to a file, and loading them back.

The file is a NumPy ``.npz`` archive with one array for each variable and rank, named ``<position>/<rank>``; nothing
in it is pickled. It is written under another name, flushed to the disk, and then renamed, so that whatever ends the
process, the path holds either the whole old checkpoint or the whole new one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Union

import numpy as np

import synkhronos as synk

__all__ = ["load", "save"]

Path = Union[str, "os.PathLike[str]"]


def save(path: Path, shared_vars: Any) -> None:
    """Write the values that shared variables have on every rank.

    Parameters
    ----------
    path : str or path
        An existing file is replaced, atomically. While saving, there is also ``<path>.partial`` beside it.
    shared_vars : shared variable or list
        Used by functions of the session; of any dtype and shape, which may differ between ranks.

    Raises
    ------
    OSError
        If the file cannot be written; an older one stands.
    TypeError, ValueError, SessionError
        As `synkhronos.get_value`.
    """
    variables = _listed(shared_vars)
    arrays = {}
    for rank in range(_count_ranks(variables)):
        for position, value in enumerate(synk.get_value(rank, variables)):
            arrays[f"{position}/{rank}"] = value
    target = os.fspath(path)
    partial = f"{target}.partial"
    with open(partial, "wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target)
    folder = os.open(os.path.dirname(os.path.abspath(target)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path, shared_vars: Any) -> None:
    """Give every rank the values that `save` wrote.

    Parameters
    ----------
    path : str or path
    shared_vars : shared variable or list
        As many as were saved, in the same order.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If the file holds other variables, or values that differ between ranks, of another number of ranks. Nothing is
        changed.
    """
    variables = _listed(shared_vars)
    n_ranks = _count_ranks(variables)
    with np.load(os.fspath(path), allow_pickle=False) as archive:
        saved = {tuple(map(int, name.split("/"))): archive[name] for name in archive.files}
    n_saved = 1 + max(rank for _, rank in saved)
    if len(saved) != len(variables) * n_saved:
        raise ValueError(f"{path}: {len(saved) // n_saved} variables were saved; got {len(variables)} to load")
    columns = [[saved[position, rank] for rank in range(n_saved)] for position in range(len(variables))]
    for var, values in zip(variables, columns):
        if values[0].dtype != np.dtype(var.dtype) or values[0].ndim != var.ndim:
            raise ValueError(
                f"{path}: expected {var.dtype} of {var.ndim} dimensions for {var}; "
                f"found {values[0].dtype} of {values[0].ndim}"
            )
    if n_saved != n_ranks:
        for var, values in zip(variables, columns):
            if any(not np.array_equal(values[0], value, equal_nan=value.dtype.kind in "fc") for value in values[1:]):
                raise ValueError(f"{path}: {var} has different values on {n_saved} ranks; the session has {n_ranks}")
        synk.broadcast(variables, [values[0] for values in columns])
        return
    for rank in range(n_ranks):
        synk.set_value(rank, variables, [values[rank] for values in columns])


def _listed(shared_vars: Any) -> Sequence[Any]:
    return list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]


def _count_ranks(variables: Sequence[Any]) -> int:
    return len(synk.get_shapes(variables[:1])[0])
