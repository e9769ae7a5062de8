"""`Function`: a Theano function that every rank computes on its share of the data."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from synkhronos import _graphs
from synkhronos._calls.arguments import Selector, arrange, check_num_slices, check_subset, inputs_of
from synkhronos._calls.repeats import LastCall, signature_of
from synkhronos._calls.results import Results
from synkhronos._data import Data, data
from synkhronos._graphs import Variant
from synkhronos._partition import Rows, Selection, select_per_rank
from synkhronos._rank import Call
from synkhronos._session import Session, current, functions
from synkhronos._team import COLLECTIVES
from synkhronos.errors import SessionError

__all__ = ["Function"]


class Function:
    """A function on all ranks; made by `function`, called like a Theano function.

    Attributes
    ----------
    name : str or None
    output_modes : list of str or None
        The op of each output.
    update_modes : list of str
        The op of each update that was given.
    counts : tuple of int, or None
        How many data points each rank computed in the last call: the weights of ``"avg"``. Ones, for a function
        without data; ``None`` before the first call.
    """

    def __init__(
        self,
        session: Session,
        graph: _graphs.Graph,
        results: Results,
        update_modes: dict[Any, str],
        *,
        single: bool,
        name: str | None,
    ) -> None:
        self.name = name
        self.output_modes = results.modes
        self.update_modes = list(update_modes.values())
        self.counts: tuple[int, ...] | None = None
        self._graph = graph
        self._inputs = inputs_of(graph)
        self._results = results
        self._mode_of = update_modes
        self._single = single
        self._plain = Variant(device=session.on_gpu)
        self._theano = graph.compile(self._plain)
        self._keys: dict[Variant, int] = {}
        self._session: weakref.ref[Session] | None = None
        self._last = LastCall()
        functions.add(self)
        self.join(session)

    def __repr__(self) -> str:
        return f"<synkhronos.Function {self.name or ''} of {self._graph.input_variables}>"

    def get_shared(self) -> list[Any]:
        """The shared variables that the function reads or updates, as of a Theano function."""
        return _graphs.shared_variables_of(self._theano)

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain Theano function, in the master only, on the whole arguments."""
        subset = kwargs.pop("output_subset", None)
        inputs = [value.data if isinstance(value, Data) else value for value in arrange(self._graph, args, kwargs)]
        values = self._theano(*inputs, output_subset=subset)
        outputs = self._graph.outputs if subset is None else [self._graph.outputs[i] for i in subset]
        values = [_graphs.as_asked(value, output) for value, output in zip(values, outputs)]
        return values[0] if self._single and len(values) == 1 and subset is None else values

    def build_inputs(
        self, *args: Any, force_cast: bool = False, oversize: float = 1, minibatch: bool = False, **kwargs: Any
    ) -> Any:
        """Make `Data` for each input, from one value for each, given in order or by name.

        Returns
        -------
        Data, or list of Data
            A list unless the function has one input.
        """
        values = arrange(self._graph, args, kwargs)
        made = [
            data(value, var, minibatch=minibatch, force_cast=force_cast, oversize=oversize)
            for value, var in zip(values, self._graph.input_variables)
        ]
        return made[0] if len(made) == 1 else made

    def __call__(
        self,
        *args: Any,
        output_subset: Any = None,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
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

        Returns
        -------
        array, list of array
            As in Theano; a list where the function was given one.

        Raises
        ------
        TypeError, ValueError, IndexError
            For bad arguments, before anything is sent.
        WorkerError
            If a rank fails.
        """
        session = current("Function")
        values = arrange(self._graph, args, kwargs)
        num_slices = check_num_slices(num_slices)
        subset = check_subset(output_subset, len(self.output_modes))
        with session.lock, session.timeline.call(self.name or "function"):
            session.check_usable()
            if not self.join(session):
                raise SessionError(f"{self!r} was built on GPUs; this session computes on CPU cores: build it anew")
            options = (batch_s is None, num_slices, subset)
            signature = None if self._graph.sliceable_shareds else signature_of(values, batch, *options)
            call = self._last.find(session, signature, values)
            if call is None:
                call = self._plan(session, values, batch, batch_s, num_slices, subset)
                self._last.keep(signature, call)
            results = session.run(call)
            session.timeline.switch(COLLECTIVES)
            self.counts = call.counts
            wanted = range(len(self.output_modes)) if subset is None else subset
            weights = (1,) * session.n_ranks if call.everybody else call.counts
            outputs = self._results.combine(results, session.master_rank, wanted, weights, call.nccl)
        return outputs[0] if self._single and outputs and subset is None else outputs if self.output_modes else []

    def _plan(
        self, session: Session, values: list[Any], batch: Any, batch_s: Any, num_slices: int, subset: Any
    ) -> Call:
        """Check the arguments, and stage what is not in shared memory; returns what every rank is to do."""
        selector = Selector(session, self._graph, self._inputs, values, batch)
        rows = self._rows(session, batch_s, num_slices)
        accumulate = num_slices > 1 and bool(self._graph.accumulated)
        kind = "all" if rows is None else "range" if isinstance(rows[0], Rows) else "index"
        key = self._key(session, Variant(accumulate, kind, self._plain.device))
        session.distribute((self._keys[self._plain], key))
        counts, everybody = self._count(session, selector, rows, num_slices)
        sources, row_refs = selector.stage(rows)
        wanted = range(len(self.output_modes)) if subset is None else subset
        updated = self._graph.accumulated if accumulate else []
        n = len(self.output_modes)
        return Call(
            function=key,
            inputs=sources,
            n_scattered=self._graph.n_scattered,
            shares=selector.shares,
            rows=row_refs,
            counts=counts,
            everybody=everybody,
            num_slices=num_slices,
            output_modes=tuple([self.output_modes[i] for i in wanted]),
            output_subset=None if subset is None else (*subset, *range(n, n + len(updated))),
            updated=session.keys(updated),
            update_modes=tuple([self._mode_of.get(var, "avg") for var in updated]),
            nccl=self._results.over_nccl(wanted) if session.nccl and (everybody or all(counts)) else (),
            master=session.master_rank,
        )

    def join(self, session: Session) -> bool:
        """Become a function of a session, to be distributed there; returns whether that is possible."""
        if self._session is None or self._session() is not session:
            if self._plain.device and not session.on_gpu:
                return False
            self._session, self._keys, self._last = weakref.ref(session), {}, LastCall()
            self._key(session, self._plain)
        return True

    def _key(self, session: Session, variant: Variant) -> int:
        """The key of a variant in the session; compiles it and hands it in where it is new."""
        if variant not in self._keys:
            key = self._keys[variant] = session.add_function(self._graph.compile(variant))
            weakref.finalize(self, _drop, weakref.ref(session), key).atexit = False
        return self._keys[variant]

    def _rows(self, session: Session, batch_s: Any, num_slices: int) -> list[Selection] | None:
        """The rows of the sliceable shared variables on each rank; ``None`` for all, as they are."""
        shareds = self._graph.sliceable_shareds
        if not shareds:
            if batch_s is not None:
                raise ValueError("batch_s was given, but the function was built without sliceable_shareds")
            return None
        if batch_s is None and num_slices == 1:
            return None
        lengths = self._lengths(session)
        rows = select_per_rank(batch_s, lengths)
        if all(isinstance(one, Rows) for one in rows):
            return rows
        return [np.arange(*one.bounds, dtype=np.int64) if isinstance(one, Rows) else one for one in rows]

    def _lengths(self, session: Session) -> list[int]:
        """The number of rows of the sliceable shared variables on each rank, which must agree between them."""
        session.distribute((self._keys[self._plain],))
        shapes = session.shapes(self._graph.sliceable_shareds)
        for rank, on_rank in enumerate(shapes):
            if len({shape[0] for shape in on_rank}) > 1:
                raise ValueError(
                    f"sliceable_shareds have different lengths on rank {rank}: {[shape[0] for shape in on_rank]}"
                )
        return [on_rank[0][0] for on_rank in shapes]

    def _count(
        self, session: Session, selector: Selector, rows: list[Selection] | None, num_slices: int
    ) -> tuple[tuple[int, ...], bool]:
        """How many data points each rank computes on, and whether ranks without any compute all the same."""
        if selector.shares is not None:
            counts = selector.counts
            if rows is not None and num_slices > 1 and counts != tuple(map(len, rows)):
                raise ValueError(
                    "num_slices: scattered inputs and sliceable shared variables are sliced together and need as many "
                    f"rows on each rank; got {counts} and {tuple(map(len, rows))}"
                )
        elif rows is not None:
            counts = tuple(len(one) for one in rows)
        elif self._graph.sliceable_shareds:
            counts = tuple(self._lengths(session))
        else:
            return (1,) * session.n_ranks, False
        return counts, not any(counts)


def _drop(session: weakref.ref[Session], key: int) -> None:
    alive = session()
    if alive is not None:
        alive.drop_function(key)
