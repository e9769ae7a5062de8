"""Make Theano 1.0.5 reuse compiled C code in other processes, and compile modules with precompiled headers.

A compilation that is interrupted (Ctrl-C, an exception of a signal handler) releases the lock of the cache. Otherwise
other processes would wait for it until this process compiles again.

Theano compiles some Ops again in every process, including workers:

* An Op class with ``__props__ = ()`` (Dot22, the softmax and cross entropy Ops, …) counts as a class without a version.
  The reason is that Theano adds the empty tuple to the versions, and does not cache code if one of them is empty.
* The version of a `COp` (DimShuffle, ScalarFromTensor, the random generator's DotModulo, …) is Python's hash of its
  source code, and hashes of strings differ between processes.

Each C++ module includes the headers of Python, NumPy and the C++ library, and parsing them takes two thirds of the
compilation time. When the first module with given flags is compiled, the headers are compiled with the same flags to a
folder in Theano's compile cache. Later modules include the precompiled header. If it is unsuitable, the compiler
ignores it and parses the headers as usual. Compiled modules and their keys in the cache stay the same.

Theano's messages about a missing compiler or GPU become one line, which names a command that explains it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any, Callable

from .flags import wrap_methods


def patch_cache_keys() -> None:
    """Make both kinds of Ops cacheable. Theano must have been imported; calling this again does nothing."""
    from theano.gof.cc import CLinker
    from theano.gof.op import COp

    wrap_methods(CLinker, cmodule_key_=_key)
    wrap_methods(COp, c_code_cache_version=_version)


def _key(theanos_own: Callable[..., Any], linker: Any, fgraph: Any, *args: Any, **kwargs: Any) -> Any:
    """Return Theano's key; if only empty ``__props__`` kept it from having a version, add the version."""
    key = theanos_own(linker, fgraph, *args, **kwargs)
    if not key or key[0]:
        return key
    versions: list[Any] = []
    for node in linker.schedule(fgraph):
        if hasattr(node.op, "c_code_cache_version_apply"):  # Scan does not: its code is that of its inner function
            versions.append(node.op.c_code_cache_version_apply(node))
        versions.extend(variable.type.c_code_cache_version() for variable in (*node.inputs, *node.outputs))
    return (tuple(versions), *key[1:]) if versions and all(versions) else key


def _version(theanos_own: Callable[..., Any], op: Any) -> tuple[Any, ...]:
    """Return a version computed from the source code, which is the same in all processes."""
    digest = hashlib.sha256("\0".join(map(str, op.func_codes)).encode()).digest()
    version = (int.from_bytes(digest[:7], "big"),)
    return (*version, op.params_type.c_code_cache_version()) if hasattr(op, "params_type") else version


_HEADERS = ("Python.h", "iostream", "math.h", "numpy/arrayobject.h", "numpy/arrayscalars.h", "vector", "algorithm")
_FIRST_LINE = b"#include <Python.h>"
_FOLDER = "synkhronos_headers"

_failed: set[str] = set()  # headers that this process could not compile, and does not try to compile again


def precompile_headers(cmodule: Any) -> None:
    """Make the backend whose module of compilers is ``cmodule`` use precompiled headers; again, it does nothing."""

    def output_subprocess_Popen(theanos_own: Callable[..., Any], command: Any, **params: Any) -> Any:
        """Run a command of the backend; if it is a compilation, use precompiled headers."""
        if isinstance(command, list) and "-shared" in command:
            with contextlib.suppress(OSError):
                command = with_headers(command, cmodule.config.compiledir)
        return theanos_own(command, **params)

    wrap_methods(cmodule, output_subprocess_Popen=output_subprocess_Popen)


def release_lock_of_interrupted() -> None:
    """Release the lock of Theano's cache after any exception; calling this again does nothing."""
    from theano.gof import compilelock

    @contextlib.contextmanager
    def lock_ctx(theanos_own: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        """Hold the lock within a ``with`` block."""
        n_before = getattr(compilelock.get_lock, "n_lock", 0)
        try:
            with theanos_own(*args, **kwargs):
                yield
        except BaseException:
            while compilelock.get_lock.n_lock > n_before:
                compilelock.release_lock()
            raise

    wrap_methods(compilelock, lock_ctx=lock_ctx)


def with_headers(command: list[str], cache: str) -> list[str]:
    """Return the command that compiles a module, with an option for precompiled headers if the module can use them.

    Parameters
    ----------
    command : list of str
        The compiler, its flags, the source file and the libraries.
    cache : str
        Folder for the precompiled headers of each combination of flags.
    """
    sources = [part for part in command if part.endswith(".cpp")]
    if len(sources) != 1 or not _begins_like_a_module(sources[0]):
        return command
    flags = _flags(command[1:], sources[0])
    header = os.path.join(cache, _FOLDER, _identity(command[0], flags), "theano.h")
    if not os.path.exists(f"{header}.gch") and (header in _failed or not _compile(command[0], flags, header)):
        _failed.add(header)
        return command
    return [command[0], "-include", header, *command[1:]]


def _begins_like_a_module(source: str) -> bool:
    with open(source, "rb") as file:
        return file.readline().strip() == _FIRST_LINE and b"PY_SSIZE_T_CLEAN" not in file.read(2000)


def _flags(arguments: list[str], source: str) -> list[str]:
    """Return the arguments that affect headers: all except input, output and libraries."""
    flags = []
    skip = False
    for argument in arguments:
        if skip or argument == source or argument.startswith(("-l", "-L", "-Wl,", "-shared", "-include")):
            skip = False
        elif argument == "-o":
            skip = True
        else:
            flags.append(argument)
    return flags


def _identity(compiler: str, flags: list[str]) -> str:
    """Return a name that changes with the compiler, its flags and the headers, which the compiler does not check."""
    import numpy

    program = shutil.which(compiler) or compiler
    stamps: list[Any] = [os.stat(program).st_mtime_ns]
    for flag in flags:
        for header in _HEADERS:
            path = os.path.join(flag[2:], header)
            if flag.startswith("-I") and os.path.exists(path):
                stamps.append((path, os.stat(path).st_mtime_ns))
    described = repr((sys.version, numpy.__version__, program, stamps, flags))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _compile(compiler: str, flags: list[str], header: str) -> bool:
    """Compile the headers; return whether this succeeded. If several processes do it at once, the last result stays."""
    folder = os.path.dirname(header)
    os.makedirs(folder, exist_ok=True)
    with open(header, "w") as file:
        file.writelines(f"#include <{name}>\n" for name in _HEADERS)
    handle, partial = tempfile.mkstemp(dir=folder)
    os.close(handle)
    try:
        command = [compiler, *flags, "-x", "c++-header", header, "-o", partial]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)
        if done.returncode == 0:
            os.replace(partial, f"{header}.gch")
        return done.returncode == 0
    except subprocess.SubprocessError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


# -- messages

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
