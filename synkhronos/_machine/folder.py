"""A private folder of links, named by what it holds, so that no run can disturb another.

Invariants: a folder that another user owns, or could write to, is never used; a folder appears complete or not at all;
its contents never change, as other contents have another name. It may be deleted whenever no program runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping

__all__ = ["private_folder"]


def private_folder(links: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Make a folder of symbolic links, unless there is one.

    Parameters
    ----------
    links : mapping
        From the path of each link, relative to the folder, to its target.
    environment : mapping
        Environment variables; ``XDG_CACHE_HOME`` and ``HOME`` say where the user's caches are.

    Returns
    -------
    str
        The folder's path; mode 0700.

    Raises
    ------
    PermissionError
        If there is no place for it that only this user can write to.
    """
    contents = "\0".join(f"{link}\0{target}" for link, target in sorted(links.items()))
    name = "links-" + hashlib.sha256(os.fsencode(contents)).hexdigest()[:20]
    tried = []
    for parent in _parents(environment):
        tried.append(parent)
        try:
            os.makedirs(os.path.dirname(parent), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o700)
            if _is_safe(parent):
                return _filled(os.path.join(parent, name), links)
        except OSError:
            continue
    raise PermissionError(
        f"no place for a folder that nobody else can write to; tried {' and '.join(tried)}; "
        "set XDG_CACHE_HOME to a folder of your own"
    )


def _parents(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the places for such folders: in the user's cache, or else where temporary files are."""
    cache = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # relative ones are to be ignored, says the specification
        cache = os.path.join(environment.get("HOME", ""), ".cache")
    if os.path.isabs(cache):
        yield os.path.join(cache, "synkhronos")
    yield os.path.join(tempfile.gettempdir(), f"synkhronos-{os.geteuid()}")


def _is_safe(folder: str) -> bool:
    """Tell whether a folder is this user's alone, and nobody else can put another in its place."""
    own, above = os.lstat(folder), os.stat(os.path.dirname(folder))
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.geteuid() or own.st_mode & 0o022:
        return False
    replaceable = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    return above.st_uid in (0, os.geteuid()) and not replaceable


def _filled(folder: str, links: Mapping[str, str]) -> str:
    """Make the folder, unless it is there, and mend the links of one that is damaged."""
    if not os.path.lexists(folder):
        fresh = tempfile.mkdtemp(prefix="new-", dir=os.path.dirname(folder))  # mode 0700
        try:
            _link(fresh, links)
            with contextlib.suppress(OSError):  # another run was faster
                os.rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    if not _is_safe(folder):
        raise PermissionError(f"{folder} is not this user's alone")
    _link(folder, links)
    return folder


def _link(folder: str, links: Mapping[str, str]) -> None:
    """Make those links that are not there, each at one stroke."""
    for link, target in links.items():
        path = os.path.join(folder, link)
        if os.path.islink(path) and os.readlink(path) == target:
            continue
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fresh = tempfile.mktemp(prefix="new-", dir=os.path.dirname(path))
        os.symlink(target, fresh)
        os.replace(fresh, path)
