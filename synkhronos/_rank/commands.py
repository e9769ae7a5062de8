"""Commands that the controller sends, and that every rank executes, the controller included.

A command is a small immutable record. It contains no arrays: an `ArrayRef` says where an array is in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, NamedTuple, TypeVar, Union

from synkhronos._memory import ArrayRef, Place
from synkhronos._utils.rows import Rows

_Kind = TypeVar("_Kind", bound=type)

#: Commands that change no shapes of variables.
KEEPS_SHAPES: set[type] = set()
#: Commands in which all ranks wait for each other before any of them changes anything.
SYNCHRONIZES: set[type] = set()
#: Commands for which it does not matter that other ranks have stale values of variables.
IGNORES_VALUES: set[type] = set()


def _command(*properties: set[type]) -> Callable[[_Kind], _Kind]:
    """Decorator that adds a command to the sets of commands with some properties."""

    def enter(kind: _Kind) -> _Kind:
        for one in properties:
            one.add(kind)
        return kind

    return enter


#: Rows of an array in a command: a range, or the place of an index array in shared memory.
RowsRef = Union[Rows, ArrayRef]


class Source(NamedTuple):
    """An array in shared memory, and the selected rows of it (``None``: the full array)."""

    array: ArrayRef
    rows: RowsRef | None
    axis: int = 0  # of the rows


@_command(KEEPS_SHAPES, IGNORES_VALUES)
@dataclass(frozen=True)
class Flush:
    """Do only what the envelope asks for: map new memory, and drop objects.

    With `trim`, each rank also releases the freed blocks that its part of the shared heap keeps for reuse.
    """

    trim: bool = False


@_command(IGNORES_VALUES)
@dataclass(frozen=True)
class Bind:
    """Make the GPU ``devices[rank]`` this rank's device."""

    devices: tuple[str, ...]


@_command(IGNORES_VALUES)
@dataclass(frozen=True)
class Connect:
    """Join the other ranks in an NCCL communicator."""

    clique: bytes


@_command(IGNORES_VALUES)
@dataclass(frozen=True)
class Load:
    """Unpickle functions and their new shared variables, on some workers (``None``: all).

    With `replicate_rng`, random streams are the same on all ranks; else each rank has its own.
    """

    pickled: ArrayRef
    buffers: tuple[ArrayRef, ...]
    replicate_rng: bool
    ranks: tuple[int, ...] | None = None


class Follow(NamedTuple):
    """Second step of a call in slices of a function with collectives.

    The graph is cut where values enter collectives. `Call.function` is the part before the cut. It runs once for each
    slice, and returns the outputs that need no collective, then the values that enter collectives. Both are accumulated
    over the slices. The function of this class is the part after the cut; it takes the accumulated values.
    """

    function: int
    modes: tuple[str, ...]  # how to combine each result of the slices
    n_entering: int
    output_subset: tuple[int, ...] | None
    order: tuple[int, ...]  # of the wanted outputs: indices in the outputs of the slices, then this function's


class SlicedUpdate(NamedTuple):
    """Update of variables of equal shape, of which each rank computes a range of elements.

    `inputs` has a kind and a number for each input of the function: ``"value"`` and the key of a variable;
    ``"product"`` and a position in `Step.products`; or ``"partial"``, ``"array"`` or ``"scalar"`` and a position in the
    outputs of `Call.function`. The function gets the sum over the ranks of partial arrays and products.
    """

    function: int
    variables: tuple[int, ...]
    inputs: tuple[tuple[str, int], ...]


class RowProduct(NamedTuple):
    """The matrix product ``left.T @ right``. Summed over the ranks, it is the product over all rows."""

    left: int  # position in the outputs of `Call.function`
    right: int
    function: int  # of both matrices


class Step(NamedTuple):
    """Updates of a call, which happen completely or not at all.

    After the wanted outputs, `Call.function` returns the new values of `others`, and then the inputs of `sliced`.
    Workers do not set the variables in `adopted`, which are some of `others`: they get the controller's values later.
    The function itself updates `drawn`, states of random streams that are equal on all ranks.
    """

    others: tuple[int, ...]
    adopted: frozenset[int]
    drawn: tuple[int, ...]
    sliced: tuple[SlicedUpdate, ...]
    products: tuple[RowProduct, ...] = ()


