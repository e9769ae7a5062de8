"""Flags that turn off replacements of Theano's C code, and marks on functions that replace Theano's.

``THEANO_FLAGS=synkhronos.NAME=False`` turns off a replacement.

The marks ensure that no function is replaced twice. They also work between two copies of this package, one of which was
loaded while ``theano`` was being imported.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def replacement(function: _Function) -> _Function:
    """Mark a function as a replacement by this package."""
    function.synkhronos_role = "patch"  # type: ignore[attr-defined]
    return function


def is_replacement(function: Any) -> bool:
    """Return whether a function is a replacement by this package."""
    return getattr(function, "synkhronos_role", None) == "patch"


def wrap_methods(owner: Any, **wrappers: Callable[..., Any]) -> None:
    """Replace methods of a class, or functions of a module. Calling this again does nothing.

    Parameters
    ----------
    owner : type or module
    **wrappers : callable
        The replacements, by name. Each takes Theano's own method as an additional first argument.
    """

    def wrapped(wrapper: Callable[..., Any], theanos_own: Callable[..., Any]) -> Callable[..., Any]:
        return replacement(lambda *arguments, **named: wrapper(theanos_own, *arguments, **named))

    found = {name: getattr(owner, name) for name in wrappers}
    if not any(map(is_replacement, found.values())):
        for name, wrapper in wrappers.items():
            setattr(owner, name, wrapped(wrapper, found[name]))


def with_version(version: str, is_used: Callable[..., bool] = lambda *_: True) -> Callable[..., tuple[Any, ...]]:
    """Return a wrapper for an Op's method that returns the version of its C++ code, for the keys of Theano's cache.

    Parameters
    ----------
    version : str
        Version to add, unless Theano's own version is empty, which means that the code must not be cached.
    is_used : callable
        ``is_used(op)``, or ``is_used(op, node)`` for a method that takes the Apply node, returns whether the Op has
        code of this package. Default: always.
    """

    def c_code_cache_version(theanos_own: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
        own = theanos_own(*arguments)
        return (version, *own) if own and is_used(*arguments) else own

    return c_code_cache_version


SWITCHES = {
    "fused_sum": "Sum the results of elementwise operations without an array of them.",
    "one_pass": "In exact functions, compute the updates of a variable and its state in one pass.",
    "vector_convolution": "Correlate images with filters by vector code.",
    "vector_elementwise": "Compute elementwise operations by vector code.",
    "vector_pooling": "Pool windows that do not overlap by vector code.",
    "vector_sum": "Sum over the first or the last axes by vector code.",
    "vector_tanh": "Compute hyperbolic tangents by code without branches.",
}


def offer_switches() -> None:
    """Add the flags ``synkhronos.NAME``, which are on by default. Calling this again does nothing.

    Call this before ``theano.configdefaults`` runs, because that module warns about unknown flags.
    """
    from theano.configparser import AddConfigVar, BoolParam, config

    if not hasattr(config, "synkhronos"):
        for name, purpose in SWITCHES.items():
            AddConfigVar(f"synkhronos.{name}", purpose, BoolParam(True), in_c_key=False)


def is_on(name: str) -> bool:
    """Return whether a flag of `SWITCHES` is on."""
    from theano.configparser import config

    return bool(getattr(config.synkhronos, name))


def read_support_code(*headers: str) -> tuple[str, str]:
    """Read files of this folder: C++ headers, or Python modules that generate C++ code.

    Returns
    -------
    code : str
        The contents of all files.
    version : str
        Version for the keys of Theano's cache: a hash of the contents.
    """
    code = ""
    for header in headers:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), header)) as file:
            code += file.read()
    return code, f"synkhronos {hashlib.sha256(code.encode()).hexdigest()[:16]}"
