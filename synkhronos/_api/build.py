"""`synk.function`: check the arguments, and build a function that runs on all ranks."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import synkhronos
from synkhronos import _backends, _graph
from synkhronos._api.calibration import measured
from synkhronos._api.choice import Costs, check_plan
from synkhronos._api.combine import Results
from synkhronos._api.exact import ExactFunction
from synkhronos._api.functions import Function, Keyed, KeyedFunction
from synkhronos._collectives import check_op, lists_ops
from synkhronos._session import current, warn
from synkhronos._sharding import ShardedGraph, check_open
from synkhronos._utils.display import unknown_keyword
from synkhronos.typing import Input, Keywords, Outputs, Update, Variable

if TYPE_CHECKING:
    from typing_extensions import Unpack

_logger = logging.getLogger("synkhronos")

_FOR_EXACT = ("exact", "shard", "random", "blocked", "mapped", "plan", "whole")
_OWN_KEYWORDS = ("inputs", "outputs", "bcast_inputs", "updates", "givens", "sliceable_shareds", *_FOR_EXACT)
_KEYWORDS_FOR_THEANO = [name for name in _backends.KEYWORDS if name not in _OWN_KEYWORDS]


@lists_ops
def function(
    inputs: Sequence[Input],
    outputs: Outputs = None,
    bcast_inputs: Sequence[Input] | None = None,
    updates: Mapping[Any, Any] | Iterable[Update] | None = None,
    givens: Mapping[Any, Any] | Iterable[tuple[Variable, Any]] | None = None,
    sliceable_shareds: Sequence[Variable] | None = None,
    *,
    exact: bool = False,
    shard: Mapping[Any, int] | Sequence[Variable] | None = None,
    random: Literal["serial", "own"] = "serial",
    blocked: bool = False,
    mapped: Sequence[Variable] | None = None,
    plan: Literal["auto", "rows", "controller"] | None = None,
    whole: Mapping[Variable, Any] | None = None,
    **kwargs: Unpack[Keywords],
) -> Function:
    """Build a function that runs on every rank, in place of ``theano.function`` or ``pytensor.function``.

    Call it in the controller. The controller compiles the function; the workers get a copy with its first call, or by
    `distribute`. In each call, every rank computes on its shard of the scattered inputs, and the controller combines
    the ranks' outputs. Shared variables are copied to every rank; updates change each rank's own copy.

    Parameters
    ----------
    inputs : list of variables or ``In``
        Inputs that are scattered over the ranks along axis 0, as evenly as possible. Each has shape ``(n, ...)`` in a
        call, and ``(n_k, ...)`` on rank k. Every one must be a dense array with at least one dimension.
    outputs : variable, (variable, op), or a list or dict of these, optional
        ``op`` says how the ranks' values are combined: {ops}, element by element; ``"gather"``, concatenation along
        axis 0 in rank order; or ``None``, the controller's own value. ``"avg"``, the default, is
        ``sum(n_k * x_k) / sum(n_k)``, where ``n_k`` is the number of data points of rank k. The prefix ``c_``, as in
        ``"c_avg"``, requests that the values are combined on the CPU. With a dict, whose keys are strings, calls return
        dicts, and ``output_subset`` takes keys.
    bcast_inputs : list of variables or ``In``, optional
        Inputs that every rank gets in full. They need not be dense arrays: sparse matrices and objects are allowed.
    updates : dict, or list of (shared, expression) or (shared, expression, op), optional
        New values of shared variables. Each rank computes them from its own shard, for its own copy; use `averaged` in
        the expressions to make them equal. In a call with ``num_slices``, ``op`` (default ``"avg"``) combines the new
        values of the slices. With ``exact=True``, write the serial program's expressions, without `averaged` and ops.
    givens : dict or list of pairs, optional
        Replacements of variables in the graph, as in Theano.
    sliceable_shareds : list of shared variables, optional
        Shared variables that hold data, with different rows along axis 0 on each rank. In a call, ``batch_s`` and
        ``num_slices`` select rows of them.
    exact : bool
        Build an exact function, which computes what the serial program computes. Sharding is propagated through the
        graph, and collectives are inserted where values of different rows are combined, as in GSPMD (Y. Xu et al.
        (2021), GSPMD: general and scalable parallelization for ML computation graphs, arXiv:2105.04663); see
        docs/exact.md. Outputs and updates take no ops. ``sliceable_shareds`` must have been scattered.
    shard : dict or list of variables, optional
        For exact functions: further sharded variables, each with the axis of its rows (0 for a list). These may be
        scattered inputs whose rows lie along another axis than 0, or any variables of the graph. An example is a
        minibatch that ``givens`` takes from data that all ranks have.
    random : str
        For exact functions. ``"serial"``: draw the random numbers of the serial program. ``"own"``: if numbers are
        drawn for each row, each rank draws them for its own rows only. This is cheaper, and gives other numbers from
        the same distribution.
    blocked : bool
        For exact functions that combine rows only at the end, by sums, products, minima or maxima, such as the loss of
        a large data set and its gradient. Each rank computes in a loop over blocks of its rows, which stay in its
        core's cache until all operations are done. This is faster if memory bandwidth limits the computation.
    mapped : list of variables, optional
        For exact functions with ``blocked=True`` and without updates: some of ``bcast_inputs``, of which a call gets k
        values, stacked along a new axis 0, with k at least 1. All outputs are stacked in the same way. Each block of
        rows is read once for all k, and the ranks meet once. The results do not depend on k, bit by bit.
    plan : str, optional
        For exact functions. ``"rows"``: every rank computes its rows. ``"controller"``: the controller computes all
        rows as the serial program does, with as many BLAS threads as the program had before `fork`; the other ranks get
        the updated variables when they need them. This is faster if a call takes little time. ``"auto"``: for each
        call, the faster one, as predicted by a cost model; see docs/exact.md. Calls in a `sequence` or with
        ``num_slices``, and sessions on several nodes or GPUs, then have the plan ``"rows"``. Default: the argument
        ``plan`` of `fork`.
    whole : dict, optional
        For exact functions: for each of ``sliceable_shareds``, an array or expression of the rows of all ranks. The
        controller needs it for the plan ``"controller"``, because it has its own rows of a scattered variable only.
        Arrays are copied; expressions may use shared variables that are equal on all ranks. Scatter other rows only
        together with such a variable's new value.
    **kwargs
        Keyword arguments of the backend's function, such as ``name`` and ``mode``.

    Returns
    -------
    Function
        To be called with NumPy arrays or `Data`; see `Function.__call__`.

    Raises
    ------
    SessionError
        Without a session.
    TypeError, ValueError
        For invalid arguments, and any error of the backend.

    Warns
    -----
    RuntimeWarning
        If nothing in an exact function can be sharded.

    Examples
    --------
    >>> x = T.dvector("x")
    >>> with synk.session(2):
    ...     f = synk.function([x], [x.mean(), (x.max(), "max"), (2 * x, "gather")])
    ...     mean, largest, doubled = f([1, 2, 6])
    ...     print(mean, largest, doubled, f.counts)
    3.0 6.0 [ 2.  4. 12.] (2, 1)
    """
    if sys._getframe(1).f_globals.get("__name__", "").startswith(f"{_backends.engine}."):
        # the program has set the backend's `function` to this one, but Variable.eval etc. need the backend's own
        own = {"outputs": outputs, "updates": updates, "givens": givens, **kwargs}
        return _backends.compile_function(inputs, **{name: value for name, value in own.items() if value is not None})
    session = current("function")
    for name in kwargs:
        if name not in _backends.KEYWORDS:
            raise unknown_keyword("synkhronos.function", name, [*_OWN_KEYWORDS, *_KEYWORDS_FOR_THEANO])
    for name, value in (("inputs", inputs), ("bcast_inputs", bcast_inputs), ("sliceable_shareds", sliceable_shareds)):
        if value is not None and not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} is {value!r}; expected a list")
    pairs, update_modes, named_updates = _read_updates(updates)
    keys = _keys_of(outputs) if isinstance(outputs, Mapping) else None
    asked: Any = outputs if keys is None else [outputs[key] for key in keys]  # type: ignore[index, call-overload]
    many = isinstance(asked, (list, tuple)) and not _is_pair(asked)
    items: list[Any] = [] if asked is None else list(asked) if many else [asked]
    variables, output_modes = [], []
    for position, item in enumerate(items):
        var, op = item if _is_pair(item) else (item, "avg")
        variables.append(var)
        output_modes.append(check_op(f"output {position}", op, "gather", None))
        if not exact and output_modes[-1] is not None and not _graph.is_tensor_variable(getattr(var, "variable", var)):
            raise TypeError(
                f"output {position} is {var!r}; expected a {_backends.TITLE} tensor variable, or the op None"
            )
    for_backend = {**kwargs, "mode": _backends.exact_mode(kwargs.get("mode"))} if exact else dict(kwargs)
    for_backend["name"] = kwargs.get("name") or _line_of_program()
    graph = _graph.Graph(
        inputs,
        variables,
        bcast_inputs=bcast_inputs or (),
        updates=pairs,
        givens=givens,
        sliceable_shareds=sliceable_shareds or (),
        kwargs=for_backend,
    )
    if graph.packed_names:
        _logger.info(
            "every rank gets these inputs in full, because they are not dense arrays: %s", ", ".join(graph.packed_names)
        )
    title = kwargs.get("name")
    if exact:
        if named_updates or any(map(_is_pair, items)):
            raise ValueError("got ops of outputs or updates with exact=True, which infers them; leave the ops out")
        if random not in ("serial", "own"):
            raise ValueError(f'random is {random!r}; expected "serial" or "own"')
        check_plan(plan)
        _check_all_inputs(graph)
        if whole is not None:
            whole = _graph.expressions_of_all_rows(whole, graph.sliceable_shareds)
        one = graph
        graph, stacks = _mapped(graph, mapped, blocked) if mapped else (graph, {})
        divided = ShardedGraph(one, for_backend, shard=shard, random=random, blocked=blocked, stacks=stacks)
        if divided.undivided:
            warn(
                f"{title or 'a function'}: nothing in it is sharded, so every rank computes all of it; if "
                f"{divided.undivided[0]} is a minibatch, pass shard={{variable: axis}} with the axis of its rows"
            )

        def measure(running: Any) -> Costs:
            return measured(running, importlib.metadata.version("synkhronos"), function)

        def again(swap: Mapping[Any, Any], delete_updates: bool, **options: Any) -> Function:
            """Build the function again, with other shared variables or without updates."""
            updated = [] if delete_updates else [var for var, _ in graph.expressions[1]]
            new = {**{var: var.default_update for var in updated if var not in dict(pairs)}, **dict(pairs)}
            pairs_given = _graph.pairs_of(givens)
            if swap:  # the backend refuses givens that depend on replaced variables
                pairs_given = [
                    (old, _backends.clone(value, replace=swap) if isinstance(value, _backends.Variable) else value)
                    for old, value in pairs_given
                ]
            replaced = [(old, value) for old, value in (*swap.items(), *pairs_given) if old is not value]
            return function(
                inputs,
                outputs,
                bcast_inputs,
                [(swap.get(var, var), new[var]) for var in updated],
                replaced,
                [swap.get(var, var) for var in sliceable_shareds or ()],
                exact=True,
                shard=shard,
                random=random,
                blocked=blocked,
                mapped=mapped,
                plan=plan,
                whole=None if whole is None or {*whole} & {*swap} else whole,  # the rows of others are not known
                **{**kwargs, **options, "no_default_updates": True},
            )

        mode = _backends.name_of_mode(kwargs.get("mode"))
        is_profiled = kwargs.get("profile") or _backends.config.profile
        axes = list(shard.values()) if isinstance(shard, dict) else len(shard or ())
        exactly = ExactFunction(
            session,
            graph,
            divided,
            single=not many,
            name=title,
            plan=plan,
            options=f"mode {mode}, blocked {blocked}, mapped {len(stacks)}, shard {axes}"
            if mode and not is_profiled
            else "",
            measure=measure,
            again=again,
            whole=whole,
        )
        return _with_streams(_with_keys(exactly, KeyedExactFunction, keys), own=divided.own_states)
    if shard is not None or random != "serial" or blocked or mapped or plan is not None or whole is not None:
        raise ValueError(
            "got shard, random, blocked, mapped, plan or whole without exact=True, which they need; pass exact=True"
        )
    for variable in graph.input_variables[: graph.n_scattered]:
        if not variable.broadcastable[0]:  # an input that is broadcastable along axis 0 has one row
            check_open(variable, 0)
    on_host = [_is_pair(item) and str(item[1]).startswith("c_") for item in items]
    results = Results(variables, output_modes, on_host, session.on_gpu, title or "the function")
    named = [_is_pair(item) for item in items]
    made = Function(
        session, graph, results, update_modes, named=named, named_updates=named_updates, single=not many, name=title
    )
    return _with_streams(_with_keys(made, KeyedFunction, keys))


def _check_all_inputs(graph: _graph.Graph) -> None:
    """Raise the backend's error for a missing input, before the graph is divided."""
    outputs, updates = graph.expressions
    for leaf in _backends.leaves_of([*outputs, *(new for _, new in updates)]):
        is_value = isinstance(leaf, (_backends.Constant, _backends.SharedVariable))
        if not (is_value or any(leaf is one for one in graph.input_variables)):
            raise _backends.MissingInputError(
                f"the graph needs the input {leaf}, which is not in inputs; add it to inputs, or to bcast_inputs if it "
                "has no rows"
            )


