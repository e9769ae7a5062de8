"""Report of `python -m synkhronos info`: required parts, devices, and commands that fix problems.

The commands are those for the system and the driver of this machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, MISSING, UNUSABLE, OPTIONAL = "ok", "missing", "unusable", "optional"

#: Groups of parts, with their headings.
GROUPS = {"cpu": "CPU cores", "gpu": "Any GPU", "cuda": "CUDA GPUs", "opencl": "OpenCL devices"}

#: A row of a table: three cells, and the texts of the last column.
Row = tuple[str, str, str, list[str]]


@dataclass
class Part:
    """A part of the system that computing needs, such as a compiler or a library.

    Attributes
    ----------
    group : str
        ``"cpu"``, ``"gpu"`` (CUDA and OpenCL), ``"cuda"`` or ``"opencl"``.
    name : str
    state : str
        ``"ok"``, ``"missing"``, ``"unusable"``, or ``"optional"``: a problem with an optional part.
    version, path, note, remedy : str
        Empty if there is nothing to report. ``note`` may have several lines. ``remedy`` is the command that fixes the
        problem; it is cleared if the state is ``"ok"``.
    """

    group: str
    name: str
    state: str
    version: str = ""
    path: str = ""
    note: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.state == OK:
            self.remedy = ""


@dataclass(frozen=True)
class Device:
    """A GPU and whether computing on it works.

    Attributes
    ----------
    name : str
        Name for ``fork(devices=...)``.
    description : str
    memory : int
        In bytes.
    compute_capability : str
        Empty except for CUDA.
    state : str
        ``"ok"`` or ``"unusable"``.
    note : str
        A message that says what does not work.
    """

    name: str
    description: str
    memory: int
    compute_capability: str
    state: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Results of an examination of this node.

    Attributes
    ----------
    version : str
        Version of Synkhronos.
    engine : str
        ``"Theano"`` or ``"PyTensor"``.
    parts : list of Part
    devices : list of Device
    changed : dict
        The environment variables that ``python -m synkhronos run`` sets.
    cores : int
        Number of CPU cores that this process may run on.
    free_memory : int
        Number of bytes that this process can still allocate, by the limits of the machine and of its memory cgroup.
    """

    version: str
    engine: str
    parts: list[Part]
    devices: list[Device]
    changed: dict[str, str]
    cores: int
    free_memory: int

    @property
    def ready(self) -> dict[str, bool]:
        """Whether CPU cores and, if they were examined, CUDA GPUs and OpenCL devices are usable."""
        lacking = {part.group for part in self.parts if part.state in (MISSING, UNUSABLE)}
        cpu = "cpu" not in lacking
        usable = {
            kind: cpu
            and not lacking & {"gpu", kind}
            and any(device.state == OK and device.name.startswith(kind) for device in self.devices)
            for kind in ("cuda", "opencl")
            if any(part.group == kind for part in self.parts)
        }
        return {"cpu": cpu, **usable}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, for JSON."""
        return {"ready": self.ready, **asdict(self)}

    def as_text(self) -> str:
        """Return the report as a table in plain text."""
        verdicts = {group: ": ready" if is_ready else ": not ready" for group, is_ready in self.ready.items()}
        tables = {GROUPS[group] + verdicts.get(group, ""): self._rows_of(group) for group in GROUPS}
        tables["Devices tested"] = [_device_row(device) for device in self.devices]
        rows = [row for table in tables.values() for row in table]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"Synkhronos {self.version}, with {self.engine}"]
        for heading, table in tables.items():
            lines += ["", heading, *_lines(table, widths)] if table else []
        if self.changed:
            lines += ["", "`python -m synkhronos run` sets"]
            lines += [f"  {name}={value}" for name, value in self.changed.items()]
        remedies = [
            (GROUPS[part.group], part.name + " (optional)" * (part.state == OPTIONAL), "", [part.remedy])
            for part in self.parts
            if part.remedy
        ]
        if remedies:
            widths = [max(len(row[column]) for row in remedies) for column in range(3)]
            lines += ["", "How to fix it", *_lines(remedies, widths)]
        return "\n".join(lines)

    def _rows_of(self, group: str) -> list[Row]:
        return [
            (part.state, part.name, part.version, [text for text in (part.path, *part.note.split("\n")) if text])
            for part in self.parts
            if part.group == group
        ]


def _device_row(device: Device) -> Row:
    capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
    texts = [device.description + capability, device.note]
    return device.state, device.name, f"{device.memory / 2**30:.1f} GiB", list(filter(None, texts))


def _lines(rows: Sequence[Row], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of rows, in columns of these widths; each text of the last column gets a line of its own."""
    for *cells, texts in rows:
        start = "  ".join(["", *(cell.ljust(width) for cell, width in zip(cells, widths)), ""])
        for text in texts or [""]:
            yield (start + text).rstrip()
            start = " " * len(start)


