"""The C code of Scan's loop on Python 3.11, where Theano alone runs the loop in Python.

Theano brings that code as Cython 0.28 wrote it, and compiles it when it first needs it. It reads structures of the
interpreter that Python 3.11 hides, though nothing in it has to: Cython's macros choose between quick ways and official
ones. Here the official ones are chosen, and the two that Cython did not foresee are filled in.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("synkhronos")

#: Which of Cython's quick ways not to take.
_OFFICIAL_WAYS = ("CYTHON_FAST_THREAD_STATE", "CYTHON_FAST_PYCALL", "CYTHON_USE_PYLONG_INTERNALS")

#: Both are for tracebacks. Code made by the second function has one line, and a frame on it needs not be told which.
_REPLACED = {
    "(frame)->f_lineno = (lineno)": "((void) 0)",
    "PyCode_New(a, k, l, s, f, code, c, n, v, fv, cell, fn, name, fline, lnos)": (
        "PyCode_NewEmpty(PyUnicode_AsUTF8(fn), PyUnicode_AsUTF8(name), fline)"
    ),
}

_failed = False


@contextlib.contextmanager
def loop_in_c() -> Iterator[None]:
    """Around the execution of ``theano.scan_module.scan_perform_ext``, which compiles the loop where that is not done.

    Raises
    ------
    ImportError
        Where the loop cannot be compiled: Theano then runs it in Python. Why stands in the log, once.
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
        """Compile a module of C code, this one for today's Python."""
        options["preargs"] = [*options["preargs"], *(f"-D{name}=0" for name in _OFFICIAL_WAYS)]
        with contextlib.redirect_stdout(io.StringIO()):  # Theano prints where it left the code that failed
            return theanos_own(module_name, for_todays_python(src_code), **options)

    GCC_compiler.compile_str = staticmethod(compile_str)
    try:
        yield
    except Exception as error:
        _failed = True
        logger.warning("Scan runs its loop in Python, which is slower: %.300s", error)
        raise ImportError(str(error)) from error
    finally:
        GCC_compiler.compile_str = staticmethod(theanos_own)


def for_todays_python(code: str) -> str:
    """The C code without what Python 3.11 hides.

    Parameters
    ----------
    code : str
        As Cython 0.28 wrote it.
    """
    for old, new in _REPLACED.items():
        code = code.replace(f"{old}\n", f"{new}\n")
    return code
