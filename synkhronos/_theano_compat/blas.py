"""Find a BLAS library that Theano's C code can be linked to, without root privileges and without compiling one.

`find_blas` is the default of ``theano.config.blas.ldflags``; `refuse_unfit_blas` replaces a library that gives wrong
results. The preferred library is scipy-openblas32, the OpenBLAS that the maintainers of NumPy and SciPy build. Its
wheel works with all versions of Python, and is updated. So it has kernels for processors that are newer than the wheels
of NumPy and SciPy that Theano needs.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import blas_probe as routines
from .blas_probe import try_blas, try_routines
from .flags import is_replacement, replacement

logger = logging.getLogger("synkhronos")

#: Environment variable that selects a BLAS: one of `NAMES`, or the path of a library.
CHOICE = "SYNKHRONOS_BLAS"
NAMES = {  # with the commands that install them
    "scipy-openblas32": "python -m pip install scipy-openblas32",
    "system": "apt-get install libopenblas-dev",
    "mkl": "python -m pip install mkl",
    "scipy": "python -m pip install 'scipy<1.11'",
}

#: Flags that `find_blas` has returned, after it tried the library.
found: set[str] = set()

_HEADER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scipy_openblas32.h")


class Candidate(NamedTuple):
    """A library that Theano may be linked to."""

    flags: str  # for ``theano.config.blas.ldflags``; empty if the path cannot be written there
    library: str  # a path, or a file name for which the loader searches
    prefix: str = ""  # of the names of its symbols


def find_blas(cxx: str) -> str:
    """Find a BLAS that the compiler can link and the loader can load, and that computes correctly.

    Each rejected library is logged with the reason: as a warning if `CHOICE` names it, otherwise as information.

    Parameters
    ----------
    cxx : str
        The C++ compiler; empty if Theano has none, and so cannot link anything.

    Returns
    -------
    str
        Flags for ``theano.config.blas.ldflags``; empty if none was found.
    """
    if not cxx or not sys.platform.startswith("linux"):
        return ""
    chosen = os.environ.get(CHOICE, "")
    if os.sep in chosen:  # make the path of a library valid in any working directory
        chosen = os.path.abspath(os.path.expanduser(chosen))
    refused: dict[Candidate, str] = {}
    for choice in filter(None, (chosen, "any")):
        for candidate in candidates(cxx, choice):
            if candidate in refused:
                continue
            reason = _objection(candidate, choice == chosen)
            if not reason:
                logger.debug("Theano is linked to the BLAS %s (%s)", candidate.library, candidate.flags)
                found.add(candidate.flags)
                return candidate.flags
            refused[candidate] = reason if candidate.library == chosen else f"{candidate.library}: {reason}"
            if choice != chosen:
                logger.info("not used as a BLAS for Theano: %s", refused[candidate])
        if choice == chosen:
            nothing = f"`{NAMES[chosen]}` brings it" if chosen in NAMES else f"it is no path, nor {', '.join(NAMES)}"
            reasons = "; ".join(refused.values()) or f"there is no such BLAS: {nothing}"
            logger.warning("%s=%s: %s; trying others", CHOICE, chosen, reasons)
    if importlib.util.find_spec("scipy_openblas32") is None:
        logger.info("no BLAS found to link Theano to; `python -m pip install scipy-openblas32` provides one")
    return ""


def _objection(candidate: Candidate, named: bool) -> str:
    """Return why Theano must not be linked to a library; if there is no reason, load it and return an empty string.

    If the user has named the library, it is tried in a forked process first, because MKL ends the process if a part of
    it is missing.
    """
    if not candidate.flags:
        return "its path holds white space or a comma, at which Theano and the compiler split flags"
    if os.path.isfile(candidate.library) and processor_of(candidate.library) not in (processor_of(sys.executable), b""):
        return "it is made for another kind of processor"  # the loader would report a missing file
    load = functools.partial(routines.load, candidate.library, candidate.prefix)
    try:
        tried = try_routines(load) if named else None
        reason = (tried.trouble or tried.objection) if tried else ""
        return (reason or routines.objection(load())).removeprefix(f"{candidate.library}: ")
    except OSError as error:
        return str(error).removeprefix(f"{candidate.library}: ")


def processor_of(path: str) -> bytes:
    """Return the word size and processor from the header of an ELF file; empty for other files."""
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError:
        return b""
    return head[4:6] + head[18:20] if head.startswith(b"\x7fELF") else b""


def candidates(cxx: str, choice: str = "any") -> Iterator[Candidate]:
    """Yield the libraries of a choice, the best first. ``"any"`` means all except MKL.

    Theano adds a run path for each ``-L``. For the system's folders neither is used: they would precede this Python's
    folders, and some contain another libpython.
    """
    if choice in ("any", "scipy-openblas32"):
        yield from _in_wheel("scipy_openblas32", "lib/libscipy_openblas.so", "scipy_")
    if choice in ("any", "system"):
        own = os.path.join(sys.prefix, "lib", "libopenblas.so")
        if os.path.exists(own):
            yield Candidate(link_flags(own), own)
        # The compiler prints the path of the file that -lopenblas would link, or only the name if there is none. The
        # library is also loaded by its name, to check that the loader finds it without a path.
        name = "libopenblas.so"
        try:
            command = [cxx, "-print-file-name=" + name]
            if os.path.isabs(subprocess.check_output(command, text=True).strip()):
                yield Candidate("-lopenblas", name)
        except (OSError, subprocess.SubprocessError):
            pass
    if choice in ("any", "scipy"):  # wheels of scipy < 1.11 bundle a BLAS with the standard symbol names
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
    """Return the flags that link a library file, such as ``-L/a/b -lc`` for ``/a/b/libc.so``.

    If its symbols have a prefix, the flags include the header that maps the standard names to them. Return an empty
    string if the path contains white space or a comma: Theano splits flags at white space, and the compiler splits
    flags for the linker at commas.
    """
    if "," in library:
        return ""
    directory, name = os.path.split(library)
    if name.startswith("lib") and name.endswith(".so"):
        flags = [f"-L{directory}", f"-l{name[len('lib') : -len('.so')]}"]
    else:  # -l does not find names that end with a version number
        flags = [f"-Wl,--no-as-needed,{library},-rpath,{directory}"]
    if prefix:
        flags.append(f"-include{_HEADER}")
    return " ".join(flags) if len(" ".join(flags).split()) == len(flags) else ""


def offer_blas(configdefaults: Any) -> None:
    """Make `find_blas` the default of ``theano.config.blas.ldflags``, with Theano's own default as fallback.

    Any setting by the user, in one of Theano's ways, takes precedence over the default.

    Parameters
    ----------
    configdefaults : module
        ``theano.configdefaults``, executed.
    """
    config = configdefaults.config
    parameter = type(config.blas).__dict__["ldflags"]
    theanos_own = parameter.default
    parameter.default = lambda: find_blas(config.cxx) or theanos_own()
    if parameter.is_default and getattr(parameter, "val", None) == "":
        # Theano has already searched for a BLAS, and found none
        config.blas.ldflags = find_blas(config.cxx)


def refuse_unfit_blas() -> None:
    """Have ``theano.config.blas.ldflags`` reject a BLAS with which Theano would compute wrong results.

    The present value is tried now, and each later one when it is set. Rejected flags are replaced by those that
    `find_blas` returns. Flags that cannot be linked stay, with a warning. Theano must have been imported; calling this
    again does nothing.
    """
    from theano import config

    parameter = type(config.blas).__dict__["ldflags"]
    theanos_own = parameter.filter
    if is_replacement(theanos_own):
        return
    answers: dict[str, str] = {}

    @replacement
    def filter(value: Any) -> str:
        """Convert a value as Theano does, and replace it if the BLAS gives wrong results."""
        flags = str(theanos_own(value))
        if not flags.strip() or flags in found or not config.cxx or not sys.platform.startswith("linux"):
            return flags
        if flags not in answers:
            answers[flags] = _fit(flags, config.cxx)
        return answers[flags]

    parameter.filter = filter
    config.blas.ldflags = config.blas.ldflags


def _fit(flags: str, cxx: str) -> str:
    """Return these flags, or those of another BLAS if this one gives wrong results."""
    linked = try_blas(flags)
    if not linked.objection:
        if linked.trouble:
            logger.warning("blas.ldflags=%s: %s", flags, linked.trouble)
        return flags
    others = find_blas(cxx)
    instead = "another is taken" if others else "NumPy's is called instead, which is slower"
    logger.warning("blas.ldflags=%s: %s; %s", flags, linked.objection, instead)
    return others