class Call(NamedTuple):
    """Call a function on this rank's shard of the data.

    `_api.call_plan.Planner.plan` creates it. Functions and variables are given by their keys. In a call in slices, the
    function returns the new values of the variables `updated` after its outputs, and the rank sets them at the end.
    """

    function: int
    inputs: tuple[Source, ...]
    n_scattered: int
    shares: tuple[Rows, ...] | None  # rows of the scattered inputs, by rank
    rows: tuple[RowsRef, ...]  # of the sliceable shared variables, by rank; empty: all rows, as they are
    #: Data points by rank; 0: does not compute, unless `all_compute`, `exact` or `has_collectives`.
    counts: tuple[int, ...]
    all_compute: bool
    num_slices: int
    output_modes: tuple[str | None, ...]  # of the wanted outputs; ``None``: the controller's own value
    output_subset: tuple[int, ...] | None
    updated: tuple[int, ...]
    update_modes: tuple[str, ...]
    nccl: tuple[int, ...] = ()  # indices of the wanted outputs that NCCL reduces to the controller
    controller: int = 0  # the rank of the controller
    has_collectives: bool = False  # the function has collectives; a rank without data points takes part with weight 0
    kept: tuple[int, ...] = ()  # variables that a rank without data points must not update
    exact: bool = False  # the function also takes: the total row count, the rank's first row, its row count
    follow: Follow | None = None
    starts: ArrayRef | None = None  # int64 offsets that are added to the scattered inputs' ranges
    step: Step | None = None  # updates that the function does not make itself
    #: Replicas stay equal, except for scattered variables and random states of single ranks. After a failure, the other
    #: ranks get the controller's values.
    keeps_equal: bool = False


@_command(SYNCHRONIZES, IGNORES_VALUES)
@dataclass(frozen=True)
class Broadcast:
    """Set variables on all other ranks to the controller's values, which have these `shapes`."""

    variables: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


@_command(IGNORES_VALUES)
@dataclass(frozen=True)
class Share:
    """Set variables on all workers to the controller's arrays at these places, so that no rank has a copy.

    On another node, the leader has a copy, and the others use it. Each rank returns whether they can.
    """

    variables: tuple[int, ...]
    places: tuple[Place, ...]


@_command(KEEPS_SHAPES, IGNORES_VALUES)
@dataclass(frozen=True)
class Unshare:
    """Give each worker its own copy of variables whose memory it shares with the controller, or its node's leader."""

    variables: tuple[int, ...]


@_command(KEEPS_SHAPES)
@dataclass(frozen=True)
class Get:
    """Return the values of variables, on some ranks (``None``: all)."""

    variables: tuple[int, ...]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Put:
    """Set variables to arrays, or to rows of them, on some ranks (``None``: all).

    `shares` gives the rows of each rank, for each variable. With `digests`, each rank returns the digests of its values
    of these variables, which may then differ between ranks.
    """

    variables: tuple[int, ...]
    sources: tuple[Source, ...]
    shares: tuple[tuple[Rows, ...], ...] | None = None
    ranks: tuple[int, ...] | None = None
    digests: tuple[int, ...] = ()


@_command(KEEPS_SHAPES, SYNCHRONIZES)
class AllReduce(NamedTuple):
    """Reduce variables over all ranks, in place on every rank."""

    variables: tuple[int, ...]
    op: str
    weights: tuple[float, ...] | None
    nccl: bool = True  # whether to use NCCL where it is available


@_command(KEEPS_SHAPES, SYNCHRONIZES)
class Reduce(NamedTuple):
    """Reduce variables over all ranks, into the controller's variables or into arrays that it returns."""

    variables: tuple[int, ...]
    op: str
    in_place: bool


