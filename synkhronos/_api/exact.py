"""`ExactFunction`: a sharded function with the results and updates of the serial program."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from synkhronos import _graph
from synkhronos._api.call_plan import (
    ControllerCall,
    Inputs,
    Planner,
    chosen,
    count_rows,
    divide,
    rows_on_ranks,
    slices_of,
    view_variables,
)
from synkhronos._api.checks import EXACT, ExactChecks, Input, Serial
from synkhronos._api.choice import Chooser, ChosenPlans, Costs, Unmeasured, check_plan, preferred, prefers_controller
from synkhronos._api.combine import ExactGraphCollectives, Results
from synkhronos._api.data_arrays import Data
from synkhronos._api.functions import MOST_PLANS, Function
from synkhronos._costs import Estimate
from synkhronos._graph import Graph, Variant
from synkhronos._graph.ops import compiled_has_collectives
from synkhronos._processes import FUNCTION
from synkhronos._rank import Call
from synkhronos._session import Place, Session, Updates, current
from synkhronos._sharding import ShardedGraph, Slices, rules  # noqa: F401 - the rules register themselves
from synkhronos._utils.interrupts import new_lock
from synkhronos._utils.rows import Rows, Selection
from synkhronos.errors import SessionError

_measuring = new_lock()

_Run = Callable[[list[Any]], list[Any]]


class ExactFunction(Function):
    """A function whose graph is sharded by the rows of its scattered inputs; made by `function(..., exact=True)`.

    Parameters
    ----------
    session : Session
    user : Graph
        The user's graph.
    divided : ShardedGraph
        The graph that each rank computes on its shard.
    single : bool
        Whether a call returns one array rather than a list.
    name : str or None
    plan : str or None
        ``"auto"``, ``"rows"`` or ``"controller"``; ``None``: that of the session.
    options : str
        See `Chooser`.
    measure : callable
        ``measure(session)`` returns the `Costs` of the machine.
    again : callable
        ``again(swap, delete_updates, **keywords)`` builds the function again, with some shared variables replaced,
        optionally without updates, and with other keyword arguments of the backend's ``function``.
    whole : dict or None
        See `function`.
    """

    _graph: ShardedGraph
    _alone: _OnController | None = None
    _repetition: _Repetition | None = None

    def __init__(
        self,
        session: Session,
        user: Graph,
        divided: ShardedGraph,
        *,
        single: bool,
        name: str | None,
        plan: str | None,
        options: str,
        measure: Callable[[Session], Costs],
        again: Callable[..., Any],
        whole: Mapping[Any, Any] | None = None,
    ) -> None:
        title, n_outputs = name or "the function", len(divided.outputs)
        results = Results(divided.outputs, divided.modes, [False] * n_outputs, session.on_gpu, title)
        named = [True] * n_outputs
        super().__init__(session, divided, results, {}, named=named, named_updates=[], single=single, name=name)
        self._user, self._options, self._measure, self._again = user, options, measure, again
        self._whole = whole
        self._serial = Serial(user, Results(user.outputs, [EXACT] * n_outputs, [False] * n_outputs, False, title))
        self._slices = slices = slices_of(session, divided)
        has_any = compiled_has_collectives(self._theano) or (slices is not None and bool(slices.summed))
        self._collectives = ExactGraphCollectives(divided, has_any, results)
        self._checks = ExactChecks(divided, results, named, named_updates=[])
        # with num_slices, all slices compute the same new value; "max", because an average would round it
        alike = dict.fromkeys((var for var, _ in divided.updates), "max")
        serial = _graph_on_controller(user, divided, whole, session)
        alone = None if serial is None else _OnController(serial, self._inputs, self.get_shared, whole or {})
        check_plan(plan, alone is not None)
        self._alone = alone
        chooser = Chooser(divided, user, self._theano, self._inputs, options=options, slices=slices)
        self._planner: _ExactPlanner = _ExactPlanner(
            divided, results, self._collectives, alike, session.on_gpu, plan=plan, alone=alone, chooser=chooser
        )
        self._common = [var for var in self._variables() if var not in divided.own_states]
        self._shapes: list[Any] = []  # of their values
        self._syncs = tuple([_graph.sync_of(var.container) for var in self._common])

    @property
    def partition(self) -> Any:
        """Table of the collectives: a list, with ``products``, ``updates``, ``plans`` and ``picture(path)``."""
        session = None if self._session is None else self._session()
        slices = self._slices if session is None else slices_of(session, self._graph)
        compiled = (self._graph if slices is None else slices.graph).compile(self._plain)
        return self._graph.partition(compiled, self._planner.chooser.predictions(), slices)

    @property
    def plan(self) -> str:
        """The plan of later calls, as the argument ``plan`` of `function`. It can be set."""
        return self._planner.asked or current("plan").plan

    @plan.setter
    def plan(self, plan: str | None) -> None:
        check_plan(plan, self._alone is not None)
        self._planner.asked = plan
        self._forget_plans()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on all ranks; see `Function.__call__`.

        Values of shared variables that the program has set on the controller are given to the other ranks, too.
        """
        if _graph.first_set(self._syncs) >= 0:
            self._give_what_was_set(current("Function"))
        repetition = self._repetition
        if repetition is not None and not kwargs:
            outputs = repetition.compute(args)
            if outputs is None:
                arrays = self._with_arrays(args)
                outputs = None if arrays is args else repetition.compute(tuple(arrays))
            if outputs is not None:
                self.counts = repetition.counts
                return outputs[0] if repetition.single else outputs
        try:
            return super().__call__(*args, **kwargs)
        except Unmeasured as error:
            inputs = error.inputs
        return self._measured_call(inputs, args, kwargs)

    def _measured_call(self, inputs: Inputs | None, args: Any, kwargs: Any) -> Any:
        """Make the measurements that a call needs to choose its plan, then call again."""
        session = current("Function")
        if inputs is None:
            with _measuring:
                if session.costs is None:
                    session.costs = self._measure(session)
                    session.trim()
        else:
            before, repeated = self.counts, self._planner.chooser.repeated(session, inputs)
            with session.lock:  # another thread's updates would be undone, too
                session.check_usable()
                try:
                    self._planner.chooser.estimate(session, inputs)
                except Unmeasured:  # another thread has not timed them meanwhile
                    if repeated is not None:
                        self._planner.chooser.time(session, repeated, functools.partial(self._by_plan, session))
                        self.counts = before
        return ExactFunction.__call__(self, *args, **kwargs)

    def _by_plan(self, session: Session, plan: str, values: Sequence[Any], batch: Any) -> Callable[[], Any]:
        """Return a function that makes a call with one of the plans, under the session's lock."""
        inputs = divide(session, self._inputs[: self._graph.n_scattered], list(values), batch)
        self._planner.pinned = plan
        try:
            distributed = functools.partial(self._distributed, session)
            call, places = self._planner.plan(session, distributed, inputs, None, 1, None)
        finally:
            self._planner.pinned = None
        if isinstance(call, ControllerCall):
            return functools.partial(call.compute, session, inputs.values, inputs.batch)
        command, arrays = call, [value for value in inputs.values if not isinstance(value, Data)]

        def run() -> Any:
            session.restage(places, arrays)
            return session.submit(command, lambda results: self._combined(session, results, command, self._all))

        return run

    def _first_graph(self, session: Session) -> Graph:
        slices = slices_of(session, self._graph)
        return self._graph if slices is None else slices.graph

    def get_shared(self) -> list[Any]:
        """Return the shared variables that the function reads or updates; see `Function.get_shared`."""
        slices = self._graph.slices
        in_slices = [] if slices is None else [*slices.variables, *slices.values]
        return list(dict.fromkeys([*super().get_shared(), *in_slices, *(var for var, _ in self._graph.updates)]))

    def _variables(self) -> list[Any]:
        """Return the shared variables of all plans."""
        of_whole = [] if self._whole is None else _graph.shared_leaves(self._whole.values())
        return list(dict.fromkeys([*self.get_shared(), *of_whole]))

    def join(self, session: Session) -> bool:
        """Register the function with a session; see `Function.join`."""
        is_new = self._session is None or self._session() is not session
        if is_new and self._alone is not None:
            self._alone.ready.clear()
        can = super().join(session)
        if can and is_new:
            self._forget_plans()
        return can

    def _forget_plans(self) -> None:
        self._repetition = None
        self._plans = ChosenPlans(MOST_PLANS, self._preferred, self._latest)

    def _is_valid(self, session: Session, call: Call | ControllerCall) -> bool:
        step = call.step if isinstance(call, Call) else None
        return step is None or session.view([key for one in step.sliced for key in one.variables])

    def _note_call(self, session: Session, call: ControllerCall, arrays: Sequence[Any], single: bool) -> None:
        assert self._alone is not None
        runner = self._alone.ready.get(call.subset)
        if runner is not None and call.subset is None and not self._compares:
            self._repetition = _Repetition(
                session,
                runner,
                arrays,
                counts=call.counts,
                n_changes=self._n_changes,
                estimate=call.estimate,
                single=single,
                name=self._alone.name,
            )

    def _preferred(self, estimate: Estimate, plans: Sequence[Any]) -> Any:
        session = None if self._session is None else self._session()
        return None if session is None else preferred(session, estimate, plans)

    def _latest(self) -> Estimate | None:
        return self._planner.latest

    def copy(
        self,
        share_memory: bool = False,
        swap: Mapping[Any, Any] | None = None,
        delete_updates: bool = False,
        name: str | None = None,
        profile: Any = None,
    ) -> Any:
        """Copy the function, as ``copy`` of the backend's functions does.

        Parameters
        ----------
        share_memory : bool
            No effect. The copy shares the compiled function unless ``swap``, ``delete_updates`` or ``profile`` is
            given; with one of these, it is compiled again.
        swap : dict, optional
            Replacements: shared variables of the function as keys, shared variables of the same type as values.
        delete_updates : bool
            Whether the copy has no updates.
        name : str, optional
            Name of the copy. Default: that of this function, with ``" copy"``.
        profile : optional
            As for the backend's ``function``.

        Returns
        -------
        Function

        Raises
        ------
        SessionError
            Without a session.
        ValueError
            For a variable in ``swap`` that the function does not use.
        TypeError
            For a replacement that is not a shared variable of the same type.
        """
        session, swap = current("copy"), dict(swap or {})
        own = self.get_shared()
        for old, new in swap.items():
            if not any(old is var for var in own):
                raise ValueError(f"copy: swap has {old}, which the function does not use; it uses {own}")
            if not _graph.is_shared_variable(new) or new.type != old.type:
                raise TypeError(f"copy: got {new!r} in place of {old}; expected a shared variable of {old.type}")
        name = name or (f"{self.name} copy" if self.name else None)
        if swap or delete_updates or profile is not None:
            return self._again(swap, delete_updates, name=name, profile=profile)
        return ExactFunction(
            session,
            self._user,
            self._graph,
            single=self._single,
            name=name,
            plan=self._planner.asked,
            options=self._options,
            measure=self._measure,
            again=self._again,
            whole=self._whole,
        )

    def _give_what_was_set(self, session: Session) -> None:
        with session.lock:
            values, there = [sync.storage[0] for sync in self._syncs], self._not_sent(session)
            if there:
                session.sequencer.check_first(f"a new value of {there[0]}")
            session.stale.add(there)
            for sync, value in zip(self._syncs, values):
                sync.sent = value
            shapes = [getattr(value, "shape", None) for value in values]
            if shapes != self._shapes:  # the faster plan may be another one
                self._forget_plans()
                self._shapes = shapes

    def _not_sent(self, session: Session) -> list[Any]:
        """Return variables that the program has set on the controller since the other ranks got their values.

        Variables that the ranks do not have yet are left out: their values are sent with the function.
        """
        pairs = zip(self._common, self._syncs)
        found = {var.container: var for var, sync in pairs if sync.sent is not sync.storage[0]}
        parts, key = session.replica_check.scattered(list(found.values())), session.replica.variables.key
        return [var for var in found.values() if var not in parts and key(var) is not None]

    def _check_values(self, session: Session) -> None:
        """Refuse a recorded sequence if the program has set a variable since the call was recorded.

        Otherwise the controller alone would use the new value in the recorded call.
        """
        there = self._not_sent(session)
        if there:
            raise SessionError(
                f"{there[0]} was set after a call of an exact function that uses it, in the same sequence, so that "
                "call would use the new value; set it outside of the block. No call of the block was sent"
            )


