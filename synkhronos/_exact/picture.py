"""A picture of the user's graph: where the rows of each value are, by colours, and where ranks meet."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from synkhronos._backends import Constant, io_toposort
from synkhronos._exact.placements import Partial, Shard
from synkhronos._exact.walk import Walk

__all__ = ["draw"]

_COLOURS = {"replicated": "#e0e0e0", "sharded": "#9ecae1", "a part of a sum": "#fdd0a2"}
_MEETING = "#cb181d"


def draw(walk: Walk, outputs: Sequence[Any], path: str) -> None:
    """Write a picture of all that some variables are computed of.

    Raises
    ------
    RuntimeError
        Where Graphviz is needed and is not there, or fails.
    """
    text = "\n".join(_lines(walk, outputs)) + "\n"
    kind = os.path.splitext(path)[1].lstrip(".") or "dot"
    if kind == "dot":
        with open(path, "w") as file:
            file.write(text)
        return
    program = shutil.which("dot")
    if program is None:
        raise RuntimeError(
            f"picture: {path} needs the program dot of Graphviz (apt install graphviz), which is not there; a path "
            "that ends in .dot needs nothing"
        )
    done = subprocess.run([program, f"-T{kind}", "-o", path], input=text, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"picture: dot failed for {path}: {done.stderr.strip()}")


def _lines(walk: Walk, outputs: Sequence[Any]) -> Iterator[str]:
    """The text in Graphviz's language."""
    yield 'digraph partition {\nnode [style=filled, fontname="sans-serif", shape=box];'
    for what, colour in _COLOURS.items():
        yield f'"{what}" [fillcolor="{colour}"];'
    yield f'"ranks meet" [fillcolor=white, color="{_MEETING}", penwidth=3];'
    kinds = {one.variable: one.kind for one in walk.met}
    names: dict[Any, str] = {}
    reduced: set[Any] = set(kinds)  # and what is computed of these alone: no part of a sum any more
    for node in io_toposort([], list(outputs)):
        sums = [one for one in node.inputs if walk.knows(one) and isinstance(walk.placement(one), Partial)]
        if sums and reduced.issuperset(sums):
            reduced.update(node.outputs)
        for variable in node.inputs:
            if variable.owner is None and variable not in names and not isinstance(variable, Constant):
                names[variable] = f"v{len(names)}"
                yield _box(names[variable], str(variable), _kind(walk, variable, kinds, reduced), variable, kinds)
        own = f"v{len(names)}"
        names.update(dict.fromkeys(node.outputs, own))
        names[node] = own
        yield _box(own, str(node.op), _kind(walk, node.outputs[0], kinds, reduced), node.outputs[0], kinds)
        yield from (f"{names[one]} -> {own};" for one in node.inputs if one in names)
    yield "}"


def _box(name: str, title: str, kind: str, variable: Any, kinds: dict[Any, str]) -> str:
    meeting = kinds.get(variable)
    lines = [title, *([str(variable.name)] if variable.name and variable.name != title else [])]
    border = f', color="{_MEETING}", penwidth=3' if meeting else ""
    label = "\\n".join(line.replace("\\", "").replace('"', "'") for line in [*lines, *([meeting] if meeting else [])])
    return f'{name} [label="{label}", fillcolor="{_COLOURS.get(kind, "white")}"{border}];'


def _kind(walk: Walk, variable: Any, kinds: dict[Any, str], reduced: set[Any]) -> str:
    """What a rank holds of a value; of one that ranks reduce, what it holds before."""
    if not walk.knows(variable):
        return ""
    placement = walk.placement(variable)
    if isinstance(placement, Shard):
        return "sharded"
    is_part = isinstance(placement, Partial) and (variable in kinds or variable not in reduced)
    return "a part of a sum" if is_part else "replicated"
