"""Pickle compiled functions and graphs of Theano for other processes, and derive random streams for ranks.

A pickled function consists of its maker, which has the optimized graph, and of the assignment of storage cells to
inputs. The graph is not optimized again. Variables and tags are pickled with only those attributes that Theano itself
sets. Other libraries attach entire layers (Keras its ``_keras_history``, Blocks its annotations), which ranks may be
unable to load.

MRG31k3p (L'Ecuyer and Touzin, "Fast combined multiple recursive generators with multipliers of the form a = ±2^q ±
2^r", 2000) has a period of about 2^185. `MRG_RandomStreams` spaces its variables 2^134 and its substreams 2^72 steps
apart. Rank ``k`` jumps ahead by k · 2^160 steps, so the streams of different ranks do not overlap. `RandomStreams`
holds Mersenne twisters, whose period is 2^19937 - 1; rank ``k`` jumps ahead by k · 2^128 steps.
"""

# ruff: noqa: F401 (the imported names are used through this module)

from __future__ import annotations

from typing import Any

import numpy as np
from theano.compile.nanguardmode import NanGuardMode
from theano.compile.ops import FromFunctionOp
from theano.gof.op import PureOp
from theano.gof.type import PureType
from theano.gof.utils import scratchpad as Scratchpad
from theano.sandbox import rng_mrg
from theano.tensor.raw_random import RandomStateType

#: Attributes that Theano sets on variables, Apply nodes and tags of a compiled graph and that other processes need.
OF_VARIABLES = frozenset(
    ["auto_name", "clients", "container", "data", "fgraph", "index", "name", "owner", "tag", "type"]
)
#: Attributes of shared variables that other processes do not need, and the values that they get there.
RESET: dict[str, Any] = {}
#: Attributes that Ops create when they first run. None here: ``__getstate__`` of Theano's Ops leaves them out.
MADE_AT_RUN_TIME: tuple[tuple[type, str, bool], ...] = ()
OF_NODES = frozenset(["deps", "fgraph", "inputs", "op", "outputs", "tag"])
OF_TAGS = frozenset(
    [
        "context_name",
        "indestructible",
        "is_rng",
        "nan_guard_mode_check",
        "target",
        "trace",
        "unique_value",
        "values_eq_approx",
    ]
)


def reduced_otherwise(obj: Any) -> Any:
    """Return ``NotImplemented``: no other objects of Theano need a special reduction."""
    return NotImplemented


def pack(function: Any) -> Any:
    """Return the picklable parts of a compiled function."""
    # a container means "use this storage"; other inputs start with their default value, or ``None``
    cells = [
        container if spec.shared or spec.implicit else default
        for spec, container, (_, _, default) in zip(function.maker.inputs, function.input_storage, function.defaults)
    ]
    return function.maker, cells, function.trust_input


def unpack(packed: Any) -> Any:
    """Make a compiled function from the parts that `pack` returned."""
    maker, cells, trust_input = packed
    function = maker.create(cells, trustme=True)
    function.trust_input = trust_input
    return function


_EXTRA_DOUBLINGS = 160 - 134


def is_random_state(var: Any) -> bool:
    """Return whether a shared variable is the state of a random stream (`RandomStreams` or `MRG_RandomStreams`)."""
    return isinstance(var.type, RandomStateType) or _is_mrg_state(var)


def _is_mrg_state(var: Any) -> bool:
    """Return whether a shared variable holds states of the MRG31k3p generator: int32, shape ``(n_streams, 6)``."""
    update = getattr(var, "default_update", None)
    return update is not None and update.owner is not None and isinstance(update.owner.op, rng_mrg.mrg_uniform_base)


def other_stream(state: Any, stream: int) -> Any:
    """Return a random state moved ahead by ``stream`` (> 0) streams.

    Parameters
    ----------
    state : numpy.random.RandomState, or int32 array of shape (n, 6)
    stream : int
    """
    if isinstance(state, np.random.RandomState):
        twister: Any = np.random.MT19937()
        twister.state = state.get_state(legacy=False)
        return np.random.RandomState(twister.jumped(stream))
    moved = np.array(state)
    for columns, jump, modulus in (
        (slice(0, 3), rng_mrg.A1p134, int(rng_mrg.M1)),
        (slice(3, 6), rng_mrg.A2p134, int(rng_mrg.M2)),
    ):
        matrix = _power(np.asarray(jump).astype(object), stream << _EXTRA_DOUBLINGS, modulus)
        moved[:, columns] = (state[:, columns].astype(object) @ matrix.T % modulus).astype(state.dtype)
    return moved


def _power(matrix: np.ndarray, exponent: int, modulus: int) -> np.ndarray:
    """Return a power of a 3×3 integer matrix modulo ``modulus``, by repeated squaring with Python's exact integers."""
    result = np.eye(3, dtype=object)
    while exponent:
        if exponent & 1:
            result = result @ matrix % modulus
        matrix = matrix @ matrix % modulus
        exponent >>= 1
    return result
