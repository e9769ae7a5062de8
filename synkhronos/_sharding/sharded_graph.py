"""Sharded graph (the user's graph rewritten for one rank's rows), and random streams that differ between ranks.

The sharded graph comes with the report of its collectives. It can be computed in slices (``num_slices``) if no sharded
value depends on the result of a collective.

With ``random="own"``, random streams differ between ranks: each rank draws numbers for its own rows only. A stream
whose draws have one entry per row differs between ranks; every other stream is the same on all ranks. One stream cannot
have draws of both kinds. A stream that differs must be a shared variable. All other draws, such as those in the steps
of a loop, are those of the serial program.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from synkhronos._backends import (
    NO_TENSORS,
    Out,
    SharedVariable,
    T,
    UnusedInputError,
    ancestors,
    config,
    io_toposort,
    is_random_state,
    leaves_of,
    ops,
)
from synkhronos._graph import Graph, copy_of, is_host_variable
from synkhronos._graph.ops import after_collectives, has_collectives
from synkhronos._sharding.blocking import in_blocks
from synkhronos._sharding.checking import environment_asks, errors_logged
from synkhronos._sharding.lengths import RowCounts
from synkhronos._sharding.placements import ONE, Length, Placed, Replicate, Shard, described, line_of
from synkhronos._sharding.propagate import REPLICATED_RULES, RULES, Propagation, Rule
from synkhronos._sharding.rank_ops import ON_RANKS, label
from synkhronos._sharding.report import Partition, Prediction, draw, products_of
from synkhronos._sharding.slices import Slices
from synkhronos._sharding.user_shards import Sharding
from synkhronos._utils.rendezvous import is_spread

_REMEDY = "Call it without slices, with a smaller batch"


def why_not_sliced(
    propagation: Propagation, needed: Sequence[Any], drawn: Sequence[Any], is_given: bool, random: str
) -> str:
    """Return the reason why a function cannot be computed in slices; empty if it can.

    Parameters
    ----------
    propagation : Propagation
    needed : list of variables
        Outputs and new values of the sharded graph.
    drawn : list of shared variables
        States of random streams that are the same on all ranks.
    is_given : bool
        Whether calls pass the rows.
    random : str
        ``"serial"`` or ``"own"``, as the function was built.
    """
    if drawn:
        remedy = "" if random == "own" else ', or, if there is a draw for each row, build it with random="own"'
        return f"num_slices: {_draw_of(drawn[0], needed)} is drawn for all rows at once. {_REMEDY}{remedy}"
    if not is_given:
        return "num_slices: the function has no scattered inputs and variables, whose rows could be sliced"
    found, after = set(ancestors(list(needed))), after_collectives(needed)
    for variable, new in propagation.items():
        if new in found and new in after and not isinstance(propagation.placement(variable), Replicate):
            return (
                f"num_slices: {described(variable)} has rows and depends on a collective over all rows, whose result "
                f"is available only after all slices. {_REMEDY}"
            )
    return ""


def _draw_of(state: Any, needed: Sequence[Any]) -> str:
    """Describe a random draw from a stream, with its line in the program."""
    for node in io_toposort([], list(needed)):
        if state in node.inputs:
            return described(node.outputs[-1 if type(node.op) in ops.DRAWS else 0])
    return described(state)


_logger = logging.getLogger("synkhronos")


class ShardedGraph(Graph):
    """A user's graph, rewritten so that each rank computes on its rows of the scattered inputs.

    After the graph's inputs, its functions take three int64 scalars: the number of all rows, the index of this rank's
    first row, and the number of its rows. If the function has no scattered inputs and no sliceable variables, it takes
    none of these, and counts the rows inside the graph.

    Parameters
    ----------
    user : Graph
    kwargs : dict
        Further arguments of the backend's ``function``.
    shard : dict or list of variables, or None
        See `Sharding`.
    random : str
        ``"serial"``: draw the serial program's random numbers. ``"own"``: each rank draws for its own rows.
    blocked : bool
        Each rank computes in a loop over blocks of its rows; see `in_blocks`.
    stacks : dict, optional
        Inputs of which a call gets several values; see `in_blocks`.

    Attributes
    ----------
    takes_rows : bool
        Whether its functions take the three scalars.
    checks_shapes : bool
        Whether its functions compare shapes with the serial program's, as the environment variable
        ``SYNKHRONOS_CHECK_SHARDING`` requests; ``blocked`` is then ignored.
    undivided : list of str
        Slices of shared variables that might be minibatches but are not sharded, if nothing else is sharded.
    own_states : list of shared variables
        States of random streams that differ between ranks.
    modes : list of "gather" or None
        For each output: ``"gather"`` if each rank has its rows, in rank order; ``None`` if each has the full value.

    Raises
    ------
    ValueError
        If a scattered input cannot be sharded, if the user's graph has collectives, or if ``blocked`` is not possible.
    UnusedInputError
        For unused inputs, unless ``on_unused_input`` allows them. The backend cannot raise it: it sees only the sharded
        graph.
    """

    def __init__(
        self,
        user: Graph,
        kwargs: dict[str, Any],
        *,
        shard: Any = None,
        random: str = "serial",
        blocked: bool = False,
        stacks: Mapping[Any, Any] | None = None,
    ) -> None:
        outputs, updates = user.expressions
        expressions = [*outputs, *(new for _, new in updates)]
        if has_collectives(expressions):
            raise ValueError("exact=True inserts collectives itself; leave out averaged, summed, reduced and gathered")
        _look_for_unused(user.input_variables, expressions, kwargs.get("on_unused_input"))
        user._check_sliceable(leaves_of(expressions))
        sharding, draws = Sharding(user, shard), OwnDraws()
        own = draws.rules if random == "own" else {}
        self.takes_rows, self._given = sharding.is_given, sharding.given
        self.undivided = list(map(described, sharding.undivided))
        self.checks_shapes = environment_asks()
        tables = {**RULES, **own}, {**REPLICATED_RULES, **own}
        propagation = Propagation(
            sharding.scattered,
            sharding.rows,
            ON_RANKS,
            *tables,
            checks_shapes=self.checks_shapes,
            reduces_before_joins=is_spread(),
        )
        propagation.mark_used(expressions)
        sharding.divide(propagation)
        propagation.run(expressions)
        draws.check(outputs, updates)
        self.own_states = draws.states
        self.modes: list[str | None] = []
        needed = []
        for output in outputs:
            has_rows = self.takes_rows and _rows_come_in_order(propagation, output)
            self.modes.append("gather" if has_rows else None)
            reason = "an output that is not in rows along axis 0"
            needed.append(propagation.new(output) if has_rows else propagation.replicated(output, reason))
        for var, new in updates:
            is_own = var in user.sliceable_shareds
            reason = f"the update of {var}"
            needed.append(propagation.sharded(new, Shard(0)) if is_own else propagation.replicated(new, reason))
        self._collectives, self._lengths = propagation.collectives_for(needed), propagation.lengths
        with errors_logged("The report of collectives", "the graph"):
            label(self._collectives)
        self._draw = functools.partial(draw, propagation, expressions)
        self._products = functools.partial(products_of, propagation, expressions)
        drawn = [var for var, _ in updates if is_random_state(var) and var not in self.own_states]
        self._why_not_sliced = functools.partial(why_not_sliced, propagation, needed, drawn, self.takes_rows, random)
        if blocked and (drawn or self.own_states or not self.takes_rows or sharding.rows is not sharding.given):
            raise ValueError("blocked=True is for rows of inputs and of scattered variables, without random draws")
        if blocked and (stacks or not self.checks_shapes):
            needed = in_blocks(needed, sharding.rows, sharding.scattered, set(self._lengths.common), stacks or {})
        items = zip(user.outputs, needed)
        for node, reason in propagation.gathered:
            what = node.op, line_of(node.outputs[0]), reason
            _logger.info("%s (%s) is gathered and computed in full on every rank: %s", *what)
        ins = [copy_of(spec, (stacks or {}).get(spec.variable)) for spec in user._copied_ins()]
        super().__init__(
            ins[: user.n_scattered],
            [Out(new, borrow=item.borrow) if isinstance(item, Out) else new for item, new in items],
            bcast_inputs=ins[user.n_scattered :],
            updates=[(var, new) for (var, _), new in zip(updates, needed[len(outputs) :])],
            givens=None,
            sliceable_shareds=user.sliceable_shareds,
            kwargs={**kwargs, "no_default_updates": True, "on_unused_input": "ignore"},
        )
        self.axes = sharding.axes
        self.packed, self.input_defaults = user.packed, user.input_defaults

    def _copied_ins(self) -> list[Any]:
        numbers = [self._given.total, self._given.first, self._given.local]
        return [*super()._copied_ins(), *(numbers if self.takes_rows else ())]

    def _check_sliceable(self, used: Sequence[Any]) -> None:
        """Accept all variables, because a variable that is used only for its length is not in the sharded graph."""

    @functools.cached_property
    def slices(self) -> Slices | None:
        """How large updates are computed by slices; ``None`` if there are none."""
        updated = [var for var, _ in self.expressions[1]]
        arrays = [var for var in updated if is_host_variable(var) or is_random_state(var)]
        if len(arrays) < len(updated) or any(var in self.sliceable_shareds for var in updated):
            return None
        slices = Slices(self, self.own_states)
        return slices if slices.groups else None

    def partition(self, compiled: Any, plans: Sequence[Prediction], slices: Slices | None) -> Partition:
        """Return the report of the collectives in a function that was compiled from this graph, or from ``slices``."""
        updates, sums = [], []
        if slices is not None:
            updates = list(map(str, slices.variables))
            totals = [(one, self.expression_of(one.result)) for one in self._collectives]
            sums = [
                (one, slices.kind_of(total), slices.n_bytes_of(total))
                for one, total in totals
                if total in slices.summed
            ]
        return Partition(
            self._collectives,
            compiled,
            self._draw,
            plans=plans,
            products=self._products(),
            updates=updates,
            sums=sums,
        )

    def check_slices(self) -> None:
        """Raise `ValueError` if a call cannot be computed in slices."""
        reason = self._why_not_sliced()
        if reason:
            raise ValueError(reason)

    @property
    def varying(self) -> list[Any]:
        """Inputs and variables that differ between ranks or slices, including the numbers of rows."""
        return [*super().varying, self._given.first, self._given.local]

    @property
    def common(self) -> list[Any]:
        """Lengths along axes that are not sharded, which are equal on all ranks and in all slices."""
        found = map(self.expression_of, self._lengths.common)
        return [one for one in found if one is not None]


def _look_for_unused(inputs: Sequence[Any], expressions: Sequence[Any], asked: str | None) -> None:
    used = set(leaves_of(expressions))
    unused = [variable for variable in inputs if variable not in used]
    what = asked or config.on_unused_input
    message = f"the function does not use the inputs {unused}; on_unused_input='ignore' allows that"
    if unused and what == "raise":
        raise UnusedInputError(message)
    if unused and what == "warn":
        warnings.warn(message, stacklevel=6)


def _rows_come_in_order(propagation: Propagation, output: Any) -> bool:
    """Return whether concatenating the ranks' values along axis 0 in rank order gives the full output."""
    placement = propagation.placement(output)
    return isinstance(placement, Shard) and placement.axis == 0 and placement.outer == ONE


