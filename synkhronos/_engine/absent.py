"""What stands for a kind of operation that an engine has not."""

from __future__ import annotations

__all__ = ["absent"]


def absent(name: str) -> type:
    """A class that no operation is of, so that tables of rules are the same for all engines."""
    return type(name, (), {"__doc__": "Not in this engine."})
