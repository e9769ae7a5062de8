"""The compiled core: synchronization, the shared heap, reductions, collectives and fast calls, in C."""

try:
    from synkhronos._native import native
except ImportError as error:
    raise ImportError(
        f"synkhronos was installed without its compiled part, or for another Python ({error}): "
        "install it again with pip, which compiles it"
    ) from error
