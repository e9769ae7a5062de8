"""The compiled core: what every rank does for every command, and what counts in microseconds or gigabytes."""

from __future__ import annotations

try:
    from synkhronos._native import native
except ImportError as error:
    raise ImportError(
        f"synkhronos was installed without its compiled part, or for another Python ({error}): "
        "install it again with pip, which compiles it"
    ) from error

__all__ = ["native"]
