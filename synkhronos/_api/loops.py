"""Train on all ranks without a collective in every step: `loop`."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Callable, Literal

import cloudpickle
import numpy as np

from synkhronos import _graph
from synkhronos._api.collectives import all_reduce, broadcast
from synkhronos._api.data_arrays import Data, data
from synkhronos._api.exact import ExactFunction
from synkhronos._api.functions import Function
from synkhronos._api.run import (
    COMBINE,
    N_MEASURED,
    ONE_COMMAND,
    Length,
    Run,
    Saved,
    averages_within_nodes,
    bar_of,
    combined,
    delayed,
    goes_on,
    in_shared_memory,
    length_of,
    makes_exact_steps,
    positive,
    run_by_calls,
    shuffled,
    states_of_ranks,
    values_at,
)
from synkhronos._api.variables import check_replicas, start
from synkhronos._backends import is_random_state
from synkhronos._costs import to_hide
from synkhronos._memory import Board
from synkhronos._rank import (
    MOST_BARRIERS,
    MOST_STEPS,
    EndLoop,
    Exchange,
    Loop,
    Records,
    RestoreLoop,
    TimeReduction,
    pack,
)
from synkhronos._session import Session, current
from synkhronos._utils.display import suggests_keywords
from synkhronos._utils.interrupts import deferred_interrupts, interrupt_behind
from synkhronos.errors import SessionError, SynkhronosError, WorkerRestarted
from synkhronos.rules import BSP, Average, Rule

_numbers = itertools.count()
_LEAST_PIECE = 1 << 16  # bytes of the smallest pieces in which transports move arrays

#: Treatments of variables that the function updates in addition to the parameters.
_OF_OTHERS = ("local", "average", "reset")

_NO_RESULT = "the loop failed, so that it has no result; the ranks have different parameters"


@suggests_keywords
def loop(
    f: Any,
    inputs: Any,
    *,
    batch_size: int,
    params: Sequence[Any] = (),
    epochs: int | None = None,
    steps: int | None = None,
    rule: Rule | Literal["local"] | None = None,
    schedule: Mapping[Any, Any] | None = None,
    on_epoch: Callable[[Run], Any] | None = None,
    seed: int = 0,
    others: str = "local",
    resume: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Run:
    """Train on all ranks: each rank makes steps of a function on batches of its own.

    All ranks start from the controller's values. The steps change each rank's own variables. A training rule of
    `synkhronos.rules` combines the parameters of the ranks from time to time. In each epoch, the rows are shuffled, and
    each row is used once, except that rows from the start of the epoch fill the last batches.

    Parameters
    ----------
    f : Function, or other callable
        A function with updates, such as those of a step of gradient descent. Its outputs are scalars. It is called on
        each rank's own batch. With ``rule=None``, it may be any callable that takes the inputs and ``batch``, such as
        an exact function.
    inputs : list of array_like, Data or h5py dataset, or callable
        The scattered inputs of the function, of shape ``(n, ...)`` with the same ``n``. Data that is not in shared
        memory is copied there. A callable ``batches(rank, n_ranks, epoch, rng)`` returns an iterator on each rank
        instead. Each item is the list of the inputs of one step, and a thread prepares the next one.
    batch_size : int
        The number of rows of one step of one rank.
    params : list of shared variables
        The parameters that the rule combines, all of one dtype.
    epochs, steps : int
        The number of epochs, or of steps of each rank. One of them must be given. For a callable, ``steps``, or both:
        then each epoch has this number of steps.
    rule : Rule or "local", optional
        The training rule. ``None`` or ``BSP()``: all ranks make equal steps, with the rows of all. A function with
        collectives in its graph runs in one command for each epoch, if ``params`` are given. Any other is called for
        each step. On several nodes, rules with averages take exact functions and functions with collectives, too: the
        ranks of a node make equal steps, and the rule averages between nodes. ``"local"``: the same, with averages in
        the background whose delay is chosen by measured times; on one node, ``BSP()``.
    schedule : dict, optional
        Values of the function's other inputs, and of shared variables, by input, variable or name: a constant, or a
        callable of the step's number, from 0.
    on_epoch : callable, optional
        ``on_epoch(run)`` is called after each epoch. If it returns ``False``, the loop ends.
    seed : int
        Seed of the shuffling, and of the random numbers of rules.
    others : str
        Treatment of other variables of floating-point numbers that the function updates, such as those of an update
        rule. ``"local"``: exchanges do not change them. ``"average"`` and ``"reset"``: each exchange averages them, or
        resets them to their values at the start; with averages only. At the end of the loop, they are averaged, and
        variables of integers have the controller's values.
    resume : dict of arrays, optional
        What `Run.state` returned in ``on_epoch`` of another loop with equal arguments, or what
        `synkhronos.extensions.checkpoint.load_run` returns. The loop continues from there: on as many ranks, with equal
        results. On another number of ranks, all start from the mean or the centre, and the records begin again.
        ``epochs`` and ``steps`` include those before.
    progress : bool
        Show a bar on a terminal or in a notebook, with the loss and the steps per second of each rank of this node.

    Returns
    -------
    Run
        The records of the loop. After Ctrl-C, those of the steps until then. The parameters on all ranks are
        `Run.params`.

    Raises
    ------
    SessionError
        Without a session, or in a `sequence`.
    TypeError, ValueError
        For invalid arguments.
    WorkerError
        If a rank fails. Errors of a rule name it and the step. The ranks then have different parameters.

    Examples
    --------
    >>> w, x, t = theano.shared(np.zeros(2), "w"), T.dmatrix("x"), T.dvector("t")
    >>> loss = T.sqr(x.dot(w) - t).mean()
    >>> rows, targets = np.tile(np.eye(2), (50, 1)), np.tile([1.0, 2.0], 50)
    >>> with synk.session(2):
    ...     step = synk.function([x, t], loss, updates=[(w, w - 0.5 * T.grad(loss, w))])
    ...     rule = synk.rules.LocalSGD(every=5)
    ...     run = synk.loop(step, [rows, targets], params=[w], batch_size=10, epochs=6, rule=rule)
    ...     print(run.steps, run.exchanges, w.get_value().round(2))
    [30, 30] [6, 6] [1. 2.]
    """
    session, seed = current("loop"), operator.index(seed)
    if session.sequencer.place:
        raise SessionError("loop cannot be called in a sequence; call it outside of the block")
    if (epochs is None) == (steps is None) and not (callable(inputs) and steps):
        raise TypeError(f"got epochs={epochs} and steps={steps}; expected one of them")
    size = positive("batch_size", batch_size)
    plan = Length(positive("epochs", epochs), positive("steps", steps))
    rule = BSP() if rule is None else rule
    if rule != "local" and not isinstance(rule, Rule):
        raise TypeError(f"rule is {rule!r}; expected a rule of synkhronos.rules, or 'local'")
    if others not in _OF_OTHERS:
        raise ValueError(f"others is {others!r}; expected one of {_OF_OTHERS}")
    if others != "local" and rule != "local" and rule.engine != "average":
        raise ValueError(f"others is {others!r} with {rule!r}, which has no averages; use others='local'")
    if isinstance(rule, BSP) or (rule == "local" and session.is_on_one_node):
        if not _steps_together(f, inputs, params):
            if resume is not None:
                raise TypeError(f"resume got {f!r}; {ONE_COMMAND}")
            options = {"size": size, "plan": plan, "schedule": schedule, "seed": seed, "progress": progress}
            return run_by_calls(session, f, inputs, params, on_epoch=on_epoch, **options)
        others = "local"
    saved = None if resume is None else Saved(resume)
    options = {"size": size, "schedule": schedule or {}, "seed": seed, "others": others, "saved": saved}
    return _Loop(session, f, inputs, params, rule, **options).run(plan, on_epoch, progress)


def _steps_together(f: Any, inputs: Any, params: Sequence[Any]) -> bool:
    """Return whether the ranks can make steps with collectives in one command."""
    if callable(inputs) or not params or isinstance(f, ExactFunction) or not isinstance(f, Function):
        return False
    return f.steps_together() and all(mode is None or mode in COMBINE for mode in f.output_modes)


def inputs_of_loop(f: Any, inputs: Sequence[Any], params: Sequence[Any]) -> Sequence[Any]:
    """Return inputs as a loop without a training rule passes them: as `Data`, if one command makes many steps."""
    return in_shared_memory(inputs, f._user.input_variables) if _steps_together(f, inputs, params) else inputs


def _ranks_of_a_step(session: Session, f: Function, inputs: Any, rule: Rule) -> str | None:
    """Return which ranks make a step together, by its collectives; see `Exchange.together`."""
    if isinstance(rule, BSP):
        return "all"
    if session.is_on_one_node or rule.engine != "average" or averages_within_nodes(rule) or callable(inputs):
        return None
    return "node" if makes_exact_steps(f) else None


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names))


def _uses_losses(rule: Rule) -> bool:
    """Return whether a rule gets the mean loss of each epoch."""
    return isinstance(rule, Average) and type(rule).on_epoch is not Average.on_epoch


class _Loop:
    """A loop with a training rule, on the controller."""

    def __init__(
        self,
        session: Session,
        f: Any,
        inputs: Any,
        params: Sequence[Any],
        rule: Rule | str,
        *,
        size: int,
        schedule: Mapping[Any, Any],
        seed: int,
        others: str,
        saved: Saved | None,
    ) -> None:
        name, self._is_delay_open = repr(rule), rule == "local" and not session.is_on_one_node
        #: Steps of the next commands: the first step of a loop, in which the backend may compile, and measured steps.
        self._opening = [1, N_MEASURED - 1] if self._is_delay_open else []
        if not isinstance(rule, Rule):
            rule = delayed(1) if self._is_delay_open else BSP()
        self._together = _ranks_of_a_step(session, f, inputs, rule) if isinstance(f, Function) else None
        if self._is_delay_open and self._together is None:
            raise TypeError(f"rule is 'local' for {f!r}; expected arrays, and exact=True or collectives in its graph")
        if not isinstance(f, Function) or (isinstance(f, ExactFunction) and self._together is None):
            raise TypeError(
                f"{name} needs a function of synkhronos.function without exact=True; got {f!r}. With exact=True, it "
                "needs a session on several nodes, averages between nodes alone, and arrays as inputs"
            )
        rule.check(min(session.sizes) if rule.engine == "centre" else session.n_ranks)
        self._session, self._size, self._seed = session, size, seed
        self._key = next(_numbers)
        if not len(params):
            raise ValueError(f"params is empty; expected the shared variables that {name} combines")
        _, variables = start("loop", list(params))
        if len({var.dtype for var in variables}) > 1:
            raise TypeError(f"params have the dtypes {[var.dtype for var in variables]}; expected a single one")
        if np.dtype(variables[0].dtype).kind != "f":
            raise TypeError(f"params have the dtype {variables[0].dtype}; expected floating-point numbers")
        is_together = self._together is not None
        self._groups = {"all": [range(session.n_ranks)], "node": session.nodes}.get(self._together or "", [])
        self._function, self._scattered, rest, self._takes_rows = f.local(session, together=is_together)
        self._modes = f.output_modes
        if is_together and not all(mode is None or mode in COMBINE for mode in self._modes):
            raise TypeError(
                f"{f!r} has outputs with the ops {self._modes}; expected None or one of {', '.join(COMBINE)}"
            )
        if _uses_losses(rule) and not self._modes:
            raise TypeError(f"{rule!r} got {f!r} without outputs; expected the loss as the first output")
        self._batches = cloudpickle.dumps(inputs) if callable(inputs) else None
        self._data = [] if callable(inputs) else self._arrays(inputs)
        self._n_rows = None if callable(inputs) else length_of(self._data)
        self._set_schedule(schedule, rest)
        self._rule, self._variables = rule, variables
        updated = _graph.updated_variables(session.replica.functions[self._function])
        rest = [var for var in updated if not any(var is one for one in variables)]
        self._others = [var for var in rest if _graph.is_tensor_variable(var) and np.dtype(var.dtype).kind == "f"]
        self._integers = [
            var
            for var in rest
            if _graph.is_tensor_variable(var) and np.dtype(var.dtype).kind in "biu" and not is_random_state(var)
        ]
        self._changed = [*variables, *rest]
        nested = [var for var in self._changed if session.replica_check.is_in_loop(var)]
        if nested:
            raise SessionError(f"loop: {nested[0]} is in another loop; expected a call after its end, not in on_epoch")
        self._saved_keys = session.keys(self._changed)
        own = f._graph.own_states if self._together == "node" and isinstance(f, ExactFunction) else self._changed
        self._streams = [var for var in self._changed if is_random_state(var) and not any(var is one for one in own)]
        self._of_others = others
        self._about = {
            "rule": name,
            "others": others,
            "seed": seed,
            "params": [[var.dtype, list(_graph.get_array(var).shape)] for var in variables],
            "updated": [str(getattr(var, "dtype", var.type)) for var in rest],
            "streams": [i for i, var in enumerate(self._changed) if is_random_state(var)],
        }
        self._saved = saved
        if saved is not None:
            saved.check(**self._about)
        self._keys = session.keys([*variables, *self._others])
        self._memory: Data | None = None  # of the board
        self._is_open = False
        self._number = 0  # of the next command
        self._unanswered: int | None = None  # number of a command whose records were not added yet

    def _arrays(self, inputs: Any) -> list[Data]:
        given = list(inputs)
        if len(given) != len(self._scattered):
            raise TypeError(f"got {len(given)} inputs; expected {len(self._scattered)}, one for each scattered input")
        for one, var in zip(given, self._scattered):
            if isinstance(one, Data) and (one.dtype != np.dtype(var.dtype) or one.ndim != var.ndim):
                raise TypeError(f"got {one!r} for {var}; expected {var.dtype} data of {var.ndim} dimensions")
        return in_shared_memory(given, self._scattered)

    def _check_length(self) -> None:
        """Check that the program has not changed the number of rows."""
        if self._n_rows is not None and length_of(self._data) != self._n_rows:
            raise ValueError(f"on_epoch: data got {len(self._data[0])} rows; expected {self._n_rows} as before")

    def _variables_of(self) -> list[Any]:
        """Return the shared variables of the function."""
        return _graph.shared_variables_of(self._session.replica.functions[self._function])

    def _set_schedule(self, schedule: Mapping[Any, Any], rest: Sequence[Any]) -> None:
        """Sort scheduled values into those of the function's other inputs, in order, and of shared variables."""
        by_name = {var.name: var for var in [*self._variables_of(), *rest] if var.name}
        given = {by_name.get(key, key) if isinstance(key, str) else key: value for key, value in schedule.items()}
        missing = [var for var in rest if var not in given]
        unknown = [key for key in given if key not in rest and not _graph.is_shared_variable(key)]
        if missing or unknown:
            wrong = [("lacks", missing), ("has the unknown", unknown)]
            found = " and ".join(f"{what} {_listed(keys)}" for what, keys in wrong if keys)
            expected = f"the inputs {_listed(rest)}" if rest else "shared variables alone"
            raise TypeError(f"schedule {found}; expected values of {expected}")
        self._inputs = [(var, given[var]) for var in rest]
        shared = [var for var in given if _graph.is_shared_variable(var)]
        if shared:
            start("loop", shared)
        self._shared = [(var, given[var]) for var in shared]

    def run(self, plan: Length, on_epoch: Callable[[Run], Any] | None, progress: bool) -> Run:
        session, n_ranks = self._session, self._session.n_ranks
        if self._n_rows is None and plan.steps is None:
            raise TypeError("got epochs for batches from a callable; expected steps")
        in_epoch = plan.steps if self._n_rows is None else math.ceil(self._n_rows / (self._size * n_ranks))
        assert in_epoch is not None
        n_epochs = plan.epochs or math.ceil((plan.steps or 0) / in_epoch)
        self._rule = self._rule.plan(in_epoch, n_epochs)
        run = Run(n_ranks, self._look, lambda: self._save(run))
        self._about["steps_per_epoch"], self._about["nodes"], self._last = in_epoch, [*session.sizes], in_epoch
        if self._saved is not None:
            self._saved.check_length(n_ranks, in_epoch, is_over=not plan.of_epoch(self._saved.about["epoch"], in_epoch))
        bar = contextlib.ExitStack()
        try:
            with deferred_interrupts():
                self._begin()
                self._resume(run, in_epoch)
            n_steps = plan.total(in_epoch) * len(session.loops)
            bar.enter_context(bar_of(progress, n_steps, session.loops))
            while n_steps := plan.of_epoch(run.epoch, in_epoch):
                self._make_epoch(run, n_steps, in_epoch)
                run.epoch, self._last = run.epoch + 1, n_steps
                try:
                    if not goes_on(on_epoch, run):
                        break
                    self._check_length()
                except Exception as error:
                    raise _OfProgram from error
            self._end(run)
        except _OfProgram as error:
            assert error.__cause__ is not None
            if self._is_open and not session.broken and not isinstance(error.__cause__, WorkerRestarted):
                self._end(run)
            else:
                self._discard_at_once()
            raise error.__cause__ from None
        except BaseException as error:
            if isinstance(error, Exception) and interrupt_behind(error) is None:
                self._discard_at_once()
                raise
            run.interrupted = True  # by a signal handler
            if self._is_open and not session.broken:
                self._end(run, drop=True)
            if session.broken or not isinstance(error, KeyboardInterrupt):
                raise
            if run._values is None:  # the loop had not begun
                run._values = [np.array(_graph.host_array(var)) for var in self._variables]
        finally:
            bar.close()
        return run

    def _end(self, run: Run, drop: bool = False) -> None:
        """Complete the exchanges, and set the parameters to the result on all ranks."""
        session = self._session
        with deferred_interrupts():
            try:
                command = EndLoop(self._key, self._keys, drop=drop, unanswered=self._unanswered)
                results = session.run(command)
                of_ranks, nothing = [records for records, _ in results], Records([], 0, [], 0.0, 0, [])
                for one in itertools.zip_longest(*of_ranks, fillvalue=nothing):
                    run._add(self._combined(one))
                run._values = session.private(results[session.master_rank][1])
                if self._shared:
                    broadcast([var for var, _ in self._shared])
                if self._together == "all" and drop:  # some ranks may have made one step less
                    broadcast([*self._variables, *self._others])
                elif self._together == "all" and self._others:
                    differ = check_replicas(self._others)  # such as running averages of each rank's own rows
                    if differ:
                        all_reduce([*differ])
                if self._integers:  # such as numbers of steps
                    broadcast(self._integers)
                session.replica_check.note_parts([*self._variables, *self._others], are_parts=False)
            finally:
                self._discard(is_whole=not drop)

    def _discard(self, is_whole: bool = False) -> None:
        """Have the ranks forget the loop, and free its memory; ``is_whole``: all ranks have made as many steps."""
        self._is_open = False
        if not is_whole:
            self._session.stale.add(self._streams)  # of exact steps, which must be equal on all ranks
        self._session.replica_check.note_loop(self._changed, begins=False)
        kept, self._data, self._memory = [*self._data, self._memory], [], None
        with contextlib.suppress(SynkhronosError):  # the exception that has ended the loop says more
            if not self._session.broken:
                self._session.run(EndLoop(self._key, self._keys, discard=True))
        del kept

    def _discard_at_once(self) -> None:
        """Discard, and raise an interrupt afterwards."""
        with deferred_interrupts():
            self._discard()

    def _begin(self) -> None:
        """Have the ranks make the state of the loop, all or none of them."""
        session, keys = self._session, self._session.keys
        broadcast([*self._variables, *self._others])
        values = [np.asarray(_graph.host_array(var)).reshape(-1) for var in self._variables]
        x = np.concatenate(values)
        memory, engine = None, self._rule.engine
        if engine in ("centre", "gossip"):
            n_bytes = Board.n_bytes(engine, max(session.sizes), len(x), x.dtype)
            self._memory = data(shape=(n_bytes,), dtype="uint8", ndim=1)
            memory = self._memory.ref
        self._exchange = Exchange(
            cloudpickle.dumps(self._rule),
            keys(self._variables),
            () if self._together == "all" else keys(self._others),
            self._of_others,
            memory,
            self._seed,
            self._together,
            self._takes_rows,
        )
        self._issue(np.zeros((0, self._size), np.int64), 0, 0, 0, 0, None)
        self._unanswered, self._is_open = None, True
        if self._together != "all":
            session.replica_check.note_loop(self._changed, begins=True)

    def _resume(self, run: Run, in_epoch: int) -> None:
        """Have the ranks continue from the saved state, if there is one."""
        session, saved, n_steps = self._session, self._saved, None
        if saved is None:
            return
        is_same = self._is_same(saved)
        run._restore(saved, same_ranks=is_same)
        if is_same:
            if run.delay is not None:
                self._use_delay(run.delay)
            states = [saved.of_rank(rank) for rank in range(session.n_ranks)]
        else:
            states, n_steps = [saved.merged()], run.epoch * in_epoch
        archives = []
        mean = np.concatenate([value.reshape(-1) for value in saved.params()])
        for state in states:
            state.setdefault("reference", mean)  # equal on all ranks
            archives.append(pack(state))
        with session.lock:
            refs = session.stage(archives) * (session.n_ranks if n_steps is not None else 1)
            session.run(RestoreLoop(self._key, self._saved_keys, tuple(refs), n_steps))

    def _save(self, run: Run) -> tuple[dict[str, Any], list[dict[str, np.ndarray]]]:
        """Return facts about the loop, and the state of each rank."""
        session = self._session
        if not self._is_open:
            raise SessionError(_NO_RESULT)
        states = states_of_ranks(session, self._key, self._saved_keys)
        facts = {"mean_loss": run._mean_loss(max(0, min(run.steps) - self._last)), "last_epoch": self._last}
        return {**self._about, **facts, "delay": run.delay, "in_nodes": self._together == "node"}, states

    def _is_same(self, saved: Saved) -> bool:
        """Return whether the states of ranks in a checkpoint can be those of these ranks."""
        in_nodes = self._together == "node"
        if saved.n_ranks != self._session.n_ranks or saved.about.get("in_nodes", False) != in_nodes:
            return False
        is_alike = self._rule.engine in ("average", "none") and not in_nodes  # otherwise, ranks of a node share some
        return is_alike or saved.about.get("nodes", [saved.n_ranks]) == [*self._session.sizes]

    def _choose_delay(self, run: Run, records: Sequence[Records], n_steps: int) -> None:
        """Choose the delay of averages by measured times, of which the longest of all ranks count."""
        n_bytes = sum(_graph.get_array(var).nbytes for var in self._variables)
        command = TimeReduction(n_bytes, 3, delayed=str(self._variables[0].dtype))
        exchange = max(map(np.median, self._session.run(command)))
        step = max(one.seconds - one.waited for one in records) / n_steps
        run.delay = to_hide(float(exchange), step)
        self._use_delay(run.delay)

    def _use_delay(self, delay: int) -> None:
        """Have the ranks use another rule from the next command on."""
        self._is_delay_open, self._opening, self._rule = False, [], delayed(delay)
        self._exchange = replace(self._exchange, rule=cloudpickle.dumps(self._rule))

    def _make_epoch(self, run: Run, n_steps: int, in_epoch: int) -> None:
        n_ranks, n_rows = self._session.n_ranks, self._n_rows
        n_batches = n_steps * n_ranks
        order = np.zeros((n_batches, 0), np.int64)
        if n_rows is not None:
            order = shuffled(n_rows, n_batches * self._size, self._seed, run.epoch).reshape(n_batches, -1)
        mean_loss = None
        if run.epoch and _uses_losses(self._rule):
            mean_loss = run._mean_loss(min(run.steps) - in_epoch)
        n_bytes = sum(_graph.get_array(var).nbytes for var in (*self._variables, *self._others))
        n_barriers = 64 + 2 * n_bytes // _LEAST_PIECE  # of a step
        n_barriers *= 16 if self._together else 1  # the step may have other collectives
        most = max(1, min(MOST_STEPS, MOST_BARRIERS // n_barriers)) * n_ranks
        first, opening = 0, self._opening
        while first < n_batches:
            n_now = min(opening.pop(0) * n_ranks if opening else most, n_batches - first)
            step = run.epoch * in_epoch + first // n_ranks
            records = self._issue(order, first, n_now, run.epoch, step, None if first else mean_loss)
            with deferred_interrupts():
                run._add(self._combined(records))
                self._unanswered = None
            first += n_now
            if self._is_delay_open and not opening:
                self._choose_delay(run, records, n_now // n_ranks)

    def _combined(self, records: Sequence[Records]) -> Sequence[Records]:
        return combined(records, self._groups, self._session.master_rank, self._modes)

    def _issue(
        self, order: np.ndarray, first: int, n_batches: int, epoch: int, step: int, mean_loss: float | None
    ) -> list[Records]:
        """Have the ranks make steps; return their records."""
        session = self._session
        steps = range(step, step + n_batches // session.n_ranks)
        try:
            inputs = [values_at(given, steps, var) for var, given in self._inputs]
            shared = [values_at(given, steps, var) for var, given in self._shared]
        except Exception as error:
            raise _OfProgram from error
        with session.lock:  # so that another thread does not use the staging memory
            refs = session.stage([order, *inputs, *shared])
            n_inputs = 1 + len(inputs)
            command = Loop(
                self._key,
                self._number,
                self._function,
                tuple([one.ref for one in self._data]),
                refs[0],
                tuple(refs[1:n_inputs]),
                tuple(zip(session.keys([var for var, _ in self._shared]), refs[n_inputs:])),
                first,
                n_batches,
                step,
                self._exchange,
                self._batches,
                epoch,
                mean_loss,
            )
            self._unanswered = self._number
            self._number += 1
            return session.run(command)

    def _look(self) -> list[np.ndarray]:
        """Return the present mean of the parameters, or the centre."""
        if not self._is_open:
            raise SessionError(_NO_RESULT)
        results = self._session.run(EndLoop(self._key, self._keys, keep=True))
        return self._session.private(results[self._session.master_rank][1])


class _OfProgram(Exception):
    """An exception of the program's `on_epoch` or `schedule`, or of data that it has changed, which is the cause."""
