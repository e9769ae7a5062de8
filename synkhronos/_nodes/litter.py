"""Files that a library of MPI has left in ``/dev/shm``, because its program was killed.

Invariant: only files of this user are removed, and only those that no process holds open or maps.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["sweep"]

#: MPICH's and UCX's, Open MPI's (versions 5 and 4), Intel MPI's.
_NAMES = re.compile(r"(mpich_sh(m_|ar_tmp)|ucx_shm_posix_|sm_segment\.|vader_segment\.|Intel_MPI_).+")

_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}


def sweep(folder: Path = Path("/dev/shm")) -> None:
    """Remove what nobody uses.

    Parameters
    ----------
    folder : Path
        Where shared memory has names.
    """
    left = {}
    with contextlib.suppress(OSError):  # there is no such folder
        for name in filter(_NAMES.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):  # another process has removed it
                status = (folder / name).lstat()
                if status.st_uid == os.geteuid():
                    left[status.st_dev, status.st_ino] = folder / name
    if not left:
        return
    with contextlib.suppress(OSError):  # a process that does not tell what it uses may use anything
        for used in _used():
            left.pop(used, None)
        for path in left.values():
            path.unlink(missing_ok=True)


def _used() -> Iterator[tuple[int, int]]:
    """Device and inode of all files that processes hold open or map: those of this user, at least.

    Raises
    ------
    PermissionError
        If there are processes of this user that do not tell, or that this one cannot see.
    """
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in _FIRST_NAMESPACES}
    if own["ipc"] == _FIRST_NAMESPACES["ipc"] and own["pid"] != _FIRST_NAMESPACES["pid"]:
        raise PermissionError("a container with the memory of its host, and without sight of its processes")
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield from _used_by(f"/proc/{process}")
        except PermissionError:
            with contextlib.suppress(FileNotFoundError):
                if process != "1" and os.stat(f"/proc/{process}").st_uid == os.geteuid():  # 1: that of a container
                    raise
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue


def _used_by(process: str) -> Iterator[tuple[int, int]]:
    with open(f"{process}/maps") as maps:
        for line in maps:
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = (int(part, 16) for part in device.split(":"))
            yield os.makedev(major, minor), int(inode)
    for fd in os.listdir(f"{process}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed
            status = os.stat(f"{process}/fd/{fd}")
            yield status.st_dev, status.st_ino
