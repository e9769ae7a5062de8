"""Examine what this node can compute with, in the environment that the launcher prepares.

Code that could crash or hang runs in a process of its own, so that a broken part does not end the examination.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata

from synkhronos._cli import report as remedies
from synkhronos._cli.devices import (
    OPTIONAL_PACKAGES,
    Engine,
    blas_parts,
    cuda_gpus,
    cuda_parts,
    engine_of,
    opencl_parts,
    pygpu_parts,
    try_devices,
)
from synkhronos._cli.gpu_libraries import Finder, survey
from synkhronos._cli.launcher import chosen_in, package_path, variables
from synkhronos._cli.probes import MPI, OPENCL, PYGPU, Answer, ask, python
from synkhronos._cli.report import MISSING, OK, OPTIONAL, UNUSABLE, Device, Part, Report
from synkhronos._costs import Store, describe_machine, path_of_store
from synkhronos._utils.resources import count_cores, free_memory

_OFF = "turned off by cxx in {}: {} compiles no C++"

#: Time limit for importing the backend or compiling on a busy machine, in seconds.
_SECONDS = 120.0

#: Free memory below this many bytes is reported as a problem.
_LITTLE = 2**30


def examine(version: str, environment: Mapping[str, str], search_path: Sequence[str], gpus_too: bool = False) -> Report:
    """Examine this node, and return the report.

    Parameters
    ----------
    version : str
        Version of Synkhronos.
    environment : mapping
        The environment variables.
    search_path : sequence of str
        The folders in which programs find packages.
    gpus_too : bool
        Examine what GPUs need, too, if there is no NVIDIA driver.
    """
    finder = Finder(environment, search_path)
    gpus, trouble = cuda_gpus(finder, environment)
    found = survey(finder, environment, gpus)
    changed, refusal = {}, ""
    try:
        changed = variables(environment, finder, found)
    except OSError as error:
        refusal = str(error)
    prepared = {**environment, **changed}
    engine = engine_of(environment, search_path)
    gpus_too = engine.has_gpus and bool(gpus_too or gpus or trouble)
    programs = {"engine": engine.inquiry, "mpi": MPI, **({"pygpu": PYGPU, "opencl": OPENCL} if gpus_too else {})}
    answers = ask({name: python(program) for name, program in programs.items()}, prepared, _SECONDS)
    record = answers["engine"].record
    compiler = record.get("cxx", shutil.which("g++") or "")
    compiled = _compile(compiler, record.get("arguments", []), prepared)
    compiling = _compiling(compiler, compiled, prepared, engine)
    working = compiler if compiling[0].state == OK else ""
    openblas = bool(package_path("scipy_openblas32", search_path))
    room, where = min(free_memory())
    cores = count_cores()
    parts = [
        *_packages(search_path, answers, engine),
        *_theano(),
        *_device(record.get("device", ""), environment),
        *compiling,
        *blas_parts(answers["engine"], working, prepared, openblas, engine),
        Part("cpu", "cores", OK, f"{cores} of {os.cpu_count()}"),
        _judged(room, where),
        *_costs(environment, f"; {engine.title} ", f"; Synkhronos {version}"),
    ]
    devices: list[Device] = []
    if gpus_too:
        parts += [
            *pygpu_parts(answers["pygpu"], compiled["gpuarray"], search_path),
            *([Part("gpu", "links", UNUSABLE, note=refusal)] if refusal else []),
            *cuda_parts(found, gpus, trouble),
            *opencl_parts(answers["opencl"], finder),
        ]
        devices = try_devices(gpus, answers["opencl"], not answers["pygpu"].error, prepared)
    elif engine.has_gpus:
        note = "no NVIDIA driver was found; `info --gpu` shows what GPUs need, also those of OpenCL"
        parts.append(Part("cpu", "GPUs", OK, "not examined", "", note))
    return Report(version, engine.title, parts, devices, changed, cores, room)


def _theano() -> list[Part]:
    """Return a part for Theano where it cannot be installed."""
    if sys.version_info < (3, 12):
        return []
    return [Part("cpu", "Theano", OPTIONAL, note="scripts for Theano, Lasagne or Keras need Python 3.9 to 3.11")]


def _device(name: str, environment: Mapping[str, str]) -> list[Part]:
    """Return a part for a device of Theano's old GPU backend, with which Theano 1.0 cannot be imported."""
    if not name.startswith("gpu"):
        return []
    place = chosen_in("device", environment) or "a configuration file"
    note = f"{place} sets device={name}, of a backend that Theano 1.0 does not have: it cannot be imported"
    return [Part("cpu", "device", UNUSABLE, name, "", note, "export THEANO_FLAGS=device=cpu")]


