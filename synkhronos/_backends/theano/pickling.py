"""What of compiled functions travels to other processes, and what is defined by name.

What travels of a function is its maker (the optimised graph; nothing is optimised again) and which storage cell feeds
which input. Of the variables of a graph, and of their tags, only what Theano itself puts there travels: other libraries
hang whole layers on them (Keras its ``_keras_history``, Blocks its annotations), which the ranks may be unable to load.

States of Theano's random streams.

MRG31k3p (L'Ecuyer and Touzin, "Fast combined multiple recursive generators with multipliers of the form a = ±2^q ±
2^r", 2000) has a period of about 2^185. `MRG_RandomStreams` spaces its variables 2^134 and its substreams 2^72 steps
apart; rank ``k`` jumps ahead by k · 2^160 steps, so that no variable of one rank meets another of any rank.
`RandomStreams` holds Mersenne twisters, which jump by k · 2^128 steps of a period of 2^19937 - 1.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from theano import Apply, Variable
from theano.compile.nanguardmode import NanGuardMode
from theano.compile.ops import FromFunctionOp
from theano.gof.op import PureOp
from theano.gof.type import PureType
from theano.gof.utils import scratchpad
from theano.sandbox import rng_mrg
from theano.tensor.raw_random import RandomStateType

from synkhronos._backends.common import GUARDS, errors_of, new, once

__all__ = [
    "MADE_AT_RUN_TIME",
    "FromFunctionOp",
    "PureOp",
    "PureType",
    "is_random_state",
    "other_stream",
    "pack",
    "reduced",
    "unpack",
]


#: What Theano puts on the variables, the nodes and the tags of a compiled graph, as far as other processes need it.
_OF_VARIABLES = frozenset(
    ["auto_name", "clients", "container", "data", "fgraph", "index", "name", "owner", "tag", "type"]
)
#: What Theano's Ops make when they first run: their own ``__getstate__`` leaves it out.
MADE_AT_RUN_TIME: tuple[tuple[type, str, bool], ...] = ()
_OF_NODES = frozenset(["deps", "fgraph", "inputs", "op", "outputs", "tag"])
_OF_TAGS = frozenset(
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


def reduced(obj: Any, frames: dict[Any, Any]) -> Any:
    """How to make an object of Theano's, for pickle; ``NotImplemented`` for others.

    ``frames`` are those of traces, which are the same objects wherever they come again: pickled once each.
    """
    if isinstance(obj, (Variable, Apply)):
        # a class of the user's own may need all that it has
        if type(obj).__module__.startswith("theano."):
            known = _OF_NODES if isinstance(obj, Apply) else _OF_VARIABLES
            return new(type(obj), {name: value for name, value in obj.__dict__.items() if name in known})
    elif isinstance(obj, scratchpad):
        tags = {name: value for name, value in obj.__dict__.items() if name in _OF_TAGS}
        if "trace" in tags:
            tags["trace"] = once(tags["trace"], frames)
        return new(scratchpad, tags)
    elif inspect.isfunction(obj) and obj.__qualname__ in GUARDS:
        return _guard, (GUARDS[obj.__qualname__], errors_of(obj))
    return NotImplemented


def _guard(attribute: str, errors: tuple[bool, ...]) -> Any:
    return getattr(NanGuardMode(*errors).linker, attribute)


def pack(function: Any) -> Any:
    """What travels of a compiled function."""
    # a container stands for "use this storage"; other inputs start with their default value, or with nothing
    cells = [
        container if spec.shared or spec.implicit else default
        for spec, container, (_, _, default) in zip(function.maker.inputs, function.input_storage, function.defaults)
    ]
    return function.maker, cells, function.trust_input


def unpack(packed: Any) -> Any:
    """The compiled function of which this has travelled."""
    maker, cells, trust_input = packed
    function = maker.create(cells, trustme=True)
    function.trust_input = trust_input
    return function


_EXTRA_DOUBLINGS = 160 - 134


def is_random_state(var: Any) -> bool:
    """Whether a shared variable is the state of a random stream (`RandomStreams` or `MRG_RandomStreams`)."""
    return isinstance(var.type, RandomStateType) or _is_mrg_state(var)


def _is_mrg_state(var: Any) -> bool:
    """Whether a shared variable holds states of the MRG31k3p generator: int32, shape ``(n_streams, 6)``."""
    update = getattr(var, "default_update", None)
    return update is not None and update.owner is not None and isinstance(update.owner.op, rng_mrg.mrg_uniform_base)


def other_stream(state: Any, stream: int) -> Any:
    """The random state ``stream`` (> 0) streams further on.

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
    """A 3×3 integer matrix to a power modulo ``modulus``, by repeated squaring in Python's exact integers."""
    result = np.eye(3, dtype=object)
    while exponent:
        if exponent & 1:
            result = result @ matrix % modulus
        matrix = matrix @ matrix % modulus
        exponent >>= 1
    return result
