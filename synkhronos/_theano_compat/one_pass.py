"""Updates of shared variables in one pass over memory. Import this module only after Theano.

An update rule such as Adam computes several new arrays from the same gradient. Theano computes them one after the
other, and each time reads the arrays from memory again, because they are larger than the caches. `OnePass` computes all
of them for some elements, then for the next ones. What one operation has written, the next one reads from the
first-level cache.

The rewrites are for exact functions only, which include them by their tag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from theano import config
from theano.compile import optdb
from theano.gof import Apply, InconsistencyError, Op
from theano.gof.opt import copy_stack_trace
from theano.gof.utils import MethodNotDefined
from theano.tensor import elemwise

from .elementwise import Operand, elements, given, read_inputs
from .flags import is_on, read_support_code
from .fused_sum import Rewrite, publish

FOR_EXACT, FOR_SLICES = "synkhronos_exact", "synkhronos_slices"
_NAME = "synkhronos_one_pass"
_POSITION = 74.2  # after all other rewrites, but before elementwise operations work in place
_DTYPES = ("float32", "float64")
_MOST_STEPS = 12  # of a group: gcc takes seconds for loops over many arrays
_CHUNK = 1024  # elements: the chunks of ten arrays fit into the first-level cache

_LEAST_PART = 1 << 15  # elements that a thread computes
_HEADERS = ("../_native/threads.h", "loops.h")

_SUPPORT, _ = read_support_code(*_HEADERS)
_, _VERSION = read_support_code(*_HEADERS, "elementwise.py", "one_pass.py")

_CODE = """
{checks}
{{
    npy_intp dims[] = {{{dims}}};
    npy_intp size = 1;
    for (int axis = 0; axis < {ndim}; axis++)
        size *= dims[axis];
    {whole}
    {outputs}
    {begin}
        {buffers}
        for (npy_intp done = first, n; done < end; done += n) {{
            n = end - done < {chunk} ? end - done : {chunk};
            {pointers}
            {steps}
            {copies}
        }}
    {close}
}}
"""
#: The start and end of the loop, if its code may leave it for Theano's handling of errors, and if threads divide it.
_ALONE = "{ npy_intp first = 0, end = size;", "}"
_DIVIDED = f"synkhronos::divide(size, {_LEAST_PART}, [&](npy_intp first, npy_intp end) {{", "});"
_NEW = """
if (!({out} && PyArray_NDIM({out}) == {ndim} && PyArray_ISCARRAY({out})
      && PyArray_CompareLists(PyArray_DIMS({out}), dims, {ndim}))) {{
    Py_XDECREF({out});
    {out} = (PyArrayObject *)PyArray_EMPTY({ndim}, dims, NPY_{TYPE}, 0);
    if (!{out}) {{
        {fail}
    }}
}}
"""
_OVER = """
Py_INCREF({array}_whole.array);
Py_XDECREF({out});
{out} = {array}_whole.array;
"""


class OnePass(Op):
    """Op that computes several elementwise operations of arrays of equal shape, for a chunk of elements at a time.

    Parameters
    ----------
    steps : tuple of (Elemwise, tuple of int)
        The operations in order, each with its operands: the number of an input of this Op, or the number of inputs plus
        that of an earlier step.
    returned : tuple of int
        Numbers of the steps whose results are the outputs.
    over : tuple of (int, int)
        Pairs of an output and the input that it overwrites.

    Attributes
    ----------
    least_divided : int
        Number of elements from which the threads of the controller divide the work.
    """

    __props__ = ("steps", "returned", "over")
    least_divided = 2 * _LEAST_PART

    def __init__(self, steps: Any, returned: tuple[int, ...], over: tuple[tuple[int, int], ...] = ()) -> None:
        self.steps, self.returned, self.over = steps, returned, over
        self.destroy_map = {output: [place] for output, place in over}

    def _nodes(self, inputs: Any) -> list[Any]:
        """Return the Apply nodes of the steps."""
        values, nodes = list(inputs), []
        for op, operands in self.steps:
            nodes.append(op.make_node(*[values[i] for i in operands]))
            values += nodes[-1].outputs
        return nodes

    def make_node(self, *inputs: Any) -> Any:
        """Apply the Op to the inputs of all steps."""
        nodes = self._nodes(inputs)
        return Apply(self, list(inputs), [nodes[i].outputs[0].type() for i in self.returned])

    def infer_shape(self, node: Any, shapes: Any) -> Any:
        """Return the shape of an operand with full axes, for each output."""
        full = next(
            shape for one, shape in zip(node.inputs, shapes) if one.broadcastable == node.outputs[0].broadcastable
        )
        return [full] * len(node.outputs)

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """Compute the steps one after the other, for modes without C code."""
        values = list(inputs)
        for one, (op, operands) in zip(self._nodes(node.inputs), self.steps):
            result: list[Any] = [None]
            op.prepare_node(one, None, None, "py")
            op.perform(one, [values[i] for i in operands], [result])
            values.append(result[0])
        for storage, i in zip(outputs, self.returned):
            storage[0] = values[len(inputs) + i]

    def __str__(self) -> str:
        return f"OnePass{{{', '.join(str(op) for op, _ in self.steps)}}}"

    # -- C++ code

    def c_code(self, node: Any, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
        """Return the loop over chunks, after Theano's own checks of the lengths."""
        nodes = self._nodes(node.inputs)
        pattern, n_inputs = node.outputs[0].broadcastable, len(inputs)
        operands, checks, whole = read_inputs(dict(zip(inputs, node.inputs)), 0, sub)
        full = next(one.name for one in operands if one.broadcastable == pattern)
        over, last_use = dict(self.over), self._last_uses()
        pointers, buffers, copies, results = [], [], [], []
        for operand in operands:
            moves = " + done" if operand.broadcastable == pattern else ""
            pointers.append(
                f"{operand.type} *{operand.name}_run = ({operand.type} *)PyArray_DATA({operand.array}){moves};"
            )
        for step, one in enumerate(nodes):
            result = Operand(f"{name}_step{step}", "", one.outputs[0].type.dtype_specs()[1], pattern)
            place = self.returned.index(step) if step in self.returned else None
            target = f"({result.type} *)PyArray_DATA({outputs[place]}) + done" if place is not None else ""
            if place in over and last_use.get(over[place], -1) <= step:
                result = operands[over[place]]  # the same pointer, so that the compiler knows that both are one array
            elif place is not None and place not in over:
                pointers.append(f"{result.type} *{result.name}_run = {target};")
            else:
                buffers.append(f"{result.type} {result.name}_run[{_CHUNK}] __attribute__((aligned(64)));")
                if place is not None:
                    copies.append(f"memcpy({target}, {result.name}_run, n * sizeof({result.type}));")
            results.append(result)
        values = [*operands, *results]
        steps = []
        for step, (one, (op, places)) in enumerate(zip(nodes, self.steps)):
            op.prepare_node(one, None, None, "c")
            used = [values[i] for i in dict.fromkeys(places)]
            task = op.scalar_op.c_code(
                one.tag.fake_node,
                f"{name}_{step}_scalar_",
                [f"{values[i].name}_i" for i in places],
                [f"{values[n_inputs + step].name}_i"],
                sub,
            )
            arrays = list(dict.fromkeys([*used, results[step]]))
            steps.append(_function_of(arrays, elements(arrays, 0, "n", f"{{{task}}}")))
        made = []
        for place, (out, variable) in enumerate(zip(outputs, node.outputs)):
            if place in over:
                made.append(_OVER.format(array=inputs[over[place]], out=out))
            else:
                made.append(_NEW.format(out=out, ndim=variable.ndim, TYPE=variable.dtype.upper(), fail=sub["fail"]))
        begin, close = _ALONE if any("goto" in step for step in steps) else _DIVIDED
        return _CODE.format(
            checks=checks,
            dims=", ".join("1" if fixed else f"{full}_n{axis}" for axis, fixed in enumerate(pattern)),
            ndim=len(pattern),
            whole=whole,
            outputs="\n".join(made),
            begin=begin,
            buffers="\n".join(buffers),
            chunk=_CHUNK,
            pointers="\n".join(pointers),
            steps="\n".join(steps),
            copies="\n".join(copies),
            close=close,
        )

    def _last_uses(self) -> dict[int, int]:
        """Return the last step that reads each operand, by number."""
        return {i: step for step, (_, operands) in enumerate(self.steps) for i in operands}

    def c_headers(self) -> list[str]:
        """Return the headers that the code includes."""
        return ["<string.h>", *dict.fromkeys(header for op, _ in self.steps for header in op.c_headers())]

    def c_compile_args(self) -> list[str]:
        """Return the compiler arguments of elementwise operations."""
        return list(dict.fromkeys(argument for op, _ in self.steps for argument in op.c_compile_args()))

    def c_support_code(self) -> str:
        """Return the support code of the elementwise operations."""
        return _SUPPORT + "\n".join(dict.fromkeys(given(op.c_support_code) for op, _ in self.steps))

    def c_support_code_apply(self, node: Any, name: str) -> str:
        """Return the support code of the Apply nodes of the steps."""
        pairs = enumerate(zip(self.steps, self._nodes(node.inputs)))
        codes = [op.scalar_op.c_support_code_apply(one, f"{name}_{i}_scalar_") for i, ((op, _), one) in pairs]
        return "\n".join(codes)

    def c_code_cache_version_apply(self, node: Any) -> tuple[Any, ...]:
        """Return the version of the entire code; empty if it must not be cached."""
        versions = [op.c_code_cache_version_apply(one) for (op, _), one in zip(self.steps, self._nodes(node.inputs))]
        return (_VERSION, *versions) if all(versions) else ()


