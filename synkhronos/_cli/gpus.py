"""Report on GPU computing: pygpu, the CUDA libraries, the OpenCL platforms, and the devices."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Mapping, Sequence

from synkhronos._cli import report as remedies
from synkhronos._cli.gpu_libraries import NAMES, Finder, Gpu, Survey, ask_gpus, dotted
from synkhronos._cli.launcher import package_path, system_pygpu
from synkhronos._cli.probes import TRIAL, Answer, ask, python
from synkhronos._cli.report import MISSING, OK, OPTIONAL, UNUSABLE, Device, Part

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
