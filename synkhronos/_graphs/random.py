"""Which random states are the ranks' own, so that replicated dropout draws different masks, and which are common."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["claim_stream", "has_common_stream"]

#: For containers of states whether all ranks draw the same of them.
_is_common: Any = weakref.WeakKeyDictionary()


def claim_stream(var: Any, common: bool) -> None:
    """A function draws of this random state: of a common stream, or of streams that differ between ranks.

    Raises
    ------
    ValueError
        If another function was built that does otherwise.
    """
    if _is_common.setdefault(var.container, common) != common:
        raise ValueError(
            f"the random state {var} is used by exact functions, which draw the same on all ranks, and by others (or "
            'with random="own"), for which each rank has a stream of its own: make a RandomStreams for each kind'
        )


def has_common_stream(var: Any) -> bool:
    """Whether all ranks are to draw the same of a random state."""
    return bool(_is_common.get(var.container))