@dataclass(frozen=True)
class Nccl:
    """Broadcast variables from rank `root`, reduce them to it, or all-gather them, over NCCL.

    `kind` is ``"broadcast"``, ``"reduce"`` or ``"all_gather"``. A broadcast takes the `shapes` of the variables. A
    reduction returns its result on the root and changes no variable.
    """

    kind: str
    variables: tuple[int, ...]
    root: int
    op: str = "avg"
    shapes: tuple[tuple[int, ...], ...] = ()


@_command(SYNCHRONIZES)
@dataclass(frozen=True)
class AllGather:
    """Set each variable to the concatenation of all ranks' values, on axis 0.

    ``shapes[i][rank]`` is the shape of variable ``i`` on a rank.
    """

    variables: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]


@_command(KEEPS_SHAPES)
@dataclass(frozen=True)
class Digest:
    """Return digests of variables' values, which are equal for values of equal shape, dtype and bits."""

    variables: tuple[int, ...]


@_command(KEEPS_SHAPES)
@dataclass(frozen=True)
class Shapes:
    """Return the shapes of variables."""

    variables: tuple[int, ...]


@_command(KEEPS_SHAPES, IGNORES_VALUES)
@dataclass(frozen=True)
class Record:
    """Start to record how this rank spends its time, or stop and return the record.

    The record holds the time in each category, and the last `room` changes of category.
    """

    on: bool
    room: int = 0


@_command(KEEPS_SHAPES)
@dataclass(frozen=True)
class Loop:
    """Make steps of a function on each rank's own batches, with the exchanges of a training rule between them.

    The first command of a loop, number 0, makes no steps. Ranks keep the state of the loop until it is discarded.
    """

    key: int  # of the loop
    number: int  # of this command in the loop
    function: int
    data: tuple[ArrayRef, ...]  # the inputs of which a step takes rows
    order: ArrayRef  # int64 row numbers of all batches, of shape (number of batches, batch size)
    scheduled: tuple[ArrayRef, ...]  # the other inputs: one value for each step, along axis 0
    shared: tuple[tuple[int, ArrayRef], ...]  # the same for shared variables that are set before each step
    first: int  # number of the first batch in `order`
    n_batches: int  # of all ranks
    step: int  # number of steps of a rank before this command, if all took equally many batches
    exchange: Exchange
    batches: bytes | None  # pickled callable that makes the inputs of each step, instead of `data`
    epoch: int
    mean_loss: float | None  # of the epoch before; ``None`` at the start, and within an epoch


@dataclass(frozen=True)
class Exchange:
    """Training rule of a loop, and what it acts on."""

    rule: bytes  # pickled
    variables: tuple[int, ...]  # the parameters
    others: tuple[int, ...]  # further variables of floating-point numbers that the function updates
    of_others: str  # "local", "average" or "reset" in each exchange
    memory: ArrayRef | None  # of the `Board` of the node
    seed: int
    #: Ranks that make steps with collectives together: ``"all"``, or those of each ``"node"``. ``None``: none do.
    together: str | None
    takes_rows: bool  # the function also takes: the total row count, the rank's first row, its row count


@_command(KEEPS_SHAPES)
@dataclass(frozen=True)
class EndLoop:
    """Complete the exchanges of a loop, and set the parameters to the result on every rank; return its records.

    With `keep`, the parameters stay as they are, the controller returns the result, and the loop can go on. Exchanges
    that were begun are dropped with `drop`, because an interrupt may have kept some ranks from beginning them. With
    `discard`, the ranks only forget the loop. `unanswered` is the number of a `Loop` whose records were lost.
    """

    key: int
    variables: tuple[int, ...]  # the parameters, and further variables that the function updates
    keep: bool = False
    drop: bool = False
    unanswered: int | None = None
    discard: bool = False


#: Bytes of each rank's state that it returns to one `SaveLoop`, so that a slow link transfers them in time.
STATE_PART = 2 << 20


@_command(KEEPS_SHAPES)
@dataclass(frozen=True)
class SaveLoop:
    """Return the next `STATE_PART` bytes of each rank's state of a loop, with the values of variables.

    The state is an archive, see `pack`, which the first one of these commands makes. A shorter part is the last one.
    """

    key: int
    variables: tuple[int, ...]
    start: int  # of the part, in bytes


