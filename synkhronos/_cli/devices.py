"""Report on the devices: CPU cores with the backend and BLAS libraries, and GPUs with pygpu, CUDA and OpenCL.

The default backend is Theano on Python 3.9 to 3.11, and PyTensor from Python 3.12 on.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from synkhronos._cli import report as remedies
from synkhronos._cli.gpu_libraries import NAMES, Finder, Gpu, Survey, ask_gpus, dotted
from synkhronos._cli.launcher import chosen_in, package_path, system_pygpu
from synkhronos._cli.probes import PRODUCT, PYTENSOR, THEANO, TRIAL, Answer, ask, python
from synkhronos._cli.report import MISSING, OK, OPTIONAL, UNUSABLE, Device, Part


@dataclass(frozen=True)
class Engine:
    """A graph backend.

    Attributes
    ----------
    module : str
        Name of its Python module.
    title : str
        Its name in messages.
    packages : tuple
        Packages that programs need or can use, each as (name, module, requirement for pip).
    inquiry : str
        Source code of the program that reports the backend's compiler and BLAS.
    separator : str
        Separator in the names of its flags.
    has_gpus : bool
        Whether it supports GPUs.
    """

    module: str
    title: str
    packages: tuple[tuple[str, str, str], ...]
    inquiry: str
    separator: str
    has_gpus: bool

    def flag(self, name: str) -> str:
        """Return the backend's name of a flag, given Theano's name, such as ``"blas.ldflags"``."""
        return name.replace(".", self.separator)


#: Packages that Synkhronos itself imports.
_COMMON = (("posix_ipc", "posix_ipc", "posix_ipc>=1.1"), ("threadpoolctl", "threadpoolctl", "threadpoolctl>=3.5"))
_MPI = ("mpi4py", "mpi4py", "mpi4py>=4")

#: What optional packages are for, by module: the note if they are installed, and if they are missing.
OPTIONAL_PACKAGES = {
    "mpi4py": ("", "sessions on several nodes need it, and an MPI"),
    "lasagne": ("", "the MNIST demos build their networks with it"),
    "pymc": ("", "synkhronos.extensions.pymc divides its models"),
    "nutpie": (
        "the sampler of pm.sample(), unless its arguments need PyMC's own NUTS, or PyTensor's linker is not numba",
        "pm.sample() uses PyMC's own NUTS without it",
    ),
}

ENGINES = {
    "theano": Engine(
        "theano",
        "Theano",
        (
            ("NumPy", "numpy", "numpy>=1.22,<1.24"),
            ("SciPy", "scipy", "scipy>=1.7,<1.11"),
            ("Theano", "theano", "Theano==1.0.5"),
            *_COMMON,
            ("Lasagne", "lasagne", "Lasagne>=0.1"),
            _MPI,
        ),
        THEANO,
        ".",
        True,
    ),
    "pytensor": Engine(
        "pytensor",
        "PyTensor",
        (
            ("NumPy", "numpy", "numpy>=2"),
            ("SciPy", "scipy", "scipy>=1"),
            ("PyTensor", "pytensor", "pytensor>=3.3.6,<3.4"),
            ("numba", "numba", "numba>=0.58"),
            *_COMMON,
            ("PyMC", "pymc", "pymc>=6.4,<6.5"),
            ("nutpie", "nutpie", "nutpie>=0.16.11,<0.17"),
            _MPI,
        ),
        PYTENSOR,
        "__",
        False,
    ),
}


def engine_of(environment: Mapping[str, str], search_path: Sequence[str]) -> Engine:
    """Return the backend that a program would use.

    This is the one in ``SYNKHRONOS_ENGINE``; otherwise an installed one; otherwise the one that pip would install.
    """
    asked = environment.get("SYNKHRONOS_ENGINE", "")
    if asked in ENGINES:
        return ENGINES[asked]
    installed = [name for name in ENGINES if package_path(name, search_path)]
    return ENGINES[installed[0] if installed else "theano" if sys.version_info < (3, 12) else "pytensor"]


# -- arithmetic and BLAS

#: Program that multiplies and adds float32 numbers in registers only, with the widest vectors that the compiler has for
#: this processor.
_PEAK = r"""
#include <chrono>
#include <cstdio>
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
enum { CHAINS = 12, STEPS = 1 << 17 };
int main() {
    Vector sums[CHAINS] = {}, factor = {}, term = {};
    factor += 0.999f;
    term += 1e-3f;
    double best = 0;
    for (int turn = 0; turn < 60; turn++) {
        auto begin = std::chrono::steady_clock::now();
        for (int step = 0; step < STEPS; step++)
#pragma GCC unroll 12
            for (int i = 0; i < CHAINS; i++) sums[i] = sums[i] * factor + term;
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        double rate = 2.0 * LANES * CHAINS * STEPS / took.count() / 1e9;
        if (rate > best) best = rate;
    }
    float used = 0;
    for (int i = 0; i < CHAINS; i++) used += sums[i][0];
    std::printf("{\"peak\": %.1f, \"used\": %d}\n", best, used > 0);
}
"""

#: OpenBLAS's kernel sets, by the width of their vectors in bits; all other sets use 128 bits.
_WIDTHS = {
    512: ("SkylakeX", "Cooperlake", "SapphireRapids"),
    256: ("Haswell", "Zen", "Excavator", "Sandybridge", "Bulldozer", "Piledriver", "Steamroller"),
}


def peak_of_core(compiler: str, environment: Mapping[str, str]) -> float:
    """Return the peak rate of one core's vector units in GFLOP/s (float32); 0 if it cannot be measured."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "peak.cpp"), os.path.join(folder, "peak")
        with open(source, "w") as file:
            file.write(_PEAK)
        command = [compiler, "-std=c++11", "-O3", "-march=native", "-ffp-contract=fast", source, "-o", program]
        if ask({"compile": command}, environment, 60.0)["compile"].error:
            return 0.0
        return float(ask({"run": [program]}, environment, 60.0)["run"].record.get("peak", 0.0))


