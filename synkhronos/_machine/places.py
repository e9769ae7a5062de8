"""Where CUDA's libraries lie on a machine: wheels, conda, toolkits, drivers, and what the loader knows.

Nothing is loaded or executed here but ``ldconfig``, to read the loader's cache.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["COMPANIONS", "NAMES", "Finder"]

#: What libgpuarray and Theano open as ``lib<name>.so``, and what it is called.
NAMES = {"cuda": "CUDA driver", "nvrtc": "NVRTC", "cublas": "cuBLAS", "nccl": "NCCL", "cudnn": "cuDNN"}

#: Beginnings of the names of files that a library opens from its own folder.
COMPANIONS = {
    "cuda": ("libcuda.so", "libnvidia-"),
    "nvrtc": ("libnvrtc",),
    "cublas": ("libcublas",),
    "nccl": ("libnccl",),
    "cudnn": ("libcudnn",),
}


class Finder:
    """Where libraries lie, in the order in which places are preferred.

    Parameters
    ----------
    environment : mapping
        Environment variables; ``LD_LIBRARY_PATH``, ``CONDA_PREFIX``, ``CUDA_HOME`` and ``CUDA_PATH`` name places.
    search_path : sequence of str
        The folders of Python packages, as in ``sys.path``; NVIDIA's wheels lie there. It is an attribute, too.
    root : str
        The root of the system.
    cache : str
        The loader's cache.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        search_path: Sequence[str],
        root: str = "/",
        cache: str = "/etc/ld.so.cache",
    ) -> None:
        self.search_path = list(search_path)
        multiarch = sysconfig.get_config_var("MULTIARCH") or ""
        defaults = [os.path.join(root, folder) for folder in (f"usr/lib/{multiarch}", "usr/lib64", "usr/lib")]
        by_loader = [*environment.get("LD_LIBRARY_PATH", "").split(":"), *_folders_of_cache(cache), *defaults]
        self._by_loader = _existing(by_loader)
        named = environment.get("LD_LIBRARY_PATH", "").split(":")
        self._folders = _existing([*named, *_usual_places(environment, search_path, root), *by_loader])
        self._names = {folder: os.listdir(folder) for folder in self._folders}

    def candidates(self, name: str) -> list[str]:
        """Return the files that may be library ``name`` (of `NAMES`), the preferred place first.

        Links are resolved, nothing comes twice, and files for another kind of processor are left out.
        """
        pattern = re.compile(rf"lib{name}\.so(\.\d+)*")
        found = []
        for folder in self._folders:
            if os.path.basename(folder) != "stubs":  # made for linking only
                names = sorted(file for file in self._names[folder] if pattern.fullmatch(file))
                found += [os.path.realpath(os.path.join(folder, file)) for file in names]
        return [path for path in dict.fromkeys(found) if _processor(path) == _processor(sys.executable)]

    def loaded_as(self, file: str) -> str | None:
        """Return the file that the loader takes for this name by itself, links resolved; None if it finds none."""
        for folder in self._by_loader:
            if file in self._names[folder]:
                path = os.path.realpath(os.path.join(folder, file))
                if _processor(path) == _processor(sys.executable):
                    return path
        return None


def _usual_places(environment: Mapping[str, str], search_path: Sequence[str], root: str) -> Iterator[str]:
    """Yield where wheels, conda, NVIDIA's toolkit, and drivers in containers and under WSL put libraries."""
    for folder in search_path:
        yield from sorted(glob.glob(os.path.join(glob.escape(folder), "nvidia", "*", "lib")))
    for prefix in (environment.get("CONDA_PREFIX", ""), sys.prefix, sys.base_prefix):
        yield os.path.join(prefix, "lib")
    toolkits = [environment.get("CUDA_HOME", ""), environment.get("CUDA_PATH", "")]
    toolkits += sorted(glob.glob(os.path.join(glob.escape(root), "usr/local/cuda*")))
    for toolkit in filter(None, [*toolkits, os.path.join(root, "usr/local/nvidia")]):
        yield from (os.path.join(toolkit, "lib64"), os.path.join(toolkit, "lib"))
    yield os.path.join(root, "usr/lib/wsl/lib")


def _existing(folders: Sequence[str]) -> list[str]:
    """Leave out what is no folder, what cannot be read, and what comes twice."""
    return [
        folder for folder in dict.fromkeys(folders) if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)
    ]


def _folders_of_cache(cache: str) -> list[str]:
    """Return the folders that the loader's cache knows, in its order."""
    command = ["/sbin/ldconfig", "-p", "-C", cache]
    try:
        listing = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):  # a system without glibc's loader
        return []
    paths = re.findall(r" => (/.*)$", os.fsdecode(listing), re.MULTILINE)
    return list(dict.fromkeys(os.path.dirname(path) for path in paths))


def _processor(path: str) -> bytes:
    """Return what the head of an ELF file says of processor and word size; empty for other files."""
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError:
        return b""
    return head[4:6] + head[18:20] if head.startswith(b"\x7fELF") else b""
