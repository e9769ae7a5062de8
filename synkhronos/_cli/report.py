"""What `python -m synkhronos info` tells: the parts that computing needs, the devices, and the table of both.

The commands that mend what is missing, by the system and the driver that there are.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "MISSING",
    "OK",
    "OPTIONAL",
    "UNUSABLE",
    "Device",
    "Part",
    "Report",
    "apt",
    "blas",
    "cuda_wheel",
    "driver",
    "pip",
    "pygpu",
    "python_headers",
    "without",
]


OK, MISSING, UNUSABLE, OPTIONAL = "ok", "missing", "unusable", "optional"

#: The groups of parts, and their headings.
GROUPS = {"cpu": "CPU cores", "gpu": "Any GPU", "cuda": "CUDA GPUs", "opencl": "OpenCL devices"}

#: A line of a table: three columns, and texts for the last one.
Row = tuple[str, str, str, list[str]]


@dataclass
class Part:
    """A part that computing needs.

    Attributes
    ----------
    group : str
        ``"cpu"``, ``"gpu"`` (for CUDA and OpenCL alike), ``"cuda"`` or ``"opencl"``.
    name : str
    state : str
        ``"ok"``, ``"missing"``, ``"unusable"``, or ``"optional"``: something is lacking that one can do without.
    version, path, note, remedy : str
        Empty if there is nothing to say; ``note`` may have several lines; ``remedy`` is the command that mends what
        is lacking, and is dropped if nothing is.
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
    """A GPU by the name that ``fork(devices=...)`` takes, and whether computing on it works.

    ``memory`` is in bytes; ``compute_capability`` is empty but for CUDA; ``note`` says what does not work.
    """

    name: str
    description: str
    memory: int
    compute_capability: str
    state: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes
    ----------
    version : str
        Of Synkhronos.
    engine : str
        ``"Theano"`` or ``"PyTensor"``.
    parts : list of Part
    devices : list of Device
    changed : dict
        The environment variables that ``python -m synkhronos run`` sets.
    cores : int
        CPU cores that this process may run on.
    free_memory : int
        Bytes that may be taken, by the machine and by the memory cgroup of this process.
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
        """Whether CPU cores, CUDA GPUs and OpenCL devices can be computed on."""
        lacking = {part.group for part in self.parts if part.state in (MISSING, UNUSABLE)}
        cpu = "cpu" not in lacking
        usable = {
            kind: cpu
            and not lacking & {"gpu", kind}
            and any(device.state == OK and device.name.startswith(kind) for device in self.devices)
            for kind in ("cuda", "opencl")
        }
        return {"cpu": cpu, **usable}

    def as_dict(self) -> dict[str, Any]:
        """Return everything in dicts, lists, strings and numbers, for JSON."""
        return {"ready": self.ready, **asdict(self)}

    def as_text(self) -> str:
        """Return the table that people read."""
        tables = {GROUPS[group] + self._verdict(group): self._rows_of(group) for group in GROUPS}
        tables["Devices that were tried"] = [_device_row(device) for device in self.devices]
        rows = [row for table in tables.values() for row in table]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"Synkhronos {self.version}, with {self.engine}"]
        for heading, table in tables.items():
            lines += ["", heading, *_lines(table, widths)] if table else []
        if self.changed:
            lines += ["", "`python -m synkhronos run` sets"]
            lines += [f"  {name}={value}" for name, value in self.changed.items()]
        to_mend = [
            (GROUPS[part.group], part.name + " (optional)" * (part.state == OPTIONAL), "", [part.remedy])
            for part in self.parts
            if part.remedy
        ]
        if to_mend:
            widths = [max(len(row[column]) for row in to_mend) for column in range(3)]
            lines += ["", "What mends it", *_lines(to_mend, widths)]
        return "\n".join(lines)

    def _rows_of(self, group: str) -> list[Row]:
        return [
            (part.state, part.name, part.version, [text for text in (part.path, *part.note.split("\n")) if text])
            for part in self.parts
            if part.group == group
        ]

    def _verdict(self, group: str) -> str:
        if group not in self.ready:
            return ""
        return ": ready" if self.ready[group] else ": not ready"