def _mapped(graph: _graph.Graph, mapped: Sequence[Variable], blocked: bool) -> tuple[_graph.Graph, dict[Any, Any]]:
    """Check the argument ``mapped``; return what `Graph.mapped` returns."""
    inputs = [graph.leaf_of(one) for one in mapped]
    others = [one for one in inputs if one not in graph.input_variables[graph.n_scattered :]]
    if others:
        raise ValueError(f"mapped has {others[0]}; expected some of bcast_inputs")
    if not blocked or graph.expressions[1]:
        raise ValueError("got mapped with blocked=False or updates; expected blocked=True, and no updates")
    return graph.mapped(inputs)


def _with_streams(function: Function, own: Sequence[Any] | None = None) -> Function:
    """Record which random streams of a function differ between ranks: those in ``own``, by default all.

    Return the function.
    """
    for var in filter(_backends.is_random_state, function.get_shared()):
        _graph.claim_stream(var, common=own is not None and var not in own)
    return function


class KeyedExactFunction(Keyed, ExactFunction):
    """Exact function whose outputs have keys."""

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the function; see `ExactFunction.copy`."""
        made = super().copy(*args, **kwargs)
        made.__class__, made.output_keys = KeyedExactFunction, self.output_keys
        return made


def _keys_of(outputs: Mapping[Any, Any]) -> list[str]:
    """Return the keys of outputs, sorted as the backends sort them."""
    for key in outputs:
        if not isinstance(key, str):
            raise TypeError(f"outputs has the key {key!r}; expected strings")
    return sorted(outputs)


def _with_keys(function: Any, keyed: type, keys: list[str] | None) -> Any:
    """Have a function return dicts with these keys, if there are any."""
    if keys is not None:
        function.__class__, function.output_keys = keyed, keys
    return function


def _is_pair(item: Any) -> bool:
    """Return whether ``item`` is ``(variable, op)`` rather than a list of outputs."""
    return isinstance(item, tuple) and len(item) == 2 and (item[1] is None or isinstance(item[1], str))


def _line_of_program() -> str | None:
    """Return file and line of the program that build a function, as the backend names functions.

    If no line is of the program, it is that of a library, though not of the backend or of this package.
    """
    own = tuple([os.path.join(folder, "") for folder in (*synkhronos.__path__, _backends.FOLDER)])
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1))]
    foreign = [one for one in frames if not one[0].startswith(own)]
    found = next((one for one in foreign if not one[0].startswith(_backends.LIBRARIES)), next(iter(foreign), None))
    return None if found is None else "{}:{}".format(*found)


def _read_updates(updates: Any) -> tuple[list[tuple[Any, Any]], dict[Any, str], list[Any]]:
    """Return (shared variable, new value) pairs, the op of each update, and the variables whose op the user named."""
    pairs: list[tuple[Any, Any]] = []
    modes: dict[Any, str] = {}
    named: list[Any] = []
    if updates is None:
        return pairs, modes, named
    if isinstance(updates, tuple) and len(updates) == 3 and all(hasattr(part, "items") for part in updates[:2]):
        raise TypeError(
            "updates is (grad_updates, param_updates, grad_shared), from a rule of synkhronos.extensions.updates; "
            "expected pairs of shared variable and expression. Use synkhronos.extensions.train.make_train_function, or "
            "two functions, the first with grad_updates and the second with param_updates, and "
            "synkhronos.all_reduce(grad_shared, weights=f.counts) in between"
        )
    for item in updates.items() if hasattr(updates, "items") else updates:
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            raise TypeError(f"updates has {item!r}; expected (shared, expression) or (shared, expression, op)")
        pairs.append((item[0], item[1]))
        modes[item[0]] = check_op(f"the update of {item[0]}", item[2] if len(item) == 3 else "avg")
        named += item[:1] if len(item) == 3 else []
    return pairs, modes, named