def _function_of(arrays: Sequence[Operand], loop: str) -> str:
    """Return a call of a function of its own for a loop: gcc takes long for many loops in one function."""
    if "goto" in loop:  # to Theano's handling of errors
        return f"{{{loop}}}"
    parameters = ", ".join(f"{one.type} *{one.name}_run" for one in arrays)
    given = ", ".join(f"{one.name}_run" for one in arrays)
    return f"[]({parameters}, npy_intp n) __attribute__((noinline)) {{{loop}}}({given}, n);"


# -- rewrites


def _fits(node: Any) -> bool:
    """Return whether an Apply node is an elementwise operation that can be a step."""
    if node is None or type(node.op) is not elemwise.Elemwise or node.op.inplace_pattern or len(node.outputs) != 1:
        return False
    pattern = node.outputs[0].broadcastable
    variables = [*node.inputs, *node.outputs]
    return (
        not all(pattern)
        and not node.op.openmp
        and all(one.dtype in _DTYPES for one in variables)
        and all(one.broadcastable == pattern or all(one.broadcastable) for one in node.inputs)
    )


def _full(node: Any) -> Iterator[Any]:
    """Yield the operands and the result of a step that have all elements."""
    pattern = node.outputs[0].broadcastable
    yield from (one for one in (*node.inputs, *node.outputs) if one.broadcastable == pattern)


