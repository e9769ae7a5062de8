"""Run a program in an environment in which GPUs work, and read a backend's flags without importing the backend.

libgpuarray opens the CUDA libraries by names without a version, but neither wheels nor drivers install such names. And
the loader reads ``LD_LIBRARY_PATH`` only when a process starts. Therefore links with these names are made in a private
folder, and the same Python is executed again with an environment that contains the folder. The environment is changed
only as far as necessary; on a machine without CUDA and pygpu it stays the same.

Invariant: this process imports neither Theano nor pygpu, and loads no CUDA library.
"""

from __future__ import annotations

import configparser
import contextlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from typing import NoReturn

from synkhronos._cli.gpu_libraries import COMPANIONS, NAMES, Finder, Survey, private_folder, survey
from synkhronos._utils.rendezvous import rendezvous


def chosen_in(name: str, environment: Mapping[str, str], engine: str = "theano") -> str:
    """Return where a flag of the backend is set.

    Parameters
    ----------
    name : str
        Name of the flag, such as ``"cxx"``, or ``"blas.ldflags"``, which is ``"blas__ldflags"`` for PyTensor.
    environment : mapping
        The environment variables.
    engine : str
        ``"theano"`` or ``"pytensor"``.

    Returns
    -------
    str
        ``"THEANO_FLAGS"`` or ``"PYTENSOR_FLAGS"``, the path of a configuration file, or an empty string if the flag is
        not set.
    """
    flags = f"{engine.upper()}_FLAGS"
    splitter = shlex.shlex(environment.get(flags, ""), posix=True)
    splitter.whitespace, splitter.whitespace_split = ",", True
    with contextlib.suppress(ValueError):  # for an unterminated quote, which the backend itself reports
        if any("=" in flag and flag.split("=")[0].strip() == name for flag in splitter):
            return flags
    section, _, option = name.replace("__", ".").rpartition(".")
    home = environment.get("HOME", "")
    paths = environment.get(f"{engine.upper()}RC", f"~/.{engine}rc").split(os.pathsep)
    for file in reversed(paths):  # the last one wins
        path = home + file[1:] if file.startswith("~/") else file
        files = configparser.RawConfigParser()
        with contextlib.suppress(configparser.Error, UnicodeDecodeError):
            files.read(path)
        if files.has_option(section or "global", option):
            return path
    return ""


_logger = logging.getLogger("synkhronos")

#: Folder of Debian's Python packages, for the system's Python.
SYSTEM_PACKAGES = "/usr/lib/python3/dist-packages"

#: pygpu, and the packages that it imports in addition to NumPy.
PYGPU = ("pygpu", "mako", "markupsafe", "six")


def run(arguments: Sequence[str], command_line: Sequence[str], search_path: Sequence[str]) -> NoReturn:
    """Replace this process by the same Python with the same options, which executes another program with usable GPUs.

    Parameters
    ----------
    arguments : sequence of str
        Arguments of Python: a script, or ``-m`` and a module, and their arguments.
    command_line : sequence of str
        Command line of this process, without ``arguments`` and this package's own arguments.
    search_path : sequence of str
        The folders in which programs find packages.

    Raises
    ------
    PermissionError
        If links are needed and there is no safe folder for them.
    """
    environment = dict(os.environ)
    finder = Finder(environment, search_path)
    found = survey(finder, environment) if finder.candidates("cuda") else None
    lacking = what_cuda_lacks(found) if found else ""
    if lacking:
        _logger.warning("CUDA cannot be used: %s; `python -m synkhronos info --gpu` shows how to fix it", lacking)
    environment.update(variables(environment, finder, found))
    # importing the package may have imported Theano and opened a GPU; with this variable the program could not open it
    environment.pop("THEANO_GPU_IS_ALREADY_ACTIVE", None)
    rendezvous.pass_on(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *interpreter_options(command_line), *arguments], environment)


