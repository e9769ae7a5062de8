"""What a `Function` shows of itself: in text, in notebooks, and to `dir`.

`Function`: a compiled function that every rank computes on its share of the data.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from synkhronos import _graph
from synkhronos._api.arguments import arrange, check_num_slices, check_subset, describe_inputs, inputs_of
from synkhronos._api.call_plan import LastCall, Planner, look_at
from synkhronos._api.checks import Averages, Doubt, Serial, environment_asks, is_asked
from synkhronos._api.combine import Meetings, Results
from synkhronos._api.data_arrays import Data
from synkhronos._api.make_data import data
from synkhronos._api.rows import Selector, rows_on_ranks, sliceable_rows
from synkhronos._backends import as_asked, machine
from synkhronos._graph import Variant
from synkhronos._processes import COLLECTIVES
from synkhronos._rank import Call
from synkhronos._session import Session, current, functions
from synkhronos._utils.display import html_table, public_names
from synkhronos.errors import SessionError

__all__ = ["Appearance", "Function"]


class Appearance:
    """The part of a `Function` that people look at."""

    name: str | None
    _graph: Any
    _results: Any
    _session: Any

    def __repr__(self) -> str:
        session = None if self._session is None else self._session()
        ranks = "no session" if session is None or session.broken else f"{session.n_ranks} ranks"
        return f"<synkhronos.Function {self.name or ''}({describe_inputs(self._graph)}) -> {self._results}; {ranks}>"

    def _repr_html_(self) -> str:
        """Inputs and outputs as a table, as notebooks show it."""
        return html_table(
            [("Function", self.name or ""), ("inputs", describe_inputs(self._graph)), ("outputs", self._results)]
        )

    def __dir__(self) -> list[str]:
        return public_names(self, "join")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} belongs to its session and can be neither copied nor pickled: build it anew, by "
            "synkhronos.function, where it is wanted; the values of its shared variables can be saved by "
            "synkhronos.extensions.checkpoint"
        )


class Function(Appearance):
    """A function on all ranks; made by `function`, called like one of Theano or PyTensor.

    Attributes
    ----------
    name : str or None
    output_modes : list of str or None
        The op of each output.
    update_modes : list of str
        The op of each update that was given.
    counts : tuple of int, or None
        How many data points each rank computed in the last call: the weights of ``"avg"``. Ones, for a function
        without data; ``None`` before the first call. In a `sequence` they are known at once.
    """

    def __init__(
        self,
        session: Session,
        graph: _graph.Graph,
        results: Results,
        update_modes: dict[Any, str],
        *,
        named: Sequence[bool],
        named_updates: Sequence[Any],
        single: bool,
        name: str | None,
    ) -> None:
        self.name = name
        self.output_modes = results.modes
        self.update_modes = list(update_modes.values())
        self.counts: tuple[int, ...] | None = None
        self._graph = self._user = graph
        self._inputs = inputs_of(graph)
        self._all = range(len(results.modes))  # outputs
        self._results = results
        self._serial = Serial(graph, results)
        self._checks = environment_asks() and not graph.is_random
        self._single = single
        self._plain = Variant(device=session.on_gpu)
        self._theano = graph.compile(self._plain)
        self._meetings = Meetings(graph, self._theano, results)
        self._planner = Planner(graph, results, self._meetings, update_modes, session.on_gpu)
        self._averages = Averages(graph, self._serial, results, self._meetings, named, named_updates=named_updates)
        self._keys: dict[tuple[_graph.Graph, Variant], int] = {}
        self._session: weakref.ref[Session] | None = None
        self._last, self._n_changes = LastCall(), 0
        self._doubt = Doubt(graph, results.modes)
        functions.add(self)
        self.join(session)

    maker: Any = property(lambda self: self._theano.maker, doc="That of the master's own function, with its graph.")
    fn: Any = property(lambda self: machine(self._theano), doc="What the master's own function runs.")
    vm: Any = property(lambda self: self.fn, doc="The same, by PyTensor's name.")
    profile: Any = property(lambda self: self._theano.profile, doc="The engine's profile of it, or ``None``.")

    def get_shared(self) -> list[Any]:
        """The shared variables that the function reads or updates, as of the engine's own."""
        return _graph.shared_variables_of(self._theano)

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function of Theano or PyTensor, in the master only, on the whole arguments."""
        subset = kwargs.pop("output_subset", None)
        given = arrange(self._graph, args, kwargs, ("output_subset",))
        inputs = [value.data if isinstance(value, Data) else value for value in given]
        values = self._user.compute(self._plain, inputs, subset)
        outputs = self._graph.outputs if subset is None else [self._graph.outputs[i] for i in subset]
        values = [as_asked(value, output) for value, output in zip(values, outputs)]
        return values[0] if self._single and len(values) == 1 and subset is None else values

    def build_inputs(
        self, *args: Any, force_cast: bool = False, oversize: float = 1, minibatch: bool = False, **kwargs: Any
    ) -> Any:
        """Make `Data` for each input, from one value for each, given in order or by name.

        Returns
        -------
        Data, or list of Data
            A list unless the function has one input. A value that is no dense array, such as a sparse matrix, is
            returned as it is.
        """
        values = arrange(self._graph, args, kwargs, ("force_cast", "oversize", "minibatch"))
        made = [
            value
            if i in self._graph.packed
            else data(value, var, minibatch=minibatch, force_cast=force_cast, oversize=oversize)
            for i, (value, var) in enumerate(zip(values, self._graph.input_variables))
        ]
        return made[0] if len(made) == 1 else made

    def __call__(
        self,
        *args: Any,
        output_subset: Any = None,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        check_against_theano: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute on all ranks.

        Parameters
        ----------
        *args, **kwargs : Data or array_like
            The scattered inputs, then the broadcast ones, in order or by name.
        output_subset : list of int, optional
            Which outputs to compute, as in Theano.
        batch : int, slice, or list / 1-d array of integers or booleans, optional
            Which rows of the scattered inputs to use: picked from the whole data set, before scattering.
        batch_s : the same, or a list with one slice or list for each rank, optional
            Which rows of the sliceable shared variables each rank uses.
        num_slices : int
            Each rank computes its share in this many pieces; updates are computed from the values before the call and
            applied once.
        check_against_theano : bool, optional
            Compare the outputs with what one process gives for the same rows in one piece, in the master. Default: what
            the environment variable ``SYNKHRONOS_CHECK`` said (``1`` or ``0``) when the function was built, but for
            functions that draw random numbers.

        Returns
        -------
        array, list of array
            As in Theano; a list where the function was given one. In a `sequence`: a `Future` of that.

        Raises
        ------
        TypeError, ValueError, IndexError
            For bad arguments, before anything is sent.
        ValueError
            After the call and its updates: for what has a row for each data point and is averaged though no op says so,
            and where outputs differ from those. The message has the largest difference.
        WorkerError
            If a rank fails.
        """
        session = current("Function")
        values: Sequence[Any] = args
        if kwargs or len(args) != len(self._inputs) or type(None) in map(type, args):
            values = arrange(self._graph, args, kwargs)
        if type(num_slices) is not int or num_slices < 1:
            num_slices = check_num_slices(num_slices)
        subset = None if output_subset is None else check_subset(output_subset, len(self.output_modes))
        wanted = self._all if subset is None else subset
        with session.lock, session.timeline.call(self.name or "function"):
            place = session.sequencer.place
            is_checked = is_asked(check_against_theano, self._checks, place)
            session.check_usable()
            if not self.join(session):
                raise SessionError(f"{self!r} was built on GPUs; this session computes on CPU cores: build it anew")
            if session.replicas.n_changes != self._n_changes:
                self._averages.see_parts(session, session.replicas.scattered(self.get_shared()))
                self._n_changes = session.replicas.n_changes
            call, sight, rows, expected = None, None, None, None
            on_ranks = None
            if self._graph.sliceable_shareds:
                self._distributed(session, self._plain, self._graph)
                on_ranks = (self._n_changes, *rows_on_ranks(session, self._graph))
            if not is_checked and batch_s is None:
                scattered = self._inputs[: self._graph.n_scattered]
                sight = look_at(values, batch, scattered, on_ranks, num_slices, subset, place)
                call, rows = (None, None) if sight is None else self._last.find(session, sight)
            if call is None:
                selector = Selector(session, self._graph, self._inputs, values, batch)
                rows = sliceable_rows(session, self._graph, batch_s, num_slices)
                if is_checked:
                    expected = self._serial.expected(session, selector.chosen(), rows, wanted)
                distributed = functools.partial(self._distributed, session)
                call, refs = self._planner.plan(session, distributed, selector, rows, num_slices, subset)
                self._last.keep(sight, call, refs, rows)
            single = self._single and bool(self.output_modes) and subset is None

            def finish(results: Sequence[Any]) -> Any:
                def select() -> Selector:
                    return Selector(session, self._graph, self._inputs, values, batch)

                outputs = self._combined(session, results, call, wanted, select, rows)
                if expected is not None:
                    self._serial.compare(outputs, expected, wanted)
                return outputs[0] if single else outputs

            if place:
                self._results.check_not_borrowed()
                session.sequencer.keep([value.memory for value in values if isinstance(value, Data)])
                self.counts = call.counts
            return session.submit(call, finish, shared=self.get_shared, check=self._check_values)

    def _check_values(self, session: Session) -> None:
        """The master's values of variables are its own."""

    def _combined(
        self, session: Session, results: Sequence[Any], call: Call, wanted: Sequence[int], select: Any, rows: Any
    ) -> list[Any]:
        """The outputs, of those of all ranks; or what is wrong with these."""
        session.timeline.switch(COLLECTIVES)
        self._doubt.settle(self.name, results)
        self.counts = call.counts
        weights = (1,) * session.n_ranks if call.everybody else call.counts
        self._averages.judge(results, call, wanted, select, rows)
        return self._results.combine(results, call, wanted, weights, meetings=self._meetings, private=session.private)

    def _distributed(self, session: Session, variant: Variant, graph: _graph.Graph) -> int:
        """The key of a variant, which every rank has, and the plain function too."""
        key = self._key(session, variant, graph)
        session.distribute((self._keys[self._graph, self._plain], key))
        return key

    def join(self, session: Session) -> bool:
        """Become a function of a session, to be distributed there; returns whether that is possible."""
        if self._session is None or self._session() is not session:
            if self._plain.device and not session.on_gpu:
                return False
            self._session, self._keys, self._last = weakref.ref(session), {}, LastCall()
            self._n_changes = 0
            self._key(session, self._plain, self._graph)
            session.replicas.note_data(self._graph.sliceable_shareds)
        return True

    def _key(self, session: Session, variant: Variant, graph: _graph.Graph) -> int:
        """The key of a variant in the session; compiles it and hands it in where it is new."""
        if (graph, variant) not in self._keys:
            self._keys[graph, variant] = session.add_function(graph.compile(variant), self)
        return self._keys[graph, variant]
