"""Find CUDA libraries and their versions, select those that work together, and make links to them.

The libraries are in wheels, conda, toolkits, drivers, and the loader's cache. Links are made in a private folder whose
name is a hash of its contents, so that runs with different contents do not affect each other.

Invariants
----------
* This process loads no library, and no process creates a CUDA context. Libraries report their versions in processes of
  their own, so that a broken library, or one that needs another driver, does not affect this process. `Finder` executes
  only ``ldconfig``, to read the loader's cache.
* A folder that another user owns, or can write to, is never used. A folder is created atomically. Its contents never
  change, because a folder with other contents has another name. It may be deleted whenever no program runs.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from synkhronos._cli.probes import ask, python
from synkhronos._utils.resources import cache_folder

# -- search for libraries

#: Libraries that libgpuarray and Theano open as ``lib<name>.so``, with their names in messages.
NAMES = {"cuda": "CUDA driver", "nvrtc": "NVRTC", "cublas": "cuBLAS", "nccl": "NCCL", "cudnn": "cuDNN"}

#: Prefixes of the names of files that a library opens in its own folder.
COMPANIONS = {
    "cuda": ("libcuda.so", "libnvidia-"),
    "nvrtc": ("libnvrtc",),
    "cublas": ("libcublas",),
    "nccl": ("libnccl",),
    "cudnn": ("libcudnn",),
}


class Finder:
    """Searches for libraries, in preferred folders first.

    Parameters
    ----------
    environment : mapping
        Environment variables, of which ``LD_LIBRARY_PATH``, ``CONDA_PREFIX``, ``CUDA_HOME`` and ``CUDA_PATH`` are used.
    search_path : sequence of str
        The folders of Python packages, as in ``sys.path``, which contain NVIDIA's wheels. Also an attribute.
    root : str
        The root folder of the system.
    cache : str
        The file of the loader's cache.
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
        named = environment.get("LD_LIBRARY_PATH", "").split(":")
        by_loader = [*named, *_folders_of_cache(cache), *defaults]
        self._by_loader = _existing(by_loader)
        self._folders = _existing([*named, *_usual_places(environment, search_path, root), *by_loader])
        self._names = {folder: os.listdir(folder) for folder in self._folders}

    def candidates(self, name: str) -> list[str]:
        """Return the files that may be library ``name`` (of `NAMES`), those in preferred folders first.

        Links are resolved. Duplicates, and files for another kind of processor, are left out.
        """
        pattern = re.compile(rf"lib{name}\.so(\.\d+)*")
        found = []
        for folder in self._folders:
            if os.path.basename(folder) != "stubs":  # stubs are for linking only
                names = sorted(file for file in self._names[folder] if pattern.fullmatch(file))
                found += [os.path.realpath(os.path.join(folder, file)) for file in names]
        return [path for path in dict.fromkeys(found) if _is_for_this_processor(path)]

    def loaded_as(self, file: str) -> str | None:
        """Return the file, with links resolved, that the loader finds for this name; ``None`` if there is none."""
        for folder in self._by_loader:
            if file in self._names[folder]:
                path = os.path.realpath(os.path.join(folder, file))
                if _is_for_this_processor(path):
                    return path
        return None


def _usual_places(environment: Mapping[str, str], search_path: Sequence[str], root: str) -> Iterator[str]:
    """Yield the folders with libraries of wheels, conda, NVIDIA's toolkit, and drivers in containers or WSL."""
    for folder in search_path:
        yield from sorted(glob.glob(os.path.join(glob.escape(folder), "nvidia", "*", "lib")))
    for prefix in (environment.get("CONDA_PREFIX", ""), sys.prefix, sys.base_prefix):
        yield os.path.join(prefix, "lib")
    toolkits = [environment.get("CUDA_HOME", ""), environment.get("CUDA_PATH", "")]
    toolkits += sorted(glob.glob(os.path.join(glob.escape(root), "usr/local/cuda*")))
    for toolkit in filter(None, [*toolkits, os.path.join(root, "usr/local/nvidia")]):
        yield from (os.path.join(toolkit, "lib64"), os.path.join(toolkit, "lib"))
    yield os.path.join(root, "usr/lib/wsl/lib")


def _is_for_this_processor(path: str) -> bool:
    from synkhronos._theano_compat.blas import processor_of  # imports ctypes, which most programs do not need here

    return processor_of(path) == processor_of(sys.executable)


def _existing(folders: Sequence[str]) -> list[str]:
    """Return the folders that exist and are readable, without duplicates."""
    unique = dict.fromkeys(folders)
    return [folder for folder in unique if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)]


def _folders_of_cache(cache: str) -> list[str]:
    """Return the folders in the loader's cache, in its order."""
    command = ["/sbin/ldconfig", "-p", "-C", cache]
    try:
        listing = subprocess.run(command, capture_output=True, timeout=_LIBRARIES_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):  # a system without glibc's loader
        return []
    paths = re.findall(r" => (/.*)$", os.fsdecode(listing), re.MULTILINE)  # names need not be UTF-8
    return list(dict.fromkeys(os.path.dirname(path) for path in paths))


