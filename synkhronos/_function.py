"""`synk.function`: a Theano function that every rank computes on its share of the data."""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from synkhronos import _graphs
from synkhronos._arguments import Selector, arrange
from synkhronos._collectives import OPS, combine
from synkhronos._data import Data, data
from synkhronos._graphs import Variant
from synkhronos._lifecycle import current
from synkhronos._partition import Rows, Selection, select_per_rank
from synkhronos._protocol import Call, RowsRef
from synkhronos._session import Session
from synkhronos._variables import shapes_on_ranks

__all__ = ["Function", "function"]

OUTPUT_MODES = (*OPS, "gather", None)


def function(
    inputs: Sequence[Any],
    outputs: Any = None,
    bcast_inputs: Optional[Sequence[Any]] = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Optional[Sequence[Any]] = None,
    **kwargs: Any,
) -> Function:
    """Build a function that runs on every rank; replaces `theano.function`.

    Parameters
    ----------
    inputs : list of Theano variables or theano.In
        Scattered over the ranks along axis 0, as evenly as possible.
    outputs : variable, (variable, op), or a list of these, optional
        ``op`` says how the ranks' values become one: ``"avg"`` (default; weighted by data points), ``"sum"``,
        ``"prod"``, ``"max"``, ``"min"``, ``"gather"`` (concatenated on axis 0 in rank order), or ``None`` (the master's own
        value). ``"c_avg"``, ``"c_sum"``, … ask for the CPU path.
    bcast_inputs : list of Theano variables, optional
        Inputs that every rank uses whole.
    updates : dict, or list of (shared, expression) or (shared, expression, op), optional
        They act locally on each rank. ``op`` (default ``"avg"``) says how a call with ``num_slices`` accumulates.
    givens : dict or list of pairs, optional
        As in Theano.
    sliceable_shareds : list of shared variables, optional
        Those that hold data, subject to ``batch_s`` and ``num_slices``.
    **kwargs
        For `theano.function`.

    Returns
    -------
    Function

    Raises
    ------
    SessionError
        A `RuntimeError`: before ``fork``.
    TypeError, ValueError
        For arguments that make no sense, and whatever Theano raises.
    """
    session = current("function")
    for name, value in (("inputs", inputs), ("bcast_inputs", bcast_inputs), ("sliceable_shareds", sliceable_shareds)):
        if value is not None and not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a list; got {value!r}")
    pairs, update_modes = _read_updates(updates)
    many = isinstance(outputs, (list, tuple)) and not _is_pair(outputs)
    items = [] if outputs is None else list(outputs) if many else [outputs]
    variables, output_modes = [], []
    for position, item in enumerate(items):
        var, op = item if _is_pair(item) else (item, "avg")
        variables.append(var)
        output_modes.append(_check_op(op, f"output {position}", OUTPUT_MODES))
        if output_modes[-1] is not None and not _graphs.is_tensor_variable(getattr(var, "variable", var)):
            raise TypeError(f'output {position} must be a Theano tensor variable, or have the op None; got {var!r}')
    graph = _graphs.Graph(inputs, bcast_inputs or (), variables, pairs, givens, sliceable_shareds or (), kwargs)
    return Function(session, graph, output_modes, update_modes, single=not many, name=kwargs.get("name"))


def _is_pair(item: Any) -> bool:
    """Whether ``item`` is ``(variable, op)`` rather than a list of outputs."""
    return isinstance(item, tuple) and len(item) == 2 and (item[1] is None or isinstance(item[1], str))


def _check_op(op: Any, what: str, modes: Sequence[Any]) -> Any:
    plain = op[2:] if isinstance(op, str) and op.startswith("c_") else op
    if plain not in modes:
        raise ValueError(f"{what}: unknown op {op!r}; expected one of {', '.join(map(repr, modes))}")
    return plain


