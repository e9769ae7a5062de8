"""Finding a BLAS library that Theano's C code can be linked to, without root and without a compilation."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

logger = logging.getLogger("synkhronos")

# Routines of levels 1 to 3 that the C code written by Theano calls by these names.
SYMBOLS = ("sdot_", "ddot_", "sgemv_", "dgemv_", "sger_", "dger_", "sgemm_", "dgemm_")


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
    for flags, library in candidates(cxx):
        if flags and is_usable(library):
            logger.debug("Theano is linked to the BLAS %s (%s)", library, flags)
            return flags
    logger.info("no BLAS to link Theano to; `apt-get install libopenblas-dev` provides one")
    return ""


def candidates(cxx: str) -> Iterator[tuple[str, str]]:
    """Yield flags for the linker with the library to load: this environment's own one first.

    Theano adds the run path for ``-L`` by itself. Neither is used for the system's directories: they would come before
    this Python's, and some hold another libpython.
    """
    own = os.path.join(sys.prefix, "lib", "libopenblas.so")
    if os.path.exists(own):
        yield link_flags(own), own
    # Where the linker would take -lopenblas from; the bare name is echoed if it would not. The loader is asked for the
    # bare name too, so that it will find the library by itself later.
    name = "libopenblas.so"
    try:
        command = [cxx, "-print-file-name=" + name]
        if os.path.isabs(subprocess.check_output(command, text=True).strip()):
            yield "-lopenblas", name
    except (OSError, subprocess.SubprocessError):
        pass
    # Wheels of scipy < 1.11 bundle an OpenBLAS under the plain names that Theano's C code uses.
    scipy = importlib.util.find_spec("scipy")
    if scipy is not None and scipy.origin:
        site_packages = os.path.dirname(os.path.dirname(scipy.origin))
        pattern = os.path.join(glob.escape(site_packages), "scipy.libs", "libopenblas*.so")
        for bundled in glob.glob(pattern):
            yield link_flags(bundled), bundled


def link_flags(library: str) -> str:
    """Return the flags that link one library file, ``/a/b/libc.so`` as ``-L/a/b -lc``.

    Empty if the path holds white space, at which Theano would split the flags.
    """
    directory, name = os.path.split(library)
    flags = f"-L{directory} -l{name[len('lib') : -len('.so')]}"
    return flags if len(flags.split()) == 2 else ""


def is_usable(library: str) -> bool:
    """Load a BLAS and try it.

    Loading it also lets threadpoolctl see it before Theano's first compiled module needs it.

    Parameters
    ----------
    library : str
        A path, or a bare file name that the loader looks for.

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
    if not all(hasattr(blas, symbol) for symbol in SYMBOLS):
        return False
    n = 8
    size, step = ctypes.c_int64(n), ctypes.c_int64(1)  # right for 32-bit arguments as well
    zero, one = ctypes.c_double(0.0), ctypes.c_double(1.0)
    matrix, x = (ctypes.c_double * (n * n))(*[1.0] * (n * n)), (ctypes.c_double * n)(*[1.0] * n)
    for transpose in (b"N", b"T"):
        y = (ctypes.c_double * n)(*[float("nan")] * n)
        pointers = [ctypes.byref(c) for c in (size, size, one, matrix, size, x, step, zero, y, step)]
        blas.dgemv_(transpose, *pointers)
        if list(y) != [float(n)] * n:
            return False
    return True
