"""Graph of one `synk.function`: its checked arguments, and the functions compiled from it.

Each variant is compiled when it is first needed:

* The plain function is compiled by the backend from the user's arguments, unchanged. Only its outputs may stay on a
  GPU.
* All other variants compute the same expressions. An "accumulating" variant returns the new values of the updated
  variables instead of storing them; random states are the exception, and advance in every call. A "range" or "index"
  variant uses only given rows of the sliceable shared variables, wherever these occur in the graph, in givens and
  default updates too.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._backends import (
    TAKES_SUBSETS,
    TITLE,
    Constant,
    Container,
    In,
    T,
    Variable,
    ancestors,
    as_type_of,
    clone,
    compile_function,
    engine,
    input_like,
    is_device_type,
    is_random_state,
    mode_for_slices,
    of_equal_length,
    ops,
    rebuilt,
    stack_of,
    stacked,
    stay_on_device,
)
from synkhronos._graph.fast_call import with_deep_stack
from synkhronos._graph.pickling import Unpacked, bytes_variable
from synkhronos._graph.pickling import pack_values as pack
from synkhronos._graph.shared_variables import (
    describe,
    get_array,
    is_host_variable,
    is_shared_variable,
    is_tensor_variable,
    shared_variables_of,
)
from synkhronos._utils.display import progress


def as_in(item: Any, argument: str, allow_downcast: bool | None) -> Any:
    """Return an input, which was in the list of this argument, as the backend's ``In``."""
    if isinstance(item, In):
        return item
    if not isinstance(item, Variable):
        by_name = "; pass updates by name: updates=[...]" if isinstance(item, tuple) else ""
        raise TypeError(f"{argument} has {item!r}; expected {TITLE} variables or {engine}.In{by_name}")
    return In(item, allow_downcast=allow_downcast)


def default_of(spec: Any) -> Any:
    """Return the default value of an input, a variable or ``In``; ``None`` if it has none."""
    value = getattr(spec, "value", None)
    return value.data if isinstance(value, Container) else value


def with_leaves(ins: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, Any]], dict[int, Any]]:
    """Replace inputs that a compiled function cannot take by new variables.

    These inputs are results in the middle of a graph, and values that are not dense arrays. The new variables for the
    latter are vectors of bytes, which are unpickled in the graph.

    Parameters
    ----------
    ins : list of In

    Returns
    -------
    list of In
        The inputs in the same order.
    list of (variable, expression)
        The replaced inputs with their replacements, which are used as givens of the function.
    dict
        The types of the inputs that are passed as bytes, by position.
    """
    found, replaced, packed = [], [], {}
    for position, spec in enumerate(ins):
        variable = spec.variable
        if not is_host_variable(variable):
            leaf = bytes_variable(variable.name)
            packed[position] = variable.type
            replaced.append((variable, Unpacked((variable.type,))(leaf)))
            spec = In(leaf, name=spec.name)
        elif variable.owner is not None:
            leaf = variable.type(variable.name)
            replaced.append((variable, leaf))
            spec = copy_of(spec, leaf)
        found.append(spec)
    return found, replaced, packed


def copy_of(spec: Any, variable: Any = None) -> Any:
    """Copy an ``In``, for another variable if one is given; the backend's ``function`` modifies the ``In`` it gets.

    The copy is never mutable, so that a function cannot overwrite a value that the program passed.
    """
    variable = spec.variable if variable is None else variable
    return In(variable, name=spec.name, value=spec.value, strict=spec.strict, allow_downcast=spec.allow_downcast)


def pairs_of(givens: Any) -> list[tuple[Any, Any]]:
    """Return givens, a dict or pairs, as a list of pairs."""
    return list(givens.items() if hasattr(givens, "items") else givens or ())


