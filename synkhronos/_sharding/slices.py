"""Updates by slices: large shared variables whose new values each rank computes for its own range of elements.

A sharded function would compute all new values on every rank. Instead, it returns what they are computed from, and a
small function of one-dimensional slices computes them. The gradients that it gets are not reduced yet: a rank adds the
ranks' gradients only in its range. On several nodes they are, so that their exchange begins while others are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos._backends import (
    T,
    ancestors,
    constant_value,
    engine,
    equal_computations,
    io_toposort,
    is_random_state,
    ops,
)
from synkhronos._costs import Product, most_rows_by_slices
from synkhronos._graph import Graph, get_array, is_large, is_shared_variable
from synkhronos._graph.ops import Collective
from synkhronos._sharding.work import Needs
from synkhronos._utils.rendezvous import is_spread

#: Size of a variable from which on it is updated by slices: for less, the work in Python takes longer.
LEAST_BYTES = 1024 * 1024


_FLOATS = ("float32", "float64")  # dtypes of products that BLAS computes


class Leaf(NamedTuple):
    """An input of the small function.

    Attributes
    ----------
    kind : str
        ``"partial"``: the sum over the ranks of a slice of each rank's array. ``"product"``: the same, of an array that
        is in `Slices.products`. ``"array"``: a slice of the rank's own array, which is equal on all ranks.
        ``"scalar"``: a number. ``"value"``: a slice of a shared variable.
    variable : variable
        An expression of the sharded graph, or the shared variable.
    """

    kind: str
    variable: Any
    total: Any = None  # of the sharded graph: the sum of a partial input


class ProductOfRows(NamedTuple):
    """The matrix product ``left.T @ right``. Summed over the ranks, it is the product over all rows.

    From all ranks' rows, a rank can compute a range of its elements.
    """

    left: Any
    right: Any
    function: Graph  # of both


class Group(NamedTuple):
    """Variables of equal shape whose new values are computed together, from some of their old values."""

    variables: list[Any]
    leaves: list[Leaf]
    function: Graph  # of the leaves


class Slices:
    """A sharded graph whose large updates are computed by slices.

    Parameters
    ----------
    graph : Graph
        The sharded graph.
    own_states : list of shared variables
        States of random streams that differ between ranks.

    Attributes
    ----------
    graph : Graph
        Returns the outputs of the sharded graph, the new values of ``others``, and ``returned``. Its only updates are
        those of random states.
    returned : list of variables
        The leaves of all groups that are not shared variables; for products, their factors.
    products : dict of variable to ProductOfRows
        Products of the sharded graph.
    others : list of shared variables
        Those that are not updated by slices, without random states.
    adopted : list of shared variables
        The large ones of these.
    drawn : list of shared variables
        The states of random streams that are equal on all ranks.
    groups : list of Group
    variables : list of shared variables
        Those of all groups.
    values : list of shared variables
        Those whose values the groups need.
    summed : dict
        For each of their sums, which the sharded graph gets by all-reduces, a variable of equal shape. Empty on
        several nodes, where ``graph`` has the all-reduces.
    """

    def __init__(self, graph: Graph, own_states: Sequence[Any]) -> None:
        outputs, updates = graph.expressions
        drawn = [(var, new) for var, new in updates if is_random_state(var)]
        rest = [(var, new) for var, new in updates if not is_random_state(var)]
        chosen = [(var, new) for var, new in rest if _n_bytes(var) >= LEAST_BYTES]
        while True:  # what the function computes in full may be an input of the small functions: choose again
            others = [(var, new) for var, new in rest if not any(var is one for one, _ in chosen)]
            ends = [*outputs, *(new for _, new in (*others, *drawn))]
            used = {one for one in ancestors(ends) if one.owner is not None}
            found = [_Flat(var, new, used) for var, new in chosen]
            fitting = [(one.var, one.new) for one in found if one.keeps_shape]
            if len(fitting) == len(chosen):
                break
            chosen = fitting
        self.drawn = [var for var, _ in drawn if var not in own_states]
        self.others = [var for var, _ in others]
        self.adopted = [var for var in self.others if is_large(var, get_array(var))]
        functions: list[_Function] = []
        self.groups = [_group(graph, one, functions) for one in _connected(found)]
        leaves = [leaf for one in self.groups for leaf in one.leaves]
        self.products = _products(graph, [leaf.variable for leaf in leaves if leaf.kind == "product"])
        returned: list[Any] = []
        for leaf in leaves:
            if leaf.kind == "product":
                returned += self.products[leaf.variable][:2]
            elif leaf.kind != "value":
                returned.append(leaf.variable)
        self.returned = list(dict.fromkeys(returned))
        self.variables = [var for one in self.groups for var in one.variables]
        self.values = list(dict.fromkeys([leaf.variable for leaf in leaves if leaf.kind == "value"]))
        of_groups = [(leaf, one.variables[0]) for one in self.groups for leaf in one.leaves]
        self.summed = {leaf.total: var for leaf, var in of_groups if leaf.total is not None}
        self._n_before = len(outputs) + len(others)
        returned = [*outputs, *(new for _, new in others), *self.returned]
        self.graph = graph.part(returned, drawn)
        leaves_of_all = {*ancestors([*returned, *(new for _, new in drawn)])}
        self.graph.sliceable_shareds = [var for var in self.graph.sliceable_shareds if var in leaves_of_all]

    def needs(self, needs: Needs, n_ranks: int) -> Needs:
        """Return what a rank needs with the updates, from what it needs for the function of ``graph``.

        With one rank, return what the controller needs alone.
        """
        products, passes, summed = list(needs.work.products), [], 0.0
        for total, var in self.summed.items():
            product = self.products.get(total.owner.inputs[0])
            if product is not None:
                m, n = get_array(var).shape
                n_rows = needs.lengths[self._n_before + self.returned.index(product.left)]
                if n_rows is None:
                    return needs._replace(work=needs.work._replace(unknown=(*needs.work.unknown, "Dot")))
                if n_ranks > 1 and n_rows * n_ranks <= most_rows_by_slices(m, n):
                    products.append(Product(-(-m // n_ranks), n, n_rows * n_ranks, total.dtype))
                    passes.append(2 * n_rows * (m + n * n_ranks) * float(np.dtype(total.dtype).itemsize))  # a copy
                    continue
                products.append(Product(m, n, n_rows, total.dtype))
            summed += self.n_bytes_of(total)
        if n_ranks > 1 and summed:
            passes.append(summed * (n_ranks - 1) / n_ranks)  # a range of each other rank's arrays
        updates = [self._n_bytes_of_update(one) / n_ranks for one in self.groups]
        by_threads = engine == "theano" and n_ranks == 1
        n_nodes = needs.work.n_nodes + len(self.groups) + len(self.products)
        work = needs.work._replace(
            products=tuple(products),
            passes=(*needs.work.passes, *passes, *(() if by_threads else updates)),
            divided=(*needs.work.divided, *(updates if by_threads else ())),
            n_nodes=n_nodes,
        )
        return needs._replace(work=work)

    def _n_bytes_of_update(self, group: Group) -> float:
        """Return the bytes that an update reads and writes."""
        arrays = [*group.variables, *(leaf.variable for leaf in group.leaves if leaf.kind != "scalar")]
        return float(get_array(group.variables[0]).size * sum(np.dtype(one.dtype).itemsize for one in arrays))

    def kind_of(self, total: Any) -> str:
        """Return how one of the sums in ``summed`` is computed."""
        if total.owner.inputs[0] not in self.products:
            return "sum in slices"
        return f"product in slices (up to {most_rows_by_slices(*get_array(self.summed[total]).shape)} rows)"

    def n_bytes_of(self, total: Any) -> int:
        """Return the bytes of one of the sums in ``summed``."""
        return int(get_array(self.summed[total]).size) * np.dtype(total.dtype).itemsize


def _n_bytes(var: Any) -> int:
    value = get_array(var)
    return value.nbytes if is_large(var, value) else 0


class _Flat:
    """The elementwise expression of a variable's new value, down to its leaves.

    Parameters
    ----------
    var : shared variable
    new : variable
        Its new value.
    used : set of variables
        What the sharded graph computes in any case.

    Attributes
    ----------
    leaves : dict
        The leaves by variable of the sharded graph; ``None`` for a constant.
    """

    def __init__(self, var: Any, new: Any, used: set[Any]) -> None:
        self.var, self.new = var, new
        self._pattern = tuple(var.broadcastable)
        self.leaves: dict[Any, Leaf | None] = {}
        waiting, seen = [new], {new}
        while waiting:
            one = waiting.pop()
            if self._is_step(one, used):
                inputs = [each for each in dict.fromkeys(one.owner.inputs) if each not in seen]
                seen.update(inputs)
                waiting += inputs
            else:
                self.leaves[one] = self._leaf(one, used)

    @property
    def keeps_shape(self) -> bool:
        """Whether the new value has the old one's shape; otherwise, an elementwise operation raises an error."""
        return self.reads(self)

    def reads(self, other: _Flat) -> bool:
        """Return whether the new value is computed from another variable's old one."""
        values = [leaf.variable for leaf in self.leaves.values() if leaf is not None and leaf.kind == "value"]
        return any(var.container is other.var.container for var in values)

    def _is_step(self, one: Any, used: set[Any]) -> bool:
        """Return whether the small function computes a variable."""
        if one.owner is None or one in used or type(one.owner.op) is not ops.Elemwise or not self._is_full(one):
            return False
        return all(self._is_full(each) or all(each.broadcastable) for each in one.owner.inputs)

    def _is_full(self, one: Any) -> bool:
        return tuple(one.broadcastable) == self._pattern

    def _leaf(self, one: Any, used: set[Any]) -> Leaf | None:
        if all(one.broadcastable):
            if constant_value(one) is not None:
                return None
            return Leaf("scalar", one.dimshuffle() if one.ndim else one)
        if is_shared_variable(one):
            return Leaf("value", one)
        node = one.owner
        is_sum = node is not None and isinstance(node.op, Collective) and node.op.ops == ("sum",)
        if is_sum and not is_spread() and one not in used and node.inputs[0].dtype == one.dtype:
            kind = "partial" if node.inputs[0] in used or not _is_product(node.inputs[0]) else "product"
            return Leaf(kind, node.inputs[0], one)
        return Leaf("array", one)


