"""Elementwise operations as vector code: Theano's loop over contiguous arrays, which gcc thinks hardly ever runs.

The loop stands behind a condition of many parts, each of which gcc guesses to hold every other time. With five arrays,
as in Adam's update, it thinks the loop too rare to be worth vector code: 2.9 ms for 1.28 million float32 in place of
0.36. So it is told not to guess. Results are the same but for rounding: gcc fuses a product and a sum in other places.
``THEANO_FLAGS=synkhronos.vector_elementwise=False`` turns it off.
"""

from __future__ import annotations

from typing import Any

from .marks import is_mend, mend
from .switches import switch

__all__ = ["vectorize_elementwise"]

_FLAG = "-fno-guess-branch-probability"


def vectorize_elementwise(module: Any) -> None:
    """Give the op the compiler's flag, which is part of the keys of Theano's cache. Calling it again does nothing.

    Parameters
    ----------
    module : module
        ``theano.tensor.elemwise``, executed.
    """
    op_class, is_on = module.Elemwise, switch("vector_elementwise")
    c_compile_args = op_class.c_compile_args
    if is_mend(c_compile_args):
        return

    @mend
    def with_flag(self: Any) -> list[str]:
        """Give Theano's arguments, and the flag."""
        return [*c_compile_args(self), *([_FLAG] if is_on() else [])]

    op_class.c_compile_args = with_flag