def _groups(fgraph: Any, places: Iterable[int]) -> list[set[Any]]:
    """Return groups of elementwise operations that compute some outputs from common arrays."""
    waiting = [{fgraph.outputs[i].owner} for i in places if _fits(fgraph.outputs[i].owner)]
    group_of: dict[Any, set[Any]] = {}  # by array
    found: list[set[Any]] = []
    while waiting:
        group = _with_ancestors(waiting.pop())
        arrays = {one for node in group for one in _full(node)}
        others = [one for one in found if any(group_of.get(array) is one for array in arrays)]
        if others and sum(map(len, others)) + len(group) <= _MOST_STEPS:
            found = [one for one in found if not any(one is other for other in others)]
            waiting.append(group.union(*others))  # which may have further ancestors
        else:
            found.append(group)
            group_of.update(dict.fromkeys(arrays, group))
    return found


def _with_ancestors(group: set[Any]) -> set[Any]:
    """Return a group with the elementwise operations whose results only the group uses."""
    nodes, waiting = set(group), list(group)
    while waiting:
        for one in _full(waiting.pop()):
            node = one.owner
            if node not in nodes and _fits(node) and all(user in nodes for user, _ in one.clients):
                nodes.add(node)
                waiting.append(node)
    return nodes


def _leaves_and_returns(nodes: set[Any]) -> bool:
    """Return whether an operation outside of a group lies between two operations of it."""
    seen: set[Any] = set()
    waiting = [user for node in nodes for user, _ in node.outputs[0].clients if user != "output" and user not in nodes]
    while waiting:
        node = waiting.pop()
        if node in nodes:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [user for one in node.outputs for user, _ in one.clients if user != "output"]
    return False


