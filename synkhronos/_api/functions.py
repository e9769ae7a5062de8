"""`Function`: a compiled function that every rank executes on its shard of the data."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._api.call_plan import (
    ControllerCall,
    Planner,
    check_inputs,
    chosen,
    make_signature,
    rows_on_ranks,
    sliceable_rows,
)
from synkhronos._api.checks import (
    Checks,
    Serial,
    arrange,
    check_num_slices,
    check_subset,
    describe_inputs,
    environment_asks,
    inputs_of,
    is_asked,
)
from synkhronos._api.combine import GraphCollectives, Results
from synkhronos._api.data_arrays import Data, data
from synkhronos._backends import as_asked, machine
from synkhronos._graph import Variant
from synkhronos._graph.ops import compiled_has_collectives
from synkhronos._processes import COLLECTIVES
from synkhronos._rank import Call
from synkhronos._session import Future, Place, Session, current, functions
from synkhronos._utils import KeyedCache
from synkhronos._utils.display import html_table, public_names
from synkhronos.errors import SessionError

MOST_PLANS = 64  # number of plans that a function caches
_NUMBERS = (int, float, bool, np.int32, np.int64, np.float32, np.float64)


_NEVER = -1  # value of `Function._n_changes` until scattered variables are checked in a session; see `ReplicaCheck`


class Function:
    """A compiled function on all ranks, made by `function` and called like a function of Theano or PyTensor.

    Attributes
    ----------
    name : str or None
    output_modes : list of str or None
        The op of each output.
    update_modes : list of str
        The op of each given update.
    counts : tuple of int, or None
        The number of data points of each rank in the last call. These are the weights of ``"avg"``. They are all 1 for
        a function without data, and ``None`` before the first call. In a `sequence` they are available immediately.
    maker, fn, vm, profile
        Attributes of the controller's compiled function: its maker, the object that executes it (``fn`` in Theano,
        ``vm`` in PyTensor), and the backend's profile.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], [x.mean(), (x.max(), "max")], name="f")
    ...     outputs = f([1, 2, 6])
    ...     print(f.name, f.output_modes, f.counts)
    f ['avg', 'max'] (2, 1)
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
        self._scattered = self._inputs[: graph.n_scattered]
        self._all = range(len(results.modes))  # outputs
        self._results = results
        self._serial = Serial(graph, results)
        self._compares = environment_asks() and not graph.is_random
        self._single = single
        self._plain = Variant(device=session.on_gpu)
        self._first = self._first_graph(session)
        self._theano = self._first.compile(self._plain)
        self._collectives = GraphCollectives(graph, compiled_has_collectives(self._theano), results)
        self._planner = Planner(graph, results, self._collectives, update_modes, session.on_gpu)
        self._checks = Checks(graph, results, named, named_updates=named_updates)
        self._keys: dict[tuple[_graph.Graph, Variant], int] = {}
        self._session: weakref.ref[Session] | None = None
        # by `CallSignature.key`
        self._plans: KeyedCache[tuple[Call | ControllerCall, Sequence[Place]]] = KeyedCache(MOST_PLANS)
        self._n_changes = _NEVER
        functions.add(self)
        self.join(session)

    def _first_graph(self, session: Session) -> _graph.Graph:
        """Return the graph that is compiled when the function is built."""
        return self._graph

    maker: Any = property(lambda self: self._theano.maker, doc="Maker of the controller's function; it has the graph.")
    fn: Any = property(lambda self: machine(self._theano), doc="Callable that runs the controller's function.")
    vm: Any = property(lambda self: self.fn, doc="The same as ``fn``, by PyTensor's name.")
    profile: Any = property(
        lambda self: self._theano.profile, doc="The backend's profile of the controller's function, or ``None``."
    )

    def get_shared(self) -> list[Any]:
        """Return the shared variables that the function reads or updates, as the backend's functions do.

        Returns
        -------
        list of shared variables
            Each variable once. States of random streams are included.

        Examples
        --------
        >>> s = theano.shared(0.0, "s")
        >>> with synk.session(2):
        ...     print(synk.function([], 2 * s).get_shared())
        [s]
        """
        return _graph.shared_variables_of(self._theano)

    def _variables(self) -> list[Any]:
        """Return the shared variables whose scattering is checked."""
        return self.get_shared()

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain function of Theano or PyTensor, in the controller only, on the unsharded inputs.

        Parameters
        ----------
        *args, **kwargs : Data or array_like
            The inputs, in order or by name. The keyword ``output_subset`` is a list of the outputs to compute.

        Returns
        -------
        array, list of array
            The outputs, as in Theano. Updates change the controller's variables only.

        Raises
        ------
        TypeError
            For missing or surplus inputs. Errors of the backend are raised, too.

        Examples
        --------
        >>> x = T.dvector("x")
        >>> with synk.session(2):
        ...     f = synk.function([x], x.sum())
        ...     print(f([1, 2, 6]), f.as_theano([1, 2, 6]))  # the average of 3 (twice) and 6, and the sum
        4.0 9.0
        """
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
        """Make `Data` from a value for each input, given in order or by name.

        Parameters
        ----------
        *args : array_like
            The values, which are copied into shared memory.
        force_cast : bool
            Convert a value to the input's dtype even if that loses precision.
        oversize : float
            Allocate this many times the memory needed, from 1 to 2, so that the data can grow in place.
        minibatch : bool
            Whether the data will hold only the rows of the current batch; see `data`.
        **kwargs : array_like
            The values of inputs given by name.

        Returns
        -------
        Data, or list of Data
            One `Data` if the function has one input, otherwise a list. A value that is not a dense array, such as a
            sparse matrix, is returned unchanged.

        Raises
        ------
        SessionError, TypeError, ValueError, MemoryError
            As `data`; also a `TypeError` for missing or surplus inputs.

        Examples
        --------
        >>> x = T.dvector("x")
        >>> with synk.session(2):
        ...     f = synk.function([x], x.mean())
        ...     print(f(f.build_inputs([1, 2, 6])))
        3.0
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
        """Compute on all ranks: each rank computes on its shard of the selected rows, and the outputs are combined.

        The selected rows of NumPy inputs are copied into shared memory in each call. `Data` is read in place by each
        rank. Shared variables are updated on every rank.

        Parameters
        ----------
        *args, **kwargs : Data or array_like
            The inputs, in order or by name: first the scattered inputs, of shape ``(n, ...)`` with the same ``n``, then
            the broadcast inputs. Values are cast to an input's dtype as in Theano.
        output_subset : list of int, optional
            The outputs to compute, as in Theano.
        batch : int, slice, or list / 1-d array of integers or booleans, optional
            The rows of the scattered inputs to use: the first ``batch`` rows, a range, or an index list. They are
            selected first, and then divided among the ranks. Default: all rows.
        batch_s : the same, or a list with one slice or list for each rank, optional
            The rows of the sliceable shared variables that each rank uses. Default: all rows.
        num_slices : int
            Each rank computes its shard in this many slices, one after the other, which saves memory. Updates are
            computed from the values before the call, and applied once.
        check_against_theano : bool, optional
            Compare the outputs with those that the controller computes alone from the same rows. Default: the value of
            the environment variable ``SYNKHRONOS_CHECK`` (``1`` or ``0``) when the function was built, and ``False``
            for functions that draw random numbers.

        Returns
        -------
        array, list of array
            The outputs, as in Theano: a list if the function was built with a list. They are new arrays in the
            controller, except for outputs built with ``borrow=True``. In a `sequence`, a `Future` of the outputs.

        Raises
        ------
        SessionError
            Without a session.
        TypeError, ValueError, IndexError
            For invalid arguments; also for an output that has a row for each data point and would be averaged because
            no op was named. Nothing is sent to the ranks in these cases.
        ValueError
            With ``check_against_theano``, if outputs differ from the serial result. The message has the largest
            difference. The call and its updates are complete then.
        WorkerError
            If a rank fails.

        Examples
        --------
        >>> x = T.dvector("x")
        >>> with synk.session(2):
        ...     f = synk.function([x], x.mean())
        ...     print(f([1, 2, 6]), f([1, 2, 6], batch=[0, 2]))
        3.0 3.5
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
            is_checked = False
            if self._compares or check_against_theano is not None:
                is_checked = is_asked(check_against_theano, self._compares, place)
            session.check_usable()
            if not self.join(session):
                raise SessionError(
                    f"{self!r} was built on GPUs, and this session computes on CPU cores; build it again"
                )
            if session.replica_check.n_changes != self._n_changes:
                self._checks.check_variables(session, self.name, session.replica_check.scattered(self._variables()))
                self._n_changes = session.replica_check.n_changes
            call, signature, plan, expected, on_ranks = None, None, None, None, None
            if self._graph.sliceable_shareds:
                on_ranks = tuple(rows_on_ranks(session, self._graph))
            if not (is_checked or self._graph.packed) and batch_s is None:
                signature = make_signature(values, batch, self._scattered, on_ranks, num_slices, subset, place)
                if signature is None and batch is None:
                    values = self._with_arrays(values)
                    signature = make_signature(values, batch, self._scattered, on_ranks, num_slices, subset, place)
                if signature is not None:
                    plan = self._plans.get(signature.key, self._n_changes)
                    if (
                        plan is not None
                        and (not signature.contents or session.restage(plan[1], signature.contents))
                        and self._is_valid(session, plan[0])
                    ):
                        call = plan[0]
            if call is None:
                parsed = batch if signature is None or signature.batch is None else signature.batch
                inputs = check_inputs(session, self._graph, self._inputs, values, parsed)
                values, batch = inputs.values, inputs.batch
                rows = sliceable_rows(session, self._graph, batch_s, num_slices)
                if is_checked:
                    arrays = chosen(values, batch, self._inputs, self._graph.n_scattered)
                    expected = self._serial.expected(session, arrays, rows, wanted)
                distributed = functools.partial(self._distributed, session)
                call, refs = self._planner.plan(session, distributed, inputs, rows, num_slices, subset)
                if isinstance(call, Call):
                    self._checks.check_call(call, wanted)
                if signature is not None:
                    self._plans.put(signature.key, self._n_changes, (call, refs))
            single = self._single and bool(self.output_modes) and subset is None

            if isinstance(call, ControllerCall):
                if signature is not None and signature.batch is not None:
                    batch = signature.batch
                outputs = call.compute(session, values, batch)
                self.counts = call.counts
                if expected is not None:
                    self._serial.compare(outputs, expected, wanted)
                elif (
                    signature is not None
                    and plan is not None
                    and batch is None
                    and len(signature.contents) == len(values)
                ):
                    self._note_call(session, call, values, single)
                return outputs[0] if single else outputs

            def finish(results: Sequence[Any], command: Call = call) -> Any:
                outputs = self._combined(session, results, command, wanted)
                if expected is not None:
                    self._serial.compare(outputs, expected, wanted)
                return outputs[0] if single else outputs

            if place:
                self._results.check_not_borrowed()
                session.sequencer.keep([value.memory for value in values if isinstance(value, Data)])
                self.counts = call.counts
            return session.submit(call, finish, shared=self.get_shared, check=self._check_values)

    def _with_arrays(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs with numbers as arrays, which have the same plan whatever their values are."""
        if len(values) == len(self._inputs) and any(type(value) in _NUMBERS for value in values):
            with contextlib.suppress(OverflowError, TypeError, ValueError):  # `check_inputs` raises them again
                return [
                    self._graph.filter_input(i, value) if type(value) in _NUMBERS and not one.ndim else value
                    for i, (one, value) in enumerate(zip(self._inputs, values))
                ]
        return values

    def _is_valid(self, session: Session, call: Call | ControllerCall) -> bool:
        """Return whether a planned call can be made as it is, after preparing for it if needed."""
        return True

    def _note_call(self, session: Session, call: ControllerCall, arrays: Sequence[Any], single: bool) -> None:
        """Prepare for further calls on the controller with NumPy arrays of these shapes and dtypes."""

    def _check_values(self, session: Session) -> None:
        """Check a recorded call before its sequence is sent.

        Values of shared variables that the program has set on the controller are accepted: replicas may differ.
        """

    def _combined(self, session: Session, results: Sequence[Any], call: Call, wanted: Sequence[int]) -> list[Any]:
        """Return the combined outputs, and record the counts of the call."""
        session.timeline.switch(COLLECTIVES)
        self.counts = call.counts
        weights = (1,) * session.n_ranks if call.all_compute else call.counts
        return self._results.combine(
            results, call, wanted, weights, collectives=self._collectives, private=session.private
        )

    def _distributed(self, session: Session, variant: Variant, graph: _graph.Graph) -> int:
        """Send a variant of a graph to the workers that do not have it; return its key."""
        key = self._key(session, variant, graph)
        session.distribute((key,))
        return key

    def join(self, session: Session) -> bool:
        """Register the function with a session, so that the session distributes it.

        Parameters
        ----------
        session : Session
            The current session.

        Returns
        -------
        bool
            Whether this is possible. A function that was built on GPUs cannot join a session on CPU cores.
        """
        if self._session is None or self._session() is not session:
            if self._plain.device and not session.on_gpu:
                return False
            self._session, self._keys, self._n_changes = weakref.ref(session), {}, _NEVER
            self._plans = KeyedCache(MOST_PLANS)
            self._key(session, self._plain, self._first)
            session.replica_check.note_data(self._graph.sliceable_shareds)
        return True

    def updates_alone(self) -> bool:
        """Return whether each rank updates variables by itself, so that ranks get different values.

        Returns
        -------
        bool
            Whether the function has updates of tensor variables, and no collectives.
        """
        updated = map(_graph.is_tensor_variable, _graph.updated_variables(self._theano))
        return any(updated) and not self._collectives.any

    def steps_together(self) -> bool:
        """Return whether ranks can make steps of the function in one command, with its collectives in each step.

        Returns
        -------
        bool
            Whether it has collectives, outputs that are scalars, and no inputs or variables of another kind than
            `local` allows.
        """
        return self._collectives.any and self._is_simple()

    def _is_simple(self) -> bool:
        graph = self._graph
        outputs = [var for var in graph.outputs if getattr(var, "ndim", 0)]
        return not (outputs or graph.sliceable_shareds or graph.packed or any(graph.axes))

    def local(self, session: Session, together: bool = False) -> tuple[int, Sequence[Any], Sequence[Any], bool]:
        """Distribute the function as a rank computes it on its own rows, for `loop`.

        Parameters
        ----------
        session : Session
            The current session.
        together : bool
            Whether it may have collectives.

        Returns
        -------
        key : int
            The key of the function in the session.
        scattered, others : list of variables
            The scattered inputs, and the broadcast inputs.
        takes_rows : bool
            Whether it takes the numbers of rows of an exact function after these.

        Raises
        ------
        TypeError
            If ranks cannot compute it alone: it has collectives, outputs that are not scalars, or sliceable shared
            variables, or is scattered along another axis than 0.
        """
        graph = self._graph
        if not self._is_simple() or (self._collectives.any and not together):
            raise TypeError(
                f"{self!r} cannot be used in a loop with a training rule; expected a function without collectives and "
                "sliceable shared variables, with dense inputs scattered along axis 0, and with scalar outputs"
            )
        self.join(session)
        variables = self._user.input_variables
        key = self._distributed(session, self._plain, graph)
        self._give_what_was_set(session)
        takes_rows = getattr(graph, "takes_rows", False)
        return key, variables[: graph.n_scattered], variables[graph.n_scattered :], takes_rows

    def _give_what_was_set(self, session: Session) -> None:
        """Give the other ranks values that the program has set on the controller, if the function is exact."""

    def _key(self, session: Session, variant: Variant, graph: _graph.Graph) -> int:
        """Return the key of a variant in the session; compile and register it if it is new."""
        if (graph, variant) not in self._keys:
            self._keys[graph, variant] = session.add_function(graph.compile(variant), self, self.get_shared())
        return self._keys[graph, variant]

    # -- representation

    def __repr__(self) -> str:
        session = None if self._session is None else self._session()
        ranks = "no session" if session is None or session.broken else f"{session.n_ranks} ranks"
        return f"<synkhronos.Function {self.name or ''}({describe_inputs(self._graph)}) -> {self._results}; {ranks}>"

    def _repr_html_(self) -> str:
        """Return a table of the inputs and outputs, for notebooks."""
        return html_table(
            [("Function", self.name or ""), ("inputs", describe_inputs(self._graph)), ("outputs", self._results)]
        )

    def __dir__(self) -> list[str]:
        return public_names(self, "join", "local", "updates_alone")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self!r} cannot be copied or pickled, because it belongs to its session; build it again by "
            "synkhronos.function, and save the values of its shared variables by synkhronos.extensions.checkpoint"
        )


class Keyed:
    """Mixin for functions whose outputs have keys: they return dicts.

    Attributes
    ----------
    output_keys : list of str
        Key of each output.
    """

    output_keys: list[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on all ranks; see `Function.__call__`. ``output_subset`` is a list of keys."""
        return self._with_keys(super().__call__, args, kwargs)  # type: ignore[misc]

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Compute in the controller only; see `Function.as_theano`. ``output_subset`` is a list of keys."""
        return self._with_keys(super().as_theano, args, kwargs)  # type: ignore[misc]

    def _with_keys(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keys, subset = self.output_keys, kwargs.get("output_subset")
        if subset is not None:
            unknown = [key for key in subset if key not in keys]
            if unknown:
                raise ValueError(f"output_subset has the key {unknown[0]!r}; expected some of {keys}")
            keys, kwargs = list(subset), {**kwargs, "output_subset": [keys.index(key) for key in subset]}
        results = call(*args, **kwargs)
        if isinstance(results, Future):
            return results.through(lambda values: dict(zip(keys, values)))
        return dict(zip(keys, results))


class KeyedFunction(Keyed, Function):
    """Function whose outputs have keys."""