def variables(environment: Mapping[str, str], finder: Finder, found: Survey | None) -> dict[str, str]:
    """Make the links that a program needs to compute on GPUs, and return the environment variables to set.

    Parameters
    ----------
    environment : mapping
        The existing environment variables. The user's settings are kept, and take precedence.
    finder : Finder
    found : Survey or None
        The libraries; without a driver, no variable is set for them.

    Raises
    ------
    PermissionError
        If links are needed and there is no safe folder for them.
    """
    libraries = library_links(found, finder) if found and found.driver else {}
    packages = package_links(finder.search_path)
    links = {f"lib/{name}": path for name, path in libraries.items()}
    links.update({f"python/{name}": path for name, path in packages.items()})
    folder = private_folder(links, environment) if links else ""
    changed = {}
    if libraries:
        changed["LD_LIBRARY_PATH"] = _joined(":", f"{folder}/lib", environment.get("LD_LIBRARY_PATH"))
    if packages:
        changed["PYTHONPATH"] = _joined(":", environment.get("PYTHONPATH"), f"{folder}/python")
    if found and found.driver and "cudnn" not in found.chosen and not chosen_in("dnn.enabled", environment):
        changed["THEANO_FLAGS"] = _joined(",", "dnn.enabled=False", environment.get("THEANO_FLAGS"))
    return changed


def what_cuda_lacks(found: Survey) -> str:
    """Return a line that says which required libraries are missing or unusable; an empty string if there are none."""
    lacking = [] if found.driver else ["cuda"]
    lacking += [name for name in ("nvrtc", "cublas") if name not in found.chosen]
    reasons = {name: "no " + NAMES[name] for name in lacking}
    reasons.update({library.name: f"{library.path} {reason}" for library, reason in found.refused})
    return "; ".join(reasons[name] for name in lacking)


def interpreter_options(command_line: Sequence[str]) -> list[str]:
    """Return Python's own options in a command line that ends with the module or script to execute.

    >>> interpreter_options(["python", "-X", "dev", "-um", "synkhronos"])
    ['-X', 'dev', '-u']
    """
    *options, program = command_line[1:]
    module = program
    if program.startswith("-") and "m" in program:  # -msynkhronos
        options.append(program[: program.index("m") + 1])
        module = program[program.index("m") + 1 :]
    if module in ("synkhronos", "synkhronos.__main__") and options and re.fullmatch("-.*m", options[-1]):
        flags = options.pop()[:-1]
        options += [flags] if flags != "-" else []
    return options


def library_links(found: Survey, finder: Finder) -> dict[str, str]:
    """Return the links that the chosen libraries need, as a dict from the link's name to its target.

    Each library needs a link of its name without a version, and links to the files in its folder that it opens itself.
    Links are left out if the loader finds the same files without them.
    """
    links = {}
    for library in filter(None, [found.driver, *found.chosen.values()]):
        folder = os.path.dirname(library.path)
        wanted = {f"lib{library.name}.so": library.path}
        for file in os.listdir(folder):
            if file.startswith(COMPANIONS[library.name]) and ".so" in file:
                wanted.setdefault(file, os.path.realpath(os.path.join(folder, file)))
        links.update({name: path for name, path in wanted.items() if finder.loaded_as(name) != path})
    return links


def package_links(search_path: Sequence[str]) -> dict[str, str]:
    """Return links that make the system's pygpu importable, and its dependencies that are missing."""
    if package_path("pygpu", search_path) or not system_pygpu():
        return {}
    links = {}
    for name in PYGPU:
        path = package_path(name, [SYSTEM_PACKAGES])
        if path and not package_path(name, search_path):
            links[os.path.basename(path)] = path
    return links


def system_pygpu() -> str:
    """Return the folder of the system's pygpu if it is built for this version of Python, otherwise an empty string."""
    path = package_path("pygpu", [SYSTEM_PACKAGES])
    return path if any(os.path.exists(os.path.join(path, f"gpuarray{suffix}")) for suffix in EXTENSION_SUFFIXES) else ""


def package_path(name: str, search_path: Sequence[str]) -> str:
    """Find a package or module without importing it; return its folder or file, or an empty string if there is none."""
    spec = PathFinder.find_spec(name, list(search_path))
    if spec is None or not spec.origin:
        return ""
    return os.path.dirname(spec.origin) if spec.submodule_search_locations else spec.origin


def _joined(separator: str, *parts: str | None) -> str:
    return separator.join(part for part in parts if part)
