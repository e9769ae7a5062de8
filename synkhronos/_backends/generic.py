"""Functions that are the same for all backends, written with the names that each backend defines."""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from synkhronos import _backends
from synkhronos._backends import T, ops

__all__ = [
    "CONTINUOUS",
    "FOLDER",
    "INTEGERS",
    "LIBRARIES",
    "accumulated",
    "constant_value",
    "divert",
    "exact_mode",
    "label_prints",
    "length_along",
    "make_printable",
    "mode_for_slices",
    "name_of_mode",
    "of_equal_length",
    "rebuilt",
    "reduced",
    "running_parts",
    "stack_of",
    "stacked",
    "timed_machine",
]

_OWN = f"{_backends.engine}."
#: Folder in which the backend is installed.
FOLDER = os.path.dirname(str(sys.modules[_backends.engine].__file__))
#: Beginnings of the paths of code that is not the program's own.
LIBRARIES = (*map(sysconfig.get_path, ("purelib", "platlib", "stdlib", "platstdlib")), "<frozen ")
INTEGERS = tuple([kind.dtype for kind in _backends.scalar.integer_types])
#: The dtypes of values that have gradients.
CONTINUOUS = tuple([kind.dtype for kind in _backends.scalar.continuous_types])


# -- graphs


def length_along(variable: Any, axis: int) -> Any:
    """Return the length of a variable along one axis, as a symbolic int64 scalar."""
    return ops.Shape_i(axis)(variable)


def constant_value(variable: Any) -> Any:
    """Return the value of an array of equal elements that the backend recognizes as constant, else ``None``."""
    try:
        return _backends.get_scalar_constant_value(variable)
    except (_backends.NotScalarConstantError, AttributeError, TypeError):
        return None


def accumulated(
    step: Callable[..., list[Any]], initial: Sequence[Any], n_steps: Any, others: Sequence[Any]
) -> list[Any]:
    """Return expressions for the values of some variables after a loop.

    Parameters
    ----------
    step : callable
        ``step(number, *values, *others)`` returns the new values of the variables.
    initial : list of variables
        Values of the variables before the first step.
    n_steps : variable
        Number of steps, at least one.
    others : list of variables
        Other variables that the steps use.
    """
    all_steps = _backends.scan(
        step,
        sequences=[T.arange(n_steps)],
        outputs_info=list(initial),
        non_sequences=list(others),
        strict=True,
        return_list=True,
    )
    return [values[-1] for values in all_steps]


def stack_of(var: Any) -> Any:
    """Make a new input for several values of a variable, stacked along a new axis 0."""
    return _backends.retyped(var.dimshuffle("x", *range(var.ndim)), free=(0,))(var.name)


def stacked(step: Callable[..., list[Any]], sequences: Sequence[Any]) -> list[Any]:
    """Return the results of a step for each entry of some variables along axis 0, stacked along a new axis 0.

    Parameters
    ----------
    step : callable
        ``step(*entries)`` returns a list of variables.
    sequences : list of variables
    """
    return list(_backends.scan(step, sequences=list(sequences), return_list=True))


def of_equal_length(stacks: Sequence[Any]) -> list[Any]:
    """Return variables, with checks that they have as many entries along axis 0 as the first one."""
    first, *others = stacks
    check = ops.Assert("mapped: the inputs must have equally many values, stacked along axis 0")
    return [first, *(check(one, T.eq(one.shape[0], first.shape[0])) for one in others)]


# -- functions


def exact_mode(mode: Any) -> Any:
    """Return the mode for exact functions: no matrix product is computed twice, and updates are computed in one pass.

    Parameters
    ----------
    mode : object
        The program's mode. It is returned unchanged if it is not a plain one, such as ``DebugMode``, or does not
        optimize.
    """
    found = _backends.get_mode(mode)
    if type(found) is not _backends.Mode:
        return mode
    _, rewrites = found.get_linker_optimizer(found.provided_linker, found.provided_optimizer)
    if "fast_run" not in getattr(rewrites, "include", ()):
        return mode
    return found.including(_backends.FOR_EXACT).excluding("local_dot22_to_dot22scalar")