def _graph_on_controller(
    user: Graph, divided: ShardedGraph, whole: Mapping[Any, Any] | None, session: Session
) -> Graph | None:
    """Return the graph that the controller can compute alone; ``None`` if it does not have all data."""
    if divided.own_states or session.on_gpu:
        return None
    if not divided.sliceable_shareds:
        return user
    updated = [var for var, _ in divided.updates if var in divided.sliceable_shareds]
    return None if whole is None or updated else user.with_whole(whole)


class _OnController:
    """Computes calls of an exact function on the controller alone, by the serial program's function.

    Parameters
    ----------
    user : Graph
        The user's graph.
    specs : list of Input
        The inputs, with the axes of their rows.
    shared : callable
        Returns the function's shared variables.
    whole : dict
        For each sliceable variable, an expression of all rows.
    """

    def __init__(
        self, user: Graph, specs: Sequence[Input], shared: Callable[[], list[Any]], whole: Mapping[Any, Any]
    ) -> None:
        self._user, self._specs, self._shared = user, specs, shared
        self._n_rows = {var: _graph.length_of(value) for var, value in whole.items()}
        self._functions: dict[Any, tuple[_Run, list[Any]]] = {}
        self.name = ""  # in messages
        #: Functions with their updated variables, by subset, in this session.
        self.ready: dict[Any, tuple[_Run, Updates]] = {}

    def check_rows(self, n_rows: int) -> None:
        """Raise `ValueError` if an expression of all rows has another number of rows than the ranks together."""
        for var, count in self._n_rows.items():
            if count() != n_rows:
                raise ValueError(
                    f"whole has {count()} rows of {var}, and the ranks have {n_rows}; expected equal numbers of rows"
                )

    def compute(self, subset: tuple[int, ...] | None, session: Session, values: Sequence[Any], batch: Any) -> list[Any]:
        """Compute outputs and updates from all rows of the call; return the outputs, or a subset of them."""
        run, updates = self.ready.get(subset) or self._prepare(session, subset)
        if not session.stale.is_current(updates):
            run, updates = self._prepare(session, subset)
        if session.replica_check.every:
            session.replica_check.see_calls([self._shared()])
        arrays = chosen(values, batch, self._specs, self._user.n_scattered)
        session.timeline.switch(FUNCTION)
        return session.compute_alone(run, arrays, updates, self.name)

    def _prepare(self, session: Session, subset: tuple[int, ...] | None) -> tuple[_Run, Updates]:
        run, updated = self._functions.get(subset) or self._compile(session, subset)
        updates = session.stale.updates_of(updated)
        self.ready[subset] = run, updates
        return run, updates

    def _compile(self, session: Session, subset: tuple[int, ...] | None) -> tuple[_Run, list[Any]]:
        variant, asked = Variant().for_subset(subset)
        function = self._user.compile(variant)
        self.name = function.name
        session.replica.thread_limits.apply()  # the function may have loaded a BLAS library
        self._functions[subset] = _graph.run_function(function, asked), _graph.updated_variables(function)
        return self._functions[subset]


