"""Base class of this package's own Ops.

They have the interface of Theano's Ops, and run in Python inside functions that numba compiles.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
from pytensor.compile.mode import optdb
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph import op as _op
from pytensor.graph.rewriting.basic import GraphRewriter

_here = threading.local()  # the Ops of the function that this thread executes


class Op(_op.Op):
    """Base class of Ops with the interface of Theano's Ops.

    The constructor takes the attributes in ``__props__`` first, and `perform` must not use its ``node``.

    Attributes
    ----------
    is_kept : bool
        Whether numba may cache the compiled code on disk. False if the properties are valid in one program only.
    """

    is_kept = True

    def L_op(self, inputs: Sequence[Any], outputs: Sequence[Any], output_gradients: Sequence[Any]) -> list[Any]:
        """Raise `NotImplementedError`, unless a subclass defines a gradient."""
        raise NotImplementedError(f"{self} has no gradient")

    def R_op(self, inputs: Sequence[Any], eval_points: Sequence[Any]) -> list[Any]:
        """Raise `NotImplementedError`, unless a subclass defines an R-operator."""
        raise NotImplementedError(f"{self} has no R-operator")

    def pullback(self, inputs: Sequence[Any], outputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Call `L_op`. PyTensor uses this name."""
        return self.L_op(inputs, outputs, cotangents)

    def pushforward(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Call `R_op`, with ``None`` for disconnected tangents. PyTensor uses this name."""
        points = [None if isinstance(one.type, DisconnectedType) else one for one in tangents]
        return [disconnected_type() if one is None else one for one in self.R_op(inputs, points)]


def within(graph: Any, execute: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap the call of a function's compiled code, so that it runs the Op objects of the graph, which record values.

    Ops of the same class with equal properties share one object.
    """
    own = {(type(op), _properties(op)): op for op in (node.op for node in graph.apply_nodes) if isinstance(op, Op)}
    if not own:
        return execute

    def run() -> Any:
        _here.operations = own
        try:
            return execute()
        finally:
            _here.operations = None

    return run


def _properties(op: Any) -> tuple[Any, ...]:
    return tuple([getattr(op, name) for name in op.__props__])


@functools.cache
def _like(kind: type, properties: tuple[Any, ...]) -> Any:
    return kind(*properties)


def performed(kind: type, properties: tuple[Any, ...], n_outputs: int, inputs: Sequence[Any]) -> Any:
    """Run an Op on values. In every process, code that numba has cached on disk finds this function by its name."""
    own = getattr(_here, "operations", None) or {}
    # a new Op is used inside Scan and outside of calls by ranks
    op = own.get((kind, properties)) or _like(kind, properties)
    return _results(op, n_outputs, inputs)


def _results(op: Any, n_outputs: int, inputs: Sequence[Any]) -> Any:
    storage: list[list[Any]] = [[None] for _ in range(n_outputs)]
    op.perform(None, inputs, storage)
    return storage[0][0] if n_outputs == 1 else tuple(value for (value,) in storage)


@functools.cache
def register_with_numba() -> None:
    """Make numba run Ops of this class in Python, and cache the compiled code by class and properties.

    Each process must call this before it links a function. It also calls `bind_locally`.
    """
    import numba
    from pytensor.link.numba.dispatch.basic import (
        default_hash_key_from_props,
        get_numba_type,
        numba_njit,
        register_funcify_and_cache_key,
    )

    bind_locally()

    @register_funcify_and_cache_key(Op)
    def compiled(op: Any, node: Any, **_: Any) -> Any:
        kind, properties = type(op), _properties(op)
        types = [get_numba_type(output.type) for output in node.outputs]
        n_outputs = len(types)
        returned = types[0] if n_outputs == 1 else numba.types.Tuple(types)

        def perform(inputs: Sequence[Any]) -> Any:
            return _results(op, n_outputs, inputs)

        @numba_njit
        def run_unkept(*inputs: Any) -> Any:
            with numba.objmode(result=returned):
                result = perform(inputs)
            return result  # noqa: RET504 (numba does not allow a return inside the block)

        if not op.is_kept:
            return run_unkept, None

        @numba_njit
        def run(*inputs: Any) -> Any:
            with numba.objmode(result=returned):
                result = performed(kind, properties, n_outputs, inputs)
            return result  # noqa: RET504 (numba does not allow a return inside the block)

        return run, default_hash_key_from_props(op)


class _RegisterWithNumba(GraphRewriter):
    """Rewrite that calls `register_with_numba` before numba compiles a function, and does not change the graph.

    It is not called on import, because importing numba takes a second.
    """

    def add_requirements(self, fgraph: Any) -> None:
        """Do nothing: the rewrite needs no features."""

    def apply(self, fgraph: Any) -> None:
        """Call `register_with_numba`; do not change the graph."""
        register_with_numba()


optdb.register("synkhronos_register_with_numba", _RegisterWithNumba(), "numba", position=200)


# -- object code of functions that numba compiles: use each function's own copies of operations
#
# The object code of a function contains a copy of each operation's code, optimized for this function. Numba marks the
# copies as weak symbols. LLVM replaces a weak symbol by code of the same name that the process has loaded before. In
# the process that compiled the function, this is the code of the operation alone; in another process, it may be the
# code of another function. The versions differ in rounding, because PyTensor allows fused multiply-adds. So ranks that
# run the same object code would get values that differ in the last bit.

_SECTION = np.dtype({"names": ["type", "offset", "size"], "formats": ["<u4", "<u8", "<u8"], "offsets": [4, 24, 32]})
_SYMBOL = np.dtype({"names": ["info", "section"], "formats": ["u1", "<u2"], "offsets": [4, 6], "itemsize": 24})
_SYMBOL_TABLE, _FUNCTION, _GLOBAL, _WEAK = 2, 2, 1, 2  # SHT_SYMTAB, STT_FUNC, STB_GLOBAL, STB_WEAK


def bind_locally() -> None:
    """Make numba mark the copies as local symbols in new object code, and as strong symbols in cached object code."""
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
    """Turn weak function symbols of object code (64-bit ELF, little-endian) into strong ones, which LLVM keeps.

    Parameters
    ----------
    code : bytes

    Returns
    -------
    bytes
        The same object code with another binding of its functions. Code in other formats is returned unchanged.
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
