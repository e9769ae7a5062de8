"""Finding a BLAS library that Theano's C code can be linked to, without root and without a compilation.

That of scipy-openblas32 comes first: the OpenBLAS that NumPy's and SciPy's maintainers build, one wheel for all Pythons
and kept current, so that it has kernels for processors that came after the wheels of NumPy and SciPy that Theano needs.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

logger = logging.getLogger("synkhronos")

#: The environment variable that says which to take: "scipy-openblas32", "system", "mkl", "scipy", or a library's file.
CHOICE = "SYNKHRONOS_BLAS"

# Routines of levels 1 to 3 that the C code written by Theano calls by these names.
SYMBOLS = ("sdot_", "ddot_", "sgemv_", "dgemv_", "sger_", "dger_", "sgemm_", "dgemm_")

_NAMES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scipy_openblas.h")


class Candidate(NamedTuple):
    """A library that Theano may be linked to."""

    flags: str  # for ``theano.config.blas.ldflags``; empty if they cannot be written there
    library: str  # a path, or a bare file name that the loader looks for
    prefix: str = ""  # of its symbols


def find_blas(cxx: str) -> str:
    """Find a BLAS that the compiler can link, the loader finds again, and that computes rightly.

    Parameters
    ----------
    cxx : str
        The C++ compiler; empty if Theano has none, and then nothing can be linked.

    Returns
    -------
    str
        Flags for ``theano.config.blas.ldflags``; empty if none was found.
    """
    if not cxx or not sys.platform.startswith("linux"):
        return ""
    chosen = os.environ.get(CHOICE, "")
    if os.sep in chosen:  # a library's file, which is to be found from any folder
        chosen = os.path.abspath(os.path.expanduser(chosen))
    for choice in filter(None, (chosen, "any")):
        for flags, library, prefix in candidates(cxx, choice):
            if flags and is_usable(library, prefix):
                logger.debug("Theano is linked to the BLAS %s (%s)", library, flags)
                return flags
        if choice == chosen:
            logger.warning("%s=%s: there is no such BLAS, or it cannot be linked; another is taken", CHOICE, chosen)
    logger.info("no BLAS to link Theano to; `python -m pip install scipy-openblas32` provides one")
    return ""


def candidates(cxx: str, choice: str = "any") -> Iterator[Candidate]:
    """Yield what there is of a choice: all but MKL for ``"any"``, the first one being the best.

    Theano adds the run path for ``-L`` by itself. Neither is used for the system's directories: they would come before
    this Python's, and some hold another libpython.
    """
    if choice in ("any", "scipy-openblas32"):
        yield from _in_wheel("scipy_openblas32", "lib/libscipy_openblas.so", "scipy_")
    if choice in ("any", "system"):
        own = os.path.join(sys.prefix, "lib", "libopenblas.so")
        if os.path.exists(own):
            yield Candidate(link_flags(own), own)
        # Where the linker would take -lopenblas from; the bare name is echoed if it would not. The loader is asked for
        # the bare name too, so that it will find the library by itself later.
        name = "libopenblas.so"
        try:
            command = [cxx, "-print-file-name=" + name]
            if os.path.isabs(subprocess.check_output(command, text=True).strip()):
                yield Candidate("-lopenblas", name)
        except (OSError, subprocess.SubprocessError):
            pass
    if choice in ("any", "scipy"):  # wheels of scipy < 1.11 bundle one under the plain names
        yield from _in_wheel("scipy", "../scipy.libs/libopenblas*.so")
    if choice == "mkl":
        for library in glob.glob(os.path.join(glob.escape(sys.prefix), "lib", "libmkl_rt.so*")):
            yield Candidate(link_flags(library), library)
    if os.sep in choice:
        yield Candidate(link_flags(choice), choice)


def _in_wheel(package: str, pattern: str, prefix: str = "") -> Iterator[Candidate]:
    found = importlib.util.find_spec(package)
    if found is not None and found.origin:
        folder = os.path.dirname(found.origin)
        for library in glob.glob(os.path.join(glob.escape(folder), *pattern.split("/"))):
            library = os.path.normpath(library)
            yield Candidate(link_flags(library, prefix), library, prefix)


def link_flags(library: str, prefix: str = "") -> str:
    """Return the flags that link one library file, ``/a/b/libc.so`` as ``-L/a/b -lc``.

    Where its symbols have a prefix, they include the header that gives them their standard names. Empty if a path holds
    white space, at which Theano would split the flags, or a comma, at which the compiler splits those for the linker.
    """
    if "," in library:
        return ""
    directory, name = os.path.split(library)
    if name.startswith("lib") and name.endswith(".so"):
        flags = [f"-L{directory}", f"-l{name[len('lib') : -len('.so')]}"]
    else:  # with a number behind it, which the linker does not look for
        flags = [f"-Wl,--no-as-needed,{library},-rpath,{directory}"]
    if prefix:
        flags.append(f"-include{_NAMES}")
    return " ".join(flags) if len(" ".join(flags).split()) == len(flags) else ""


def linked_library(flags: str) -> tuple[ctypes.CDLL, str] | None:
    """Load the BLAS that flags link, by whoever wrote them.

    Returns
    -------
    library : ctypes.CDLL
    prefix : str
        Of its symbols.
    """
    parts = flags.split()
    folders = [part[2:] for part in parts if part.startswith("-L")]
    names = [f"lib{part[2:]}.so" for part in parts if part.startswith("-l")]
    places = [next(filter(os.path.exists, (os.path.join(one, name) for one in folders)), name) for name in names]
    for place in [*places, *(file for part in parts if part.startswith("-Wl,") for file in part.split(",")[1:])]:
        if ".so" in place:
            try:
                library = ctypes.CDLL(place)
            except OSError:
                continue
            for prefix in ("", "scipy_"):
                if hasattr(library, f"{prefix}dgemm_"):
                    return library, prefix
    return None


def is_usable(library: str, prefix: str = "") -> bool:
    """Load a BLAS and try it.

    Loading it also lets threadpoolctl see it before Theano's first compiled module needs it.

    Parameters
    ----------
    library : str
        A path, or a bare file name that the loader looks for.
    prefix : str
        Of its symbols.

    Returns
    -------
    bool
        Whether it loads, has the routines of `SYMBOLS`, and ``y = 0 * y + A x`` forgets a NaN in ``y``: Theano passes
        memory that was never written there. (It has a check of its own for that, whose C code lacks a parenthesis.)
    """
    try:
        blas = ctypes.CDLL(library)
    except OSError:
        return False
    if not all(hasattr(blas, prefix + symbol) for symbol in SYMBOLS):
        return False
    dgemv = getattr(blas, f"{prefix}dgemv_")
    n = 8
    size, step = ctypes.c_int64(n), ctypes.c_int64(1)  # right for 32-bit arguments as well
    zero, one = ctypes.c_double(0.0), ctypes.c_double(1.0)
    matrix, x = (ctypes.c_double * (n * n))(*[1.0] * (n * n)), (ctypes.c_double * n)(*[1.0] * n)
    for transpose in (b"N", b"T"):
        y = (ctypes.c_double * n)(*[float("nan")] * n)
        pointers = [ctypes.byref(c) for c in (size, size, one, matrix, size, x, step, zero, y, step)]
        dgemv(transpose, *pointers)
        if list(y) != [float(n)] * n:
            return False
    return True