def row_axes(graph: Graph, scattered: Sequence[Any] = ()) -> dict[int, int]:
    """Return the sharded axis of each output and each new value of an update, by position.

    Values that are not sharded, or for which the analysis fails, are left out.

    Parameters
    ----------
    graph : Graph
    scattered : list of shared variables
        Scattered variables in addition to the scattered inputs and the sliceable variables.
    """
    expressions = [*graph.expressions[0], *(new for _, new in graph.expressions[1])]
    sharded = [*graph.input_variables[: graph.n_scattered], *graph.sliceable_shareds, *scattered]
    found: dict[int, int] = {}
    with errors_logged("The search for rows", "the graph"):
        axes = dict.fromkeys([one for one in sharded if not one.broadcastable[0]], 0)
        propagation = Propagation(axes, RowCounts.as_inputs(), ON_RANKS, RULES, REPLICATED_RULES)
        propagation.run(expressions)
        placements = map(propagation.placement, expressions)
        found.update((i, placed.axis) for i, placed in enumerate(placements) if isinstance(placed, Shard))
    return found


# -- random streams that differ between ranks


class OwnDraws:
    """Sharding rule for the random draws of one graph, and list of the states that differ between ranks.

    Attributes
    ----------
    rules : dict
        The rule by type of Op; it is for Apply nodes with any placements.
    """

    def __init__(self) -> None:
        self.rules: dict[type, Rule] = dict.fromkeys(ops.DRAWS, self._draw)
        self._is_own: dict[Any, bool] = {}  # by stream
        self._streams: dict[Any, Any] = {}  # by the new states that draws return
        self._mixed: list[Any] = []  # values drawn from a stream that has draws of both kinds

    @property
    def states(self) -> list[Any]:
        """The shared variables that differ between ranks."""
        return [stream for stream, is_own in self._is_own.items() if is_own]

    def check(self, outputs: Sequence[Any], updates: Sequence[tuple[Any, Any]]) -> None:
        """Raise `ValueError` for streams with draws of both kinds, and for other uses of states that differ."""
        if self._mixed:
            raise ValueError(
                f'random="own": {described(self._mixed[0])} is drawn from a stream of which other numbers are drawn, '
                "some for each row, some the same on all ranks: make a RandomStreams for each kind"
            )
        uses = [one for one in outputs if self._differs(one)]
        uses += [var for var, new in updates if self._differs(new) and self._streams.get(new) is not var]
        for node in io_toposort([], [*outputs, *(new for _, new in updates)]):
            if type(node.op) not in self.rules and any(map(self._differs, node.inputs)):
                uses.append(node.outputs[0])
        if uses:
            raise ValueError(
                f'random="own": {described(uses[0])} uses a stream of which each row has its own draws: '
                "make a RandomStreams for each"
            )

    def _differs(self, variable: Any) -> bool:
        return self._is_own.get(self._streams.get(variable, variable), False)

    def _draw(self, propagation: Propagation, node: Any) -> str | Sequence[Placed]:
        state, size, *arguments = node.inputs
        entries = self._shape_of(propagation, node)
        places = [axis for axis, length in enumerate(entries) if propagation.lengths.per_row(length) is not None]
        fits = ops.draws_each(node.op) and all(one.ndim in (0, node.outputs[1].ndim) for one in arguments)
        stream = self._streams.get(state, state)
        is_own = bool(places) and fits and isinstance(stream, SharedVariable)
        if self._is_own.setdefault(stream, is_own) != is_own:
            self._mixed.append(node.outputs[1])
            return "its stream has draws of both kinds"  # `check` raises an error for it
        self._streams[node.outputs[0]] = stream
        if not is_own:
            return propagation.computed_replicated(node, "an argument of a random draw")
        per_row = propagation.lengths.per_row(entries[places[0]])
        assert per_row is not None  # by the choice of `places`
        shard = Shard(places[0], ONE, per_row)
        here = list(map(propagation.lengths.value, entries))
        here[shard.axis] = propagation.lengths.local(per_row)
        local = [propagation.sharded(one, shard, broadcasts=True) for one in arguments]
        if not isinstance(size.type, NO_TENSORS):
            size = T.cast(ops.MakeVector("int64")(*here), size.dtype)
        new_state, drawn = node.op.make_node(propagation.new(state), size, *local).outputs
        return [Placed(new_state, Replicate()), Placed(drawn, shard)]

    @staticmethod
    def _shape_of(propagation: Propagation, node: Any) -> Sequence[Length]:
        """Return the known lengths of a draw's shape, from its size argument or else from its other arguments."""
        _, size, *arguments = node.inputs
        if not isinstance(size.type, NO_TENSORS):
            return propagation.lengths.vector(size) or ()
        drawn, dims = node.outputs[1], [propagation.lengths.dims(one) for one in arguments if one.ndim]
        if any(len(each) != drawn.ndim for each in dims):
            return ()
        return [next((each[axis] for each in dims if each[axis] != ONE), ONE) for axis in range(drawn.ndim)]
