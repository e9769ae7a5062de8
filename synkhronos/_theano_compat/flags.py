"""Marks on the functions that take the places of Theano's, so that none is replaced twice.

They hold between two copies of this package, too, of which one was loaded while ``theano`` was being imported.

Flags of Theano's that turn the replacements of its C code off: ``THEANO_FLAGS=synkhronos.NAME=False``.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable, TypeVar

__all__ = ["is_mend", "mend", "offer_switches", "read_support_code", "switch"]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def mend(function: _Function) -> _Function:
    """Mark a function as one of ours."""
    function.synkhronos_role = "mend"  # type: ignore[attr-defined]
    return function


def is_mend(function: Any) -> bool:
    """Whether a function is one of ours."""
    return getattr(function, "synkhronos_role", None) == "mend"


SWITCHES = {
    "fused_sum": "Sum the results of elementwise operations without an array of them.",
    "vector_convolution": "Correlate images with filters by vector code.",
    "vector_elementwise": "Compute elementwise operations by vector code.",
    "vector_pooling": "Pool windows that do not overlap by vector code.",
    "vector_sum": "Sum over the first or the last axes by vector code.",
    "vector_tanh": "Compute hyperbolic tangents by code without branches.",
}


def offer_switches() -> None:
    """Add the flags ``synkhronos.NAME``, which are on where nobody turns them off. Calling it again does nothing.

    It comes before ``theano.configdefaults``, which warns of flags that nobody has asked for.
    """
    from theano.configparser import AddConfigVar, BoolParam, config

    if not hasattr(config, "synkhronos"):
        for name, purpose in SWITCHES.items():
            AddConfigVar(f"synkhronos.{name}", purpose, BoolParam(True), in_c_key=False)


def switch(name: str) -> Callable[[], bool]:
    """Give a function that tells whether a flag of `SWITCHES` is on."""
    from theano.configparser import config

    return lambda: bool(getattr(config.synkhronos, name))


def read_support_code(*headers: str) -> tuple[str, str]:
    """Read C++ code beside this module; or that and modules that make C++ code, for the version alone.

    Returns
    -------
    code : str
    version : str
        For the keys of Theano's cache.
    """
    code = ""
    for header in headers:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), header)) as file:
            code += file.read()
    return code, f"synkhronos {hashlib.sha256(code.encode()).hexdigest()[:16]}"