def check_givens(ins: Sequence[Any], givens: Sequence[tuple[Any, Any]]) -> None:
    """Raise `RuntimeError` if givens replace inputs, as the backend does when it compiles a graph."""
    inputs = {spec.variable for spec in ins}
    for old, _ in givens:
        if isinstance(old, Variable) and old in inputs:
            raise RuntimeError(
                f"givens has {old}, an input of the function, which cannot be replaced; make the new one an input in "
                "its place, as in function([y], f(x), givens={x: g(y)})"
            )


def shared_leaves(expressions: Iterable[Any]) -> list[Any]:
    """Return the shared variables on which expressions depend."""
    return [one for one in ancestors(list(expressions)) if is_shared_variable(one)]


def expressions_of_all_rows(whole: Mapping[Any, Any], variables: Sequence[Any]) -> dict[Any, Any]:
    """Check the argument ``whole`` of a function with sliceable shared variables; return it with copies of arrays."""
    if {*whole} != {*variables}:
        raise ValueError("whole must have an entry for each of sliceable_shareds, and no others")
    found = {}
    for var, given in whole.items():
        value = found[var] = T.as_tensor_variable(np.array(given) if isinstance(given, np.ndarray) else given)
        if value.ndim != var.ndim:
            raise ValueError(f"whole has {value.ndim} dimensions for {var}; expected {var.ndim}")
        own = [one for one in shared_leaves([value]) if one in variables]
        if own:
            raise ValueError(
                f"whole has the rows of {var} from {own[0]}, of which the controller has its own rows only; pass the "
                "array of all rows, or an expression of variables that are equal on all ranks"
            )
    return found


def length_of(value: Any) -> Callable[[], int]:
    """Return a callable that returns the present length of an expression along axis 0."""
    axis = 0
    while value.owner is not None and isinstance(value.owner.op, ops.DimShuffle):
        order = value.owner.op.new_order
        if order[axis] == "x":
            break
        axis, value = order[axis], value.owner.inputs[0]
    if isinstance(value, Constant) or is_shared_variable(value):
        return lambda: (value.data if isinstance(value, Constant) else get_array(value)).shape[axis]

    @functools.lru_cache(maxsize=1)
    def function() -> Any:
        return compile_function([], value.shape[axis])

    return lambda: int(function()())


def check_arguments(ins: Sequence[Any], n_scattered: int, sliceable_shareds: Sequence[Any]) -> None:
    """Raise `TypeError` for unsupported inputs or sliceable shared variables; the first inputs are scattered."""
    for position, spec in enumerate(ins):
        if is_device_type(spec.variable.type) or (position < n_scattered and not is_host_variable(spec.variable)):
            raise TypeError(
                f"input {position} ({spec.name or spec.variable}) has type {spec.variable.type}; expected a tensor "
                "variable in host memory, which can be scattered. Pass a sparse matrix or an object in bcast_inputs: "
                "every rank gets it in full"
            )
        if spec.update is not None:
            raise TypeError(
                f"input {position} ({spec.variable}): {engine}.In(update=…) is not supported; use a shared variable"
            )
    for position, spec in enumerate(ins[:n_scattered]):
        if spec.variable.ndim == 0:
            raise TypeError(
                f"input {position} ({spec.variable}) is 0-dimensional, and cannot be scattered along axis 0; "
                "pass it in bcast_inputs"
            )
    for var in sliceable_shareds:
        if not is_shared_variable(var) or not is_tensor_variable(var) or var.ndim == 0:
            raise TypeError(f"sliceable_shareds has {var!r}; expected shared variables of at least 1 dimension")


class Variant(NamedTuple):
    """Key of one of the functions compiled from a graph."""

    accumulate: bool = False  # return the new values of updated variables instead of storing them
    rows: str = "all"  # of the sliceable shared variables: "all", "range" (start, stop), or "index" (a vector)
    device: bool = False  # leave the outputs on the GPU
    outputs: tuple[int, ...] | None = None  # positions of the outputs to compute; None: all

    def for_subset(self, subset: tuple[int, ...] | None) -> tuple[Variant, tuple[int, ...] | None]:
        """Return the variant that computes a subset of the outputs, and the ``output_subset`` for its calls."""
        return (self, subset) if TAKES_SUBSETS else (self._replace(outputs=subset), None)


