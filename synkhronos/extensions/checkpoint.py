"""Save every rank's values of shared variables, or a training loop, to a checkpoint file, and load them.

The file is a NumPy ``.npz`` archive with one array for each variable and rank, named ``<position>/<rank>``, or with the
arrays that `synkhronos.Run.state` returns. Nothing in it is pickled. It is written under another name, flushed to the
disk, and then renamed. So whenever the process ends, the path holds either the complete old checkpoint or the complete
new one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import stat
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Union

import numpy as np
from numpy.lib import format as npy

import synkhronos as synk
from synkhronos._utils.interrupts import deferred_interrupts, let_interrupts_pass

__all__ = ["load", "load_run", "save", "save_run"]

Path = Union[str, "os.PathLike[str]"]


def save(path: Path, shared_vars: Any) -> None:
    """Save the values of shared variables on every rank to a file.

    The controller copies the values of all ranks and writes the file.

    Parameters
    ----------
    path : str or path
        The file. An existing file is replaced atomically. The data are first written to ``<path>.partial``; an older
        file or symbolic link of this name is removed.
    shared_vars : shared variable or list
        The variables, which functions of the session must use. They may have any dtype and shape, and shapes may differ
        between ranks.

    Raises
    ------
    OSError
        If the file cannot be written, for example because the disk is full. An older checkpoint stays, and no partial
        file is left. The message names the file and the reason.
    TypeError, ValueError, SessionError
        As in `synkhronos.get_value`.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     checkpoint.save("run.npz", s)
    """
    variables = _listed(shared_vars)
    arrays = {}
    for rank in range(_count_ranks(variables)):
        for position, value in enumerate(synk.get_value(rank, variables)):
            arrays[f"{position}/{rank}"] = value
    _write(path, arrays, _comment(len(variables), len(arrays)))


def save_run(path: Path, run: synk.Run) -> None:
    """Save a training loop to a file, from which `synkhronos.loop` continues; call this in ``on_epoch``.

    Parameters
    ----------
    path : str or path
        The file. An existing file is replaced atomically, as by `save`.
    run : Run
        What ``on_epoch`` got.

    Raises
    ------
    OSError
        As in `save`.
    TypeError, SessionError
        As in `synkhronos.Run.state`.

    Examples
    --------
    >>> w, x = theano.shared(0.0, "w"), T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], w ** 2, updates=[(w, w + x.mean())])
    ...     options = {"params": [w], "batch_size": 1, "rule": synk.rules.LocalSGD(every=2)}
    ...     save = lambda run: checkpoint.save_run("run.npz", run)
    ...     run = synk.loop(f, [np.ones(4)], epochs=2, on_epoch=save, **options)
    ...     run = synk.loop(f, [np.ones(4)], epochs=5, resume=checkpoint.load_run("run.npz"), **options)
    >>> print(run.steps, run.params[0])
    [10, 10] 10.0
    """
    state = run.state()
    _write(path, state, _comment_of_run(len(state)))


def load_run(path: Path) -> dict[str, np.ndarray]:
    """Load a training loop that `save_run` saved.

    Parameters
    ----------
    path : str or path
        The file.

    Returns
    -------
    dict of str to numpy.ndarray
        The value of ``resume`` for `synkhronos.loop`, which checks that it belongs to such a loop.

    Raises
    ------
    OSError
        If the file does not exist or cannot be read.
    ValueError
        If the file is damaged, or not one of `save_run`. The message names the file and the reason.

    Examples
    --------
    >>> state = checkpoint.load_run("run.npz")  # doctest: +SKIP
    """

    def check(arrays: Mapping[str, np.ndarray], comment: bytes) -> None:
        if comment != _comment_of_run(len(arrays)) or "about" not in arrays:
            raise ValueError(f"it holds {len(arrays)} arrays, and is not the complete state of a training loop")

    return {name: value.copy() for name, value in _read_archive(path, check).items()}


def _write(path: Path, arrays: Mapping[str, np.ndarray], comment: bytes) -> None:
    """Write an archive of arrays to a file, in place of an existing one, atomically."""
    target = os.fsdecode(path)
    partial = f"{target}.partial"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)  # a file that a killed process left, or a symbolic link
    made: list[Any] = []
    try:
        with deferred_interrupts():
            made.append(open(partial, "xb"))  # noqa: SIM115 - it is closed in any case
        with made[0] as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.comment = comment
                for name, value in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        npy.write_array(member, value, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        with deferred_interrupts(), contextlib.suppress(OSError):
            for file in made:
                os.unlink(partial)
                file.close()
        let_interrupts_pass(error)
        if isinstance(error, OSError):
            raise OSError(error.errno or errno.EIO, error.strerror or str(error), target) from None
        raise
    # the file is complete, even if its folder cannot be flushed
    with deferred_interrupts(), contextlib.suppress(OSError):
        folder = os.open(os.path.dirname(os.path.abspath(target)), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: Path, shared_vars: Any) -> None:
    """Set shared variables on every rank to the values in a file that `save` wrote.

    If the saved values were equal on all ranks, the session may have another number of ranks.

    Parameters
    ----------
    path : str or path
        The file, which the controller reads.
    shared_vars : shared variable or list
        As many as were saved, in the same order, with the same dtypes and numbers of dimensions.

    Raises
    ------
    SessionError
        If there is no session.
    OSError
        If the file does not exist or cannot be read.
    ValueError
        If the file is damaged, is not a checkpoint, or holds other variables. Also if the number of ranks differs and
        the saved values differ between ranks. No variable is changed. The message names the file and the reason.

    Examples
    --------
    >>> s = theano.shared(np.zeros(1), "s")
    >>> with synk.session(2):
    ...     synk.scatter(s, [1, 2, 3])
    ...     checkpoint.save("run.npz", s)
    ...     synk.broadcast(s, [0])
    ...     checkpoint.load("run.npz", s)
    ...     print(synk.gather(s, nd_up=0))
    [1. 2. 3.]
    """
    variables = _listed(shared_vars)
    n_ranks = _count_ranks(variables)
    saved, n_saved = _read(path)
    if len(saved) != len(variables) * n_saved:
        raise ValueError(
            f"{path}: got {len(variables)} variables to load; expected {len(saved) // n_saved}, as many as were saved"
        )
    columns = [[saved[position, rank] for rank in range(n_saved)] for position in range(len(variables))]
    for var, values in zip(variables, columns):
        for value in values:
            if value.dtype != np.dtype(var.dtype) or value.ndim != var.ndim:
                raise ValueError(
                    f"{path}: has {value.dtype} of {value.ndim} dimensions for {var}; expected {var.dtype} of "
                    f"{var.ndim}. Name the variables in the order in which they were saved"
                )
            if any(fixed and length != 1 for fixed, length in zip(var.broadcastable, value.shape)):
                raise ValueError(
                    f"{path}: has shape {value.shape} for {var}; expected length 1 where it is broadcastable: "
                    f"{var.broadcastable}"
                )
    if n_saved != n_ranks:
        for var, values in zip(variables, columns):
            if any(not np.array_equal(values[0], value, equal_nan=value.dtype.kind in "fc") for value in values[1:]):
                raise ValueError(
                    f"{path}: {var} was saved with different values on {n_saved} ranks; expected a session of as "
                    f"many, got {n_ranks}"
                )
        synk.broadcast(variables, [values[0] for values in columns])
        return
    for rank in range(n_ranks):
        synk.set_value(rank, variables, [values[rank] for values in columns])


def _read(path: Path) -> tuple[dict[tuple[int, int], np.ndarray], int]:
    """Return all arrays of a checkpoint, by (position, rank), and the number of ranks."""
    counts = [0, 0]

    def check(arrays: Mapping[str, np.ndarray], comment: bytes) -> None:
        places = list(map(_place, arrays))
        counts[:] = n_variables, n_ranks = [1 + max((place[i] for place in places), default=-1) for i in (0, 1)]
        if not arrays or len(arrays) != n_variables * n_ranks:
            raise ValueError(f"it holds {len(arrays)} arrays, not one for each variable and rank")
        if comment and comment != _comment(n_variables, len(arrays)):  # earlier versions wrote none
            raise ValueError(f"it holds {len(arrays)} arrays of {n_variables} variables; another number was saved")

    return {_place(name): value for name, value in _read_archive(path, check).items()}, counts[1]


def _read_archive(path: Path, check: Callable[[Mapping[str, np.ndarray], bytes], None]) -> dict[str, np.ndarray]:
    """Return the arrays in a file, by name; ``check(arrays, comment)`` raises if they are not as they were saved."""
    path = os.fsdecode(path)
    with deferred_interrupts():  # an interrupt between the opener and `open` would leak the descriptor
        opened = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    with opened as file:  # may be a pipe, which O_NONBLOCK opens without waiting for a writer
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is not a regular file")
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                arrays = {_name(info.filename): _array(archive.read(info)) for info in entries}
                comment = archive.comment
            if len(arrays) != len(entries):
                raise ValueError(f"it holds {len(entries)} arrays, of which some have the same name")
            check(arrays, comment)
        except MemoryError:
            raise
        except Exception as error:  # for damaged files, zipfile, zlib and NumPy raise a dozen classes of exceptions
            let_interrupts_pass(error)
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            reason = f"{error}" or type(error).__name__
            raise ValueError(f"{path} is damaged, or not a checkpoint: {reason}") from None
    return arrays


def _comment(n_variables: int, n_arrays: int) -> bytes:
    """Return the archive's comment, which has the number of entries, because zipfile does not detect missing ones."""
    return f"synkhronos: {n_variables} variables, {n_arrays} arrays".encode()


