"""Synkhronos: every device of the machine works on a serial Theano program.

A master process forks one worker for each further device, replicates Theano functions and shared variables on each,
feeds them shares of the inputs from shared memory, and combines results and variables with collectives.
"""

from __future__ import annotations

from synkhronos._compat import install as _install

_install()

from synkhronos import errors, extensions  # noqa: E402
from synkhronos._building import function  # noqa: E402
from synkhronos._data import Data, data  # noqa: E402
from synkhronos._function import Function  # noqa: E402
from synkhronos._lifecycle import close, distribute, fork, get_n_gpu  # noqa: E402
from synkhronos._single import get_lengths, get_shapes, get_value, set_value  # noqa: E402
from synkhronos._variables import (  # noqa: E402
    all_gather,
    all_reduce,
    broadcast,
    gather,
    reduce,
    scatter,
)
from synkhronos.errors import (  # noqa: E402
    DeviceError,
    SessionError,
    SynkhronosError,
    WorkerDied,
    WorkerError,
    WorkerRestarted,
    WorkerTimeout,
)

__version__ = "0.1.0"

__all__ = [
    "Data",
    "DeviceError",
    "Function",
    "SessionError",
    "SynkhronosError",
    "WorkerDied",
    "WorkerError",
    "WorkerRestarted",
    "WorkerTimeout",
    "all_gather",
    "all_reduce",
    "broadcast",
    "close",
    "data",
    "distribute",
    "errors",
    "extensions",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_n_gpu",
    "get_shapes",
    "get_value",
    "reduce",
    "scatter",
    "set_value",
]
