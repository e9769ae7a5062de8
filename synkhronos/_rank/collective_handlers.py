"""Handlers of the commands on shared variables: get, set, and collectives such as all-reduce."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import numpy as np

from synkhronos import _graph
from synkhronos._backends import is_device_array, to_host
from synkhronos._collectives import (
    NcclTransport,
    ShapesDiffer,
    Transport,
    Workspace,
    make_transport,
    nccl_reduces,
    result_dtype,
)
from synkhronos._memory import Place, array_at
from synkhronos._native import native
from synkhronos._processes import SHUFFLE, TRANSFERS, ProcessGroup
from synkhronos._rank.commands import (
    AllGather,
    AllReduce,
    Broadcast,
    Digest,
    Get,
    KeepValues,
    Nccl,
    Put,
    Reduce,
    Shapes,
    Share,
    TimeReduction,
    Unshare,
)
from synkhronos._rank.results import RowViews
from synkhronos._utils.interrupts import deferred_interrupts
from synkhronos._utils.rows import Rows

_logger = logging.getLogger("synkhronos")


class CollectiveHandlers:
    """Execution of commands on shared variables, on one rank.

    Parameters
    ----------
    group : ProcessGroup
    workspace : Workspace
    variables : VariableTable
    row_views : RowViews
    heap : Heap
        The shared heap.

    Attributes
    ----------
    nccl : NcclTransport or None
        ``None`` until the ranks have joined an NCCL communicator.
    transport : HostTransport
    variables : VariableTable
    handlers : dict of type to callable
        The method that executes each kind of command.
    """

    def __init__(
        self,
        group: ProcessGroup,
        workspace: Workspace,
        variables: _graph.VariableTable,
        row_views: RowViews,
        *,
        heap: native.Heap,
    ) -> None:
        world = group.world
        self.rank = world.first + group.rank
        self.nccl: NcclTransport | None = None
        self._is_controller = self.rank == world.master_rank
        self._leads, self._is_spread = group.rank == group.master_rank, len(world.sizes) > 1
        self._group = group
        self._workspace = workspace
        self.variables = variables
        self._row_views = row_views
        self._heap = heap
        self.transport = make_transport(group, workspace, heap)
        self._transports: list[Transport] = [self.transport]
        self._timeline = group.timeline
        self._kept: list[tuple[Any, Any, Any]] = []  # variables, their values, and copies of these
        self._at_work: list[np.ndarray] = []  # arrays that other ranks may read or write during this command
        self.handlers: dict[type, Callable[[Any], Any]] = {
            Broadcast: self._broadcast,
            Share: self._share,
            Unshare: self._unshare,
            Get: self._get,
            Put: self._put,
            AllReduce: self._all_reduce,
            Reduce: self._reduce,
            Nccl: self._nccl,
            AllGather: self._all_gather,
            Digest: self._digest,
            Shapes: self._shapes,
            KeepValues: self._keep,
            TimeReduction: self._time_reduction,
        }

    def use_nccl(self, comm: Any) -> None:
        """Use an NCCL communicator that the ranks have just joined."""
        self.nccl = NcclTransport(comm, self._workspace, self.rank, self._group.barrier)
        self._transports.append(self.nccl)

    def restart(self) -> None:
        """Reset the transports; every rank calls this at the start of a command, so that all agree on their state."""
        self._at_work.clear()
        for transport in self._transports:
            transport.restart()

    def _keep(self, command: KeepValues) -> None:
        """Copy the values of variables, or restore those that were copied."""
        if command.restore:
            self.restore()
        else:
            values = [(var, _graph.get_array(var)) for var in map(self.variables.__getitem__, command.variables)]
            self._kept = [(var, value, copy.deepcopy(value)) for var, value in values]

    def restore(self, keep: bool = False) -> None:
        """Give variables the values that they had: the same arrays, which the program may hold, with the same content.

        After an interrupt, it can be repeated. With ``keep``, it can be repeated later, too.
        """
        with deferred_interrupts():
            for var, value, before in self._kept:
                if isinstance(value, np.ndarray) and value.flags.writeable:
                    np.copyto(value, before)
                elif isinstance(value, np.random.RandomState):
                    value.set_state(before.get_state())
                elif isinstance(value, np.random.Generator):
                    value.bit_generator.state = before.bit_generator.state
                else:
                    value = copy.deepcopy(before) if keep else before
                var.container.storage[0] = value
            self._kept = self._kept if keep else []

    def _time_reduction(self, command: TimeReduction) -> list[float]:
        """Return the seconds of all-reduces on this node, of averages over all nodes, or of messages between nodes."""
        early = self.transport.early
        if command.between_nodes:
            assert early is not None
            return early.time_messages(command.n_bytes, command.repetitions)
        dtype = np.dtype(command.delayed or np.float64)
        array = np.zeros(command.n_bytes // dtype.itemsize, dtype)
        self._at_work.append(array)
        seconds = []
        for _ in range(command.repetitions):
            self.transport.barrier()
            start = time.perf_counter()
            if command.delayed:
                assert early is not None
                early.start(array).wait()
            else:
                self.transport.on_node.all_reduce([array], "max", None)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _log_values(self, what: str, variables: Sequence[Any], way: str) -> None:
        """Log on the controller which transport moved variables, and the bytes of the controller's values."""
        if self._is_controller and _logger.isEnabledFor(logging.DEBUG):
            values = [one for one in map(_graph.get_array, variables) if hasattr(one, "dtype")]  # no random states
            n_bytes = sum(int(one.size) * one.dtype.itemsize for one in values)
            _logger.debug("%s of %s (%d bytes): %s", what, ", ".join(map(str, variables)), n_bytes, way)

    def _broadcast(self, command: Broadcast) -> None:
        variables = [self.variables[key] for key in command.variables]
        sizes = self._from_controller(command.shapes)
        if self._is_controller:
            sent = [_graph.host_array(var, value=_graph.value_for_others(var)) for var in variables]
            self._at_work += sent
            directly = self.transport.run([(array, None, size) for array, size in zip(sent, sizes)], 0)
            self._log_values("broadcast", variables, _way(bool(directly)))
            return
        arrays = [self._destination(var, shape) for var, shape in zip(variables, command.shapes)]
        self._at_work += arrays
        self.transport.run([(array.reshape(-1)[:0], array, size) for array, size in zip(arrays, sizes)], 0)
        for var, array in zip(variables, arrays):
            if array is not _graph.get_array(var):
                _graph.adopt_array(var, array)

    def _from_controller(self, shapes: Iterable[tuple[int, ...]]) -> list[list[int]]:
        """Return how many elements each rank contributes to gathered arrays of these shapes: the controller, all."""
        world = self._group.world
        return [[math.prod(shape) * (rank == world.master_rank) for rank in range(world.n_ranks)] for shape in shapes]

    def _destination(self, var: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array to receive the controller's `host_array`: the variable's own if possible, or a new one."""
        if not _graph.is_tensor_variable(var):
            return np.empty(shape, np.uint8)
        own = _graph.get_array(var)
        fits = isinstance(own, np.ndarray) and own.shape == shape and own.flags.c_contiguous and own.flags.writeable
        return own if fits and not self._is_outside(var) else np.empty(shape, var.dtype)

    def _share(self, command: Share) -> bool:
        variables = [self.variables[key] for key in command.variables]
        places: Sequence[Place | None] = command.places
        if self._is_spread:
            self._to_leaders(variables, command.places)
            if self._group.world.node:
                places = self._places_on_leader(variables, command.places)
        if not self._leads:
            for var, place in zip(variables, places):
                if place is not None:
                    _graph.set_array(var, array_at(self._heap, place))
        self._log_values("share", variables, "the controller's memory")
        return None not in places

    def _to_leaders(self, variables: Sequence[Any], places: Sequence[Place]) -> None:
        """Set variables to the controller's values on the leaders of the other nodes, which allocate new arrays."""
        sizes = self._from_controller(place.shape for place in places)
        empty = [np.empty(0, var.dtype) for var in variables]
        own: Sequence[np.ndarray] = empty
        arrays: Sequence[np.ndarray | None] = [None] * len(empty)
        if self._is_controller:
            own = [array_at(self._heap, place).reshape(-1) for place in places]
        elif self._leads:
            arrays = [np.empty(place.shape, var.dtype) for var, place in zip(variables, places)]
        self.transport.run(list(zip(own, arrays, sizes)), 0)
        for var, array in zip(variables, arrays):
            if array is not None:
                _graph.set_array(var, array)

    def _places_on_leader(self, variables: Sequence[Any], places: Sequence[Place]) -> list[Place | None]:
        """Return where the leader of this node has values; ``None`` for those that other ranks cannot read."""
        found: list[Place | None] = []
        notes = self._workspace.notes[self._group.master_rank]
        for start in range(0, len(places), len(notes)):
            some = slice(start, start + len(notes))
            if self._leads:
                offsets = [self._heap.offset(_graph.get_array(var)) for var in variables[some]]
                notes[: len(offsets)] = [-1 if offset is None else offset for offset in offsets]
            self._group.barrier()
            noted = [place._replace(offset=int(offset)) for place, offset in zip(places[some], notes)]
            found += [place if place.offset >= 0 else None for place in noted]
            self._group.barrier()  # the notes may be overwritten
        return found

    def _unshare(self, command: Unshare) -> None:
        if not self._leads:
            for key in command.variables:
                var = self.variables[key]
                _graph.set_array(var, np.array(_graph.get_array(var), order="C"))

    def _get(self, command: Get) -> Any | None:
        self._log_values("get", [self.variables[key] for key in command.variables], "through shared memory")
        if command.ranks is not None and self.rank not in command.ranks:
            return None
        values = [_graph.get_array(self.variables[key]) for key in command.variables]
        return [to_host(value) for value in values] if self._is_controller else values

    def _put(self, command: Put) -> list[bytes] | None:
        self._log_values("set", [self.variables[key] for key in command.variables], "through shared memory")
        if command.ranks is not None and self.rank not in command.ranks:
            return None
        for i, (key, source) in enumerate(zip(command.variables, command.sources)):
            part = command.shares[i][self.rank] if command.shares is not None else Rows(0, 0)
            if command.shares is None and source.rows is not None:
                part = Rows(0, len(self._row_views.rows(source.rows)))
            before = self._timeline.switch(SHUFFLE)
            value = self._row_views.take(source, part)
            self._timeline.switch(TRANSFERS)
            var = self.variables[key]
            if self._is_outside(var):
                _graph.set_array(var, np.array(value, order="C"))
            else:
                _graph.copy_array(var, value)
            self._timeline.switch(before)
        return self._digest(Digest(command.digests)) if command.digests else None

    def move_to_heap(self, variables: Sequence[Any]) -> None:
        """Move values of shared variables into this rank's part of the shared heap."""
        for var in variables:
            if self._is_outside(var):
                _graph.set_array(var, np.array(_graph.get_array(var), order="C"))

    def _is_outside(self, var: Any) -> bool:
        """Return whether a value that could be in the shared heap is outside it."""
        value = _graph.get_array(var)
        if self._heap.base is None or not isinstance(value, np.ndarray) or not _graph.is_tensor_variable(var):
            return False
        return value.nbytes >= native.SMALLEST_BLOCK and self._heap.offset(value) is None

    def _all_reduce(self, command: AllReduce) -> None:
        """All-reduce over NCCL the variables that it supports, and the others over the host transport."""
        hosts = [self.variables[key] for key in command.variables]
        if self.nccl is not None and command.nccl:
            on_gpu = [var for var in hosts if is_device_array(_graph.get_array(var))]
            direct = [var for var in on_gpu if nccl_reduces(np.dtype(var.dtype), command.op, False)]
            if direct:
                self.nccl.agree([_graph.get_array(var) for var in hosts])  # before anything changes
                self.nccl.all_reduce([_graph.get_array(var) for var in direct], command.op, command.weights)
                self._log_values("all-reduce", direct, "over NCCL")
            hosts = [var for var in hosts if not any(var is other for other in direct)]
        if not hosts:
            return
        try:
            directly = self._all_reduce_hosts(command, hosts, any_order=True)
        except ShapesDiffer:  # memory layouts may differ where shapes are equal: try again in C order
            directly = self._all_reduce_hosts(command, hosts, any_order=False)
        self._log_values("all-reduce", hosts, _way(directly))

    def _all_reduce_hosts(self, command: AllReduce, variables: Sequence[Any], any_order: bool) -> bool:
        arrays = self._host_arrays(variables, any_order)
        laid_out, orders = arrays, []
        if not all(array.flags.c_contiguous for array in arrays):
            orders = [_graph.memory_order(array) for array in arrays]
            laid_out = [array.transpose(order) if order else array for array, order in zip(arrays, orders)]
        directly = self.transport.all_reduce(laid_out, command.op, command.weights, tuple(orders))
        self._write_back(variables, arrays)
        return directly

    def _reduce(self, command: Reduce) -> list[np.ndarray] | None:
        variables = [self.variables[key] for key in command.variables]
        arrays = self._host_arrays(variables)
        dtypes = [array.dtype if command.in_place else result_dtype(array.dtype, command.op) for array in arrays]
        outs: list[np.ndarray] | None = None
        if self._is_controller:
            outs = arrays if command.in_place else list(map(np.empty, [array.shape for array in arrays], dtypes))
            self._at_work += outs
        directly = self.transport.reduce(arrays, command.op, outs, dtypes)
        self._log_values("reduce", variables, _way(directly))
        if self._is_controller and command.in_place:
            self._write_back(variables, arrays)
        return None if command.in_place else outs

    def _host_arrays(self, variables: Sequence[Any], any_order: bool = False) -> list[np.ndarray]:
        """Return values as writable host arrays that share no memory: C-contiguous, or in any order with ``any_order``.

        A value that already is such an array is not copied; an object that is not a tensor is pickled. The arrays stay
        alive until the next command, because another rank may still write to them after an interrupt of this one.
        """
        before = self._timeline.switch(TRANSFERS)
        arrays = _without_overlaps([_graph.host_array(var, any_order) for var in variables])
        self._at_work += arrays
        self._timeline.switch(before)
        return arrays

    def _write_back(self, variables: Sequence[Any], arrays: Sequence[np.ndarray]) -> None:
        """Set variables to the current contents of their `_host_arrays`."""
        before = self._timeline.switch(TRANSFERS)
        for var, array in zip(variables, arrays):
            if array is not _graph.get_array(var):
                _graph.copy_array(var, array)
        self._timeline.switch(before)

    def _nccl(self, command: Nccl) -> list[Any] | None:
        assert self.nccl is not None
        variables = [self.variables[key] for key in command.variables]
        self._log_values(command.kind, variables, "over NCCL")
        if command.kind == "broadcast":
            for var, shape in zip(variables, command.shapes):
                old = _graph.get_array(var)
                if old.shape != shape or not old.flags["C_CONTIGUOUS"]:
                    value = old.copy("C") if old.shape == shape else np.empty(shape, var.dtype)
                    _graph.set_array(var, value)
            self.nccl.broadcast([_graph.get_array(var) for var in variables], command.root)
            return None
        arrays = [_graph.get_array(var) for var in variables]
        if command.kind == "reduce":
            return self.nccl.reduce(arrays, command.op, None, command.root) or None
        for var, gathered in zip(variables, self.nccl.all_gather(arrays)):
            _graph.set_array(var, gathered)
        return None

    def _all_gather(self, command: AllGather) -> None:
        arrays = self._host_arrays([self.variables[key] for key in command.variables])
        sizes = [[math.prod(shape) for shape in shapes] for shapes in command.shapes]
        gathered, directly = self.transport.all_gather(arrays, sizes)
        for key, value, shapes in zip(command.variables, gathered, command.shapes):
            length = sum(shape[0] for shape in shapes)
            _graph.set_array(self.variables[key], value.reshape(length, *shapes[0][1:]))
        self._log_values("all-gather", [self.variables[key] for key in command.variables], _way(directly))

    def _digest(self, command: Digest) -> list[bytes]:
        return [digest_of(array) for array in self._host_arrays([self.variables[key] for key in command.variables])]

    def _shapes(self, command: Shapes) -> list[tuple[int, ...]]:
        return [tuple(_graph.get_array(self.variables[key]).shape) for key in command.variables]


def digest_of(array: np.ndarray) -> bytes:
    """Return a 16-byte BLAKE2b digest of a C-contiguous array: of its shape, dtype and values."""
    digest = hashlib.blake2b(repr((array.shape, array.dtype.str)).encode(), digest_size=16)
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


def _without_overlaps(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays, with copies in place of those that share memory with others."""
    if len(arrays) < 2:
        return arrays
    starts = [array.__array_interface__["data"][0] for array in arrays]
    end = 0
    for i in sorted(range(len(arrays)), key=starts.__getitem__):
        stop = starts[i] + arrays[i].nbytes
        if starts[i] < end and arrays[i].size:
            arrays[i] = arrays[i].copy()
        end = max(end, stop)
    return arrays


def _way(directly: bool) -> str:
    return "large arrays in place" if directly else "through staging buffers"
