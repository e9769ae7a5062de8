"""Whether a graph picks rows of what it holds, as tutorials do: ``data[index * n : (index + 1) * n]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos._engine import ancestors, ops
from synkhronos._graphs.shared import is_shared_variable

__all__ = ["picks_rows_of_shared"]

_PICK = (ops.Subtensor, ops.AdvancedSubtensor1, ops.AdvancedSubtensor)


def picks_rows_of_shared(expressions: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether some inputs say which rows of a shared variable are used."""
    wanted = set(inputs)
    for var in ancestors(list(expressions)):
        node = var.owner
        if node is not None and isinstance(node.op, _PICK):
            picked_from, *by = node.inputs
            shared = any(is_shared_variable(one) for one in ancestors([picked_from]))
            if shared and not wanted.isdisjoint(ancestors(by)):
                return True
    return False
