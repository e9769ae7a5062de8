"""The hyperbolic tangent without branches, in the place of the C library's, which takes a third of an LSTM's step.

Of float32 it is off by 0.51 units in the last place at most, of float64 by less than 3; the C library's is by about 2.
``THEANO_FLAGS=synkhronos.vector_tanh=False`` turns it off.
"""

from __future__ import annotations

from typing import Any

from .marks import is_mend, mend
from .switches import read_support_code, switch

__all__ = ["vectorize_tanh"]

_SUPPORT, _VERSION = read_support_code("tanh.h")
_REORDERING = {"-fassociative-math", "-funsafe-math-optimizations"}  # -ffast-math defines a macro


def vectorize_tanh(module: Any) -> None:
    """Give the op its code. Calling it again does nothing.

    Parameters
    ----------
    module : module
        ``theano.scalar.basic``, executed.
    """
    from theano.configparser import config

    op_class, is_on = module.Tanh, switch("vector_tanh")
    if is_mend(op_class.c_code):
        return
    code, version = op_class.c_code, op_class.c_code_cache_version

    @mend
    def c_code(self: Any, node: Any, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        """Call the routine for floating-point results."""
        dtype = node.outputs[0].type.dtype
        if not is_on() or dtype not in ("float32", "float64") or node.inputs[0].type.dtype.startswith("complex"):
            theanos_own: str = code(self, node, name, inputs, outputs, sub)
            return theanos_own
        return f"{outputs[0]} = synkhronos_tanh((npy_{dtype}){inputs[0]});"

    def c_support_code(self: Any) -> str:
        """Give the routine, also if the flag is off: a composite op keeps the code that it was made with."""
        flags = config.gcc.cxxflags.split()
        return "#define SYNKHRONOS_REORDERS\n" + _SUPPORT if _REORDERING.intersection(flags) else _SUPPORT

    def c_code_cache_version(self: Any) -> tuple[Any, ...]:
        """Give the version of the code."""
        return (_VERSION, *version(self)) if is_on() else version(self)

    op_class.c_code, op_class.c_code_cache_version = c_code, c_code_cache_version
    op_class.c_support_code = c_support_code
