"""Linking a module to a BLAS by the command that Theano would use.

Theano splits ``blas.ldflags`` at white space, within quotes too; takes quotes off a flag that begins and ends with
them; refuses ``-I`` and flags of less than three characters; lists the folders of ``-L``; puts libraries behind all
other flags. So its own functions make the command here.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from importlib import import_module

from .routines import SYMBOLS, TABLE

__all__ = ["link"]

#: The modules that make the command: of Theano, and of PyTensor.
_THEANO = ("theano", "theano.gof.cmodule", "theano.tensor.blas")
_PYTENSOR = ("pytensor", "pytensor.link.c.cmodule", "pytensor.tensor.blas._core")

_SECONDS = 120  # for the compiler, on a machine that is busy


def link(flags: str, folder: str) -> str:
    """Link a module that holds the addresses of a BLAS's routines, by the command that Theano would use.

    Parameters
    ----------
    flags : str
        As in ``theano.config.blas.ldflags``.
    folder : str
        Where the module is written.

    Returns
    -------
    str
        The module's file.

    Raises
    ------
    OSError
        If that does not work; the text is what the user is told.
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
            timeout=_SECONDS,
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
        kind(include_dir=True)  # which it refuses
    except ValueError:
        raise OSError(_misunderstood(flags)) from None
    except OSError as error:  # it lists the folders of -L
        raise OSError(f"the folder {error.filename} of -L: {error.strerror}") from None
    try:
        arguments = cmodule.GCC_compiler.compile_args()
    except ValueError as error:  # of gcc.cxxflags
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


def _misunderstood(flags: str) -> str:
    """Which flag Theano does not take, and why."""
    bare = [flag[1:-1] if flag[0] in "'\"" and flag[0] == flag[-1] else flag for flag in flags.split()]
    wrong = next((flag for flag in bare if len(flag) < 3 or flag[0] != "-" or flag.startswith("-I")), flags)
    if wrong.startswith("-I"):
        return f"Theano takes no flag {wrong}: no folder of headers is used for a BLAS"
    if wrong.startswith("/"):
        return f"Theano takes no path {wrong} as a flag: -L gives the folder, -l:NAME the file"
    return f"Theano takes no flag {wrong}: it splits them at white space, within quotes too, and each begins with -"


def _said(output: str, flags: str) -> str:
    """What compiler and linker complained of, without what they say of every error."""
    lines = [re.sub(r"^(?:\S*/)?ld(?:\.\w+)?: ", "", line.strip()) for line in output.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("collect2:", "compilation terminated"))]
    for name in re.findall(r"cannot find -l([\w.+-]+)", output):
        telling += _hints(name, flags)[:1]
    if re.search(r"\S[\"']\S", flags):
        telling.append("Theano hands on quotes within a flag as they are")
    return "; ".join(list(dict.fromkeys(telling))[:4]) or "the compiler failed without a word"


def _hints(name: str, flags: str) -> list[str]:
    """Why -l might not have found what lies in the folders of -L, of which the linker says nothing."""
    hints = []
    for folder in re.findall(r"(?:^|\s)-L(\S+)", flags):
        for file in sorted(glob.glob(os.path.join(glob.escape(folder), f"lib{name}.so*")), key=len):
            if not os.access(file, os.R_OK):
                hints.append(f"{file} {'may not be read' if os.path.exists(file) else 'leads nowhere'}")
            elif os.path.basename(file) != f"lib{name}.so":
                hints.append(f"{file} would be -l:{os.path.basename(file)}")
    return hints
