"""Base class of this package's own Ops: written as for Theano, and run in Python inside functions compiled by numba."""

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

_here = threading.local()  # the Ops of the function that this thread executes


class Op(_op.Op):
    """Op whose constructor takes the attributes in ``__props__`` first, and whose `perform` does not need its node.

    Attributes
    ----------
    is_kept : bool
        Whether numba may cache the compiled code on disk: false if the properties have a meaning in one program alone.
    """

    is_kept = True

    def L_op(self, inputs: Sequence[Any], outputs: Sequence[Any], output_gradients: Sequence[Any]) -> list[Any]:
        """Raise `NotImplementedError`, unless a subclass defines a gradient."""
        raise NotImplementedError(f"{self} has no gradient")

    def R_op(self, inputs: Sequence[Any], eval_points: Sequence[Any]) -> list[Any]:
        """Raise `NotImplementedError`, unless a subclass defines an R-operator."""
        raise NotImplementedError(f"{self} has no R-operator")

    def pullback(self, inputs: Sequence[Any], outputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Call `L_op`, by the name that PyTensor uses for it."""
        return self.L_op(inputs, outputs, cotangents)

    def pushforward(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Call `R_op`, by the name that PyTensor uses for it; in `R_op`, ``None`` stands for an unchanging input."""
        points = [None if isinstance(one.type, DisconnectedType) else one for one in tangents]
        return [disconnected_type() if one is None else one for one in self.R_op(inputs, points)]


def within(graph: Any, execute: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap the call of a function's compiled code so that it runs the graph's own Op objects, which record values.

    Ops of equal class and properties that no rewrite has distinguished share one object.
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
    """Run an Op on values; code that numba has cached on disk finds this function by its name, in any process."""
    own = getattr(_here, "operations", None) or {}
    op = own.get((kind, properties)) or _like(kind, properties)  # the latter inside Scan, and outside of ranks' calls
    return _results(op, n_outputs, inputs)


def _results(op: Any, n_outputs: int, inputs: Sequence[Any]) -> Any:
    storage: list[list[Any]] = [[None] for _ in range(n_outputs)]
    op.perform(None, inputs, storage)
    return storage[0][0] if n_outputs == 1 else tuple(value for (value,) in storage)


@functools.cache
def tell_numba() -> None:
    """Have numba run Ops of this class in Python; it caches the compiled code by class and properties.

    Each process must call this before it links a function. Compiled code is bound to its own copies, see `linkage`.
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


class _TellNumba(GraphRewriter):
    """Rewrite that calls `tell_numba` when a function for numba is compiled, because importing numba takes a second."""

    def add_requirements(self, fgraph: Any) -> None:
        """Require nothing."""

    def apply(self, fgraph: Any) -> None:
        """Call `tell_numba`; leave the graph unchanged."""
        tell_numba()


optdb.register("synkhronos_tell_numba", _TellNumba(), "numba", position=200)
