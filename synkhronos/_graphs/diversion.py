"""What a program asks of the engine's ``function``, where that is diverted."""

from __future__ import annotations

from typing import Any

from synkhronos._backends import ancestors

__all__ = ["variables_used"]


def variables_used(arguments: dict[str, Any]) -> list[Any]:
    """The variables that a function will use, in some order that depends on the program alone.

    Parameters
    ----------
    arguments : dict
        As `synkhronos._backends.divert` hands them on.
    """
    asked = (arguments[name] for name in ("outputs", "givens", "updates"))
    outputs, givens, updates = ([] if one is None else one for one in asked)  # an expression has no truth
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    pairs = [pair for pairs in (givens, updates) for pair in (pairs.items() if hasattr(pairs, "items") else pairs)]
    found = [*(getattr(output, "variable", output) for output in outputs), *(new for _, new in pairs)]
    replaced = {*(getattr(item, "variable", item) for item in arguments["inputs"]), *(old for old, _ in pairs)}
    return [*(old for old, _ in pairs), *ancestors([one for one in found if hasattr(one, "owner")], replaced)]