def _costs(environment: Mapping[str, str], backend: str, version: str) -> list[Part]:
    """Return a part for each entry with measured costs, by which exact functions choose their plans.

    Entries of other backends and versions, whose names do not contain both strings, are left out.
    """
    path = path_of_store(environment)
    machines = {name: one for name, one in Store(path).machines().items() if backend in name and version in name}
    if not machines:
        return [
            Part("cpu", "costs of calls", OK, "not measured yet: the first call of an exact function does it", path)
        ]
    return [
        Part("cpu", "costs of calls", OK, "measured", path, "\n".join([*describe_machine(one), f"of {name}"]))
        for name, one in machines.items()
    ]


def _packages(search_path: Sequence[str], answers: Mapping[str, Answer], engine: Engine) -> list[Part]:
    """Return the parts for Python and its packages. The backend and MPI must work; the others must be installed."""
    parts = [Part("cpu", "Python", OK, ".".join(map(str, sys.version_info[:3])), sys.executable)]
    for name, module, requirement in engine.packages:
        path = package_path(module, search_path)
        try:
            version = metadata.version(module)
        except metadata.PackageNotFoundError:
            version = ""
        notes = OPTIONAL_PACKAGES.get(module)
        state, note, remedy = OK, notes[0] if notes else "", remedies.pip(requirement)
        if not path:
            state, note = (OPTIONAL, notes[1]) if notes else (MISSING, "")
        elif version and not _satisfies(version, requirement):
            state, note = OPTIONAL if notes else UNUSABLE, f"{requirement} is needed"
        elif module == engine.module and answers["engine"].error:
            state, note, remedy = UNUSABLE, answers["engine"].error, ""
        elif module == "mpi4py":
            error = answers["mpi"].error
            state, note = (OPTIONAL, error) if error else (OK, answers["mpi"].record["library"])
            remedy = remedies.pip("mpich")
        parts.append(Part("cpu", name, state, version, path, note, remedy))
    return parts


def _satisfies(version: str, requirement: str) -> bool:
    """Return whether a version satisfies the bounds of a requirement."""
    tests = {"==": lambda a, b: a == b, ">=": lambda a, b: a >= b, "<": lambda a, b: a < b}
    return all(
        tests[operator](_numbers(version), _numbers(bound))
        for operator, bound in re.findall(r"(==|>=|<)([\d.]+)", requirement)
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _compile(compiler: str, arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Answer]:
    """Ask the compiler for its version, and test whether it compiles and links what Theano's C code needs.

    ``arguments`` are those that Theano passes for every module, including the user's ``gcc.cxxflags``.
    """
    if not compiler:
        return {name: Answer("", "there is no C++ compiler") for name in ("version", "arguments", "python", "gpuarray")}
    include, prefix = sysconfig.get_path("include"), sys.exec_prefix
    places = [f"-I{include}", f"-I{prefix}/include", f"-L{prefix}/lib"]
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "output")
        commands = {
            "version": [compiler, "-dumpfullversion"],
            "arguments": [compiler, *arguments, "-fsyntax-only", "-x", "c++", "/dev/null"],
            "python": [compiler, *places, "-fsyntax-only", "-include", "Python.h", "-x", "c++", "/dev/null"],
            "gpuarray": [compiler, *places, "-shared", "-fPIC", "-o", output],
        }
        commands["gpuarray"] += ["-include", "gpuarray/array.h", "-x", "c++", "/dev/null", "-lgpuarray"]
        return ask(commands, environment, _SECONDS)


def _compiling(
    compiler: str, compiled: Mapping[str, Answer], environment: Mapping[str, str], engine: Engine
) -> list[Part]:
    """Return the parts for the C++ compiler and Python's headers, which are optional with PyTensor and numba."""
    version, place, remedy = compiled["version"], chosen_in("cxx", environment, engine.module), remedies.apt("g++")
    state, note = (UNUSABLE, version.error) if compiler and version.error else (OK, "")
    if place:
        remedy = remedies.without("cxx", place)
    if not compiler:
        state, note = (UNUSABLE, _OFF.format(place, engine.title)) if place else (MISSING, "")
    elif state == OK and compiled["arguments"].error:
        state, note = UNUSABLE, compiled["arguments"].error
        flag = engine.flag("gcc.cxxflags")
        place = chosen_in(flag, environment, engine.module)
        remedy = remedies.without(flag, place) if place else remedy
    parts = [Part("cpu", "C++ compiler", state, version.output.strip(), compiler, note, remedy)]
    headers = compiled["python"].error
    if state == OK:
        state, include = MISSING if headers else OK, sysconfig.get_path("include")
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        parts.append(Part("cpu", "Python.h", state, "", include, headers, remedies.apt(package)))
    if engine.module == "pytensor":
        for part in parts:
            part.state = OK if part.state == OK else OPTIONAL
    return parts


def _judged(free: int, where: str) -> Part:
    """Return the part for the free memory, which must hold data sets and results."""
    size = f"{free / 2**30:.1f} GiB free {where}"
    if free > _LITTLE:
        return Part("cpu", "memory", OK, size)
    return Part("cpu", "memory", OPTIONAL, size, "", "data sets and results lie there; use numpy.memmap of files")