def _device_row(device: Device) -> Row:
    capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
    texts = [device.description + capability, device.note]
    return device.state, device.name, f"{device.memory / 2**30:.1f} GiB", list(filter(None, texts))


def _lines(rows: Sequence[Row], widths: Sequence[int]) -> Iterator[str]:
    """Yield rows as lines of columns with these widths; the texts of the last column go below each other."""
    for *cells, texts in rows:
        start = "  ".join(["", *(cell.ljust(width) for cell, width in zip(cells, widths)), ""])
        for text in texts or [""]:
            yield (start + text).rstrip()
            start = " " * len(start)


def pip(*requirements: str) -> str:
    """Install Python packages, given as pip takes them."""
    return "python -m pip install " + " ".join(map(shlex.quote, requirements))


def apt(*packages: str) -> str:
    """Install Debian's packages."""
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {' '.join(packages)}"


def without(flag: str, place: str) -> str:
    """Let the engine choose by itself what a flag of the user's decides, in the place that `chosen_in` has told."""
    return f"take {flag} out of {place}"


def blas(flag: str, place: str, choice: str, installed: bool) -> str:
    """Give the engine another BLAS.

    Parameters
    ----------
    flag, place : str
        The name of the flag, and where the user has set it.
    choice : str
        The value of ``SYNKHRONOS_BLAS``.
    installed : bool
        Whether scipy-openblas32 is.
    """
    undo = without(flag, place) if place else "unset SYNKHRONOS_BLAS" if choice else ""
    if installed:
        return undo or apt("libopenblas-dev")
    wheel = pip("scipy-openblas32") if platform.machine() in ("x86_64", "aarch64") else apt("libopenblas-dev")
    return "; ".join(filter(None, (undo, wheel)))


def cuda_wheel(name: str, cuda: tuple[int, ...] | None, oldest: int | None = None) -> str:
    """Install one of NVIDIA's wheels that goes with the driver.

    Parameters
    ----------
    name : str
        ``"cuda-nvrtc"``, ``"cublas"`` or ``"nccl"``.
    cuda : tuple of int or None
        The version of CUDA that the driver speaks; 12 is assumed if there is none.
    oldest : int, optional
        The least compute capability of the GPUs, times 10. CUDA 13 has dropped those before 7.5.
    """
    major, minor = (cuda or (12, None))[:2]
    if major >= 13 and oldest and oldest < 75:
        major, minor = 12, None
    # Since CUDA 13 most wheels have no suffix.
    requirement = f"nvidia-{name}" if major >= 13 and name != "nccl" else f"nvidia-{name}-cu{major}"
    if name == "cuda-nvrtc" and minor is not None:
        requirement += f"<{major}.{minor + 1}"
    elif name == "cublas" and major >= 13:
        requirement += f"<{major + 1}"
    return pip(requirement)


def driver() -> str:
    """Install NVIDIA's driver."""
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return "docker run --gpus all  # the host needs NVIDIA's driver and Container Toolkit"
    if "ubuntu" in _system():
        return "sudo ubuntu-drivers install"
    return apt("nvidia-driver", "libcuda1") + "  # of Debian's component non-free; then restart"


def pygpu() -> str:
    """Install pygpu, of which there are no wheels."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    systems = os.path.basename(os.path.realpath("/usr/bin/python3"))
    if systems in (f"python{own}", "python3"):
        return apt("python3-pygpu")
    return f"{apt('python3-pygpu')} && /usr/bin/python3 -m venv new  # it serves {systems} only, this is Python {own}"


def python_headers() -> str:
    """Install Python's headers."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return apt(f"{version}-dev")


def _system() -> str:
    """Name the distribution and what it is like, from ``os-release``."""
    try:
        with open("/etc/os-release") as file:
            return file.read().lower()
    except OSError:
        return ""