@dataclass(frozen=True)
class RestoreLoop:
    """Continue a loop, which has made no steps yet, from states that `SaveLoop` returned.

    In a session of another size than the saved one, each rank gets the same state, which lacks what only one had.
    """

    key: int
    variables: tuple[int, ...]
    states: tuple[ArrayRef, ...]  # of each rank: an archive, see `pack`
    n_steps: int | None  # that a rank has made, in a session of another size


@dataclass(frozen=True)
class KeepValues:
    """Copy the values of variables on each rank, or, with `restore`, give them the values that were copied last."""

    variables: tuple[int, ...]
    restore: bool = False


@_command(KEEPS_SHAPES)
@dataclass(frozen=True)
class TimeFunction:
    """Time calls of a function on some ranks, at once and each on its own; return their seconds on each rank.

    Each takes all of the inputs, and the first `rows` of the variables `sliceable`. Updates are made. With
    `of_operands`, the ranks return in place of seconds when the operands of the largest reduction exist; see
    `times_of_operands`. The list is empty if the backend does not time single Apply nodes.
    """

    function: int
    inputs: tuple[ArrayRef, ...]
    rows: int
    takes_rows: bool  # the function also takes the total row count, the rank's first row, its row count
    sliceable: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: float
    least: int  # number of calls
    of_operands: bool = False


@_command(KEEPS_SHAPES, IGNORES_VALUES)
@dataclass(frozen=True)
class TimeReduction:
    """Time all-reduces of `n_bytes` of float64 on each node; return their seconds on each rank.

    With `between_nodes`, time messages of as many bytes between node leaders; see `EarlyTransport.time_messages`. With
    `delayed`, time averages over all nodes of arrays of this dtype, as the background of a loop makes them.
    """

    n_bytes: int
    repetitions: int
    between_nodes: bool = False
    delayed: str | None = None


@dataclass(frozen=True)
class InOrder:
    """Execute commands one after the other, and return all results; all ranks complete one before the next."""

    parts: tuple[Command, ...]


Command = Union[
    Flush,
    Bind,
    Connect,
    Load,
    Call,
    Broadcast,
    Share,
    Unshare,
    Get,
    Put,
    AllReduce,
    Reduce,
    Nccl,
    AllGather,
    Digest,
    Shapes,
    Record,
    Loop,
    EndLoop,
    KeepValues,
    TimeFunction,
    TimeReduction,
    SaveLoop,
    RestoreLoop,
    InOrder,
]


def parts_of(command: Command) -> tuple[Command, ...]:
    """Return the commands that are executed one after the other."""
    return command.parts if isinstance(command, InOrder) else (command,)


def keeps_equal(command: Command | None) -> bool:
    """Return whether a command consists of calls with `Call.keeps_equal`."""
    return command is not None and all(isinstance(one, Call) and one.keeps_equal for one in parts_of(command))


def join_reductions(parts: Sequence[Command]) -> list[tuple[Command, list[Command]]]:
    """Join consecutive reductions of different variables in place, so that the ranks meet once for all of them.

    Returns
    -------
    list of tuple
        Commands that do the same as the parts, and the parts of each.
    """
    groups: list[list[Command]] = []
    seen: set[int] = set()  # variables of the last group
    for part in parts:
        own = set(part.variables) if isinstance(part, (AllReduce, Reduce)) else set()
        own = set() if isinstance(part, Reduce) and not part.in_place else own
        if own and groups and _is_like(part, groups[-1][0]) and seen.isdisjoint(own):
            groups[-1].append(part)
        else:
            groups.append([part])
            seen.clear()
        seen |= own
    return [(_joined(group), group) for group in groups]


def _is_like(one: Command, other: Command) -> bool:
    """Return whether two commands are reductions that differ in their variables only."""
    return isinstance(one, (AllReduce, Reduce)) and type(one) is type(other) and one[1:] == other[1:]


def _joined(group: list[Command]) -> Command:
    first = group[0]
    if not isinstance(first, (AllReduce, Reduce)):
        return first
    return first._replace(
        variables=tuple([key for part in group if isinstance(part, type(first)) for key in part.variables])
    )
