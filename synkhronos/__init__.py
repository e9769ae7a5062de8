"""Data-parallel Theano and PyTensor: serial programs that run on every core or GPU of one or several nodes.

The controller, which is the user's process, forks one worker for each further device. Functions and shared variables
are replicated on each rank. Inputs are split over the ranks from shared memory, and results and variables are combined
by collectives.

``engine`` is the name of the backend, ``"theano"`` or ``"pytensor"``: the value of the environment variable
``SYNKHRONOS_ENGINE``, or else the one that the program has imported, or else the one that is installed.

Sessions        session, fork, close, distribute, get_n_gpu, sequence, Future, engine
Functions       function, parallelize, Function
Data            data, Data
Collectives     broadcast, scatter, gather, all_gather, reduce, all_reduce, set_value, get_value, get_shapes,
                get_lengths, check_replicas
In a graph      averaged, summed, reduced, gathered
Sharding rules  register_sharding, Replicate, Shard, Partial (experimental)
Instruments     profile, trace, memory, Profile
Errors          errors, and from there SynkhronosError, SessionError, DeviceError, NodeLost, WorkerError,
                WorkerDied, WorkerRestarted, WorkerTimeout
Extensions      extensions: training steps, update rules, schedules, checkpoints

The public names are imported on first use, and the backend with them. ``python -m synkhronos`` imports this package
before anything else, and must not wait for the backend, fail with it, or open a GPU.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from synkhronos._theano_compat import prepare as _install
from synkhronos._utils import rendezvous as _rendezvous  # noqa: F401 - a process of several reports if it ends without `fork`

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
    from synkhronos._sharding import Partial, Replicate, Shard, register_sharding
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
    "Partial",
    "Profile",
    "Replicate",
    "SessionError",
    "Shard",
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
    "register_sharding",
    "scatter",
    "sequence",
    "session",
    "set_value",
    "summed",
    "trace",
]

#: The modules that define the public names, in the order in which they are searched.
_HOMES = ("errors", "_session", "_api", "_graph.ops", "_sharding")

_install()


if not TYPE_CHECKING:  # type checkers read the names above

    def __getattr__(name: str) -> object:
        """Import all public names when the first one is used: none can be imported while Python shuts down."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("errors", "extensions"):
            return import_module(f"{__name__}.{name}")
        if name == "engine":
            return import_module(f"{__name__}._backends").name
        if name == "close" and sys.meta_path is None:  # Python shuts down, and there was never a session
            return lambda: None
        is_error = name in import_module(f"{__name__}.errors").__all__
        for home in _HOMES[:1] if is_error else _HOMES:
            module = import_module(f"{__name__}.{home}")
            for public in set(module.__all__) & set(__all__):
                globals().setdefault(public, getattr(module, public))
        return globals()[name]


def __dir__() -> list[str]:
    """List the public names and nothing else, whether they have been used or not."""
    return [*__all__, "__version__"]
