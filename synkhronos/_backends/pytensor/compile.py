"""Compile PyTensor functions, call them, read their parts, and divert `pytensor.function`.

`divert` makes `pytensor.function` of a program return a function of another builder. `pytensor.function` passes its
arguments to no single inner function, so its code object is replaced: programs that hold `pytensor.function` by another
name are diverted, too. Functions that PyTensor itself and this package compile stay unchanged.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any, Callable

import pytensor
from pytensor import In, Out
from pytensor.compile.executor import Function
from pytensor.compile.maker import function
from pytensor.compile.mode import get_mode
from pytensor.compile.rebuild import rebuild_collect_shared
from pytensor.link.basic import Container
from pytensor.link.utils import raise_with_op

from synkhronos._backends.common import Running
from synkhronos._backends.pytensor.custom_op import within

__all__ = [
    "KEYWORDS",
    "TAKES_SUBSETS",
    "Container",
    "Function",
    "In",
    "Out",
    "Running",
    "compile_function",
    "divert",
    "machine",
    "make_printable",
    "rebuilt",
    "running_parts",
    "updated_storage",
]


#: The arguments of `pytensor.function`.
KEYWORDS = tuple(inspect.signature(function).parameters)
#: Whether each call of a compiled function can select the outputs to compute.
TAKES_SUBSETS = False

#: Linkers whose functions ranks cannot use: class name and reason.
_REFUSED = {
    "JAXLinker": "JAX does not survive a fork, draws the same numbers on all ranks, and reads past the end of arrays "
    "without an error",
    "PytorchLinker": "PyTorch's compiler does not survive a fork",
    "MLXLinker": "MLX does not survive a fork",
}


def compile_function(inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Any:
    """Call `pytensor.function`, with a linker whose functions can be replicated.

    Raises
    ------
    ValueError
        If the linker is another one.
    """
    linker = type(get_mode(kwargs.get("mode")).linker).__name__
    if linker in _REFUSED:
        raise ValueError(f"mode: {linker} cannot be used by ranks ({_REFUSED[linker]}): use NUMBA, C or CVM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The no_default_updates parameter is deprecated", DeprecationWarning)
        return function(inputs, outputs, **kwargs)


def rebuilt(
    outputs: Sequence[Any], inputs: Sequence[Any], givens: Any, updates: Any, kwargs: dict[str, Any]
) -> tuple[list[Any], list[tuple[Any, Any]], dict[Any, Any]]:
    """Return outputs and all updates (default ones, too) as the backend itself sees them, with the givens applied.

    The third part maps each of the user's variables to the variable that replaces it.
    """
    _, cloned, (clones, update_of, _, _) = rebuild_collect_shared(
        list(outputs),
        list(inputs),
        replace=givens,
        updates=updates,
        rebuild_strict=kwargs.get("rebuild_strict", True),
        copy_inputs_over=True,
        no_default_updates=kwargs.get("no_default_updates") or False,
    )
    return list(cloned), list(update_of.items()), clones


def running_parts(function: Any) -> Running | None:
    """Return how to call a compiled function; ``None`` if only its own `__call__` will do.

    That is so for arguments that the function may write to, and for profiles.
    """
    vm = function.vm
    execute = within(function.maker.fgraph, vm) if hasattr(vm, "jit_fn") else vm
    if function.profile or function._potential_aliased_input_groups:
        return None
    pairs = zip(function.maker.inputs, function.input_storage)
    taken = [(spec.variable.type, container.storage) for spec, container in pairs if container.required]
    left = function._clear_output_storage_data if getattr(vm, "allow_gc", False) else ()
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

    def explain() -> None:
        if hasattr(vm, "position_of_error"):  # the same report as by PyTensor's own `__call__`
            where = vm.position_of_error
            thunk = vm.thunks[where] if hasattr(vm, "thunks") else None
            storage = getattr(vm, "storage_map", None)
            raise_with_op(function.maker.fgraph, node=vm.nodes[where], thunk=thunk, storage_map=storage)

    does_all = not getattr(vm, "need_update_inputs", True)
    emptied = [*(cell for _, cell in taken), *left]
    return Running(execute if does_all else compute, taken, function._n_returned_outputs, emptied, explain)


def updated_storage(function: Any) -> Sequence[list[Any]]:
    """Return the storage cells to which a call of a compiled function writes its updates."""
    if not function._has_updates:
        return ()
    pairs = zip(function.maker.expanded_inputs, function.input_storage)
    return [container.storage for spec, container in pairs if spec.update is not None]


def machine(function: Any) -> Any:
    """Return the object that executes a compiled function."""
    return function.vm


def make_printable(*classes: type) -> None:
    """Have the backend's printing functions accept objects of these classes, which have a function's ``maker``."""
    pytensor.printing.Function = (Function, *classes)


_plain: Any = types.FunctionType(
    function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
)
_code = function.__code__
_builders: list[Callable[..., Any]] = []


def divert(build: Callable[..., Any]) -> Callable[[], None]:
    """Have functions that programs request of the backend built by ``build``; return a callable that ends this.

    Parameters
    ----------
    build : callable
        ``build(plain, arguments)``: ``plain`` is the backend's own builder, ``arguments`` are the keyword arguments of
        ``function`` for it.
    """
    _builders.append(build)
    function.__code__ = _diverted.__code__

    def end() -> None:
        _builders.remove(build)
        if not _builders:
            function.__code__ = _code

    return end


def _diverted(
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
    # this code object runs with the globals of PyTensor's module, so it needs an import
    asked = dict(locals())
    from synkhronos._backends.pytensor.compile import built

    return built(asked)


def built(asked: dict[str, Any]) -> Any:
    """Build the function that a program requested; the program's frame is the caller's caller."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    is_ours = caller.startswith(("pytensor.", "synkhronos."))
    return _plain(**asked) if is_ours else _builders[-1](_plain, asked)