def width_of_processor(cpuinfo: str = "/proc/cpuinfo") -> int:
    """Return the width in bits of the widest vectors of this processor for which OpenBLAS has kernels; 0 if not x86."""
    try:
        with open(cpuinfo) as file:
            found = re.search(r"^flags\s*:(.*)$", file.read(), re.MULTILINE)
    except OSError:
        return 0
    flags = found[1].split() if found else []
    needed = {512: {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}, 256: {"avx2", "fma"}, 128: {"sse2"}}
    return next((width for width, names in needed.items() if names <= set(flags)), 0)


_SLOWER = "NumPy's is called, which is slower"


def blas_parts(
    answer: Answer, compiler: str, environment: Mapping[str, str], installed: bool, engine: Engine
) -> list[Part]:
    """Return the parts for the backend's BLAS and NumPy's BLAS; an empty list if the backend cannot be imported.

    Parameters
    ----------
    answer : Answer
        Answer of the backend's inquiry. The folder that it names is removed.
    compiler : str
        The C++ compiler; empty if none works.
    environment : mapping
    installed : bool
        Whether scipy-openblas32 is installed.
    engine : Engine
    """
    record = answer.record
    try:
        if answer.error:
            return []
        peak = peak_of_core(compiler, environment) if compiler else 0.0
        return [_engines(record, bool(compiler), environment, installed, peak, engine), _numpys(environment, peak)]
    finally:
        if record.get("folder"):
            shutil.rmtree(record["folder"], ignore_errors=True)


def _engines(
    record: Mapping[str, Any],
    compiles: bool,
    environment: Mapping[str, str],
    installed: bool,
    peak: float,
    engine: Engine,
) -> Part:
    """Return the part for the BLAS to which the backend's modules are linked.

    The remedy depends on where the user has chosen the library.
    """
    if record.get("linker") in ("auto", "numba"):
        return Part("cpu", "BLAS", OK, note="not linked: functions are compiled by numba, and call SciPy's")
    name = engine.flag("blas.ldflags")
    flags, place = record.get("ldflags", ""), chosen_in(name, environment, engine.module)
    said = [text for _, text in record.get("said", [])]
    warned = [text for warning, text in record.get("said", []) if warning]
    trouble, file = record.get("trouble") or record.get("objection", ""), record.get("file", "")
    remedy = remedies.blas(name, place, environment.get("SYNKHRONOS_BLAS", ""), installed)
    if "ILP64" in environment.get("MKL_INTERFACE_LAYER", "").upper() and "mkl" in "".join([*warned, trouble]).lower():
        remedy = "unset MKL_INTERFACE_LAYER"
    if not compiles:
        return Part("cpu", "BLAS", OPTIONAL, note=f"nothing is linked without a compiler that works: {_SLOWER}")
    if not flags:
        reason = f"{name} is empty in {place}" if place and not warned else "none is linked"
        return Part("cpu", "BLAS", OPTIONAL, note="\n".join([f"{reason}: {_SLOWER}", *said]), remedy=remedy)
    source = f", as {place} says" if place and (trouble or not warned) else ""  # a warning means: another is used
    if not trouble:
        answer = ask({"product": python(PRODUCT, record["module"])}, environment, 60.0)["product"]
        if not answer.error:
            part = _part("BLAS", answer.record, peak, [f"linked by {flags}{source}", *said], environment, remedy)
            if warned and part.state == OK:
                part.state, part.remedy = OPTIONAL, remedy
            return part
        trouble = answer.error
    note = f"{trouble}\n{name} is {flags}{source}"
    return Part("cpu", "BLAS", UNUSABLE, "", os.path.realpath(file) if file else "", note, remedy)


