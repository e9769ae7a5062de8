"""Bind the code that numba compiles for a function to this function's own copies of operations, in every process.

The object code of a function contains a copy of each operation's code, optimized for this function. Numba marks the
copies as weak symbols, so LLVM replaces them by code of the same name that the process has loaded before: by the code
of the operation alone in the process that compiled it, by the code of another function in a process that has loaded
that. The versions differ in rounding (PyTensor allows fused multiply-adds), so ranks that run the same object code
would get values that differ in the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bind_locally", "strengthen"]

_SECTION = np.dtype({"names": ["type", "offset", "size"], "formats": ["<u4", "<u8", "<u8"], "offsets": [4, 24, 32]})
_SYMBOL = np.dtype({"names": ["info", "section"], "formats": ["u1", "<u2"], "offsets": [4, 6], "itemsize": 24})
_SYMBOL_TABLE, _FUNCTION, _GLOBAL, _WEAK = 2, 2, 1, 2  # SHT_SYMTAB, STT_FUNC, STB_GLOBAL, STB_WEAK


def bind_locally() -> None:
    """Have numba make the copies local in new object code, and strong in object code that it has cached on disk."""
    from llvmlite.binding import Linkage
    from numba.core.codegen import CPUCodeLibrary

    finalize, set_object = CPUCodeLibrary._finalize_final_module, CPUCodeLibrary._set_compiled_object

    def _finalize_final_module(self: Any) -> None:
        if self._shared_module is None:  # compiled in this process
            self._shared_module = shared = self._final_module.clone()  # numba links this module into other functions
            for function in shared.functions:
                if not function.is_declaration and function.linkage == Linkage.external:
                    function.linkage = Linkage.linkonce_odr
            for function in self._final_module.functions:
                if not function.is_declaration and function.linkage == Linkage.linkonce_odr:
                    function.linkage = Linkage.internal
        finalize(self)

    def _set_compiled_object(self: Any, value: bytes) -> None:
        set_object(self, strengthen(value))

    CPUCodeLibrary._finalize_final_module = _finalize_final_module
    CPUCodeLibrary._set_compiled_object = _set_compiled_object


def strengthen(code: bytes) -> bytes:
    """Make the weak functions of object code (64-bit ELF, little-endian) strong: LLVM does not replace strong ones.

    Parameters
    ----------
    code : bytes

    Returns
    -------
    bytes
        The same object code except for the binding of its functions; other formats are returned unchanged.
    """
    if code[:6] != b"\x7fELF\x02\x01":
        return code
    changed = bytearray(code)
    first = int.from_bytes(code[40:48], "little")
    step, n_sections = int.from_bytes(code[58:60], "little"), int.from_bytes(code[60:62], "little")
    for section in np.ndarray(n_sections, _SECTION, changed, first, (step,)):
        if section["type"] == _SYMBOL_TABLE:
            symbols = np.frombuffer(changed, _SYMBOL, int(section["size"]) // _SYMBOL.itemsize, int(section["offset"]))
            weak = (symbols["info"] == (_WEAK << 4 | _FUNCTION)) & (symbols["section"] != 0)
            symbols["info"][weak] = _GLOBAL << 4 | _FUNCTION
    return bytes(changed)