def mode_for_slices(mode: Any) -> Any:
    """Return the mode for functions of slices, in which all outputs are computed in one pass."""
    found = _backends.get_mode(mode)
    return found.including(_backends.FOR_SLICES) if type(found) is _backends.Mode else mode


def name_of_mode(mode: Any) -> str:
    """Return a name of a mode, the same in each run; empty for a mode that is not plain, such as ``DebugMode``."""
    found = _backends.get_mode(mode)
    if type(found) is not _backends.Mode:
        return ""
    linker, rewrites = found.get_linker_optimizer(found.provided_linker, found.provided_optimizer)
    parts = [sorted(map(str, getattr(rewrites, name, None) or ())) for name in ("include", "require", "exclude")]
    return f"{type(linker).__name__} {parts}"


def rebuilt(
    outputs: Sequence[Any], inputs: Sequence[Any], givens: Any, updates: Any, kwargs: dict[str, Any]
) -> tuple[list[Any], list[tuple[Any, Any]], dict[Any, Any]]:
    """Return the outputs and all updates (default updates too) that the backend would compile, with givens substituted.

    Also return a dictionary from the user's variables to the variables that replace them.
    """
    _, cloned, (clones, update_of, _, _) = _backends.rebuild_collect_shared(
        list(outputs),
        list(inputs),
        replace=givens,
        updates=updates,
        rebuild_strict=kwargs.get("rebuild_strict", True),
        copy_inputs_over=True,
        no_default_updates=kwargs.get("no_default_updates") or False,
    )
    return list(cloned), list(update_of.items()), clones


class Running(NamedTuple):
    """Parts of a compiled function that are needed to call it without its own `__call__`."""

    function: Callable[[], Any]  # computes from the inputs' storage cells; its result begins with the outputs
    inputs: list[tuple[Any, list[Any]]]  # type and storage cell of each input
    n_outputs: int
    emptied: list[list[Any]]  # storage cells to clear after the call
    explain: Callable[[], None]  # raises the current exception again, with the backend's explanation


def running_parts(function: Any) -> Running | None:
    """Return the parts needed to call a compiled function, or ``None`` if its own `__call__` is needed."""
    found = _backends.execution(function)
    if found is None:
        return None
    compute, n_outputs, left = found
    vm = _backends.machine(function)
    pairs = zip(function.maker.inputs, function.input_storage)
    taken = [(spec.variable.type, container.storage) for spec, container in pairs if container.required]

    def explain() -> None:
        if hasattr(vm, "position_of_error"):  # report the error as the backend's own `__call__` does
            where = vm.position_of_error
            thunk = vm.thunks[where] if hasattr(vm, "thunks") else None
            _backends.raise_at(function, vm.nodes[where], thunk, getattr(vm, "storage_map", None))

    return Running(compute, taken, n_outputs, [*(cell for _, cell in taken), *left], explain)


def timed_machine(function: Any) -> Any:
    """Return the virtual machine of a compiled function if it can time single Apply nodes; else ``None``.

    While its attribute ``time_thunks`` is true, calls add to ``call_times`` the seconds of each of its ``nodes``, and
    to ``call_counts`` the numbers of their executions. Code that numba compiles has no such times, and those of a
    function with a profile belong to the profile.
    """
    vm = _backends.machine(function)
    has_all = all(hasattr(vm, name) for name in ("nodes", "time_thunks", "call_times", "call_counts"))
    return vm if has_all and not function.profile else None


_builders: list[Callable[..., Any]] = []


def divert(build: Callable[..., Any]) -> Callable[[], None]:
    """Make the backend's ``function`` call ``build`` to build a program's functions; return a callable that ends this.

    Functions that the backend itself or this package compiles are not affected.

    Parameters
    ----------
    build : callable
        ``build(plain, arguments)`` returns the function. ``plain`` is the backend's own builder, ``arguments`` are its
        keyword arguments.
    """
    _builders.append(build)
    _backends.redirect(_built)

    def end() -> None:
        _builders.remove(build)
        if not _builders:
            _backends.redirect(None)

    return end


