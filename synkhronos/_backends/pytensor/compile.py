"""Compile PyTensor functions, read their parts, and redirect `pytensor.function`.

`pytensor.function` has no inner function to which it passes its arguments, so `redirect` replaces its code object. This
also works for programs that have imported `pytensor.function` under another name.
"""

# ruff: noqa: F401 (the imported names are used through this module)

from __future__ import annotations

import inspect
import operator
import types
import warnings
from collections.abc import Sequence
from typing import Any, Callable

from pytensor import In, Out
from pytensor.compile.executor import Function
from pytensor.compile.maker import function
from pytensor.compile.mode import get_mode
from pytensor.compile.rebuild import rebuild_collect_shared
from pytensor.link.basic import Container
from pytensor.link.utils import raise_with_op

from synkhronos._backends.pytensor.custom_op import within

#: The arguments of `pytensor.function`.
KEYWORDS = tuple(inspect.signature(function).parameters)
#: Whether a call of a compiled function can select the outputs to compute.
TAKES_SUBSETS = False

#: Linkers whose functions ranks cannot use: class name and reason.
_REFUSED = {
    "JAXLinker": "JAX does not survive a fork, draws the same numbers on all ranks, and reads past the end of arrays "
    "without an error",
    "PytorchLinker": "PyTorch's compiler does not survive a fork",
    "MLXLinker": "MLX does not survive a fork",
}


def compile_function(inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Any:
    """Call `pytensor.function`, after checking that ranks can use functions of the linker.

    Raises
    ------
    ValueError
        If they cannot.
    """
    linker = type(get_mode(kwargs.get("mode")).linker).__name__
    if linker in _REFUSED:
        raise ValueError(f"mode: {linker} cannot be used by ranks ({_REFUSED[linker]}): use NUMBA, C or CVM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The no_default_updates parameter is deprecated", DeprecationWarning)
        return function(inputs, outputs, **kwargs)


#: Function that returns the object (virtual machine) that executes a compiled function.
machine = operator.attrgetter("vm")


def execution(function: Any) -> tuple[Any, int, Sequence[list[Any]]] | None:
    """Return what a call executes, its number of outputs, and the storage cells to clear afterwards.

    Return ``None`` if the function's own `__call__` is needed: for inputs that the function may write to, and profiles.
    """
    vm = function.vm
    execute = within(function.maker.fgraph, vm) if hasattr(vm, "jit_fn") else vm
    if function.profile or function._potential_aliased_input_groups:
        return None
    made = [container.storage for container in function.output_storage]
    updates = [(i, container.storage) for i, container in function._update_input_storage]

    def compute() -> list[Any]:
        # functions that numba has compiled leave all outputs, updates included, in the storage cells
        outputs = execute()
        if outputs is None:
            outputs = [cell[0] for cell in made]
        for i, cell in updates:
            cell[0] = outputs[i]
        return outputs

    left = function._clear_output_storage_data if getattr(vm, "allow_gc", False) else ()
    return compute if getattr(vm, "need_update_inputs", True) else execute, function._n_returned_outputs, left


def raise_at(function: Any, node: Any, thunk: Any, storage_map: Any) -> None:
    """Raise the current exception again, with the explanation that `__call__` gives."""
    raise_with_op(function.maker.fgraph, node=node, thunk=thunk, storage_map=storage_map)


def updated_storage(function: Any) -> Sequence[list[Any]]:
    """Return the storage cells to which a call of a compiled function writes its updates."""
    if not function._has_updates:
        return ()
    pairs = zip(function.maker.expanded_inputs, function.input_storage)
    return [container.storage for spec, container in pairs if spec.update is not None]


plain_function: Any = types.FunctionType(
    function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
)
_build: Callable[[dict[str, Any]], Any] | None = None


def redirect(build: Callable[[dict[str, Any]], Any] | None) -> None:
    """Make `pytensor.function` pass its arguments to ``build``; ``None`` ends this.

    The caller of `pytensor.function` is the third frame above ``build``.
    """
    global _build
    _build = build
    function.__code__ = (_redirected if build else plain_function).__code__


def _redirected(
    inputs: Any,
    outputs: Any = None,
    mode: Any = None,
    updates: Any = None,
    givens: Any = None,
    no_default_updates: Any = None,
    accept_inplace: bool = False,
    name: Any = None,
    rebuild_strict: bool = True,
    allow_input_downcast: Any = None,
    profile: Any = None,
    on_unused_input: Any = None,
    trust_input: bool = False,
) -> Any:
    # this code object runs with the globals of PyTensor's module, so it must import what it uses
    asked = dict(locals())
    from synkhronos._backends.pytensor.compile import requested

    return requested(asked)


def requested(asked: dict[str, Any]) -> Any:
    """Build a function from the arguments of a program's `pytensor.function` call."""
    return _build(asked) if _build else plain_function(**asked)