def _is_product(one: Any) -> bool:
    """Return whether a variable is the product of two matrices of its dtype."""
    node = one.owner
    if node is None or type(node.op) is not ops.Dot or any(one.broadcastable) or one.dtype not in _FLOATS:
        return False
    return all(each.ndim == 2 and each.dtype == one.dtype for each in node.inputs)


def _products(graph: Graph, found: Sequence[Any]) -> dict[Any, ProductOfRows]:
    """Return the factors of products, with functions that products of equal dtypes share."""
    functions: dict[str, Graph] = {}
    products = {}
    for one in found:
        left, right = one.owner.inputs
        if one.dtype not in functions:
            inputs = [T.matrix(dtype=one.dtype) for _ in range(2)]
            functions[one.dtype] = graph.of_slices(inputs, [T.dot(inputs[0].T, inputs[1])])
        turned = left.owner
        is_turned = turned is not None and type(turned.op) is ops.DimShuffle and tuple(turned.op.new_order) == (1, 0)
        products[one] = ProductOfRows(turned.inputs[0] if is_turned else left.T, right, functions[one.dtype])
    return products


def _connected(found: Sequence[_Flat]) -> list[list[_Flat]]:
    """Divide variables into groups, so that no group needs values that another one changes."""
    groups: list[list[_Flat]] = []
    for one in found:
        joined = [group for group in groups if any(one.reads(other) or other.reads(one) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([*(other for group in joined for other in group), one])
    return groups


def _group(graph: Graph, found: Sequence[_Flat], functions: list[_Function]) -> Group:
    """Return the group of some variables, with a function that other groups may share."""
    leaves = {one: leaf for flat in found for one, leaf in flat.leaves.items()}
    given = {one: leaf for one, leaf in leaves.items() if leaf is not None}
    inputs = [_input_of(leaf) for leaf in given.values()]
    clones = dict(zip(given, inputs))
    clones.update(
        (one, T.constant(np.asarray(constant_value(one), one.dtype))) for one, leaf in leaves.items() if leaf is None
    )
    ends = [flat.new for flat in found]
    for node in io_toposort(list(leaves), ends):
        clones[node.outputs[0]] = node.op(*(clones[one] for one in node.inputs))
    made = [clones[one] for one in ends]
    same = next((one for one in functions if one.computes(inputs, made)), None)
    if same is None:
        same = _Function(inputs, made, graph.of_slices(inputs, made))
        functions.append(same)
    return Group([flat.var for flat in found], list(given.values()), same.graph)


def _input_of(leaf: Leaf) -> Any:
    return (T.scalar if leaf.kind == "scalar" else T.vector)(dtype=leaf.variable.dtype)


class _Function(NamedTuple):
    inputs: list[Any]
    outputs: list[Any]
    graph: Graph

    def computes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Return whether this function computes some outputs from some inputs."""
        kinds = [[one.type for one in each] for each in (inputs, outputs, self.inputs, self.outputs)]
        return kinds[:2] == kinds[2:] and equal_computations(outputs, self.outputs, list(inputs), self.inputs)
