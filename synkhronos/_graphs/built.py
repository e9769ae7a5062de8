"""Ops as they were built: what they gather at run time and cannot be pickled does not travel.

Ops keep things that they make when they first run: ufuncs, compiled inner functions, handles of libraries. What the
engine itself is known to make never travels. If a function cannot be pickled, it is pickled once more, and each
attribute of its Ops that cannot be pickled travels as it was when the Op was first pickled, provided that it was
missing, ``None`` or an empty container then. For an Op that ran before it was first pickled, another Op is built from
its ``__props__``, and the attribute is taken from that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import cloudpickle

from synkhronos._backends import MADE_AT_RUN_TIME
from synkhronos._utils.interrupts import Endings, let_interrupts_pass

__all__ = ["note_ops", "reduced_op"]

_BLANK = (type(None), dict, list, set)
_MISSING, _OTHER = object(), object()

#: By the id of an Op: a reference to it, and for each attribute the class of its value, if that was blank, or `_OTHER`.
_first: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
_ended: Endings[int] = Endings()


def note_ops(ops: Iterable[Any]) -> None:
    """Note the attributes of Ops that were pickled as they are, the first time."""
    for key in _ended.take():
        _first.pop(key, None)
    for op in ops:
        if id(op) not in _first:
            kinds = {name: type(one) if type(one) in _BLANK and not one else _OTHER for name, one in vars(op).items()}
            _first[id(op)] = weakref.ref(op), kinds
            _ended.watch(op, id(op))


def reduced_op(op: Any, as_built: bool) -> Any:
    """How to make an Op, for pickle.

    Parameters
    ----------
    op : Op
    as_built : bool
        Replace attributes that cannot be pickled by what they were when the Op was built, as far as that is known.
    """
    how = op.__reduce_ex__(5)
    if not (isinstance(how, tuple) and len(how) > 2 and isinstance(how[2], dict)):
        return how
    state = dict(how[2])
    for kind, name, is_none in MADE_AT_RUN_TIME:
        if isinstance(op, kind) and name in state:
            del state[name]
            state.update({name: None} if is_none else {})
    if as_built:
        for name in [name for name, value in state.items() if not _can_be_pickled(value)]:
            value = _value_when_built(op, name)
            if value is _MISSING:
                del state[name]
            elif value is not _OTHER:
                state[name] = value
    return (*how[:2], state, *how[3:])


def _value_when_built(op: Any, name: str) -> Any:
    """What an attribute of an Op was; `_MISSING` if it was not there, `_OTHER` if that is not known."""
    reference, kinds = _first.get(id(op), (None, {}))
    if reference is not None and reference() is op:
        kind = kinds.get(name, _MISSING)
        return kind() if isinstance(kind, type) else kind
    try:
        again = type(op)(**{prop: getattr(op, prop) for prop in op.__props__})
        if again != op:
            return _OTHER
    except Exception as error:  # its constructor takes something else
        let_interrupts_pass(error)
        return _OTHER
    return vars(again).get(name, _MISSING)


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value, 5, buffer_callback=lambda buffer: None)
    except Exception as error:
        let_interrupts_pass(error)
        return False
    return True