class _Repetition:
    """Shortcut for a call on the controller that is repeated with NumPy arrays of the same shapes and dtypes.

    Parameters
    ----------
    session : Session
    runner : tuple
        The function, and its updated variables.
    arrays : sequence of ndarray
        The inputs of the call.
    counts : tuple of int
        Data points by rank.
    n_changes : int
        See `ReplicaCheck`.
    estimate : Estimate, or None
        Prediction by which the plan was chosen.
    single : bool
        Whether the call returns one array rather than a list.
    name : str
        Name of the function in messages.
    """

    def __init__(
        self,
        session: Session,
        runner: tuple[_Run, Updates],
        arrays: Sequence[Any],
        *,
        counts: tuple[int, ...],
        n_changes: int,
        estimate: Estimate | None,
        single: bool,
        name: str,
    ) -> None:
        self._name = name
        self.counts, self.single = counts, single
        self._session, self._n_changes = weakref.ref(session), n_changes
        self._run, self._updates = runner
        self._kinds = tuple([(array.shape, array.dtype) for array in arrays])
        #: `StaleReplicas.lead` at which `choose` picks the controller and returns the same lead; ``None``: any.
        self._lead = None if estimate is None or not estimate.broadcast else -estimate.broadcast / 2
        self._has_updates = estimate is not None and estimate.updates
        self._is_chosen = estimate is None or estimate.controller <= estimate.rows

    def compute(self, args: tuple[Any, ...]) -> list[Any] | None:
        """Return the outputs; ``None`` if this is another kind of call, which is planned like the first one."""
        session = current("Function")
        if session is not self._session() or not self._is_chosen or not _graph.are_of_kinds(args, self._kinds):
            return None
        with session.lock:
            stale, check = session.stale, session.replica_check
            if session.sequencer.place or session.timeline.on or check.every or check.n_changes != self._n_changes:
                return None
            if self._lead is not None and stale.lead != self._lead and (self._has_updates or stale.keys):
                return None
            if not stale.is_current(self._updates):
                return None
            session.check_usable()
            return session.compute_alone(self._run, list(args), self._updates, self._name)


