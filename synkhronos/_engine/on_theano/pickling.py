"""What of compiled functions travels to other processes, and what is defined by name.

What travels of a function is its maker (the optimised graph; nothing is optimised again) and which storage cell feeds
which input. Of the variables of a graph, and of their tags, only what Theano itself puts there travels: other libraries
hang whole layers on them (Keras its ``_keras_history``, Blocks its annotations), which the ranks may be unable to load.
"""

from __future__ import annotations

import inspect
from typing import Any

from theano import Apply, Variable
from theano.compile.nanguardmode import NanGuardMode
from theano.compile.ops import FromFunctionOp
from theano.gof.op import PureOp
from theano.gof.type import PureType
from theano.gof.utils import scratchpad

from synkhronos._engine.travelling import GUARDS, errors_of, new, once

__all__ = ["MADE_AT_RUN_TIME", "FromFunctionOp", "PureOp", "PureType", "pack", "reduced", "unpack"]

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
