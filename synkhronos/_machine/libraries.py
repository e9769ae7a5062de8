"""The versions of the CUDA libraries that were found, and which of them go together.

Invariants: no library is loaded into this process, and no CUDA context is made anywhere. Libraries are asked for their
versions in processes of their own, so that a broken one, or one that needs another driver, is an answer like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from synkhronos._machine.places import NAMES, Finder
from synkhronos._machine.probing import ask, python

__all__ = ["Gpu", "Library", "Survey", "ask_gpus", "dotted", "survey"]

#: Asks one library, given as name and path, for its version, and NVRTC also for what it compiles for.
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

#: Asks the driver, given as path, for its GPUs; the first index is the N of pygpu's cudaN.
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

#: Seconds within which a library answers; the first question to a driver may wake GPUs.
_PATIENCE = 30.0


class Library(NamedTuple):
    """A library file that was found.

    Attributes
    ----------
    name : str
        One of `synkhronos._machine.places.NAMES`.
    path : str
        The file itself; links are resolved.
    version : tuple of int
        As the library tells it (for ``cuda`` the version of CUDA, not of the driver); empty if it did not answer.
    error : str
        Why it did not answer, else empty.
    architectures : tuple of int
        For NVRTC, the compute capabilities that it compiles for, times 10; empty if it cannot tell.
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
    """What was found, and what of it serves.

    Attributes
    ----------
    driver : Library or None
        The driver's library.
    chosen : dict
        The library that serves, for each of the other names that has one.
    refused : list of (Library, str)
        The others, each with the reason.
    """

    driver: Library | None
    chosen: dict[str, Library]
    refused: list[tuple[Library, str]]


def survey(finder: Finder, environment: Mapping[str, str], gpus: Sequence[Gpu] | None = None) -> Survey:
    """Find the CUDA libraries, and choose the newest of each that goes with the driver.

    NVRTC must not be newer than the driver's CUDA, or the driver cannot read what it compiles, and it must compile for
    every GPU. cuBLAS must not be of a later major version than either. Theano speaks to cuDNN 5 to 7.

    Parameters
    ----------
    finder : Finder
    environment : mapping
        The environment variables of the processes that are asked.
    gpus : sequence of Gpu, optional
        The GPUs; if not given, the driver is asked for them if the choice of NVRTC depends on them.
    """
    paths = {path: name for name in NAMES for path in finder.candidates(name)}
    answers = ask({path: python(_VERSION, paths[path], path, isolated=True) for path in paths}, environment, _PATIENCE)
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
    """Ask the driver, the library at this path, for its GPUs; in a process of its own, and without a CUDA context.

    Returns
    -------
    list of Gpu
        In the order of pygpu's ``cuda0``, ``cuda1``, …; ``CUDA_VISIBLE_DEVICES`` counts.
    str
        What went wrong, else empty.
    """
    answer = ask({0: python(_GPUS, driver, isolated=True)}, environment, _PATIENCE)[0]
    return [Gpu(*value) for value in answer.values], answer.error


def dotted(version: Sequence[int]) -> str:
    """Write a version with dots."""
    return ".".join(map(str, version))


def _misfit(library: Library, limit: tuple[int, ...] | None, gpus: Sequence[Gpu]) -> str:
    """Say why a library cannot be used where CUDA is of version ``limit``; empty if it can."""
    version = library.version
    if not version:
        return f"does not tell its version: {library.error or 'no answer'}"
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
