"""What a user knows a variable by: its name, and the line of the program that made it."""

from __future__ import annotations

import os
import sysconfig
from typing import Any

from synkhronos._backends import FOLDER

__all__ = ["described", "line_of"]

_OWN = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (*map(sysconfig.get_path, ("purelib", "platlib", "stdlib", "platstdlib")), "<frozen ")


def described(variable: Any) -> str:
    """A variable's name, and where the program made it."""
    line = line_of(variable)
    return f"{variable} ({line})" if line else str(variable)


def line_of(variable: Any) -> str:
    """Where the user's program made a variable: file, number and text of the line; empty where that is not known.

    Of gradients Theano often keeps none of the program's lines; it is that of the nearest variable then which they are
    computed of.
    """
    waiting, seen = [variable], {variable}
    while waiting:
        found = next(filter(None, map(_own_line, waiting)), "")
        if found:
            return found
        inputs = [one for each in waiting if each.owner is not None for one in each.owner.inputs]
        waiting = [one for one in dict.fromkeys(inputs) if one not in seen]
        seen.update(waiting)
        waiting.sort(key=lambda one: one.owner is None)  # where inputs are declared tells least
    return ""


def _own_line(variable: Any) -> str:
    """The innermost line of the program's own, of those that Theano has kept; else the innermost one of a library's."""
    traces = getattr(variable.tag, "trace", None) or []
    frames = [frame for trace in traces for frame in reversed(trace) if not frame[0].startswith((FOLDER, _OWN))]
    frames.sort(key=lambda frame: frame[0].startswith(_LIBRARIES))
    return f"{os.path.basename(frames[0][0])}:{frames[0][1]} {frames[0][3] or ''}".strip() if frames else ""
