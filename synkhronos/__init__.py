"""Data-parallel Theano and PyTensor: serial programs that run on every core or GPU of one or several nodes.

The controller, which is the user's process, forks one worker for each further device. Functions and shared variables
are replicated on each rank. Inputs are split over the ranks from shared memory, and results and variables are combined
by collectives.

``engine`` is the name of the backend, ``"theano"`` or ``"pytensor"``: the value of the environment variable
``SYNKHRONOS_ENGINE``, or else the one that the program has imported, or else the one that is installed.

The public names are imported on first use, and the backend with them. ``python -m synkhronos`` imports this package
before anything else, and must not wait for the backend, fail with it, or open a GPU.
"""

# The one list of public names is `__init__.pyi`, which type checkers read, too.

from __future__ import annotations

import sys
from importlib import import_module

from synkhronos._theano_compat import prepare as _install
from synkhronos._utils import names_in_stub as _listed
from synkhronos._utils import rendezvous as _rendezvous  # noqa: F401 - a process of several reports if it ends without `fork`
from synkhronos._utils import warn_of_unusable_pymc as _warn_of_unusable_pymc

__version__ = "0.2.0"

#: Where each public name is defined: the module, and its name there.
_HOMES, _GROUPS = _listed(__name__, __file__ + "i")

#: Modules that a program may use without the others, which take longer to import. A module in itself is such a name.
_APART = ("synkhronos._backends", "synkhronos.errors", "synkhronos.extensions", "synkhronos.rules")

__all__ = sorted(_HOMES)
__doc__ = __doc__ and __doc__.replace("The public names are", f"{_GROUPS}\n\nThe public names are", 1)

_install()
_warn_of_unusable_pymc()


def __getattr__(name: str) -> object:
    """Import all public names when the first one is used: none can be imported while Python shuts down."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "close" and sys.meta_path is None:  # Python shuts down, and there was never a session
        return lambda: None
    home = _HOMES[name][0]
    for public, (module, own) in _HOMES.items():
        if module == home or (home not in _APART and module != "synkhronos.extensions"):
            globals().setdefault(public, getattr(import_module(module), own) if own else import_module(module))
    return globals()[name]


def __dir__() -> list[str]:
    """List the public names and nothing else, whether they have been used or not."""
    return [*__all__, "__version__"]
