"""Run Scan's loop as C code on Python 3.11, where Theano without this patch runs it in Python.

Theano ships C code for the loop, which Cython 0.28 generated, and compiles it on first use. The code accesses internal
structures of the interpreter that Python 3.11 hides. This is not necessary: Cython's macros select between internal
shortcuts and the official interface. This module selects the official interface, and replaces the code in two places
for which Cython has no macro.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("synkhronos")

#: Cython's macros for internal shortcuts, which are set to 0.
_OFFICIAL_WAYS = ("CYTHON_FAST_THREAD_STATE", "CYTHON_FAST_PYCALL", "CYTHON_USE_PYLONG_INTERNALS")

#: Replacements of C code, all for tracebacks. A code object from `PyCode_NewEmpty` has only one line, so the line
#: number of its frame need not be set.
_REPLACED = {
    "(frame)->f_lineno = (lineno)": "((void) 0)",
    "PyCode_New(a, k, l, s, f, code, c, n, v, fv, cell, fn, name, fline, lnos)": (
        "PyCode_NewEmpty(PyUnicode_AsUTF8(fn), PyUnicode_AsUTF8(name), fline)"
    ),
}

_failed = False


@contextlib.contextmanager
def loop_in_c() -> Iterator[None]:
    """Patch the compiler while ``theano.scan_module.scan_perform_ext`` is executed, which compiles the loop if needed.

    Raises
    ------
    ImportError
        If the loop cannot be compiled. Theano then runs it in Python. The reason is logged once.
    """
    global _failed
    if sys.version_info < (3, 11):
        yield
        return
    if _failed:
        raise ImportError("the C code of Scan's loop could not be compiled")
    from theano.gof.cmodule import GCC_compiler

    theanos_own = GCC_compiler.compile_str

    def compile_str(module_name: str, src_code: str, **options: Any) -> Any:
        """Adapt C code to Python 3.11, and compile it."""
        options["preargs"] = [*options["preargs"], *(f"-D{name}=0" for name in _OFFICIAL_WAYS)]
        for old, new in _REPLACED.items():
            src_code = src_code.replace(f"{old}\n", f"{new}\n")
        with contextlib.redirect_stdout(io.StringIO()):  # Theano prints the path of the code if this fails
            return theanos_own(module_name, src_code, **options)

    GCC_compiler.compile_str = staticmethod(compile_str)
    try:
        yield
    except Exception as error:
        _failed = True
        logger.warning("Scan runs its loop in Python, which is slower: %.300s", error)
        raise ImportError(str(error)) from error
    finally:
        GCC_compiler.compile_str = staticmethod(theanos_own)