def _comment_of_run(n_arrays: int) -> bytes:
    """Return the same for a file of `save_run`."""
    return f"synkhronos: a training loop, {n_arrays} arrays".encode()


def _name(entry: str) -> str:
    """Return the name of an array from that of its entry in an archive."""
    if not entry.endswith(".npy"):
        raise ValueError(f"it holds {entry!r}")
    return entry[: -len(".npy")]


def _place(name: str) -> tuple[int, int]:
    """Return the position and the rank of an array from its name."""
    position, _, rank = name.partition("/")
    if not (position.isdecimal() and rank.isdecimal() and name == f"{int(position)}/{int(rank)}"):
        raise ValueError(f"it holds {f'{name}.npy'!r}")
    return int(position), int(rank)


def _array(contents: bytes) -> np.ndarray:
    """Return the array in the bytes of a ``.npy`` file, as a view of them; zipfile has verified their checksum."""
    file = io.BytesIO(contents)
    if npy.read_magic(file) != (1, 0):
        raise ValueError("it holds an array that is not in NumPy's format for numbers")
    shape, fortran_order, dtype = npy.read_array_header_1_0(file)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(contents) - file.tell():
        raise ValueError(f"it holds {len(contents)} bytes as an array of {dtype} of shape {shape}")
    return np.ndarray(shape, dtype, contents, file.tell(), order="F" if fortran_order else "C")


def _listed(shared_vars: Any) -> Sequence[Any]:
    return list(shared_vars) if isinstance(shared_vars, (list, tuple)) else [shared_vars]


def _count_ranks(variables: Sequence[Any]) -> int:
    return len(synk.get_shapes(variables[:1])[0])
