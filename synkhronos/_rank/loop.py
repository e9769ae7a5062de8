"""Execute a training loop on one rank: steps on batches of its own, with the exchanges of a training rule between."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Iterable, Iterator
from time import monotonic_ns
from typing import Any, Callable

import cloudpickle
import numpy as np

from synkhronos import _graph
from synkhronos._backends import to_host
from synkhronos._collectives import HostTransport
from synkhronos._memory import SegmentTable
from synkhronos._processes import COLLECTIVES, FUNCTION, POLL, SHUFFLE, Deadline, ProcessGroup
from synkhronos._rank.commands import STATE_PART, EndLoop, Loop, RestoreLoop, SaveLoop, Source
from synkhronos._rank.exchanges import Averages, Parameters, Together
from synkhronos._rank.messages import Records
from synkhronos._rank.results import RowViews
from synkhronos._rank.unsynchronized import Centre, Gossip
from synkhronos._utils.interrupts import Background, deferred_interrupts
from synkhronos._utils.rows import Rows
from synkhronos.errors import SessionError

#: Limits of the steps of one command, and of its barriers, which have different numbers (``STEPS_BITS`` in sync.c).
MOST_STEPS, MOST_BARRIERS = 1 << 16, 1 << 24

_NOTHING = np.empty(0, np.uint8)
_ENGINES: dict[str, Any] = {"none": Together, "average": Averages, "centre": Centre, "gossip": Gossip}


class Loops:
    """The training loops of one rank.

    Parameters
    ----------
    group : ProcessGroup
    variables : VariableTable
    segments : SegmentTable
    row_views : RowViews
    transport : HostTransport
    runner : callable
        ``runner(function, together)`` returns a callable that computes the outputs of a function, with its collectives
        over the ranks that `Exchange.together` names.
    """

    def __init__(
        self,
        group: ProcessGroup,
        variables: _graph.VariableTable,
        segments: SegmentTable,
        row_views: RowViews,
        *,
        transport: HostTransport,
        runner: Callable[[int, str | None], Callable[[list[Any]], list[Any]]],
    ) -> None:
        self.group, self.variables, self.segments, self.transport = group, variables, segments, transport
        self.rank, self.n_ranks = group.world.first + group.rank, group.world.n_ranks
        self.check = group.check
        is_leader = group.rank == group.master_rank
        self.check_processes = group.check_workers if is_leader else group.check_controller
        self._row_views, self._runner = row_views, runner
        self._is_controller = self.rank == group.world.master_rank
        self._loops: dict[int, tuple[Parameters, Any]] = {}
        self._archive = _NOTHING  # the state of a loop, of which not all parts were returned yet

    def run(self, loop: Loop) -> Records:
        """Make steps, and return their records; an interrupt or a failure of another rank ends it between two steps."""
        if not loop.number:
            parameters = Parameters(self, loop.exchange)
            self._loops[loop.key] = parameters, _ENGINES[parameters.rule.engine](parameters)
        of, engine = self._of(loop.key)
        began, exchange = monotonic_ns(), loop.exchange
        of.use(exchange.rule)
        run, timeline = self._runner(loop.function, exchange.together), self.group.timeline
        numbers = self._numbers(loop) if exchange.takes_rows else ()
        if loop.mean_loss is not None:
            with of.named():
                of.rule.on_epoch(loop.mean_loss, of.state)
        scheduled = [self.segments.view(ref) for ref in loop.scheduled]
        shared = [(self.variables[key], self.segments.view(ref)) for key, ref in loop.shared]
        undivided: Callable[[], Any] = contextlib.nullcontext
        if self._is_controller:  # in a step with collectives, which waits for other ranks, a second interrupt ends it
            undivided = functools.partial(deferred_interrupts, may_end=exchange.together is not None)
        turns = engine.turns(loop)
        status = of.status
        for turn, inputs in self._batches(loop, of, turns):
            self.group.deadline.begin()  # `timeout` limits the time of a step
            self.check()
            number = (turn - loop.first) // self.n_ranks
            with undivided():
                with of.named():
                    engine.before_step()
                timeline.switch(FUNCTION)
                for var, values in shared:
                    _graph.copy_array(var, values[number % len(values), ...])
                outputs = run([*inputs, *(values[number % len(values), ...] for values in scheduled), *numbers])
                of.outputs.append([float(to_host(one)) for one in outputs])
                of.n_steps += 1
                status[0], status[1] = monotonic_ns(), of.n_steps
                if of.outputs[-1]:
                    of.status_loss[0] = of.outputs[-1][0]
                timeline.switch(COLLECTIVES)
                if not engine.waits:
                    with of.named():
                        engine.after_step()
            if engine.waits:
                with of.named():
                    engine.after_step()
        engine.after_steps()
        with undivided():
            of.given = loop.number, of.take_records()._replace(seconds=(monotonic_ns() - began) / 1e9)
        return of.given[1]

    def _numbers(self, loop: Loop) -> list[np.ndarray]:
        """Return the further inputs of an exact function, of which the ranks of a node make a step together."""
        size, group = loop.order.shape[1], self.group
        return list(map(np.asarray, (size * group.n_ranks, size * group.rank, size)))

    def _of(self, key: int) -> tuple[Parameters, Any]:
        """Return the state of a loop."""
        if key not in self._loops:
            raise SessionError("this rank does not know the loop, because its worker has replaced a dead one meanwhile")
        return self._loops[key]

    def _check_own(self) -> None:
        """Check as `check`, while this rank itself is what the others wait for."""
        self.group.deadline.begin()
        self.check()

    def _batches(self, loop: Loop, of: Parameters, turns: Iterator[int]) -> Iterator[tuple[int, list[Any]]]:
        """Yield the numbers of batches and the inputs of their steps."""
        if not loop.n_batches:
            return
        if loop.batches is None:
            for turn in turns:
                yield turn, self._rows(loop, turn)
            return
        if of.items is None or of.epoch_of_items != loop.epoch:
            of.epoch_of_items = loop.epoch
            random = np.random.default_rng([loop.exchange.seed, loop.epoch, self.rank])
            make = functools.partial(cloudpickle.loads(loop.batches), self.rank, self.n_ranks, loop.epoch, random)
            seconds = self.group.deadline.seconds if self._is_controller else None  # it watches the other ranks
            of.items = Ahead(make, self._check_own, seconds)
        for turn in turns:
            item = of.items.next(of.n_steps)
            if item is None:
                if of.rule.engine == "average":
                    raise ValueError("batches(...) has no more items; expected one for each step")
                return  # this rank is done
            if of.rule.engine != "average" or turn + self.n_ranks < loop.first + loop.n_batches:
                of.items.begin()
            yield turn, item

    def _rows(self, loop: Loop, turn: int) -> list[Any]:
        self.group.timeline.switch(SHUFFLE)
        size = loop.order.shape[1]
        order = loop.order._replace(shape=(loop.order.shape[0] * size,))
        part = Rows(turn * size, (turn + 1) * size)
        take = self._row_views.take
        return [take(Source(ref, order), part, (loop.function, number)) for number, ref in enumerate(loop.data)]

    def end(self, command: EndLoop) -> tuple[list[Records], list[np.ndarray] | None] | None:
        """Complete the exchanges, and set the parameters to the result; return the records, and the result."""
        if not command.keep:
            self.group.loops[self.group.rank, 1:] = 0
        if command.discard:
            self._loops.pop(command.key, None)
            self._archive = _NOTHING
            return None
        of, engine = self._of(command.key)
        self.group.deadline.begin()
        with of.named():
            x = engine.result(command.drop, command.keep)
        values = [view.copy() for view in of.split(x)] if self._is_controller else None
        if command.keep:
            return [], values
        of.unpack(x)
        if of.others:
            of.average_others()
        self.transport.barrier()
        lost = [of.given[1]] if of.given is not None and of.given[0] == command.unanswered else []
        return [*lost, of.take_records()], values

    def save(self, command: SaveLoop) -> list[np.ndarray]:
        """Return a part of the state of a loop on this rank; it is empty after the end."""
        loop = self._of(command.key)
        if not command.start:
            self._archive = pack(self._state(*loop, command.variables))
        part = self._archive[command.start : command.start + STATE_PART]
        if len(part) < STATE_PART:
            self._archive = _NOTHING
        return [part]

    def _state(self, of: Parameters, engine: Any, variables: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return the state of a loop, as arrays that can be saved without pickling."""
        state: dict[str, Any] = {"n_steps": of.n_steps, "random": _random_text(of.random)}
        for number, key in enumerate(variables):
            var = self.variables[key]
            value = _graph.get_array(var)
            if _graph.is_tensor_variable(var):
                state[f"variables/{number}"] = to_host(value)
            else:
                state[f"random/{number}"] = _random_text(value, var)
        state.update({f"first/{number}": value for number, value in enumerate(of.first_others)})
        state.update({f"rule/{name}": value for name, value in of.state.items()})
        state.update({f"engine/{name}": value for name, value in engine.state().items()})
        if of.reference is not None:
            state["reference"] = of.reference
        arrays = {name: np.array(value) for name, value in state.items()}
        for name, value in arrays.items():
            if value.dtype.hasobject:
                raise TypeError(f"{name} of {of.rule!r} is {state[name]!r}; expected a number or an array, to be saved")
        return arrays

    def restore(self, command: RestoreLoop) -> None:
        """Continue a loop from a state."""
        of, engine = self._of(command.key)
        state = unpack(self.segments.view(command.states[self.rank]).tobytes())
        of.n_steps = int(state["n_steps"]) if command.n_steps is None else command.n_steps
        for number, key in enumerate(command.variables):
            if f"variables/{number}" in state:
                var, value = self.variables[key], state[f"variables/{number}"]
                own = _graph.get_array(var)
                if (value.shape, value.dtype) != (own.shape, own.dtype):
                    raise ValueError(
                        f"resume has {value.dtype} of shape {value.shape} for {var}; expected {own.dtype} of shape "
                        f"{own.shape}"
                    )
                _graph.copy_array(var, value)
            elif f"random/{number}" in state:
                _set_random(_graph.get_array(self.variables[key]), state[f"random/{number}"])
        of.first_others = [state[f"first/{number}"] for number in range(len(of.first_others))]
        x = of.pack()
        if of.reference is not None:
            of.reference[:] = state["reference"]
        if "random" in state:
            _set_random(of.random, state["random"])
        if of.rule.engine == "average" or command.n_steps is None:
            saved = {name: value if value.ndim else value.item() for name, value in _within("rule", state).items()}
            with of.named():
                resumes = of.rule.engine == "average"
                of.state = of.rule.resume(saved, x.copy(), of.n_members, of.n_steps) if resumes else saved
        elif of.rule.engine == "centre":
            of.state = of.rule.begin(x.copy(), of.n_members)
        engine.restore(_within("engine", state))


