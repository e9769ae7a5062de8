"""Training runs: their length, rows and records, their state, and runs that call a function for each step."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._api.collectives import broadcast
from synkhronos._api.data_arrays import Data, data
from synkhronos._api.exact import ExactFunction
from synkhronos._api.functions import Function
from synkhronos._rank import STATE_PART, Records, SaveLoop, unpack
from synkhronos._session import Session
from synkhronos._utils.display import Progress, progress
from synkhronos.errors import SessionError
from synkhronos.rules import Hierarchical, Outer

#: Combination of an output of all ranks, by its mode.
COMBINE: dict[Any, Callable[..., Any]] = {
    "avg": np.mean, "sum": np.sum, "min": np.min, "max": np.max, "prod": np.prod
}  # fmt: skip

ONE_COMMAND = "expected a training rule, or params and a function of synkhronos.function with collectives"

#: First steps of a loop with ``rule="local"``: an average follows each, and all but the first are measured.
N_MEASURED = 6
_VERSION = 1  # of the arrays in a state
_MOST_SHOWN = 8  # ranks in a progress bar
_KINDS = ("meet", "send", "merge", "nodes")  # of exchanges in `Run.order`


def positive(name: str, value: Any) -> Any:
    """Return an argument as an int, or ``None``; raise `ValueError` unless it is at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise ValueError(f"{name} is {value!r}; expected an int of at least 1")
    return None if value is None else int(value)


class Length:
    """Length of a loop, in epochs or in steps of each rank."""

    def __init__(self, epochs: int | None, steps: int | None) -> None:
        self.epochs, self.steps = epochs, steps

    def total(self, in_epoch: int) -> int:
        """Return the number of steps of a rank in all epochs."""
        return self.steps or 0 if self.epochs is None else self.epochs * in_epoch

    def of_epoch(self, epoch: int, in_epoch: int) -> int:
        """Return the number of steps of an epoch; 0 if the loop has ended."""
        if self.epochs is not None:
            return in_epoch if epoch < self.epochs else 0
        assert self.steps is not None
        return max(0, min(in_epoch, self.steps - epoch * in_epoch))


