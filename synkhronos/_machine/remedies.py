"""The commands that mend what is missing, by the system and the driver that there are."""

from __future__ import annotations

import os
import platform
import shlex
import sys

__all__ = ["apt", "blas", "cuda_wheel", "driver", "pip", "pygpu", "python_headers", "without"]


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
