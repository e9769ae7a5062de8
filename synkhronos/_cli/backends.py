"""The backend that programs use on this machine, and the packages that it needs.

The default is Theano on Python 3.9 to 3.11, and PyTensor from Python 3.12 on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from synkhronos._cli.launcher import package_path
from synkhronos._cli.probes import PYTENSOR, THEANO


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
        Packages that programs need, each as (name, module, requirement for pip).
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

ENGINES = {
    "theano": Engine(
        "theano",
        "Theano",
        (
            ("NumPy", "numpy", "numpy>=1.22,<1.24"),
            ("SciPy", "scipy", "scipy>=1.7,<1.11"),
            ("Theano", "theano", "Theano==1.0.5"),
            *_COMMON,
            ("Lasagne", "lasagne", "Lasagne==0.1"),  # optional
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