class _ExactPlanner(Planner):
    """`Planner` of exact functions, which also chooses between the plans.

    Parameters
    ----------
    *args
        As for `Planner`.
    plan : str or None
        ``"rows"`` or ``"controller"``; ``None``: that of the session.
    alone : _OnController, or None
        ``None`` if the function cannot be computed on the controller alone.
    chooser : Chooser

    Attributes
    ----------
    asked : str or None
        The argument `plan`; it can be set.
    pinned : str or None
        Plan of all calls while the plans are timed.
    latest : Estimate, or None
        Prediction for the call that was planned last; ``None`` if its plan was not chosen by cost.
    """

    _graph: ShardedGraph

    def __init__(self, *args: Any, plan: str | None, alone: _OnController | None, chooser: Chooser) -> None:
        super().__init__(*args)
        self.asked, self._alone = plan, alone
        self.chooser = chooser
        self.pinned: str | None = None
        self.latest: Estimate | None = None

    def plan(
        self,
        session: Session,
        distributed: Callable[[Any, Graph], int],
        inputs: Inputs,
        rows: list[Selection] | None,
        num_slices: int,
        subset: tuple[int, ...] | None,
    ) -> tuple[Call | ControllerCall, Sequence[Place]]:
        """Choose the plan of a call. For ``"rows"``, have each rank's function get its range of rows.

        A call in slices, in a sequence, or without rows always has the plan ``"rows"``. If there are fewer rows than
        ranks, each rank gets all rows, and only the controller has a weight in collectives.
        """
        fits = num_slices == 1 and rows is None and not session.sequencer.place
        fits = fits and (inputs.shares is None or any(inputs.counts))
        self.latest, kind = None, self.pinned or self.asked or session.plan
        if self._graph.sliceable_shareds:  # before the choice, on which errors should not depend
            inputs = self._follow_rows(session, inputs, rows)
            if self._alone is not None and kind != "rows" and rows is None:
                self._alone.check_rows(sum(inputs.counts))
        needs_ranks = not session.is_on_one_node or self._graph.checks_shapes
        if self._alone is None or not fits or (kind == "auto" and needs_ranks):
            kind = "rows"
        if kind == "auto" and session.n_ranks == 1 and not self._graph.sliceable_shareds:
            kind = "controller"  # computing scattered variables in blocks may be faster, also on one rank
        if kind == "auto":
            self.latest = self.chooser.estimate(session, inputs)
            kind = "controller" if prefers_controller(session, self.latest) else "rows"
        if self._alone is not None and kind == "controller":
            counts = (1,) * session.n_ranks
            if self._graph.takes_rows:
                n_rows = count_rows(session, self._graph, inputs)
                counts = tuple(n_rows * (rank == session.master_rank) for rank in range(session.n_ranks))
            return ControllerCall(functools.partial(self._alone.compute, subset), counts, subset, self.latest), ()
        if num_slices > 1 and self._graph.checks_shapes:
            num_slices = 1  # same results; the checks gather inputs first, so the graph cannot be cut for slices
        if num_slices > 1:
            self._graph.check_slices()
        call, refs = super().plan(session, distributed, inputs, rows, num_slices, subset)
        assert isinstance(call, Call)
        call = call._replace(exact=self._graph.takes_rows, keeps_equal=True)
        if not call.exact:
            return call, refs
        if all(call.counts):
            return call, refs
        # with fewer rows than ranks, each rank computes all rows, and collectives use the controller's values only
        n_rows = sum(call.counts)
        counts = tuple(n_rows * (rank == call.controller) for rank in range(session.n_ranks))
        shares = (Rows(0, n_rows),) * session.n_ranks
        return call._replace(shares=shares, counts=counts, all_compute=n_rows == 0), refs

    def _slices(self, session: Session, num_slices: int) -> Slices | None:
        is_possible = num_slices == 1 and not session.sequencer.place
        slices = slices_of(session, self._graph) if is_possible else None
        return slices if slices is not None and view_variables(session, slices) else None

    def _follow_rows(self, session: Session, inputs: Inputs, rows: list[Selection] | None) -> Inputs:
        """Return the inputs with the ranks' shards changed to those of the sliceable shared variables."""
        variables = self._graph.sliceable_shareds
        for var in variables:
            if not session.replica_check.scattered([var]):
                raise ValueError(
                    f"{var} is in sliceable_shareds, but is equal on all ranks; scatter it first (synkhronos.scatter), "
                    "or build the function with shard=[...] in place of sliceable_shareds"
                )
        updated = [var for var, _ in self._graph.updates if var in variables]
        if updated and rows is not None:
            raise ValueError(
                f"got batch_s or num_slices in a call that updates {updated[0]}, which is sharded; expected a call on "
                "all of its rows"
            )
        counts = rows_on_ranks(session, self._graph) if rows is None else list(map(len, rows))
        if not all(counts):
            raise ValueError(
                f"{', '.join(map(str, variables))}: the ranks have {counts} rows in this call; an exact function needs "
                "at least one on each"
            )
        if inputs.shares is not None and sum(inputs.counts) != sum(counts):
            raise ValueError(
                f"the scattered inputs have {sum(inputs.counts)} rows, and {', '.join(map(str, variables))} "
                f"{sum(counts)}; expected equal numbers of rows"
            )
        ends = list(itertools.accumulate(counts))
        return inputs._replace(shares=tuple(Rows(end - n, end) for end, n in zip(ends, counts)), counts=tuple(counts))