def _read_updates(updates: Any) -> Tuple[List[Tuple[Any, Any]], Dict[Any, str]]:
    pairs, modes = [], {}
    if updates is None:
        return pairs, modes
    for item in updates.items() if hasattr(updates, "items") else updates:
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            raise TypeError(f"updates must be (shared, expression) or (shared, expression, op); got {item!r}")
        pairs.append((item[0], item[1]))
        modes[item[0]] = _check_op(item[2] if len(item) == 3 else "avg", f"the update of {item[0]}", tuple(OPS))
    return pairs, modes


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
        How many data points each rank computed in the last call: the weights of ``"avg"``. Ones, for a function without
        data; ``None`` before the first call.
    """

    def __init__(
        self, session: Session, graph: _graphs.Graph, output_modes: List[Any], update_modes: Dict[Any, str], single: bool,
        name: Optional[str],
    ) -> None:
        self.name = name
        self.output_modes = output_modes
        self.update_modes = list(update_modes.values())
        self.counts: Optional[Tuple[int, ...]] = None
        self._graph = graph
        self._mode_of = update_modes
        self._single = single
        self._theano = graph.compile()
        self._keys: Dict[Variant, int] = {}
        self._session: Optional[Session] = None
        self._key(session, Variant())

    def __repr__(self) -> str:
        return f"<synkhronos.Function {self.name or ''} of {self._graph.input_variables}>"

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain Theano function, in the master only, on the whole arguments."""
        values = self._theano(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        return values[0] if self._single and len(values) == 1 and kwargs.get("output_subset") is None else values

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
        self, *args: Any, output_subset: Any = None, batch: Any = None, batch_s: Any = None, num_slices: int = 1,
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
        num_slices = _check_num_slices(num_slices)
        subset = self._check_subset(output_subset)
        with session.lock:
            session.check_usable()
            selector = Selector(session, self._graph, values, batch)
            rows = self._rows(session, batch_s, num_slices)
            accumulate = num_slices > 1 and bool(self._graph.accumulated)
            variant = Variant(accumulate, "all" if rows is None else "range" if isinstance(rows[0], Rows) else "index")
            key = self._key(session, variant)
            session.distribute()
            counts, everybody = self._count(session, selector, rows, num_slices)
            sources, row_refs = selector.stage(rows)
            wanted = self.output_modes if subset is None else [self.output_modes[i] for i in subset]
            n_outputs = len(self.output_modes)
            n_updated = len(self._graph.accumulated) if accumulate else 0
            updated = self._graph.accumulated if accumulate else []
            call = Call(
                function=key,
                inputs=sources,
                n_scattered=self._graph.n_scattered,
                shares=selector.shares,
                rows=row_refs,
                counts=counts,
                everybody=everybody,
                num_slices=num_slices,
                output_modes=tuple(wanted),
                output_subset=None if subset is None else (*subset, *range(n_outputs, n_outputs + n_updated)),
                updated=tuple(session.replica.variables.key(var) for var in updated),
                update_modes=tuple(self._mode_of.get(var, "avg") for var in updated),
            )
            results = session.run(call)
            self.counts = counts
            outputs = self._combine(session, results, wanted, counts if not everybody else (1,) * session.n_ranks)
        return outputs[0] if self._single and outputs and subset is None else outputs if self.output_modes else []

    def _combine(self, session: Session, results: List[Any], modes: Sequence[Any], counts: Sequence[int]) -> List[Any]:
        """Make one output of the ranks' values, for each output."""
        present = [rank for rank, values in enumerate(results) if values is not None]
        outputs = []
        for i, mode in enumerate(modes):
            if mode is None:
                own = results[session.master_rank]
                outputs.append(None if own is None else own[i])
            else:
                arrays = [results[rank][i] for rank in present]
                outputs.append(combine(arrays, mode, [counts[rank] for rank in present], f"output {i} of {self.name or 'the function'}"))
        return outputs

    def _key(self, session: Session, variant: Variant) -> int:
        """The key of a variant in the session; compiles it and hands it in where it is new."""
        if self._session is not session:
            self._session, self._keys = session, {}
        if variant not in self._keys:
            key = self._keys[variant] = session.add_function(self._graph.compile(variant))
            weakref.finalize(self, session.drop_function, key).atexit = False
        return self._keys[variant]

    def _rows(self, session: Session, batch_s: Any, num_slices: int) -> Optional[List[Selection]]:
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
        return [np.arange(*one, dtype=np.int64) if isinstance(one, Rows) else one for one in rows]

    def _lengths(self, session: Session) -> List[int]:
        """The number of rows of the sliceable shared variables on each rank, which must agree between them."""
        session.distribute()
        shapes = shapes_on_ranks(session, self._graph.sliceable_shareds)
        for rank, on_rank in enumerate(shapes):
            if len({shape[0] for shape in on_rank}) > 1:
                raise ValueError(f"sliceable_shareds have different lengths on rank {rank}: {[shape[0] for shape in on_rank]}")
        return [on_rank[0][0] for on_rank in shapes]

    def _count(
        self, session: Session, selector: Selector, rows: Optional[List[Selection]], num_slices: int
    ) -> Tuple[Tuple[int, ...], bool]:
        """How many data points each rank computes on, and whether ranks without any compute all the same."""
        if selector.shares is not None:
            counts = tuple(len(share) for share in selector.shares)
            if rows is not None and num_slices > 1 and counts != tuple(map(len, rows)):
                raise ValueError(
                    "num_slices: scattered inputs and sliceable shared variables are sliced together and must have as many "
                    f"rows on each rank; got {counts} and {tuple(map(len, rows))}"
                )
        elif rows is not None:
            counts = tuple(len(one) for one in rows)
        elif self._graph.sliceable_shareds:
            counts = tuple(self._lengths(session))
        else:
            return (1,) * session.n_ranks, False
        return counts, not any(counts)

    def _check_subset(self, subset: Any) -> Optional[List[int]]:
        if subset is None:
            return None
        if not isinstance(subset, (list, tuple)) or not all(isinstance(i, (int, np.integer)) for i in subset):
            raise TypeError(f"output_subset must be a list of ints; got {subset!r}")
        for i in subset:
            if not 0 <= i < len(self.output_modes):
                raise IndexError(f"output_subset: there is no output {i}; the function has {len(self.output_modes)}")
        return [int(i) for i in subset]


def _check_num_slices(num_slices: Any) -> int:
    if isinstance(num_slices, bool) or not isinstance(num_slices, (int, np.integer)):
        raise TypeError(f"num_slices must be an int; got {num_slices!r}")
    if num_slices < 1:
        raise ValueError(f"num_slices must be at least 1; got {num_slices}")
    return int(num_slices)


def _plain(value: Any) -> Any:
    return value.data if isinstance(value, Data) else value
