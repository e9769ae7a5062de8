"""Test, in a forked process, the BLAS routines that Theano's C code calls, linked by Theano's own command.

If a BLAS crashes, or ends the process as MKL does if a part of it is missing, it does so in the fork. Libraries that
this process has already loaded are also loaded there, and may help the loader to find others.

`link` uses Theano's own functions to make the command, because Theano handles ``blas.ldflags`` in a special way. It
splits flags at white space, even within quotes; removes quotes around a flag; rejects ``-I`` and flags of fewer than
three characters; lists the folders of ``-L``; and puts libraries after all other flags.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

# -- routines

#: Names of the routines of levels 1 to 3 that Theano's C code calls.
SYMBOLS = ("sdot_", "ddot_", "sgemv_", "dgemv_", "sger_", "dger_", "sgemm_", "dgemm_")

#: Name of the table, in a linked module, with the addresses of `SYMBOLS` as resolved by the linker and the loader.
TABLE = "synkhronos_blas"

_N = 8
_MATRIX = [float(i * 7 % 5 - 1) for i in range(_N * _N)]  # in column-major order


def load(library: str, prefix: str = "") -> dict[str, int]:
    """Load a BLAS.

    Afterwards threadpoolctl can detect it, even before Theano's first compiled module needs it.

    Parameters
    ----------
    library : str
        A path, or a file name for which the loader searches.
    prefix : str
        Prefix of the names of its symbols.

    Returns
    -------
    dict
        The address of each of `SYMBOLS`.

    Raises
    ------
    OSError
        If it cannot be loaded, or does not have one of the symbols; the text is shown to the user.
    """
    blas = ctypes.CDLL(library)
    for symbol in SYMBOLS:
        if not hasattr(blas, prefix + symbol):
            raise OSError(f"it has no routine {prefix}{symbol}")
    return {symbol: ctypes.cast(blas[prefix + symbol], ctypes.c_void_p).value or 0 for symbol in SYMBOLS}


def load_table(module: str) -> dict[str, int]:
    """Load a module that was linked to a BLAS; return the addresses as `load` does.

    Raises
    ------
    OSError
        If it cannot be loaded.
    """
    addresses = (ctypes.c_void_p * len(SYMBOLS)).in_dll(ctypes.CDLL(module), TABLE)
    return {symbol: address or 0 for symbol, address in zip(SYMBOLS, addresses)}


def objection(routines: Mapping[str, int]) -> str:
    """Return why Theano must not be linked to a BLAS; an empty string if there is no reason.

    Its integers must have 32 bits. It must overwrite output memory whatever it contains, even NaN, because Theano
    passes uninitialized memory. (Theano has its own check for this, but its C code lacks a parenthesis.)

    Parameters
    ----------
    routines : mapping
        The addresses of `SYMBOLS`.
    """
    little = sys.byteorder == "little"
    seen = _elements_seen(routines["ddot_"], little)
    if seen == (0 if little else _N):
        layer = os.environ.get("MKL_INTERFACE_LAYER", "")
        because = f" (MKL_INTERFACE_LAYER is {layer})" if "ILP64" in layer.upper() else ""
        return f"its integers have 64 bits, and those that are passed have 32{because}"
    if seen != (_N if little else 0):
        return "its dot products are wrong"
    if not _multiplies(routines):
        return "its products are wrong, or keep what was in the memory that they overwrite"
    return ""


def _elements_seen(ddot: int, little: bool) -> float:
    """Return the vector length that ``ddot`` reads: `_N` for one width of its integers, and 0 for the other.

    In little-endian order the 64 bits at the address are ``_N - 2**32``, a negative number, and their first half is
    `_N`. In big-endian order they are `_N`, and their first half is 0. With either width, ``ddot`` does not read beyond
    the vectors.
    """
    size, step = ctypes.c_int64(_N - 2**32 if little else _N), ctypes.c_int64(1)
    ones = (ctypes.c_double * _N)(*[1.0] * _N)
    function = ctypes.CFUNCTYPE(ctypes.c_double)(ddot)
    return float(function(ctypes.byref(size), ones, ctypes.byref(step), ones, ctypes.byref(step)))


def _multiplies(routines: Mapping[str, int]) -> bool:
    """Return whether matrix-vector products (also transposed) and matrix products are correct, and overwrite NaN."""
    size, step = ctypes.c_int(_N), ctypes.c_int(1)
    zero, one = ctypes.c_double(0.0), ctypes.c_double(1.0)
    matrix = (ctypes.c_double * len(_MATRIX))(*_MATRIX)
    gemv, gemm = (ctypes.CFUNCTYPE(None)(routines[name]) for name in ("dgemv_", "dgemm_"))
    sizes, factor, term = [ctypes.byref(size)] * 3, ctypes.byref(one), ctypes.byref(zero)
    rows = [_MATRIX[i::_N] for i in range(_N)]
    columns = [_MATRIX[i * _N : (i + 1) * _N] for i in range(_N)]
    for transpose, lines in ((b"N", rows), (b"T", columns)):
        y: Any = (ctypes.c_double * _N)(*[float("nan")] * _N)
        gemv(transpose, *sizes[:2], factor, matrix, sizes[0], matrix, ctypes.byref(step), term, y, ctypes.byref(step))
        if list(y) != [_dot(line, columns[0]) for line in lines]:
            return False
    z: Any = (ctypes.c_double * len(_MATRIX))(*[float("nan")] * len(_MATRIX))
    gemm(b"N", b"N", *sizes, factor, matrix, sizes[0], matrix, sizes[0], term, z, sizes[0])
    return list(z) == [_dot(row, column) for column in columns for row in rows]


def _dot(x: list[float], y: list[float]) -> float:
    return sum(map(float.__mul__, x, y))


class _Symbol(ctypes.Structure):
    _fields_ = tuple(zip(("file", "base", "name", "address"), 2 * (ctypes.c_char_p, ctypes.c_void_p)))


def file_of(address: int) -> str:
    """Return the file from which a routine was loaded; an empty string if it is unknown."""
    symbol = _Symbol()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
    return symbol.file.decode(errors="replace") if found else ""


# -- trial in a forked process

_PROBE_SECONDS = 60  # time limit for loading and calling a BLAS on a busy machine


class Linked(NamedTuple):
    """Result of linking to a BLAS and calling it.

    Attributes
    ----------
    trouble : str
        Why Theano's modules cannot be linked to it, cannot be loaded, or crash in it; empty if they work.
    objection : str
        Why Theano must not compute with it; empty if there is no reason.
    file : str
        The file that contains the routine for matrix products.
    """

    trouble: str = ""
    objection: str = ""
    file: str = ""


def try_blas(flags: str) -> Linked:
    """Link a module to a BLAS, load it and call its routines.

    Theano must have been imported, and have a compiler.

    Parameters
    ----------
    flags : str
        As in ``theano.config.blas.ldflags``.
    """
    from theano import config

    try:
        # use the folder of Theano's own modules, because other file systems may be mounted with noexec
        with tempfile.TemporaryDirectory(prefix="synkhronos_", dir=config.base_compiledir) as folder:
            module = link(flags, folder)
            return try_routines(lambda: load_table(module))
    except OSError as error:
        return Linked(trouble=str(error))


def try_routines(load: Callable[[], dict[str, int]]) -> Linked:
    """Load a BLAS and call its routines in a fork of this process.

    Parameters
    ----------
    load : callable
        ``load()`` loads the BLAS. It returns the addresses of `SYMBOLS`, or raises an `OSError`.
    """
    reading, writing = os.pipe()
    child = 0
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the fork must not run handlers
        try:
            child = os.fork()
            if not child:
                _answer(load, writing)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(writing)
        output = _listen(reading)
    finally:
        os.close(reading)
        status = _end(child) if child else 0
    answer: dict[str, str] = {}
    words = []
    for line in filter(None, map(str.strip, output.splitlines())):
        if line.startswith("{"):
            answer.update(json.loads(line))
        else:
            words.append(line)
    if "objection" not in answer:
        number = f" by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
        answer["trouble"] = "; ".join(words[:3]) or f"it ends the process{number}"
    return Linked(**answer)


def _answer(load: Callable[[], dict[str, int]], writing: int) -> NoReturn:
    """Test a BLAS, in a fork; write each result as a line as soon as it is known."""

    def report(**facts: str) -> None:
        os.write(writing, f"{json.dumps(facts)}\n".encode())

    try:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        addresses = load()
        report(file=file_of(addresses["dgemm_"]))
        report(objection=objection(addresses))
    except OSError as error:
        words = re.sub(r".*: undefined symbol: (\w+)", r"none of the libraries has the routine \1", str(error))
        report(trouble=words, objection="")
    finally:
        os._exit(0)


def _listen(reading: int) -> str:
    """Return the output of a fork until it ends or the time limit is reached."""
    output = b""
    ready = select.poll()
    ready.register(reading)
    while ready.poll(1000 * _PROBE_SECONDS):
        part = os.read(reading, 1 << 16)
        if not part:
            return output.decode(errors="replace")
        output += part
    return f"{output.decode(errors='replace')}\nit gave no answer within {_PROBE_SECONDS} seconds"


def _end(child: int) -> int:
    """Kill a fork if it has not ended, remove files that Intel's OpenMP leaves, and return the fork's exit status."""
    status = 0
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the program may reap all its children itself
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    with contextlib.suppress(OSError):
        os.unlink(f"/dev/shm/__KMP_REGISTERED_LIB_{child}_{os.getuid()}")
    return status


# -- linking

#: Modules of Theano and of PyTensor whose functions make the command.
_THEANO = ("theano", "theano.gof.cmodule", "theano.tensor.blas")
_PYTENSOR = ("pytensor", "pytensor.link.c.cmodule", "pytensor.tensor.blas._core")

_LINK_SECONDS = 120  # time limit for the compiler, on a busy machine


def link(flags: str, folder: str) -> str:
    """Link a module with the addresses of a BLAS's routines, by the command that Theano would use.

    Parameters
    ----------
    flags : str
        As in ``theano.config.blas.ldflags``.
    folder : str
        Folder for the module.

    Returns
    -------
    str
        The module's file.

    Raises
    ------
    OSError
        If linking fails; the text is shown to the user.
    """
    source, module = os.path.join(folder, "blas.cpp"), os.path.join(folder, "blas.so")
    with open(source, "w") as file:
        file.write('extern "C" {\n')
        file.writelines(f"void {symbol}(void);\n" for symbol in SYMBOLS)
        addresses = ", ".join(f"(void *) {symbol}" for symbol in SYMBOLS)
        file.write(f"void *{TABLE}[] = {{{addresses}}};\n}}\n")
    try:
        done = subprocess.run(
            _command(flags, source, module),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LINK_SECONDS,
            check=False,
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from None
    if done.returncode:
        raise OSError(_said(done.stdout.decode(errors="replace"), flags))
    return module


def _command(flags: str, source: str, module: str) -> list[str]:
    engine, compiling, linking = _THEANO if "pytensor" not in sys.modules else _PYTENSOR
    config, cmodule, blas = import_module(engine).config, import_module(compiling), import_module(linking)

    def kind(**wanted: bool) -> list[str]:
        everything = dict.fromkeys(("libs", "flags", "libs_dir", "include_dir"), False)
        return list(dict.fromkeys(blas._ldflags(flags, **{**everything, **wanted})))

    try:
        options, folders, libraries = kind(flags=True), kind(libs_dir=True), kind(libs=True)
        kind(include_dir=True)  # raises ValueError for -I
    except ValueError:
        raise OSError(_unknown_flag(flags)) from None
    except OSError as error:  # `_ldflags` lists the folders of -L
        raise OSError(f"the folder {error.filename} of -L: {error.strerror}") from None
    try:
        arguments = cmodule.GCC_compiler.compile_args()
    except ValueError as error:  # invalid gcc.cxxflags
        raise OSError(str(error)) from None
    return [
        config.cxx,
        cmodule.get_gcc_shared_library_arg(),
        *options,
        *arguments,
        *(f"-L{folder}" for folder in [*folders, *cmodule.std_lib_dirs()]),
        *("-o", module, source),
        *(f"-l{library}" for library in [*libraries, *cmodule.std_libs()]),
    ]


def _unknown_flag(flags: str) -> str:
    """Return a message that says which flag Theano does not accept, and why."""
    bare = [flag[1:-1] if flag[0] in "'\"" and flag[0] == flag[-1] else flag for flag in flags.split()]
    wrong = next((flag for flag in bare if len(flag) < 3 or flag[0] != "-" or flag.startswith("-I")), flags)
    if wrong.startswith("-I"):
        return f"Theano takes no flag {wrong}: no folder of headers is used for a BLAS"
    if wrong.startswith("/"):
        return f"Theano takes no path {wrong} as a flag: -L gives the folder, -l:NAME the file"
    return f"Theano takes no flag {wrong}: it splits them at white space, within quotes too, and each begins with -"


def _said(output: str, flags: str) -> str:
    """Return the error messages of compiler and linker, without the lines that accompany every error."""
    lines = [re.sub(r"^(?:\S*/)?ld(?:\.\w+)?: ", "", line.strip()) for line in output.splitlines()]
    relevant = [line for line in lines if line and not line.startswith(("collect2:", "compilation terminated"))]
    for name in re.findall(r"cannot find -l([\w.+-]+)", output):
        relevant += _hints(name, flags)[:1]
    if re.search(r"\S[\"']\S", flags):
        relevant.append("Theano passes quotes within a flag unchanged")
    return "; ".join(list(dict.fromkeys(relevant))[:4]) or "the compiler failed without a message"


def _hints(name: str, flags: str) -> list[str]:
    """Return reasons, which the linker does not give, why -l did not find a library in the folders of -L."""
    hints = []
    for folder in re.findall(r"(?:^|\s)-L(\S+)", flags):
        for file in sorted(glob.glob(os.path.join(glob.escape(folder), f"lib{name}.so*")), key=len):
            if not os.access(file, os.R_OK):
                hints.append(f"{file} {'may not be read' if os.path.exists(file) else 'is a broken link'}")
            elif os.path.basename(file) != f"lib{name}.so":
                hints.append(f"{file} would be -l:{os.path.basename(file)}")
    return hints