def pack(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return arrays as an archive: the bytes that `numpy.savez` writes."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return np.frombuffer(file.getbuffer(), np.uint8)


def unpack(archive: bytes | bytearray) -> dict[str, np.ndarray]:
    """Return the arrays of an archive."""
    with np.load(io.BytesIO(archive), allow_pickle=False) as arrays:
        return dict(arrays)


def _within(name: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays below a name."""
    return {key[len(name) + 1 :]: value for key, value in state.items() if key.startswith(f"{name}/")}


def _random_text(value: Any, var: Any = None) -> str:
    """Return the state of a random generator of NumPy as JSON."""
    if isinstance(value, np.random.RandomState):
        state: Any = value.get_state(legacy=False)
    elif isinstance(value, np.random.Generator):
        state = value.bit_generator.state
    else:
        raise TypeError(f"{var} is {type(value).__name__}; expected an array or a random state, to be saved")
    return json.dumps(state, default=np.ndarray.tolist)


def _set_random(value: Any, text: np.ndarray) -> None:
    """Set the state of a random generator of NumPy."""
    state = json.loads(str(text))
    if isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value.bit_generator.state = state


class Ahead:
    """Batches that the program makes, of which a thread prepares the next one while the present one is used.

    Parameters
    ----------
    make : callable
        Returns an iterable of the batches; called in a thread, too.
    check : callable
        Called while this rank waits for an item; it raises if the wait must end.
    seconds : float or None
        Longest wait for an item; ``None``: no limit.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], check: Callable[[], None], seconds: float | None) -> None:
        self._make, self._check, self._seconds = make, check, seconds
        self._items: Iterator[Any] | None = None
        self._next: Background | None = None

    def begin(self) -> None:
        """Begin to prepare the next item."""
        self._next = Background(self._prepare, "batches", daemon=True)
        self._next.start()

    def _prepare(self) -> list[Any] | None:
        if self._items is None:
            self._items = iter(self._make())
        item = next(self._items, None)
        # copied, because the program may fill the same arrays again while the step uses them
        return None if item is None else [np.array(one) if isinstance(one, np.ndarray) else one for one in item]

    def next(self, step: int) -> list[Any] | None:
        """Return the next item as a list; ``None`` if there is none.

        Raises
        ------
        TimeoutError
            If the wait exceeds the limit. The thread remains in the program's code, which cannot be interrupted.
        """
        if self._next is None:
            self.begin()
        assert self._next is not None
        deadline = Deadline(self._seconds)
        while not self._next.wait(POLL):
            self._check()
            if deadline.is_over():
                raise TimeoutError(f"batches(...) returned no item for step {step} within {self._seconds} seconds")
        item, self._next = self._next.outcome(), None
        return item