def pip(*requirements: str) -> str:
    """Return the command that installs Python packages, given as requirements."""
    return "python -m pip install " + " ".join(map(shlex.quote, requirements))


def apt(*packages: str) -> str:
    """Return the command that installs Debian packages."""
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {' '.join(packages)}"


def without(flag: str, place: str) -> str:
    """Return the instruction to remove a user's flag from a place, as `chosen_in` returns it."""
    return f"remove {flag} from {place}"


def blas(flag: str, place: str, choice: str, installed: bool) -> str:
    """Return instructions that give the backend another BLAS.

    Parameters
    ----------
    flag, place : str
        Name of the flag, and where the user has set it.
    choice : str
        Value of ``SYNKHRONOS_BLAS``.
    installed : bool
        Whether scipy-openblas32 is installed.
    """
    undo = without(flag, place) if place else "unset SYNKHRONOS_BLAS" if choice else ""
    if installed:
        return undo or apt("libopenblas-dev")
    wheel = pip("scipy-openblas32") if platform.machine() in ("x86_64", "aarch64") else apt("libopenblas-dev")
    return "; ".join(filter(None, (undo, wheel)))


def cuda_wheel(name: str, cuda: tuple[int, ...] | None, oldest: int | None = None) -> str:
    """Return the command that installs a wheel by NVIDIA, in a version that works with the driver.

    Parameters
    ----------
    name : str
        ``"cuda-nvrtc"``, ``"cublas"`` or ``"nccl"``.
    cuda : tuple of int or None
        Version of CUDA that the driver supports; ``None`` (no driver) means 12.
    oldest : int, optional
        Lowest compute capability of the GPUs, times 10. CUDA 13 does not support GPUs below 7.5.
    """
    major, minor = (cuda or (12, None))[:2]
    if major >= 13 and oldest and oldest < 75:
        major, minor = 12, None
    # since CUDA 13, most wheels have names without a suffix
    requirement = f"nvidia-{name}" if major >= 13 and name != "nccl" else f"nvidia-{name}-cu{major}"
    if name == "cuda-nvrtc" and minor is not None:
        requirement += f"<{major}.{minor + 1}"
    elif name == "cublas" and major >= 13:
        requirement += f"<{major + 1}"
    return pip(requirement)


def driver() -> str:
    """Return the command that installs NVIDIA's driver."""
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return "docker run --gpus all  # the host needs NVIDIA's driver and Container Toolkit"
    with contextlib.suppress(OSError), open("/etc/os-release") as file:
        if "ubuntu" in file.read().lower():  # it names the distribution and those on which it is based
            return "sudo ubuntu-drivers install"
    return apt("nvidia-driver", "libcuda1") + "  # of Debian's component non-free; then restart"


def pygpu() -> str:
    """Return the command that installs pygpu, which has no wheels."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    systems = os.path.basename(os.path.realpath("/usr/bin/python3"))
    if systems in (f"python{own}", "python3"):
        return apt("python3-pygpu")
    return f"{apt('python3-pygpu')} && /usr/bin/python3 -m venv new  # it serves {systems} only, this is Python {own}"
