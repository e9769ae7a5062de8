"""Rank context: rank, weights and transport that the operations of a graph use at run time, and numbers from it.

A rank has a `RankContext` for its transport over all ranks, and one for steps within its node. It is the `current`
context of a thread while the thread executes a function with collectives. Without a current context, a collective is
that of a single rank: the identity.

All ranks must run the same collectives in the same order. They compare signatures in each collective, and in one more
at the end of the function. A rank that takes another path therefore causes an error on all ranks, not a deadlock.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

from synkhronos._backends import Apply, Op, T
from synkhronos._collectives import EarlyReduction, HostTransport, Part, result_dtype
from synkhronos._processes import COLLECTIVES
from synkhronos._utils import KeyedCache
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import Rows, shares
from synkhronos.errors import CollectiveAborted, WorkerDied, WorkerTimeout

if TYPE_CHECKING:
    from synkhronos._processes import Timeline

GATHER = "gather"
BROADCAST = "broadcast"  # all ranks get the controller's rows or bytes

_logger = logging.getLogger("synkhronos")
_here = threading.local()
_END = -2  # number of the collective at the end of a function
_MOST_EXPECTED = 1024  # reductions that are known from earlier calls
_MOST_WEIGHTS = 8  # divisions of a reduction into pieces that are kept


def current() -> RankContext | None:
    """Return the context of the function with collectives that this thread executes; ``None`` outside of one."""
    return getattr(_here, "context", None)


#: Shape and dtype of an array.
_Kind = tuple[tuple[int, ...], np.dtype]


def _kind(array: np.ndarray) -> _Kind:
    return array.shape, array.dtype


class _Expectation(NamedTuple):
    """A reduction as the last call has made it, by which the next one begins it early.

    Attributes
    ----------
    number : int
        Number of the reduction in its function.
    ops : tuple of str
        Op of each array.
    kinds : list of tuple
        Shape and dtype of each array.
    order : tuple of int
        Indices of the arrays, in the order in which they came into existence.
    of_weights : dict
        The transport's division of the reduction into pieces, by the weights of the ranks.
    """

    number: int
    ops: tuple[str, ...]
    kinds: list[_Kind]
    order: tuple[int, ...]
    of_weights: dict[tuple[int, ...], Any]


class _Early(NamedTuple):
    """An early reduction in this call: its key, what was expected of it, and the weights for which it was divided."""

    key: int
    expectation: _Expectation
    weights: tuple[int, ...]
    reduction: EarlyReduction


def _are_these(announced: Sequence[tuple[int, np.ndarray]], arrays: Sequence[np.ndarray]) -> bool:
    """Return whether the announced operands are those of a reduction, each once."""
    return (
        len(announced) == len(arrays)
        and all(
            one.shape == arrays[i].shape and one.__array_interface__["data"] == arrays[i].__array_interface__["data"]
            for i, one in announced
        )
        and len({i for i, _ in announced}) == len(arrays)
    )


class RankContext:
    """Context of one rank in calls of functions with collectives.

    Parameters
    ----------
    rank : int
        This rank.
    n_ranks : int
        Number of ranks.
    controller : int
        Rank of the controller.
    transport : HostTransport
    timeline : Timeline

    Attributes
    ----------
    weights : tuple of int
        Weights of the ranks in the current call: their numbers of data points, or all 1 in a function without data.
        Reductions and gathers leave out ranks with weight 0; only ``"avg"`` uses the sizes of the other weights. A
        broadcast always takes the controller's values.
    own : int
        This rank's weight; while it computes a slice, the number of data points of the slice.
    pieces : tuple of tuple of int
        For each array of the last reduction, the numbers of the pieces in which it was exchanged with other nodes, if
        it began early; else empty.
    """

    def __init__(self, rank: int, n_ranks: int, controller: int, transport: HostTransport, timeline: Timeline) -> None:
        self.rank = rank
        self.n_ranks = n_ranks
        self.controller = controller
        self.weights: tuple[int, ...] = (1,) * n_ranks
        self.own = 1
        self._transport = transport
        self._between_nodes = transport.early
        self._timeline = timeline
        self._lost: Exception | None = None
        self._prepared: KeyedCache[tuple[int, list[Any]]] = KeyedCache()  # reductions of each collective
        self._left: list[Any] = []  # keeps memory alive that other ranks may still read and write after an error
        self._announced: dict[int, list[tuple[int, np.ndarray]]] = {}  # operands of reductions by key, in this call
        self._expected: dict[int, _Expectation] = {}  # by key
        self._early: _Early | None = None
        self._given_up: _Early | None = None  # in this call
        self.pieces: tuple[tuple[int, ...], ...] = ()

    def execute(self, weights: tuple[int, ...], function: Callable[[], Any]) -> Any:
        """Call a function in this context, and check at the end that all ranks have run the same collectives.

        Parameters
        ----------
        weights : tuple of int
            Weights of the ranks; at least one is not 0.
        function : callable

        Returns
        -------
        object
            The result of the function.

        Raises
        ------
        WorkerDied, WorkerTimeout
            If another rank died or did not respond in time during a collective.
        """
        self.weigh(weights)
        self._left.clear()
        self._announced.clear()  # an interrupt may have kept the last call from doing so
        self._early = self._given_up = None
        self._lost = None
        _here.context = self
        try:
            result = function()
            if self._early is not None:
                self._finish_early(None)
            if self.n_ranks > 1:
                before = self._timeline.switch(COLLECTIVES)
                self._run([], _END, _END)
                self._timeline.switch(before)
            return result
        except CollectiveAborted:
            if self._lost is not None:
                raise self._lost from None
            raise
        finally:
            with deferred_interrupts():
                _here.context = None
                self._leave_early()

    def _leave_early(self) -> None:
        """Leave an early reduction that was not finished, because the function has failed."""
        self._announced.clear()
        if self._early is not None:
            assert self._between_nodes is not None
            self._early = None
            self._between_nodes.leave()

    def weigh(self, weights: tuple[int, ...]) -> None:
        """Set the weights of the ranks. It must run before the first collective of a call."""
        self.weights = weights
        self.own = weights[self.rank]

    def combine(
        self,
        number: int,
        ops: Sequence[str],
        arrays: Sequence[np.ndarray],
        in_place: Sequence[bool],
        key: int | None = None,
    ) -> list[np.ndarray]:
        """Reduce, gather or broadcast arrays over the ranks; all ranks get the same results.

        Parameters
        ----------
        number : int
            Number of this collective in its function, the same on all ranks.
        ops : sequence of str
            For each array, a key of `OPS`, ``"gather"`` or ``"broadcast"``.
        arrays : sequence of ndarray
            C-contiguous arrays.
        in_place : sequence of bool
            For each array, whether it is overwritten by the result. The result then has the array's dtype.
        key : int, optional
            The key with which the arrays were announced.

        Returns
        -------
        list of ndarray

        Raises
        ------
        ValueError
            On every rank, if shapes that must be equal differ between ranks.
        RuntimeError
            On every rank, if ranks have reached different collectives.
        CollectiveAborted
            If another rank died or did not respond in time; `execute` raises the cause.
        """
        timeline = self._timeline
        if not timeline.on:
            return self._combine(number, ops, arrays, in_place, key)
        with timeline.call(_describe(ops, arrays)):
            timeline.switch(COLLECTIVES)
            return self._combine(number, ops, arrays, in_place, key)

    def forget_calls(self) -> None:
        """Forget all reductions, so that each is made once more before it begins early; on all ranks before a call."""
        self._expected.clear()

    def announce(self, key: int, index: int, array: np.ndarray) -> None:
        """Note that an operand of a later reduction exists; begin the reduction if it is like that of earlier calls.

        Parameters
        ----------
        key : int
            Identifier of the reduction, the same on all ranks.
        index : int
            Index of the operand.
        array : ndarray
            C-contiguous. It must not change before the reduction.
        """
        if self._between_nodes is None:
            return
        announced = self._announced.setdefault(key, [])
        announced.append((index, array))
        if self._early is None and len(announced) == 1 and key in self._expected:
            self._begin_early(key)
        early = self._early
        if early is None or early.key != key:
            return
        before = self._timeline.switch(COLLECTIVES)
        place, order = len(announced) - 1, early.expectation.order
        kinds = early.expectation.kinds
        if order[place] != index or kinds[index] != _kind(array):
            self._finish_early(None)
        elif not self._guard([array], self._between_nodes.add, early.reduction, array):
            raise self._guard([], self._early_difference, early)
        self._timeline.switch(before)

    def _begin_early(self, key: int) -> None:
        assert self._between_nodes is not None
        expectation = self._expected[key]
        number, ops, kinds, order, of_weights = expectation
        signature, reductions = self._reductions(number, ops, kinds)
        ways = [how for _, how in reductions]
        if self.weights not in of_weights:
            if len(of_weights) == _MOST_WEIGHTS:
                of_weights.clear()
            of_weights[self.weights] = self._between_nodes.divide(kinds, ways, order)
        division = of_weights[self.weights]
        if division is not None:
            self._early = _Early(key, expectation, self.weights, EarlyReduction(division, ways, signature))

    def _finish_early(self, outs: Sequence[np.ndarray] | None) -> None:
        """Write the results of the early reduction to ``outs``; ``None``: give it up."""
        early = self._early
        assert early is not None and self._between_nodes is not None
        arrays = [*early.reduction.arrays.values(), *(outs or ())]
        if not self._guard(arrays, self._between_nodes.finish, early.reduction, outs):
            raise self._guard([], self._early_difference, early)
        self._early = None
        if outs is None:
            self._given_up = early

    def _early_difference(self, early: _Early) -> Exception:
        """Return the error after a mismatch in an early reduction."""
        return self._difference(early.expectation.number, self._early_shapes(early))

    def _early_shapes(self, early: _Early) -> list[tuple[int, ...]]:
        """Return the shapes of the arrays of an early reduction; of those still to come, the expected ones."""
        shapes = [shape for shape, _ in early.expectation.kinds]
        for index, array in self._announced.get(early.key, ()):
            shapes[index] = array.shape
        return shapes

    def _is_early(self, key: int, number: int, ops: tuple[str, ...], arrays: Sequence[np.ndarray]) -> bool:
        """Return whether a reduction has begun early. If not, expect it in later calls."""
        announced = self._announced.pop(key)  # which frees the operands
        if self._early is not None and self._early.key == key:
            if self._early.weights == self.weights and _are_these(announced, arrays):
                return True
            self._finish_early(None)
            return False
        if not _are_these(announced, arrays):
            return False
        order = tuple([index for index, _ in announced])
        kinds = list(map(_kind, arrays))
        if key not in self._expected or self._expected[key][:4] != (number, ops, kinds, order):
            if len(self._expected) == _MOST_EXPECTED:  # on all ranks at the same time
                self._expected.clear()
            self._expected[key] = _Expectation(number, ops, kinds, order, {})
        return False

    def _combine(
        self,
        number: int,
        ops: Sequence[str],
        arrays: Sequence[np.ndarray],
        in_place: Sequence[bool],
        key: int | None,
    ) -> list[np.ndarray]:
        kinds = list(map(_kind, arrays))
        signature, reductions = self._reductions(number, ops, kinds)
        self.pieces = ()
        if key in self._announced and self._is_early(key, number, tuple(ops), arrays):
            assert self._early is not None
            self.pieces = self._early.reduction.division.of_arrays
            outs = [
                array if is_own else np.empty(array.shape, how[0])
                for array, is_own, how in zip(arrays, in_place, reductions)
            ]
            self._finish_early(outs)
            return outs
        in_rows = [(array, op) for (array, op), how in zip(zip(arrays, ops), reductions) if how is None]
        shapes_of = iter(self._exchange_shapes(number, in_rows) if in_rows else ())
        parts: list[Part] = []
        results = []
        for array, op, is_own, reduction in zip(arrays, ops, in_place, reductions):
            if reduction is None:
                shapes = next(shapes_of)
                out = np.empty((sum(shape[0] for shape in shapes), *array.shape[1:]), array.dtype)
                sizes = [int(np.prod(shape)) for shape in shapes]
                parts.append((array if self._is_present(self.rank, op) else array[:0], out, sizes))
            else:
                out = array if is_own else np.empty(array.shape, reduction[0])
                parts.append((array, out, reduction[1]))
            results.append(out)
        directly = self._run(parts, number, signature)
        if self.rank == self.controller and _logger.isEnabledFor(logging.DEBUG):
            way = "large arrays in place" if directly else "through staging buffers"
            _logger.debug("in a function, %s: %s", _describe(ops, arrays), way)
        return results

    def _reductions(self, number: int, ops: Sequence[str], kinds: Sequence[_Kind]) -> tuple[int, list[Any]]:
        """Return a signature that must be equal on all ranks, and the reduction of each array.

        The reduction of an array that is gathered or broadcast is ``None``.
        """
        slot, key = (number, ops), (self.weights, kinds)
        prepared = self._prepared.get(slot, key)
        if prepared is None:
            same = (*ops, *(shape for op, (shape, _) in zip(ops, kinds) if op not in (GATHER, BROADCAST)))
            reductions: list[Any] = []
            for op, (_, dtype) in zip(ops, kinds):
                returned = None if op in (GATHER, BROADCAST) else result_dtype(dtype, op)
                how = None if returned is None else self._transport.reduction_of(op, dtype, returned, self.weights)
                reductions.append(None if how is None else (returned, how))
            checksum = zlib.crc32(repr((number, same)).encode())  # unlike hash(), the same on every node
            prepared = self._prepared.put(slot, key, (checksum, reductions))
        return prepared

    def _is_present(self, rank: int, op: str) -> bool:
        """Return whether a rank contributes rows to a gather or a broadcast."""
        return rank == self.controller if op == BROADCAST else bool(self.weights[rank])

    def _exchange_shapes(self, number: int, arrays: Sequence[tuple[np.ndarray, str]]) -> list[list[tuple[int, ...]]]:
        """Return the shapes of each array on all ranks. For ranks that contribute no rows, axis 0 has length 0."""
        own = [(array.shape[0] * self._is_present(self.rank, op), *array.shape[1:]) for array, op in arrays]
        lengths = np.array([length for shape in own for length in shape], np.int64)
        table = np.empty((self.n_ranks, len(lengths)), np.int64)
        self._run([(lengths, table, [len(lengths)] * self.n_ranks)], number, hash((number, len(lengths))))
        found, start = [], 0
        for array, op in arrays:
            shapes = [tuple(row[start : start + array.ndim]) for row in table.tolist()]
            start += array.ndim
            beyond = {shape[1:] for rank, shape in enumerate(shapes) if self._is_present(rank, op)}
            if len(beyond) > 1:
                raise ValueError(f"gathered: got the shapes {shapes}; expected equal ones beyond axis 0")
            found.append(shapes)
        return found

    def _run(self, parts: list[Part], number: int, signature: int) -> bool:
        """Run the transport's collective; raise an error if the signatures of the ranks differ."""

        def run() -> bool:
            directly = self._transport.run(parts, signature)
            if directly is None:
                raise self._difference(number, [part[0].shape for part in parts if not isinstance(part[2], list)])
            return directly

        return bool(self._guard(parts, run))

    def _guard(self, arrays: Sequence[Any], function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the transport; if it raises, keep the arrays that other ranks may still access."""
        try:
            return function(*arguments)
        except BaseException as error:
            self._left += arrays
            # Theano re-raises exceptions with its own message, which these classes do not allow; see `execute`
            if isinstance(error, (WorkerDied, WorkerTimeout)):
                self._lost = error
                raise CollectiveAborted(str(error)) from error
            raise

    def _difference(self, number: int, shapes: Sequence[tuple[int, ...]]) -> Exception:
        """Return an error that describes how the ranks differ. All ranks call this together after a mismatch."""
        early = self._early or self._given_up
        of_early = [] if early is None else self._early_shapes(early)
        early_number = 0 if early is None else early.expectation.number
        rows = self._gather_numbers([number, sum(map(len, shapes)), early_number, sum(map(len, of_early))])
        # a rank whose array differs gives an early reduction up, and may be at another collective than the others
        for place, some in ((0, shapes), (2, of_early)):
            if len({tuple(row[place : place + 2]) for row in rows}) == 1:
                error = self._difference_of_shapes(some)
                if error is not None:
                    return error
        places = [
            f"rank {rank} is at {'the end' if one == _END else f'number {one}'}" for rank, (one, *_) in enumerate(rows)
        ]
        return RuntimeError(
            f"the ranks have reached different collectives of a function: {', '.join(places)}. The condition of an "
            "IfElse or the number of steps of a scan that contains collectives must be equal on all ranks; compute it "
            "from results of collectives, for example"
        )

    def _difference_of_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Exception | None:
        """Return an error if the shapes, which have as many lengths together on all ranks, differ."""
        table = self._gather_numbers([length for shape in shapes for length in shape])
        start = 0
        for shape in shapes:
            of_ranks = [tuple(row[start : start + len(shape)]) for row in table]
            start += len(shape)
            if len(set(of_ranks)) > 1:
                return ValueError(
                    f"a collective of a function got the shapes {of_ranks}; expected equal ones on all ranks. Use "
                    "gathered for values with one row for each data point"
                )
        return None

    def _gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather the same number of integers from each rank; return one list for each rank."""
        own = np.array(numbers, np.int64)
        table = np.empty(self.n_ranks * len(own), np.int64)
        self._transport.run([(own, table, [len(own)] * self.n_ranks)], 0)
        return table.reshape(self.n_ranks, -1).tolist()


def _describe(ops: Sequence[str], arrays: Sequence[np.ndarray]) -> str:
    """Describe a collective for traces: its ops, the number of arrays, and their bytes on this rank."""
    names = ", ".join(sorted(set(ops)))
    n_bytes = sum(array.nbytes for array in arrays)
    return f"{names} of {len(arrays)} array{'s' if len(arrays) > 1 else ''}, {n_bytes} bytes"


# -- operations for numbers that depend on the rank: its number and weight, and its range of the rows of a call


class RankConstant(Op):
    """A scalar that may have a different value on each rank.

    Parameters
    ----------
    what : str
        The value: ``"rank"`` or ``"n_ranks"`` (int64), or ``"inverse_weight"`` (float64). The latter is the total
        weight of all ranks divided by this rank's weight, and 0 on a rank with weight 0. Outside a call, the three
        values are 0, 1 and 1.
    """

    __props__: tuple[str, ...] = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def make_node(self) -> Any:
        """Apply the operation, which has no inputs."""
        return Apply(self, [], [T.dscalar() if self.what == "inverse_weight" else T.lscalar()])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Read the number from the current rank context."""
        context = current()
        if self.what == "inverse_weight":
            own = 1 if context is None else context.own
            total = 1 if context is None else sum(context.weights)
            output_storage[0][0] = np.asarray(total / own if own else 0.0)
        elif context is None:
            output_storage[0][0] = np.asarray(int(self.what == "n_ranks"))
        else:
            output_storage[0][0] = np.asarray(getattr(context, self.what))

    def do_constant_folding(self, *_: Any) -> bool:
        """Return false, because the value differs between ranks."""
        return False

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """Return the shape of a scalar."""
        return [()]


class Counted(RankConstant):
    """Three int64 scalars: number of rows of a call, index of this rank's first row, and number of this rank's rows.

    If the call passes these three numbers, they are the first inputs; otherwise the operation divides the rows among
    the ranks. The other inputs are lengths, which must all be equal to the number of rows. If the operation divides
    fewer rows than there are ranks, each rank gets all rows, and only rank 0 has a weight in collectives.

    Parameters
    ----------
    names : tuple of str
        Names of the variables to which the lengths belong, for messages.
    given : str
        Names of the variables whose rows the call passes, for messages; empty if the call passes no numbers.
    """

    __props__ = ("names", "given")

    def __init__(self, names: tuple[str, ...], given: str) -> None:
        self.names, self.given = names, given

    def make_node(self, *numbers: Any) -> Any:
        """Apply the operation to the three numbers (if the call passes them) and the lengths."""
        return Apply(self, list(map(T.as_tensor_variable, numbers)), [T.lscalar() for _ in range(3)])

    def perform(self, node: Any, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Compute the three numbers; raise `ValueError` on all ranks if the lengths differ."""
        numbers = list(map(int, inputs))
        names = [self.given, *self.names] if self.given else self.names
        lengths = [numbers[0], *numbers[3:]] if self.given else numbers
        if len(set(lengths)) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in zip(names, lengths))
            raise ValueError(
                f"sharded inputs and variables have different numbers of rows: {found}; expected equal ones"
            )
        rows, first, here = numbers[:3] if self.given else _divided(lengths[0])
        for storage, number in zip(output_storage, (rows, first, here)):
            storage[0] = np.asarray(number)

    def infer_shape(self, node: Any, shapes: Sequence[Any]) -> list[Any]:
        """Return the shapes of three scalars."""
        return [(), (), ()]


def _divided(n_rows: int) -> tuple[int, int, int]:
    context = current()
    if context is None:
        return n_rows, 0, n_rows
    if n_rows >= context.n_ranks:
        split = shares(n_rows, context.n_ranks)
        context.weigh(tuple(map(len, split)))
    else:
        split = [Rows(0, n_rows)] * context.n_ranks
        context.weigh(tuple(int(rank == 0) for rank in range(context.n_ranks)))
    share = split[context.rank]
    return n_rows, share.start, len(share)