# -- versions and GPUs

#: Program that reports the version of a library, given by name and path; for NVRTC also the GPUs that it supports.
_VERSION = """
import ctypes, json, sys
name, path = sys.argv[1:]
library = ctypes.CDLL(path)
numbers = [ctypes.c_int() for _ in range(3)]
pointers = [ctypes.byref(number) for number in numbers]
def check(status):
    if status:
        sys.exit(f"error code {status}")
if name == "cuda":
    check(library.cuDriverGetVersion(pointers[0]))
    version = [numbers[0].value // 1000, numbers[0].value % 1000 // 10]
elif name == "nvrtc":
    check(library.nvrtcVersion(*pointers[:2]))
    version = [number.value for number in numbers[:2]]
elif name == "cublas":
    for kind, pointer in enumerate(pointers):
        check(library.cublasGetProperty(kind, pointer))
    version = [number.value for number in numbers]
else:  # one number, whose last four or three digits are minor and patch
    if name == "nccl":
        check(library.ncclGetVersion(pointers[0]))
        code, newer = numbers[0].value, numbers[0].value >= 10000
    else:
        library.cudnnGetVersion.restype = ctypes.c_size_t
        code = library.cudnnGetVersion()
        newer = code >= 90000
    version = [code // (10000 if newer else 1000), code % (10000 if newer else 1000) // 100, code % 100]
print(json.dumps({"version": version}))
if name == "nvrtc" and hasattr(library, "nvrtcGetSupportedArchs"):
    check(library.nvrtcGetNumSupportedArchs(pointers[0]))
    found = (ctypes.c_int * numbers[0].value)()
    check(library.nvrtcGetSupportedArchs(found))
    print(json.dumps({"architectures": list(found)}))
"""

#: Program that reports the GPUs of the driver, given by its path, in the order of pygpu's cuda0, cuda1, …
_GPUS = """
import ctypes, json, sys
cuda = ctypes.CDLL(sys.argv[1])
def check(status):
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        sys.exit(f"CUDA error {status}: {(text.value or b'unknown').decode()}")
def number(function, *arguments):
    result = ctypes.c_int()
    check(function(ctypes.byref(result), *arguments))
    return result.value
check(cuda.cuInit(0))
for index in range(number(cuda.cuDeviceGetCount)):
    device = number(cuda.cuDeviceGet, index)
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    check(cuda.cuDeviceGetName(name, 256, device))
    check(cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    major, minor = (number(cuda.cuDeviceGetAttribute, attribute, device) for attribute in (75, 76))
    print(json.dumps([name.value.decode(errors="replace"), memory.value, major * 10 + minor]))
"""

#: Time limit for these programs, in seconds; the first call of a driver may have to wake GPUs.
_LIBRARIES_SECONDS = 30.0


class Library(NamedTuple):
    """A library file.

    Attributes
    ----------
    name : str
        One of `synkhronos._cli.gpu_libraries.NAMES`.
    path : str
        The file, with links resolved.
    version : tuple of int
        The version that the library reports (for ``cuda`` that of CUDA, not of the driver); empty if it reports none.
    error : str
        The reason why it reports no version; otherwise empty.
    architectures : tuple of int
        For NVRTC, the compute capabilities for which it compiles, times 10; empty if it does not report them.
    """

    name: str
    path: str
    version: tuple[int, ...]
    error: str = ""
    architectures: tuple[int, ...] = ()


class Gpu(NamedTuple):
    """A CUDA GPU: its name, its memory in bytes, and its compute capability times 10."""

    name: str
    memory: int
    capability: int


class Survey(NamedTuple):
    """Usable and rejected libraries.

    Attributes
    ----------
    driver : Library or None
        The driver's library.
    chosen : dict
        The usable libraries by name, except for the driver.
    refused : list of (Library, str)
        The rejected libraries, each with the reason.
    """

    driver: Library | None
    chosen: dict[str, Library]
    refused: list[tuple[Library, str]]