def _copy_traces(old: Iterable[Any], new: Iterable[Any]) -> None:
    for pair in zip(old, new):  # one by one: given lists, each output would get the traces of all
        copy_stack_trace(*pair)


class _Group(Rewrite):
    """Rewrite that computes the updates of a variable, and of the state that belongs to it, by one `OnePass`.

    Parameters
    ----------
    of_all : bool
        Whether to do this with all outputs instead of the updates.
    """

    def __init__(self, of_all: bool = False) -> None:
        self._of_all = of_all

    def apply(self, fgraph: Any) -> None:
        """Replace all groups."""
        if not (config.cxx and is_on("one_pass")):
            return
        order = {node: place for place, node in enumerate(fgraph.toposort())}
        places = range(len(fgraph.outputs)) if self._of_all else fgraph.update_mapping or ()
        for group in _groups(fgraph, places):
            if not 1 < len(group) <= _MOST_STEPS or _leaves_and_returns(group):
                continue
            made = _made(sorted(group, key=order.__getitem__))
            if made is not None:
                olds, news = made
                _copy_traces(olds, news)
                # an operation that works in place already may have to run between two of the group
                with contextlib.suppress(InconsistencyError):
                    fgraph.replace_all_validate(list(zip(olds, news)), reason=_NAME)


def _made(nodes: list[Any]) -> tuple[list[Any], list[Any]] | None:
    """Return the results of a group that others use, and the outputs of the `OnePass` that replaces it."""
    results = [node.outputs[0] for node in nodes]
    inputs = list(dict.fromkeys(one for node in nodes for one in node.inputs if one not in results))
    numbers = {one: i for i, one in enumerate([*inputs, *results])}
    steps = tuple((node.op, tuple(numbers[one] for one in node.inputs)) for node in nodes)
    returned = tuple(
        i for i, one in enumerate(results) if any(user == "output" or user not in nodes for user, _ in one.clients)
    )
    op = OnePass(steps, returned)
    outputs = op(*inputs, return_list=True)
    names = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in returned]
    try:
        op.c_code(outputs[0].owner, "test", *names, {"fail": ""})
    except (MethodNotDefined, NotImplementedError):  # an operation has no C code
        return None
    return [results[i] for i in returned], outputs


class _Overwrite(Rewrite):
    """Rewrite that has `OnePass` write new values over the old ones."""

    def apply(self, fgraph: Any) -> None:
        """Let each `OnePass` overwrite what it may."""
        mapping = fgraph.update_mapping or {}
        target = {fgraph.outputs[i]: fgraph.inputs[of] for i, of in mapping.items()}
        for node in fgraph.toposort():
            if isinstance(node.op, OnePass):
                pairs = [
                    (place, node.inputs.index(target[out]))
                    for place, out in enumerate(node.outputs)
                    if target.get(out) in node.inputs and target[out].type == out.type
                ]
                if pairs and self._try(fgraph, node, pairs) is None:
                    for pair in pairs:
                        node = self._try(fgraph, node, [*node.op.over, pair]) or node

    def _try(self, fgraph: Any, node: Any, pairs: list[tuple[int, int]]) -> Any:
        outputs = OnePass(node.op.steps, node.op.returned, tuple(pairs))(*node.inputs, return_list=True)
        _copy_traces(node.outputs, outputs)
        try:
            fgraph.replace_all_validate(list(zip(node.outputs, outputs)), reason=_NAME)
        except InconsistencyError:
            return None
        return outputs[0].owner


def register() -> None:
    """Register the rewrites with Theano. Calling this again does nothing."""
    if publish(OnePass):
        optdb.register(_NAME, _Group(), _POSITION, FOR_EXACT, "fusion")
        optdb.register(f"{_NAME}_of_slices", _Group(of_all=True), _POSITION, FOR_SLICES, "fusion")
        optdb.register(f"{_NAME}_inplace", _Overwrite(), _POSITION + 0.1, FOR_EXACT, "inplace")
