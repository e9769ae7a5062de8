"""How the operations of PyTensor's graphs are read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from pytensor.graph.op import HasMultipleInnerGraph
from pytensor.scan.op import Scan
from pytensor.tensor.subtensor import indices_from_subtensor

from synkhronos._engine.loop import Loop

__all__ = [
    "adds",
    "advanced_index",
    "axis_of",
    "basic_index",
    "draws_each",
    "inlined",
    "inner_outputs",
    "joined_axes",
    "parts_of",
    "read_loop",
    "softmax_axes",
    "split_axis",
]


def basic_index(inputs: Sequence[Any], op: Any) -> list[Any]:
    """The slices and integers of basic indexing; ``inputs`` are what is indexed, and the numbers of the index."""
    return list(indices_from_subtensor(inputs[1:], op.idx_list))


def adds(op: Any) -> bool:
    """Whether a node that changes what an index picks adds to it, as often as it is picked."""
    return not (op.set_instead_of_inc or op.ignore_duplicates)


def advanced_index(inputs: Sequence[Any], op: Any) -> list[Any]:
    """As `basic_index`, of arrays and slices."""
    return list(indices_from_subtensor(inputs[1:], op.idx_list))


def axis_of(node: Any) -> Any:
    """The axis along which a node joins, splits, sorts, accumulates or repeats: an integer."""
    return node.op.axis


def parts_of(node: Any) -> list[Any]:
    """What a node joins."""
    return list(node.inputs)


def draws_each(op: Any) -> bool:
    """Whether each number is drawn by itself, with the arguments at its place."""
    return op.ndim_supp == 0 and not any(op.ndims_params)


def inner_outputs(op: Any) -> list[Any]:
    """The outputs of the inner graphs of an operation, if it has any."""
    graphs = op.inner_graphs.values() if isinstance(op, HasMultipleInnerGraph) else ()
    return [output for graph in graphs for output in graph.outputs]


def inlined(node: Any) -> list[Any]:
    """The outputs of a node with an inner graph, as expressions of its inputs."""
    inner = node.op.fgraph
    return inner.bind([one.type.filter_variable(given) for one, given in zip(inner.inputs, node.inputs)])


def read_loop(node: Any) -> Loop:
    """What a Scan is made of."""
    op, outer, info = node.op, node.inputs, node.op.info
    steps = op.fgraph.unfreeze()
    inner = steps.inputs
    entries = [*op.inner_mitmot(inner), *op.inner_mitsot(inner), *op.inner_sitsot(inner)]
    states = [*op.outer_mitmot(outer), *op.outer_mitsot(outer), *op.outer_sitsot(outer)]

    def like(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        names = ("mode", "truncate_gradient", "name", "profile", "allow_gc", "strict")
        own = dataclasses.replace(info, n_non_seqs=info.n_non_seqs + len(inputs) - info.n_inner_inputs)
        return Scan(list(inputs), list(outputs), own, **{name: getattr(op, name) for name in names})

    return Loop(
        inputs=list(inner),
        outputs=list(steps.outputs),
        n_steps=outer[0],
        sequences=list(zip(op.inner_seqs(inner), op.outer_seqs(outer))),
        states=[([entries.pop(0) for _ in taps], state) for taps, state in zip(info.tap_array, states)],
        n_new=[*map(len, info.mit_mot_out_slices), *[1] * (info.n_mit_sot + info.n_sit_sot)],
        shared=list(zip(op.inner_untraced_sit_sot(inner), op.outer_untraced_sit_sot(outer))),
        lengths=list(op.outer_nitsot(outer)),
        others=list(zip(op.inner_non_seqs(inner), op.outer_non_seqs(outer))),
        is_while=info.as_while,
        like=like,
    )


def softmax_axes(node: Any) -> tuple[int, ...]:
    """The axes along which a softmax, or its logarithm, adds."""
    n_axes = node.inputs[0].ndim
    return tuple(range(n_axes)) if node.op.axis is None else tuple(axis % n_axes for axis in node.op.axis)


def joined_axes(node: Any) -> list[Any]:
    """As a reshape, what joins some axes."""
    (variable,), first, n_axes = node.inputs, node.op.start_axis, node.op.n_axes
    shape = [variable.shape[axis] for axis in range(variable.ndim)]
    joined = functools.reduce(lambda a, b: a * b, shape[first : first + n_axes], 1)
    return [variable.reshape([*shape[:first], joined, *shape[first + n_axes :]])]


def split_axis(node: Any) -> list[Any]:
    """As a reshape, what splits an axis."""
    (variable, parts), axis = node.inputs, node.op.axis
    shape = [variable.shape[i] for i in range(variable.ndim)]
    parts = [parts[i] for i in range(node.outputs[0].ndim - variable.ndim + 1)]
    return [variable.reshape([*shape[:axis], *parts, *shape[axis + 1 :]])]