def _built(asked: dict[str, Any]) -> Any:
    # frame 1 is the function that `redirect` sets, frame 2 the backend's `function`, frame 3 its caller
    caller = sys._getframe(3).f_globals.get("__name__", "")
    is_ours = caller.startswith((_OWN, "synkhronos."))
    return _backends.plain_function(**asked) if is_ours else _builders[-1](_backends.plain_function, asked)


# -- printing


def make_printable(*classes: type) -> None:
    """Make the backend's printing functions accept objects of these classes, which have the ``maker`` of a function."""
    _backends.printing.Function = (_backends.Function, *classes)


def label_prints(rank: int) -> None:
    """Make the operation ``Print`` begin each line with this process's rank, and write all its lines at once."""
    plain: Any = _backends.printing._print_fn

    def print_labelled(op: Any, value: Any) -> None:
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            plain(op, value)
        lines = written.getvalue().splitlines()
        sys.stdout.write("".join([f"rank {rank}: {line}\n" for line in lines]))
        sys.stdout.flush()

    _backends.printing._print_fn = print_labelled  # unpickled functions refer to it by this name


# -- pickling

#: Functions of NanGuardMode, which are closures and cannot be pickled, by qualified name. The values are the attributes
#: of its linker that hold them.
_GUARDS = {
    "NanGuardMode.__init__.<locals>.nan_check": "callback",
    "NanGuardMode.__init__.<locals>.nan_check_input": "callback_input",
}


def reduced(obj: Any, frames: dict[Any, Any]) -> Any:
    """Return the pickle reduction of an object of the backend; ``NotImplemented`` for other objects.

    ``frames`` collects the frames of traces, so that frames that are equal become one object and are pickled once.
    """
    if isinstance(obj, (_backends.Variable, _backends.Apply)):
        # only for the backend's own classes: a user's class may need all attributes, and parts of PyTensor's frozen
        # graphs define their own reduction
        has_own_way = type(obj).__reduce__ is not object.__reduce__ or "__reduce_ex__" in obj.__dict__
        if type(obj).__module__.startswith(_OWN) and not has_own_way:
            known = _backends.OF_NODES if isinstance(obj, _backends.Apply) else _backends.OF_VARIABLES
            state = {attribute: value for attribute, value in obj.__dict__.items() if attribute in known}
            return _new(type(obj), {**state, **_backends.RESET} if "container" in state else state)
    elif isinstance(obj, _backends.Scratchpad):
        tags = {attribute: value for attribute, value in obj.__dict__.items() if attribute in _backends.OF_TAGS}
        if "trace" in tags:
            tags["trace"] = _once(tags["trace"], frames)
        return _new(type(obj), tags)
    elif inspect.isfunction(obj) and obj.__qualname__ in _GUARDS:
        return _guard, (_GUARDS[obj.__qualname__], _errors_of(obj))
    return _backends.reduced_otherwise(obj)


def _new(cls: type, state: dict[str, Any]) -> tuple[Any, ...]:
    return copyreg.__newobj__, (cls,), state or None  # type: ignore[attr-defined]


def _once(trace: Any, frames: dict[Any, Any]) -> Any:
    """Return an equal trace in which each frame is the one object of its value in ``frames``."""
    if isinstance(trace, list):
        return [_once(part, frames) for part in trace]
    return frames.setdefault(trace, trace)


def _errors_of(guard: Any) -> tuple[bool, ...]:
    """Return whether a function of NanGuardMode reports NaN, infinity and large values as errors."""
    check = inspect.getclosurevars(guard).nonlocals["do_check_on"]
    found = inspect.getclosurevars(check).nonlocals
    return tuple(bool(found[f"{kind}_is_error"]) for kind in ("nan", "inf", "big"))


def _guard(attribute: str, errors: tuple[bool, ...]) -> Any:
    return getattr(_backends.NanGuardMode(*errors).linker, attribute)