def survey(finder: Finder, environment: Mapping[str, str], gpus: Sequence[Gpu] | None = None) -> Survey:
    """Find the CUDA libraries, and choose the newest of each that works with the driver.

    NVRTC must not be newer than the driver's CUDA, because the driver could not read its output, and it must compile
    for every GPU. The major version of cuBLAS must not be later than that of the driver's CUDA and of NVRTC. Theano
    supports cuDNN 5 to 7.

    Parameters
    ----------
    finder : Finder
    environment : mapping
        The environment variables of the processes that load the libraries.
    gpus : sequence of Gpu, optional
        The GPUs. Default: get them from the driver, if the choice of NVRTC depends on them.
    """
    paths = {path: name for name in NAMES for path in finder.candidates(name)}
    programs = {path: python(_VERSION, name, path, isolated=True) for path, name in paths.items()}
    answers = ask(programs, environment, _LIBRARIES_SECONDS)
    found: dict[str, list[Library]] = {name: [] for name in NAMES}
    for path, name in paths.items():
        record = answers[path].record
        architectures = tuple(record.get("architectures", ()))
        found[name].append(Library(name, path, tuple(record.get("version", ())), answers[path].error, architectures))
    driver = next((library for library in found["cuda"] if library.version), None)
    limit = driver.version if driver else None
    chosen: dict[str, Library] = {}
    refused = [(library, _misfit(library, None, ())) for library in found["cuda"] if not library.version]
    for name in [name for name in NAMES if name != "cuda"]:
        if name == "nvrtc" and driver and gpus is None:
            rivals = [library for library in found[name] if not _misfit(library, limit, ())]
            gpus = ask_gpus(driver.path, environment)[0] if len(rivals) > 1 else ()
        for library in found[name]:
            reason = _misfit(library, limit, gpus or ())
            if reason:
                refused.append((library, reason))
            elif name not in chosen or library.version > chosen[name].version:
                chosen[name] = library
        if name == "nvrtc" and name in chosen:
            limit = chosen[name].version
    return Survey(driver, chosen, refused)


def ask_gpus(driver: str, environment: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """Get the GPUs from the driver, the library at the path ``driver``, in another process and without a CUDA context.

    Returns
    -------
    gpus : list of Gpu
        In the order of pygpu's ``cuda0``, ``cuda1``, …; ``CUDA_VISIBLE_DEVICES`` is respected.
    error : str
        The error; empty if there was none.
    """
    answer = ask({0: python(_GPUS, driver, isolated=True)}, environment, _LIBRARIES_SECONDS)[0]
    return [Gpu(*value) for value in answer.values], answer.error


def dotted(version: Sequence[int]) -> str:
    """Return a version with dots."""
    return ".".join(map(str, version))


def _misfit(library: Library, limit: tuple[int, ...] | None, gpus: Sequence[Gpu]) -> str:
    """Return why a library cannot be used with version ``limit`` of CUDA; an empty string if it can."""
    version = library.version
    if not version:
        return f"does not report its version: {library.error or 'no answer'}"
    if library.name == "nvrtc":
        if limit and version[:2] > limit[:2]:
            return f"is newer than the driver's CUDA {dotted(limit)}"
        missing = {gpu.capability for gpu in gpus} - set(library.architectures or [gpu.capability for gpu in gpus])
        if missing:
            return f"does not compile for compute capability {min(missing) / 10}"
    elif library.name == "cublas" and limit and version[0] > limit[0]:
        return f"is newer than CUDA {limit[0]}"
    elif library.name == "cudnn" and not 5 <= version[0] <= 7:
        return f"is version {dotted(version)}"
    return ""


# -- links to libraries


def private_folder(links: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Create a folder of symbolic links, unless it exists.

    Parameters
    ----------
    links : mapping
        From the path of each link, relative to the folder, to its target.
    environment : mapping
        Environment variables; ``XDG_CACHE_HOME`` and ``HOME`` determine the folder of the user's caches.

    Returns
    -------
    str
        The folder's path; its mode is 0700.

    Raises
    ------
    PermissionError
        If it cannot be created in a place to which only this user can write.
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
    """Yield the parents for such folders: in the user's cache, then in the folder of temporary files."""
    cache = cache_folder(environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", ""))
    if cache:
        yield cache
    yield os.path.join(tempfile.gettempdir(), f"synkhronos-{os.geteuid()}")


def _is_safe(folder: str) -> bool:
    """Return whether a folder belongs to this user, and no other user can write to it or replace it."""
    own, above = os.lstat(folder), os.stat(os.path.dirname(folder))
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.geteuid() or own.st_mode & 0o022:
        return False
    replaceable = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    return above.st_uid in (0, os.geteuid()) and not replaceable


def _filled(folder: str, links: Mapping[str, str]) -> str:
    """Create the folder, unless it exists; restore links that are missing in an existing one."""
    if not os.path.lexists(folder):
        fresh = tempfile.mkdtemp(prefix="new-", dir=os.path.dirname(folder))  # mode 0700
        try:
            _link(fresh, links)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    if not _is_safe(folder):
        raise PermissionError(f"{folder} is not this user's alone")
    _link(folder, links)
    return folder


def _link(folder: str, links: Mapping[str, str]) -> None:
    """Create the missing links, each atomically."""
    for link, target in links.items():
        path = os.path.join(folder, link)
        if os.path.islink(path) and os.readlink(path) == target:
            continue
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fresh = tempfile.mktemp(prefix="new-", dir=os.path.dirname(path))
        os.symlink(target, fresh)
        os.replace(fresh, path)