def shuffled(n_rows: int, n_wanted: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffled row numbers of an epoch, followed by the first ones again up to a number of rows."""
    order = np.random.default_rng([seed, epoch]).permutation(n_rows)
    return np.resize(order, n_wanted)


def length_of(arrays: Sequence[Any]) -> int:
    """Return the number of rows of the inputs; raise `ValueError` if it is 0, or not the same for all."""
    lengths = [len(one) for one in arrays]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"the inputs have the lengths {lengths}; expected one length of at least 1")
    return lengths[0]


def read(inputs: Sequence[Any]) -> list[Any]:
    """Return inputs, of which those that are not in memory, such as datasets of h5py, are read."""
    return [one if isinstance(one, (Data, np.ndarray, list, tuple)) else np.asarray(one) for one in inputs]


def in_shared_memory(inputs: Sequence[Any], variables: Sequence[Any]) -> list[Data]:
    """Return the inputs of a loop as `Data`, which `variables` describe; errors name the input."""
    return [one if isinstance(one, Data) else _data(one, var) for one, var in zip(read(inputs), variables)]


def _data(value: Any, var: Any) -> Data:
    try:
        return data(value, var)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"input {var}: {error}") from None


def goes_on(on_epoch: Callable[[Run], Any] | None, run: Run) -> bool:
    """Call the program's function after an epoch, and return whether the training goes on."""
    found = None if on_epoch is None else on_epoch(run)
    return not isinstance(found, (bool, np.bool_)) or bool(found)  # comparisons with `run.losses` return np.bool_


def values_at(given: Any, steps: range, var: Any) -> np.ndarray:
    """Return the values of a scheduled input or variable at some steps; a single one if it is constant."""
    values = [given(step) for step in steps] if callable(given) else [given]
    found, dtype = np.asarray(values), np.dtype(var.dtype)
    are_integers = found.dtype.kind in "iu" and dtype.kind in "iu"
    if values and not (found.dtype.kind in "biufc" and (are_integers or np.can_cast(found.dtype, dtype, "same_kind"))):
        raise TypeError(f"schedule of {var} got values of dtype {found.dtype}; expected {dtype}")
    return np.asarray(values, dtype)


def combined(
    records: Sequence[Records], groups: Sequence[range], master_rank: int, modes: Sequence[str | None]
) -> list[Records]:
    """Return the records of all ranks, with the outputs that calls would return.

    Parameters
    ----------
    records : sequence of Records
    groups : sequence of range
        The ranks of each group that makes its steps together.
    master_rank : int
    modes : sequence of str or None
        The op of each output. ``None``: the value of the controller, or of the first rank of a group without it.
    """
    found = list(records)
    for ranks in groups:
        leader = master_rank if master_rank in ranks else ranks[0]
        own = found[leader].outputs
        if not own or not own[0]:
            continue
        padded = [[*records[rank].outputs, *own[len(records[rank].outputs) :]][: len(own)] for rank in ranks]
        columns = np.array(padded).transpose(2, 0, 1)  # of outputs, ranks and steps
        values = [
            column[leader - ranks[0]] if mode is None else COMBINE[mode](column, axis=0)
            for column, mode in zip(columns, modes)
        ]
        rows = np.array(values).T.tolist()
        for rank in ranks:
            found[rank] = records[rank]._replace(outputs=rows)
    return found


def makes_exact_steps(f: Function) -> bool:
    """Return whether the ranks of a node can make exact steps in a loop: the function is exact, or has collectives."""
    return isinstance(f, ExactFunction) or f.steps_together()


def averages_within_nodes(rule: Any) -> bool:
    """Return whether a training rule averages the parameters of a node's ranks, which then make steps alone."""
    return isinstance(rule, Hierarchical) and "node" in rule.periods.values()


def delayed(delay: int) -> Outer:
    """Return the rule of averages between nodes with a delay, for ``rule="local"``."""
    return Outer(every=2 * delay, delay=delay, start=N_MEASURED)


class Run:
    """A training loop, as `loop` returns it and passes it to ``on_epoch``.

    Attributes
    ----------
    epoch : int
        Number of epochs that are complete.
    outputs : list of float64 array of shape (number of steps, number of outputs)
        The outputs of each rank's steps.
    exchanges, bytes : list of int
        The number of exchanges of each rank, and the bytes that it has sent in them.
    waited : list of float
        Seconds of each rank in exchanges, waits for other ranks included.
    staleness : list of int
        For each average, the number of steps since the parameters in it were sent.
    order : list of tuple
        ``(turn, rank, kind, step, other)`` of each exchange with a centre or by gossip, in the order of the turns on
        each node: ``"meet"``, ``"send"`` or ``"merge"``, the number of steps that the rank had made, and the other
        rank. In exchanges with other nodes, the leader of a node sends its centre, and merges the mean into it; with
        gossip, such an exchange is one entry, ``"nodes"``.
    interrupted : bool
        Whether Ctrl-C, or the exception of another signal handler, has ended the loop.
    delay : int or None
        With ``rule="local"`` on several nodes, the delay of the averages in steps, which was chosen in the first epoch,
        or in the second one if an epoch has a single step. An average begins after every ``2 * delay`` steps.

    Examples
    --------
    >>> w, x = theano.shared(0.0, "w"), T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], w ** 2, updates=[(w, w + x.mean())])
    ...     run = synk.loop(f, [[1.0, 1, 1, 1]], params=[w], batch_size=1, epochs=1, rule=synk.rules.LocalSGD(every=2))
    >>> print(run.steps, run.exchanges, run.params[0])
    [2, 2] [1, 1] 2.0
    """

    def __init__(
        self,
        n_ranks: int,
        look: Callable[[], list[np.ndarray]],
        save: Callable[[], tuple[dict[str, Any], list[dict[str, np.ndarray]]]],
    ) -> None:
        self.epoch = 0
        self.interrupted = False
        self.delay: int | None = None
        self._outputs: list[list[np.ndarray]] = [[] for _ in range(n_ranks)]
        self.exchanges, self.bytes = [0] * n_ranks, [0] * n_ranks
        self.waited = [0.0] * n_ranks
        self.staleness: list[int] = []
        self.order: list[tuple[int, int, str, int, int]] = []
        self._look = look  # returns the present mean or centre
        self._save = save  # returns facts about the loop, and the state of each rank
        self._values: list[np.ndarray] | None = None
        self._loss_before: float | None = None  # mean loss of the last epoch, if its records are on other ranks

    def __repr__(self) -> str:
        delay = "" if self.delay is None else f", with a delay of {self.delay} steps"
        made = f"{self.epoch} epochs, {self.steps} steps and {self.exchanges} exchanges on the ranks"
        return f"<synkhronos.Run: {made}{delay}>"

    @property
    def outputs(self) -> list[np.ndarray]:
        n_outputs = max([parts[0].shape[1] for parts in self._outputs if parts], default=0)
        return [np.concatenate([np.zeros((0, n_outputs)), *parts]) for parts in self._outputs]

    @property
    def steps(self) -> list[int]:
        """The number of steps of each rank."""
        return [sum(map(len, parts)) for parts in self._outputs]

    @property
    def losses(self) -> np.ndarray:
        """The first output of each step: its mean over the ranks, for as many steps as all ranks have made."""
        outputs, n_steps = self.outputs, min(self.steps)
        if not n_steps or not outputs[0].shape[1]:
            return np.zeros(0)
        return np.mean([one[:n_steps, 0] for one in outputs], axis=0)

    @property
    def params(self) -> list[np.ndarray]:
        """The parameters: their mean over the ranks, or the mean of the nodes' centres. Looking changes no rank."""
        return self._look() if self._values is None else self._values

    def state(self) -> dict[str, np.ndarray]:
        """Return all that another loop needs to continue from here; call it in ``on_epoch``.

        It changes nothing. `synkhronos.extensions.checkpoint.save_run` writes it to a file.

        Returns
        -------
        dict of str to numpy.ndarray
            The value of ``resume`` for `loop`: on each rank the variables that the function updates, and the state of
            the rule, messages on their way included; the parameters; and the records.

        Raises
        ------
        SessionError
            If the loop has ended.
        TypeError
            If a value cannot be saved without pickling, or the function is not one of `synkhronos.function`.

        Examples
        --------
        >>> w, x = theano.shared(0.0, "w"), T.dvector("x")
        >>> with synk.session(2):
        ...     f = synk.function([x], w ** 2, updates=[(w, w + x.mean())])
        ...     options = {"params": [w], "batch_size": 1, "rule": synk.rules.LocalSGD(every=2)}
        ...     states = []
        ...     run = synk.loop(f, [np.ones(4)], epochs=3, on_epoch=lambda run: states.append(run.state()), **options)
        ...     again = synk.loop(f, [np.ones(4)], epochs=3, resume=states[0], **options)
        >>> print(run.params[0], again.params[0], again.steps)
        6.0 6.0 [6, 6]
        """
        if self._values is not None:
            raise SessionError("run.state() was called after the end of the loop; call it in on_epoch")
        about, ranks = self._save()
        state = {f"params/{i}": np.array(value) for i, value in enumerate(self.params)}
        for rank, arrays in enumerate(ranks):
            state.update({f"{rank}/{name}": value for name, value in arrays.items()})
        state.update({f"records/outputs/{rank}": one for rank, one in enumerate(self.outputs)})
        for name in ("exchanges", "bytes", "waited", "staleness"):
            state[f"records/{name}"] = np.array(getattr(self, name), np.float64 if name == "waited" else np.int64)
        order = [(turn, rank, _KINDS.index(kind), step, other) for turn, rank, kind, step, other in self.order]
        state["records/order"] = np.array(order, np.int64).reshape(-1, 5)
        facts = {"version": _VERSION, "epoch": self.epoch, "n_ranks": len(ranks), "names": sorted(state), **about}
        return {"about": np.array(json.dumps(facts)), **state}

    def _restore(self, saved: Saved, same_ranks: bool) -> None:
        """Set the epoch, and the records if they are of as many ranks."""
        self.epoch = saved.about["epoch"]
        if not same_ranks:
            self._loss_before = saved.about["mean_loss"]
            return
        self.delay = saved.about.get("delay")
        outputs = [saved.arrays[f"records/outputs/{rank}"] for rank in range(len(self._outputs))]
        self._outputs = [[one] if len(one) else [] for one in outputs]
        for name in ("exchanges", "bytes", "waited", "staleness"):
            setattr(self, name, saved.arrays[f"records/{name}"].tolist())
        rows = saved.arrays["records/order"].tolist()
        self.order = [(turn, rank, _KINDS[kind], step, other) for turn, rank, kind, step, other in rows]

    def _add(self, records: Sequence[Records]) -> None:
        """Add records of all ranks."""
        for rank, one in enumerate(records):
            if one.outputs:
                self._outputs[rank].append(np.array(one.outputs, np.float64))
            self.exchanges[rank] += one.n_exchanges
            self.bytes[rank] += one.n_bytes
            self.waited[rank] += one.waited
            self.order += [(turn, rank, kind, step, other) for turn, kind, step, other in one.order]
        self.order.sort()
        self.staleness += records[0].ages

    def _mean_loss(self, first: int) -> float:
        """Return the mean of the first output over the steps of all ranks from step ``first`` on."""
        if self._loss_before is not None:
            loss, self._loss_before = self._loss_before, None
            return loss
        last = [one[first:, 0] for one in self.outputs if one.shape[1]]
        return float(np.concatenate(last).mean()) if last else math.nan


def states_of_ranks(session: Session, key: int, variables: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    """Return the state of a loop on each rank, with the values of variables.

    A command returns a part of each state, so that the time-out limits the transfer of a part only.
    """
    archives = [bytearray() for _ in range(session.n_ranks)]
    with session.lock:
        for start in itertools.count(0, STATE_PART):
            parts = [part for (part,) in session.run(SaveLoop(key, variables, start))]
            for archive, part in zip(archives, parts):
                archive.extend(part)
            if max(map(len, parts)) < STATE_PART:
                break
    return [unpack(archives.pop(0)) for _ in range(session.n_ranks)]  # so that few of them exist twice


def bar_of(is_shown: bool, n_steps: int, loops: np.ndarray | None = None) -> AbstractContextManager[Progress]:
    """Return a progress bar of a loop, or one that is not shown.

    Parameters
    ----------
    is_shown : bool
    n_steps : int
        Number of steps, of all ranks of this node if ``loops`` is given.
    loops : int64 array of shape (n_ranks, 4), optional
        See `StatusBoard.loops`. ``None``: the loop counts its steps.
    """
    if not is_shown:
        return nullcontext(Progress("training"))
    return progress("training", n_steps, None if loops is None else Speed(loops).look)


class Speed:
    """Progress of the ranks of this node in a loop, for a progress bar.

    Parameters
    ----------
    loops : int64 array of shape (n_ranks, 4)
        See `StatusBoard.loops`.
    """

    def __init__(self, loops: np.ndarray) -> None:
        self._loops = loops
        self._steps, self._looked = loops[:, 1].copy(), time.monotonic()

    def look(self) -> tuple[int, str]:
        """Return the number of steps of all ranks, and their losses and steps per second since the last look."""
        steps, now = self._loops[:, 1].copy(), time.monotonic()
        speeds = (steps - self._steps) / max(now - self._looked, 1e-3)
        self._steps, self._looked = steps, now
        losses = self._loops[:, 3].copy().view(np.float64)
        return int(steps.sum()), f"loss {_numbers(losses, '.3g')}, steps/s {_numbers(speeds, '.0f')}"


def _numbers(values: np.ndarray, form: str) -> str:
    """Return the values of few ranks, or the smallest and the largest one of many."""
    if len(values) > _MOST_SHOWN:
        return f"{values.min():{form}} to {values.max():{form}}"
    return " ".join(f"{value:{form}}" for value in values)


class Saved:
    """A state of a loop, as `Run.state` returns it.

    Parameters
    ----------
    state : mapping of str to array

    Attributes
    ----------
    arrays : mapping of str to array
    about : dict
        Facts about the loop.

    Raises
    ------
    TypeError, ValueError
        If it is not such a state.
    """

    def __init__(self, state: Any) -> None:
        if not isinstance(state, Mapping) or "about" not in state:
            kind = type(state).__name__
            raise TypeError(f"resume is {kind}; expected what run.state() or checkpoint.load_run returns")
        self.arrays = state
        try:
            self.about = json.loads(str(np.asarray(state["about"])))
            version, names = self.about["version"], {*self.about["names"]}
            self.n_ranks: int = self.about["n_ranks"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError("about of resume is damaged; expected what run.state() returned") from error
        if version != _VERSION:
            raise ValueError(f"resume has the version {version}; expected {_VERSION}")
        missing = sorted(names - {*state})
        if missing:
            raise ValueError(f"resume has no {missing[0]!r}; expected all arrays that run.state() returned")

    def of_rank(self, rank: int) -> dict[str, np.ndarray]:
        """Return the arrays of a rank."""
        prefix = f"{rank}/"
        return {name[len(prefix) :]: np.asarray(one) for name, one in self.arrays.items() if name.startswith(prefix)}

    def params(self) -> list[np.ndarray]:
        """Return the mean of the parameters, or the centre."""
        return [np.asarray(self.arrays[f"params/{i}"]) for i in range(len(self.about["params"]))]

    def merged(self) -> dict[str, np.ndarray]:
        """Return the state of each rank in a session of another size.

        The parameters are the mean or the centre. Other numbers are averaged over the ranks, unless they are equal;
        those of integers are the first rank's. Random states, and messages on their way, are left out.
        """
        ranks = [self.of_rank(rank) for rank in range(self.n_ranks)]
        merged = {f"variables/{i}": value for i, value in enumerate(self.params())}
        streams = [f"variables/{i}" for i in self.about["streams"]]
        for name, first in ranks[0].items():
            if name.startswith(("variables/", "first/", "rule/")) and name not in merged and name not in streams:
                values = [one[name] for one in ranks]
                differ = first.dtype.kind == "f" and any(not np.array_equal(first, one) for one in values)
                merged[name] = np.mean(values, axis=0).astype(first.dtype) if differ else first
        return merged

    def check(self, **expected: Any) -> None:
        """Compare facts about the saved loop with those of this one.

        Raises
        ------
        ValueError
            If one differs.
        """
        for name, value in expected.items():
            if self.about[name] != value:
                was = self.about[name]
                raise ValueError(f"resume has {name} = {was!r}, and this loop has {value!r}; expected equal ones")

    def check_length(self, n_ranks: int, in_epoch: int, is_over: bool) -> None:
        """Compare the number of steps in an epoch with that of this loop, which may have no further epoch.

        Raises
        ------
        ValueError
            If they differ on as many ranks, or the state was saved within an epoch.
        """
        if self.n_ranks == n_ranks:
            self.check(steps_per_epoch=in_epoch)
        made, wanted = self.about["last_epoch"], self.about["steps_per_epoch"]
        if made < wanted and not is_over:
            raise ValueError(f"resume has {made} steps of the last epoch; expected {wanted}, a complete epoch")


# -- a call for each step


def _refuse_state() -> Any:
    raise TypeError(f"run.state() got a loop that calls its function for each step; {ONE_COMMAND}")


def run_by_calls(
    session: Session,
    f: Any,
    inputs: Any,
    params: Sequence[Any],
    *,
    size: int,
    plan: Length,
    schedule: Mapping[Any, Any] | None,
    on_epoch: Callable[[Run], Any] | None,
    seed: int,
    progress: bool,
) -> Run:
    """Call a function for each step, with the rows of all ranks."""
    if callable(inputs):
        raise TypeError("batches from a callable need a rule with local steps, such as rules.LocalSGD")
    if isinstance(f, Function) and not isinstance(f, ExactFunction) and f.updates_alone():
        raise TypeError(
            f"{f!r} updates variables on each rank alone; build it with exact=True or with collectives, or pass a rule "
            "such as rules.LocalSGD(every=1)"
        )
    inputs, n_ranks, step = read(inputs), session.n_ranks, itertools.count()
    by_name = {var.name: var for var in (f.get_shared() if isinstance(f, Function) else ()) if var.name}
    given = {by_name.get(key, key) if isinstance(key, str) else key: one for key, one in (schedule or {}).items()}
    shared = {var: one for var, one in given.items() if _graph.is_shared_variable(var)}
    given = {key: one for key, one in given.items() if key not in shared}
    named = {key if isinstance(key, str) else key.name: value for key, value in given.items()}
    n_rows = length_of(inputs)
    run = Run(n_ranks, lambda: [var.get_value() for var in params], _refuse_state)
    in_epoch = math.ceil(n_rows / (size * n_ranks))
    bar = contextlib.ExitStack()
    try:
        work = bar.enter_context(bar_of(progress, plan.total(in_epoch)))
        while n_steps := plan.of_epoch(run.epoch, in_epoch):
            order = shuffled(n_rows, n_steps * size * n_ranks, seed, run.epoch)
            for rows in order.reshape(n_steps, -1):
                number = next(step)
                hyper = {name: one(number) if callable(one) else one for name, one in named.items()}
                for var, one in shared.items():
                    broadcast(var, one(number) if callable(one) else one)
                outputs = f(*inputs, batch=rows, **hyper)
                values = outputs if isinstance(outputs, (list, tuple)) else [outputs]
                row = [float(one) for one in values]
                run._add([Records([row], 0, [], 0.0, 0, [])] * n_ranks)
                work.done += 1
            run.epoch += 1
            if not goes_on(on_epoch, run):
                break
    except KeyboardInterrupt:
        if session.broken:
            raise
        run.interrupted = True
    finally:
        bar.close()
    run._values = [var.get_value() for var in params]
    return run