#: The function compiled from the user's arguments, unchanged.
PLAIN = Variant()


_PICK = (ops.Subtensor, ops.AdvancedSubtensor1, ops.AdvancedSubtensor)

_logger = logging.getLogger("synkhronos")


class Graph:
    """Checked inputs, outputs, updates and givens of one function, and their compilation.

    Parameters
    ----------
    inputs, bcast_inputs : list of the backend's variables or ``In``
    outputs : list of the backend's variables or ``Out``
    updates : list of (shared variable, expression)
    givens : dict, list of pairs, or None
    sliceable_shareds : list of shared variables
    kwargs : dict
        Further arguments of the backend's ``function``.

    Attributes
    ----------
    input_variables, input_names, input_defaults : list
        One entry for each input, the scattered ones first; ``None`` for a missing name or default value. A new variable
        replaces an input that is a result in the middle of the graph or not a dense array.
    packed : dict
        The types of the inputs that are not dense arrays, such as sparse matrices, by position. They are passed as
        pickled bytes.
    packed_names : list of str
        The names of these inputs, which every rank gets in full.
    n_scattered : int
        Number of scattered inputs.
    axes : list of int
        The axes along which the scattered inputs are scattered.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        bcast_inputs: Sequence[Any],
        updates: list[tuple[Any, Any]],
        givens: Any,
        sliceable_shareds: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        may_downcast = kwargs.get("allow_input_downcast")
        ins = [as_in(one, "inputs", may_downcast) for one in inputs]
        ins += [as_in(one, "bcast_inputs", may_downcast) for one in bcast_inputs]
        self.n_scattered = len(inputs)
        self.axes = [0] * len(inputs)
        self.outputs = list(outputs)
        self.updates = updates
        self.sliceable_shareds = list(sliceable_shareds)
        self._kwargs = dict(kwargs)
        self._compiled: dict[Variant, Any] = {}
        self._cloned: tuple[list[Any], list[tuple[Any, Any]]] | None = None
        self._clones: dict[Any, Any] = {}
        self._whole: Graph | None = None
        check_arguments(ins, self.n_scattered, self.sliceable_shareds)
        given = pairs_of(givens)
        check_givens(ins, given)
        self._ins, replaced, self.packed = with_leaves(ins)
        self._givens = [*replaced, *given]  # a given's expression may depend on an input in the middle of the graph
        self._leaves = dict(replaced)
        self.input_variables = [spec.variable for spec in self._ins]
        self.input_names = [spec.name or spec.variable.name for spec in self._ins]
        self.packed_names = [self.input_names[i] or f"number {i}" for i in self.packed]
        self.input_defaults = list(map(default_of, ins))

    def compile(self, variant: Variant = PLAIN) -> Any:
        """Compile one variant.

        Its inputs are those of the graph. A "range" variant has the further inputs ``start`` and ``stop``, an "index"
        variant the further input ``index``.
        """
        if variant in self._compiled:
            return self._compiled[variant]
        start = time.perf_counter()
        with progress("compiling a function"):
            if variant._replace(device=False) == PLAIN:
                function = self._compile_plain(variant.device)
            else:
                function = with_deep_stack(lambda: self._compile_variant(variant))
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("compiled %s in %.2f s", describe(function), time.perf_counter() - start)
        self._compiled[variant] = function
        return function

    def compute(self, variant: Variant, inputs: Sequence[Any], subset: Sequence[int] | None) -> Any:
        """Call a variant through the backend's own ``Function.__call__``; return its outputs, or a subset of them."""
        variant, asked = variant.for_subset(None if subset is None else tuple(subset))
        inputs = [self.filter_input(i, value) if i in self.packed else value for i, value in enumerate(inputs)]
        return self.compile(variant)(*inputs, **({} if asked is None else {"output_subset": list(asked)}))

    def _compile_variant(self, variant: Variant) -> Any:
        outputs, updates = self._rebuilt()
        extra: list[Any] = []
        if variant.rows != "all":
            extra = [T.lscalar("start"), T.lscalar("stop")] if variant.rows == "range" else [T.lvector("index")]
            picked = slice(*extra) if variant.rows == "range" else extra[0]
            outputs, updates = self._replaced({var: var[picked] for var in self.sliceable_shareds})
        if variant.outputs is not None:
            outputs = [outputs[i] for i in variant.outputs]
        if variant.device:
            outputs = [stay_on_device(output) for output in outputs]
        if variant.accumulate:
            outputs = outputs + [new for var, new in updates if not is_random_state(var)]
            updates = [(var, new) for var, new in updates if is_random_state(var)]
        kwargs = {**self._kwargs, "no_default_updates": True, "on_unused_input": "ignore"}
        if kwargs.get("name"):
            kwargs["name"] = f"{kwargs['name']} ({variant})"
        return compile_function([*self._copied_ins(), *extra], outputs, updates=updates, **kwargs)

    def compile_serial(self, wanted: Sequence[int]) -> Any:
        """Compile a function that computes some outputs, without updates.

        Its inputs are those of the graph, followed by values for the sliceable shared variables.
        """
        return with_deep_stack(lambda: self._compile_serial(wanted))

    def _compile_serial(self, wanted: Sequence[int]) -> Any:
        outputs = [self._rebuilt()[0][i] for i in wanted]
        values = [input_like(var) for var in self.sliceable_shareds]
        replace = {var: as_type_of(var, value) for var, value in zip(self.sliceable_shareds, values)}
        kwargs = {**self._kwargs, "no_default_updates": True, "on_unused_input": "ignore"}
        return compile_function([*self._copied_ins(), *values], clone(outputs, replace=replace), **kwargs)

    def with_whole(self, whole: Mapping[Any, Any]) -> Graph:
        """Return the same graph with expressions of all rows in place of the sliceable shared variables.

        The first call determines the expressions.
        """
        if self._whole is not None:
            return self._whole
        self._whole = made = self.part(*self._replaced(whole))
        made.sliceable_shareds = []
        return made

    def _replaced(self, rows: Mapping[Any, Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Return the outputs and all updates with other expressions of the sliceable shared variables."""
        outputs, updates = self._rebuilt()
        replace = {var: as_type_of(var, value) for var, value in rows.items()}
        cloned = clone([*outputs, *(new for _, new in updates)], replace=replace)
        return cloned[: len(outputs)], list(zip([var for var, _ in updates], cloned[len(outputs) :]))

    def part(
        self, outputs: Sequence[Any], updates: list[tuple[Any, Any]], inputs: Any = None, *, ins: Any = None
    ) -> Graph:
        """Return a graph with other outputs and updates.

        Its inputs are those of this graph, or ``ins``. If ``inputs`` are given, they replace the scattered inputs, and
        every rank gets them in full.
        """
        ins = self._copied_ins() if ins is None else ins
        return Graph(
            ins[: self.n_scattered] if inputs is None else (),
            outputs,
            bcast_inputs=[*(inputs or ()), *ins[self.n_scattered :]],
            updates=updates,
            givens=None,
            sliceable_shareds=self.sliceable_shareds if inputs is None else (),
            kwargs={**self._kwargs, "no_default_updates": True, "on_unused_input": "ignore"},
        )

    def mapped(self, inputs: Sequence[Any]) -> tuple[Graph, dict[Any, Any]]:
        """Return a graph for several values of some inputs, and the dictionary from these inputs to those of the graph.

        Its outputs are those of this graph for each of the values, stacked along axis 0.
        """
        outputs, updates = self.expressions
        stacks = {one: stack_of(one) for one in inputs}

        def each(*entries: Any) -> list[Any]:
            return list(clone(outputs, replace=dict(zip(stacks, entries))))

        ins = [copy_of(spec, stacks.get(spec.variable)) for spec in self._ins]
        return self.part(stacked(each, of_equal_length(list(stacks.values()))), updates, ins=ins), stacks

    def of_slices(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Graph:
        """Return a graph of operations of slices of arrays, which is compiled like this one."""
        mode = mode_for_slices(self._kwargs.get("mode"))
        kwargs = {"mode": mode, "on_unused_input": "ignore"}
        return Graph([], outputs, bcast_inputs=inputs, updates=[], givens=None, sliceable_shareds=(), kwargs=kwargs)

    def _compile_plain(self, device: bool) -> Any:
        outputs = [stay_on_device(output) for output in self.outputs] if device else self.outputs
        function = compile_function(
            self._copied_ins(), outputs, updates=self.updates, givens=self._givens, **self._kwargs
        )
        self._check_sliceable(shared_variables_of(function))
        return function

    def _check_sliceable(self, used: Sequence[Any]) -> None:
        """Raise `ValueError` for a sliceable shared variable that is not among the used variables."""
        for var in self.sliceable_shareds:
            if not any(var is other for other in used):
                raise ValueError(f"sliceable_shareds has {var}, which the function does not use; leave it out")

    def _copied_ins(self) -> list[Any]:
        return list(map(copy_of, self._ins))

    def _rebuilt(self) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Return the outputs and all updates (default updates too), with givens substituted as by the backend."""
        if self._cloned is None:
            outputs, updates, self._clones = rebuilt(
                [getattr(output, "variable", output) for output in self.outputs],
                self.input_variables,
                self._givens,
                self.updates,
                self._kwargs,
            )
            self._cloned = outputs, updates
        return self._cloned

    @property
    def expressions(self) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """The outputs and all updates, with the givens substituted."""
        return self._cloned or with_deep_stack(self._rebuilt)

    def leaf_of(self, variable: Any) -> Any:
        """Return the variable that replaces an input of the user's, or the variable itself if it is not replaced."""
        return self._leaves.get(variable, variable)

    def expression_of(self, variable: Any) -> Any:
        """Return the variable that corresponds to a user's variable in `expressions`; ``None`` if there is none."""
        return self._clones.get(variable) if self.expressions else None

    @property
    def varying(self) -> list[Any]:
        """Variables that differ between ranks or slices: scattered inputs and sliceable shared variables."""
        return [*self.input_variables[: self.n_scattered], *self.sliceable_shareds]

    @property
    def common(self) -> list[Any]:
        """Variables that are computed from those of `varying`, but are equal on all ranks and in all slices: none."""
        return []

    @property
    def accumulated(self) -> list[Any]:
        """The shared variables whose new values an accumulating variant returns, in the order of its outputs."""
        return [var for var, _ in self.expressions[1] if not is_random_state(var)]

    @property
    def is_random(self) -> bool:
        """Return whether a call draws random numbers."""
        return any(is_random_state(var) for var, _ in self.expressions[1])

    def picks_rows_of_shared(self) -> bool:
        """Return whether an input that is not scattered selects rows of a shared variable."""
        outputs, updates = self.expressions
        wanted = set(self.input_variables[self.n_scattered :])
        for var in ancestors([*outputs, *(new for _, new in updates)]):
            node = var.owner
            if node is not None and isinstance(node.op, _PICK):
                picked_from, *by = node.inputs
                shared = any(is_shared_variable(one) for one in ancestors([picked_from]))
                if shared and not wanted.isdisjoint(ancestors(by)):
                    return True
        return False

    def filter_input(self, position: int, value: Any) -> Any:
        """Cast a value as the backend would for this input, and pack one that is not a dense array.

        Raises
        ------
        TypeError
            If the input does not accept the value.
        """
        if position in self.packed:
            return pack([self.packed[position].filter(value)])
        spec = self._ins[position]
        return spec.variable.type.filter(value, strict=spec.strict, allow_downcast=spec.allow_downcast)
