"""Shorten Theano's messages about a missing compiler or GPU to one line, which names a command that explains it."""

from __future__ import annotations

import logging
import subprocess
import warnings
from typing import Any

_COMMAND = "`python -m synkhronos info` says what is missing"


def shorten_complaints() -> None:
    """Have Theano report in one line that there is no compiler, or no GPU. Call this before Theano is imported.

    Theano still logs the records through its own loggers; only their texts change. Calling this again does nothing.
    """
    warnings.filterwarnings("ignore", message="DeprecationWarning: there is no c\\+\\+ compiler")  # a duplicate
    for name in ("theano.configdefaults", "theano.tensor.blas", "theano.gpuarray"):
        logging.getLogger(name).addFilter(_shortened)  # logging adds the same filter only once


def _shortened(record: logging.LogRecord) -> bool:
    """Change the text of a record, if it is one of these messages; return whether to log it."""
    said = str(record.msg)
    if said.startswith("g++ not detected"):
        _say(record, f"there is no C++ compiler: Theano computes in Python, which takes many times longer; {_COMMAND}")
    elif said.startswith("We did not find a dynamic library in the library_dir"):
        return False  # Theano logs this for -l:NAME, too, which works; `refuse_unfit_blas` reports real failures
    elif said.startswith("Using NumPy C-API based implementation for BLAS"):
        from theano import config

        return bool(config.cxx)
    elif said.startswith(("pygpu was configured", "Could not initialize pygpu")):
        from theano import config

        chosen = {name: getattr(config, name) for name in ("device", "init_gpu_device", "contexts")}
        flags = ",".join(f"{name}={value}" for name, value in chosen.items() if value not in ("", "cpu"))
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        cause = "pygpu cannot be imported" if error is None else _first_line(error)
        _say(record, f"Theano's flags ask for a GPU ({flags}), but {cause}; it computes on the CPU. {_COMMAND}")
    return True


def _say(record: logging.LogRecord, words: str) -> None:
    record.msg, record.args, record.exc_info, record.exc_text = words, None, None, None


def _first_line(error: BaseException) -> str:
    first: Any = error.args[0] if error.args else ""
    while isinstance(first, tuple) and first:  # pygpu: ((message, code),)
        first = first[0]
    text = first.decode(errors="replace") if isinstance(first, bytes) else str(first)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def explain_missing_headers(cmodule: Any) -> None:
    """Have compilations report in one line that Python.h is missing, and end the compiler if they are interrupted.

    Parameters
    ----------
    cmodule : module
        ``theano.gof.cmodule``, executed.
    """

    def output_subprocess_Popen(command: Any, **params: Any) -> Any:
        """Run a command of Theano's, and raise an error if Python's headers are missing."""
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, **params)
        if done.returncode and b"Python.h: No such file" in done.stderr + done.stdout:
            # no ImportError, because Theano catches that and continues without its virtual machine
            raise RuntimeError(f"Theano cannot compile, because Python.h is missing; {_COMMAND}") from None
        return done.stdout, done.stderr, done.returncode

    cmodule.output_subprocess_Popen = output_subprocess_Popen