def _numpys(environment: Mapping[str, str], peak: float) -> Part:
    answer = ask({"product": python(PRODUCT, "")}, environment, 60.0)["product"]
    if answer.error:
        return Part("cpu", "NumPy's BLAS", UNUSABLE, note=answer.error)
    return _part("NumPy's BLAS", answer.record, peak, [], environment, "")


_FAST = 0.7  # share of the vector units' peak above which narrower kernels do no harm
_SLOW = 0.1  # share below which the measurement was probably disturbed


def _part(
    name: str, product: Mapping[str, Any], peak: float, notes: list[str], environment: Mapping[str, str], remedy: str
) -> Part:
    """Return the part for a BLAS from its measured product; ``remedy`` is how to replace the library, if possible."""
    kernels = product.get("kernels") or ""
    version = " ".join(filter(None, (product.get("kind"), product.get("version"))))
    speed = f"{product['gflops']:.0f} GFLOP/s on one core"
    if peak:
        speed += f", {product['gflops'] / peak:.0%} of what its vector units can do ({peak:.0f})"
    notes = [f"{kernels} kernels: {speed}" if kernels else speed, *notes]
    width = next((width for width, names in _WIDTHS.items() if kernels in names), 128)
    widest = width_of_processor()
    if product["gflops"] < _SLOW * peak:
        notes.insert(0, "slow: other programs may use the cores")
    state = OK
    if kernels and width < widest and not (peak and product["gflops"] > _FAST * peak):
        notes.insert(0, f"its kernels are of {width} bits, the processor's vectors of {widest}")
        state = OPTIONAL
        if environment.get("OPENBLAS_CORETYPE"):
            remedy = "unset OPENBLAS_CORETYPE"
        elif not remedy or product["file"].endswith("libscipy_openblas.so"):
            remedy = f"export OPENBLAS_CORETYPE={'SKYLAKEX' if widest == 512 else 'HASWELL'}"
    if not product["right"]:
        notes.insert(0, "its product is wrong")
        state = UNUSABLE
    return Part("cpu", name, state, version, product["file"], "\n".join(notes), remedy)


# -- GPUs

#: Time limit for testing a device on a busy machine, in seconds.
_SECONDS = 120.0

#: Names of NVIDIA's wheels with the libraries, for `cuda_wheel`.
WHEELS = {"nvrtc": "cuda-nvrtc", "cublas": "cublas", "nccl": "nccl"}

#: What happens without an optional library.
WITHOUT = {
    "nccl": "collectives go through the memory of the host instead",
    "cudnn": "Theano supports versions 5 to 7 only, and runs without it: dnn.enabled=False",
}


def pygpu_parts(pygpu: Answer, headers: Answer, search_path: Sequence[str]) -> list[Part]:
    """Return the parts for pygpu, libgpuarray, and the headers of libgpuarray that Theano's C code includes.

    Parameters
    ----------
    pygpu : Answer
        Answer of `synkhronos._cli.probes.PYGPU`.
    headers : Answer
        Answer of the compiler for a program that includes the headers.
    search_path : sequence of str
        The folders in which programs find packages without the launcher.
    """
    facts = pygpu.record
    if facts and not pygpu.error:
        note = "" if package_path("pygpu", search_path) else "the system's; `python -m synkhronos run` lends it"
        api = f"API {dotted(facts['api'])}"
        parts = [
            Part("gpu", "pygpu", OK, facts["version"], facts["path"], note),
            Part("gpu", "libgpuarray", OK, api, facts["library"]),
        ]
    else:
        path = package_path("pygpu", search_path) or system_pygpu()
        parts = [Part("gpu", "pygpu", UNUSABLE if path else MISSING, "", path, pygpu.error, remedies.pygpu())]
    state = MISSING if headers.error else OK
    parts.append(Part("gpu", "gpuarray/*.h", state, "", "", headers.error, remedies.apt("libgpuarray-dev")))
    return parts


