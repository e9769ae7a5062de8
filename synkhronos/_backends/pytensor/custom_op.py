"""Operations of one's own: written as for Theano, and run in Python where a function is compiled by numba, too."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, Callable

from pytensor.compile.mode import optdb
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph import op as _op
from pytensor.graph.rewriting.basic import GraphRewriter

from synkhronos._backends.pytensor.linkage import bind_locally

__all__ = ["Op", "tell_numba", "within"]

_here = threading.local()  # the operations of the function that this thread executes


class Op(_op.Op):
    """An operation whose constructor takes first what ``__props__`` names, and whose `perform` does without a node.

    Attributes
    ----------
    is_kept : bool
        Whether numba may keep on disk what it compiles: not where the properties mean something in one program alone.
    """

    is_kept = True

    def L_op(self, inputs: Sequence[Any], outputs: Sequence[Any], output_gradients: Sequence[Any]) -> list[Any]:
        """None, unless a class has one."""
        raise NotImplementedError(f"{self} has no gradient")

    def R_op(self, inputs: Sequence[Any], eval_points: Sequence[Any]) -> list[Any]:
        """None, unless a class has one."""
        raise NotImplementedError(f"{self} has no R-operator")

    def pullback(self, inputs: Sequence[Any], outputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """By PyTensor's name what Theano calls `L_op`."""
        return self.L_op(inputs, outputs, cotangents)

    def pushforward(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """By PyTensor's name what Theano calls `R_op`, where ``None`` stands for what does not change."""
        points = [None if isinstance(one.type, DisconnectedType) else one for one in tangents]
        return [disconnected_type() if one is None else one for one in self.R_op(inputs, points)]


def within(graph: Any, execute: Callable[[], Any]) -> Callable[[], Any]:
    """What executes a function's compiled code so that its own operations run, and note what they see.

    Those that no rewrite has told apart are not known from each other: one of them stands for all.
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
    """What an operation makes of some values; code that numba has kept finds it by its name, in any process."""
    own = getattr(_here, "operations", None) or {}
    op = own.get((kind, properties)) or _like(kind, properties)  # the latter in loops, and outside of calls on ranks
    return _results(op, n_outputs, inputs)


def _results(op: Any, n_outputs: int, inputs: Sequence[Any]) -> Any:
    storage: list[list[Any]] = [[None] for _ in range(n_outputs)]
    op.perform(None, inputs, storage)
    return storage[0][0] if n_outputs == 1 else tuple(value for (value,) in storage)


@functools.cache
def tell_numba() -> None:
    """Have numba run operations of this kind in Python; what it compiles is kept by kind and properties.

    Each process must be told before it links a function. What numba compiles is bound to its own code, see `linkage`.
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
            return result  # noqa: RET504 (not possible within the block)

        if not op.is_kept:
            return run_unkept, None

        @numba_njit
        def run(*inputs: Any) -> Any:
            with numba.objmode(result=returned):
                result = performed(kind, properties, n_outputs, inputs)
            return result  # noqa: RET504 (not possible within the block)

        return run, default_hash_key_from_props(op)


class _TellNumba(GraphRewriter):
    """Numba is imported for its own functions alone, and late: that takes a second."""

    def add_requirements(self, fgraph: Any) -> None:
        """None."""

    def apply(self, fgraph: Any) -> None:
        """Change nothing."""
        tell_numba()


optdb.register("synkhronos_tell_numba", _TellNumba(), "numba", position=200)
