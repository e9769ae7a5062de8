"""Synkhronos: every device of the machine works on a serial Theano or PyTensor program.

A master process forks one worker for each further device, replicates functions and shared variables on each, feeds them
shares of the inputs from shared memory, and combines results and variables with collectives.

``engine`` is ``"theano"`` or ``"pytensor"``: what the environment variable ``SYNKHRONOS_ENGINE`` names, else what the
program has imported, else what is installed.

Sessions        session, fork, close, distribute, get_n_gpu, sequence, Future, engine
Functions       function, parallelize, Function
Data            data, Data
Collectives     broadcast, scatter, gather, all_gather, reduce, all_reduce, set_value, get_value, get_shapes,
                get_lengths, check_replicas
In a graph      averaged, summed, reduced, gathered
Instruments     profile, trace, memory, Profile
Errors          errors, and from there SynkhronosError, SessionError, DeviceError, NodeLost, WorkerError,
                WorkerDied, WorkerRestarted, WorkerTimeout
Extensions      extensions: training steps, update rules, schedules, checkpoints

The public names are imported when they are first used, and the engine with them: ``python -m synkhronos``, which
imports this package before anything else, must neither wait for it nor fail with it, and must not open a GPU.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from synkhronos._theano_compat import prepare as _install
from synkhronos._utils.display import list_public_modules as _list_public_modules

if TYPE_CHECKING:
    from synkhronos import errors, extensions
    from synkhronos._api import (
        Data,
        Function,
        all_gather,
        all_reduce,
        broadcast,
        check_replicas,
        data,
        function,
        gather,
        get_lengths,
        get_shapes,
        get_value,
        parallelize,
        reduce,
        scatter,
        set_value,
    )
    from synkhronos._backends import name as engine
    from synkhronos._graph.ops import averaged, gathered, reduced, summed
    from synkhronos._session import (
        Future,
        Profile,
        close,
        distribute,
        fork,
        get_n_gpu,
        memory,
        profile,
        sequence,
        trace,
    )
    from synkhronos._session.context_manager import session
    from synkhronos.errors import (
        DeviceError,
        NodeLost,
        SessionError,
        SynkhronosError,
        WorkerDied,
        WorkerError,
        WorkerRestarted,
        WorkerTimeout,
    )

__version__ = "0.2.0"

__all__ = [
    "Data",
    "DeviceError",
    "Function",
    "Future",
    "NodeLost",
    "Profile",
    "SessionError",
    "SynkhronosError",
    "WorkerDied",
    "WorkerError",
    "WorkerRestarted",
    "WorkerTimeout",
    "all_gather",
    "all_reduce",
    "averaged",
    "broadcast",
    "check_replicas",
    "close",
    "data",
    "distribute",
    "engine",
    "errors",
    "extensions",
    "fork",
    "function",
    "gather",
    "gathered",
    "get_lengths",
    "get_n_gpu",
    "get_shapes",
    "get_value",
    "memory",
    "parallelize",
    "profile",
    "reduce",
    "reduced",
    "scatter",
    "sequence",
    "session",
    "set_value",
    "summed",
    "trace",
]

#: The modules in which the public names are looked for, in this order.
_HOMES = ("errors", "_session", "_api", "_graph.ops")

_install()
_list_public_modules(__path__)


if not TYPE_CHECKING:  # who checks types reads the names above

    def __getattr__(name: str) -> object:
        """Import a public name on its first use, and the others with it: while Python shuts down, nothing can be."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("errors", "extensions"):
            return import_module(f"{__name__}.{name}")
        if name == "engine":
            return import_module(f"{__name__}._backends").name
        if name == "close" and sys.meta_path is None:  # Python shuts down, and no session has ever begun
            return lambda: None
        is_error = name in import_module(f"{__name__}.errors").__all__
        for home in _HOMES[:1] if is_error else _HOMES:
            module = import_module(f"{__name__}.{home}")
            for public in set(module.__all__) & set(__all__):
                globals().setdefault(public, getattr(module, public))
        return globals()[name]


def __dir__() -> list[str]:
    """List the public names, and nothing else, whether they have been used or not."""
    return [*__all__, "__version__"]