def cuda_gpus(finder: Finder, environment: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """Return the GPUs of the first driver that has any.

    Returns
    -------
    gpus : list of Gpu
    trouble : str
        The reason if there are no GPUs; otherwise empty.
    """
    troubles = []
    for path in finder.candidates("cuda"):
        gpus, trouble = ask_gpus(path, environment)
        if gpus:
            return gpus, ""
        troubles.append(trouble or "no GPU is visible")
    return [], "; ".join(troubles)


def cuda_parts(found: Survey, gpus: Sequence[Gpu], trouble: str) -> list[Part]:
    """Return the parts for the driver and the CUDA libraries.

    Parameters
    ----------
    found : Survey
    gpus : sequence of Gpu
    trouble : str
        The reason if there is a driver but no GPU.
    """
    why = {name: "; ".join(f"{one.path} {why}" for one, why in found.refused if one.name == name) for name in NAMES}
    driver = found.driver
    if driver:
        state = UNUSABLE if trouble else OK
        note = f"supports CUDA {dotted(driver.version)}" + (f"; {trouble}" if trouble else "")
        version = driver.path.partition(".so.")[2]  # that of the driver is part of the name of its library
        parts = [Part("cuda", NAMES["cuda"], state, version, driver.path, note)]
    else:
        note = why["cuda"] or ("" if _has_nvidia_hardware() else "no NVIDIA GPU was found in this machine")
        state = UNUSABLE if why["cuda"] else MISSING
        parts = [Part("cuda", NAMES["cuda"], state, "", "", note, remedies.driver())]
    oldest = min((gpu.capability for gpu in gpus), default=None)
    for name in ("nvrtc", "cublas", "nccl", "cudnn"):
        library = found.chosen.get(name)
        if library:
            parts.append(Part("cuda", NAMES[name], OK, dotted(library.version), library.path, why[name]))
            continue
        state = OPTIONAL if name in WITHOUT else UNUSABLE if why[name] else MISSING
        remedy = remedies.cuda_wheel(WHEELS[name], driver.version if driver else None, oldest) if name in WHEELS else ""
        note = "; ".join(filter(None, (why[name], WITHOUT.get(name))))
        parts.append(Part("cuda", NAMES[name], state, "", "", note, remedy))
    return parts


def opencl_parts(opencl: Answer, finder: Finder) -> list[Part]:
    """Return the parts for OpenCL: its loader, its platforms, and the BLAS that libgpuarray uses with it."""
    loader = finder.loaded_as("libOpenCL.so")
    remedy = remedies.apt("ocl-icd-opencl-dev")
    parts = [Part("opencl", "libOpenCL", OK if loader else MISSING, "", loader or "", "", remedy)]
    for index, (name, version, _) in enumerate(opencl.values):
        parts.append(Part("opencl", f"platform {index}", OK, re.split(r",|\s\s", version)[0], "", name))
    if not opencl.values:
        note = opencl.error if loader else ""
        parts.append(Part("opencl", "platform", MISSING, "", "", note, remedies.apt("pocl-opencl-icd")))
    blas = finder.loaded_as("libclblast.so") or finder.loaded_as("libclBLAS.so")
    note = "" if blas else "products of matrices fail in pygpu"
    remedy = remedies.apt("libclblast-dev")
    return [*parts, Part("opencl", "CLBlast", OK if blas else OPTIONAL, "", blas or "", note, remedy)]


def try_devices(gpus: Sequence[Gpu], opencl: Answer, with_pygpu: bool, environment: Mapping[str, str]) -> list[Device]:
    """Test every device in a process of its own, and return the results."""
    facts = {f"cuda{index}": (gpu.name, gpu.memory, f"{gpu.capability / 10}") for index, gpu in enumerate(gpus)}
    for platform, (_, _, devices) in enumerate(opencl.values):
        for index, (name, memory) in enumerate(devices):
            facts[f"opencl{platform}:{index}"] = (name, memory, "")
    if not with_pygpu:
        return [Device(name, *fact, UNUSABLE, "there is no pygpu") for name, fact in facts.items()]
    answers = ask({name: python(TRIAL, name) for name in facts}, environment, _SECONDS)
    return [Device(name, *fact, *_outcome(answers[name])) for name, fact in facts.items()]


def _outcome(trial: Answer) -> tuple[str, str]:
    """Return the state of a device that was tested, and a message with the steps that failed."""
    steps = trial.record
    failed = [f"{step}: {error}" for step, error in steps.items() if error]
    if trial.error:
        failed.append(f"{trial.error} after the steps: {', '.join(steps) or 'none'}")
    return (OK if steps.get("kernel") == "" else UNUSABLE), "; ".join(failed)


def _has_nvidia_hardware() -> bool:
    """Return whether there is a display controller by NVIDIA on the PCI bus, or one that Windows provides (WSL)."""
    for folder in glob.glob("/sys/bus/pci/devices/*"):
        with contextlib.suppress(OSError), open(f"{folder}/vendor") as vendor, open(f"{folder}/class") as kind:
            if vendor.read().strip() == "0x10de" and kind.read().startswith("0x03"):
                return True
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))
