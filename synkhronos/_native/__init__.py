"""The compiled core in C: synchronization, the shared heap, reductions, collectives and fast calls."""

try:
    from synkhronos._native import native
except ImportError as error:
    raise ImportError(
        f"synkhronos was installed without its compiled part, or for another Python ({error}): install it again with "
        "pip, which compiles it; or this is a checkout: run it in another folder, or install it by pip install -e ."
    ) from error
