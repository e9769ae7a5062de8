"""Simulation of divided graphs without processes: each value on each rank is compared with the serial program's.

Nothing is compiled or optimized. Each Apply node of the user's graph and of the divided graph is executed in Python,
the latter for each rank in turn, and a collective takes the values of all ranks. So each variable of the user's graph
can be compared with its counterpart in the divided graph, according to the counterpart's placement.
"""

import itertools

import numpy as np
from backend import T, on_theano, theano
from lockstep_scan import scan

from synkhronos import _backends
from synkhronos._backends import io_toposort, ops
from synkhronos._sharding.checking import environment_asks
from synkhronos._sharding.lengths import RowCounts
from synkhronos._sharding.placements import Partial, Replicate
from synkhronos._sharding.propagate import Propagation
from synkhronos._sharding.rank_ops import CollectiveBuilders
from synkhronos._sharding.rules import REPLICATED_RULES, RULES

if on_theano:  # Theano looks for some functions where an earlier SciPy had them
    from scipy.signal import _signaltools, _sigtools
    from theano.tensor.nnet import abstract_conv as conv

    conv.imported_scipy_signal = True
    conv._valfrommode, conv._bvalfromboundary = _signaltools._valfrommode, _signaltools._bvalfromboundary
    conv._convolve2d, conv.convolve = _sigtools._convolve2d, _signaltools.convolve

#: Operations that are compiled instead of executed in Python.
COMPILED = (ops.Scan, ops.IfElse, *ops.EXPRESSED) if on_theano else (ops.Scan, ops.IfElse, ops.OpFromGraph)

#: Errors that backends raise for an invalid program.
SENSELESS = (ValueError, IndexError, AssertionError, TypeError, NotImplementedError, ArithmeticError)

_REDUCTIONS = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


class CollectiveOp(theano.Op):
    """A collective, for which `evaluate` passes the values of all ranks."""

    __props__ = ("op", "axis")

    def __init__(self, op, axis=None):
        self.op, self.axis = op, axis

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        raise AssertionError("a rank alone")

    def meet(self, arrays):
        if self.op == "gather":
            return np.concatenate(arrays, self.axis)
        return np.asarray(_REDUCTIONS[self.op](arrays, axis=0), arrays[0].dtype)


COLLECTIVES = CollectiveBuilders(lambda x, op: CollectiveOp(op)(x), lambda x, axis: CollectiveOp("gather", axis)(x))


def evaluate(outputs, given, n_ranks=1, alone=False, in_step=False):
    """Compute the values of ``outputs`` and of all variables that they depend on, as lists with an entry for each rank.

    ``given`` has such lists for the inputs. With ``alone``, collectives are those of one rank. With ``in_step``, loops
    are executed step by step on all ranks; otherwise the backend compiles them.
    """
    values = {variable: list(each) for variable, each in given.items()}

    def value(variable, rank):
        if variable not in values:
            if isinstance(variable, _backends.Constant):
                values[variable] = [variable.data] * n_ranks
            else:
                values[variable] = [variable.get_value() for _ in range(n_ranks)]
        return values[variable][rank]

    for node in io_toposort(list(given), outputs):
        inputs = [[value(one, rank) for one in node.inputs] for rank in range(n_ranks)]
        if isinstance(node.op, CollectiveOp) and not alone:
            result = node.op.meet([each[0] for each in inputs])
            values[node.outputs[0]] = [result] * n_ranks
            continue
        if isinstance(node.op, ops.Scan) and in_step and len({int(each[0]) for each in inputs}) == 1:
            results = scan(node, inputs, lambda inner, held: evaluate(inner, held, n_ranks, alone, in_step=True))
        else:
            results = [_perform(node, each, alone) for each in inputs]
        for output, each in zip(node.outputs, zip(*results)):
            values[output] = list(each)
    for output in outputs:
        value(output, 0)
    return values


def _perform(node, inputs, alone):
    if isinstance(node.op, CollectiveOp):
        return inputs
    if isinstance(node.op, ops.AllocEmpty):
        return [np.zeros(list(map(int, inputs)), node.op.dtype)]
    if isinstance(node.op, COMPILED):
        return _compiled(node)(*inputs)
    if isinstance(node.op, ops.Dot) and not all(np.isfinite(one).all() for one in inputs):
        # 0 times infinity is 0 in NumPy's product with one row, and NaN with two rows
        x, y = inputs
        return [np.einsum(f"{'ij'[-x.ndim :]},{'jk'[: y.ndim]}", x, y).astype(node.outputs[0].dtype)]
    if not hasattr(node.tag, "is_prepared"):
        node.op.prepare_node(node, None, None, "py")
        node.tag.is_prepared = True
    storage = [[None] for _ in node.outputs]
    has_params = on_theano and getattr(node.op, "params_type", None) is not None
    node.op.perform(node, inputs, storage, *([node.run_params()] if has_params else []))
    return [each[0] for each in storage]


def _compiled(node):
    if not hasattr(node.tag, "function"):
        inputs = [one.type() for one in node.inputs]
        outputs = node.clone_with_new_inputs(inputs).outputs
        mode = theano.Mode("py", "fast_compile")
        node.tag.function = theano.function(inputs, outputs, mode=mode, on_unused_input="ignore")
    return node.tag.function


def shares(n_rows, n_ranks, how="even"):
    """Return the number of rows of each rank: as even as possible, or most rows on the first rank."""
    if how == "even":
        return [len(part) for part in np.array_split(np.arange(n_rows), n_ranks)]
    return [n_rows - n_ranks + 1] + [1] * (n_ranks - 1)


def rows():
    """Return the variables of the numbers of rows that a divided graph takes."""
    return RowCounts(T.lscalar("rows"), T.lscalar("first"), T.lscalar("local"))


class Divided:
    """A divided program; see `check`."""

    def __init__(self, outputs, sharded, checks_shapes=False):
        self.rows = rows()
        checks_shapes = checks_shapes or environment_asks()
        self.walk = Propagation(sharded, self.rows, COLLECTIVES, RULES, REPLICATED_RULES, checks_shapes=checks_shapes)
        self.outputs, self.sharded = outputs, sharded
        self.walk.run(outputs)
        self.replicated = [self.walk.replicated(output) for output in outputs]

    def compare(self, given, serial, counts, alone=False):
        """Compare each variable of the user's graph, on each rank, with the serial value."""
        n_ranks, n_rows = len(counts), sum(counts)
        firsts = [0, *itertools.accumulate(counts)][:-1]
        if alone:
            counts, firsts = [n_rows] * n_ranks, [0] * n_ranks
        on_ranks = {
            variable: [
                value.take(range(first, first + here), self.sharded[variable]) if variable in self.sharded else value
                for first, here in zip(firsts, counts)
            ]
            for variable, value in given.items()
        }
        on_ranks[self.rows.total] = [np.asarray(n_rows)] * n_ranks
        on_ranks[self.rows.first] = list(map(np.asarray, firsts))
        on_ranks[self.rows.local] = list(map(np.asarray, counts))
        twins = {variable: self.walk.new(variable) for variable in serial}
        placed = map(self.walk.placement, serial)
        lengths = [getattr(one, name, None) for one in placed for name in ("outer", "inner")]
        numbers = [self.walk.lengths.value(length) for length in lengths if length is not None]
        found = evaluate([*twins.values(), *self.replicated, *numbers], on_ranks, n_ranks, alone, in_step=True)
        self.found = found
        for variable, (value,) in serial.items():
            placement = self.walk.placement(variable)
            here = found[twins[variable]]
            is_array = isinstance(variable.type, (_backends.TensorType, _backends.NO_TENSORS[0]))
            is_sparse = hasattr(value, "toarray")
            if not is_array or is_sparse or not self.walk.is_used(variable):
                continue
            value = np.asarray(value)
            if isinstance(placement, Partial) and not alone:
                here, expected = [_REDUCTIONS[placement.op](here, axis=0).astype(value.dtype)], [value]
            elif isinstance(placement, (Replicate, Partial)):
                expected = [value] * n_ranks
            else:
                lengths = [self.walk.lengths.value(one) for one in (placement.outer, placement.inner)]
                outer, inner = (int(found[length][0]) for length in lengths)
                axis = placement.axis
                before, after = value.shape[:axis], value.shape[axis + 1 :]
                places = value.reshape(*before, outer, n_rows, inner, *after)
                parts = [places.take(range(first, first + n), axis + 1) for first, n in zip(firsts, counts)]
                expected = [part.reshape(*before, outer * n * inner, *after) for part, n in zip(parts, counts)]
            for rank, (got, right) in enumerate(zip(here, expected)):
                _same(got, right, lambda: f"{variable} of {variable.owner}, {placement}, rank {rank} of {counts}")  # noqa: B023
        for output, replicated in zip(self.outputs, self.replicated):
            for rank, got in enumerate(found[replicated]):
                _same(got, serial[output][0], lambda: f"the output {output}, rank {rank} of {counts}")  # noqa: B023


def _same(got, right, describe):
    got, right = np.asarray(got), np.asarray(right)
    if got.dtype == right.dtype and np.array_equal(got, right):
        return
    what = describe()
    assert got.shape == right.shape, f"{what}: shape {got.shape}, expected {right.shape}"
    assert got.dtype == right.dtype, f"{what}: {got.dtype}, expected {right.dtype}"
    if right.dtype.kind in "fc":
        scale = np.abs(right[np.isfinite(right)]).max(initial=1.0)
        tolerance = {8: 1e-9, 16: 1e-9}.get(right.dtype.itemsize, 1e-4)
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance * scale, err_msg=what)
    else:
        np.testing.assert_array_equal(got, right, err_msg=what)


def check(outputs, given, sharded, ranks=(1, 2, 3, 5), in_step=False):
    """Divide a program, and compare all values with those of the serial program.

    Parameters
    ----------
    outputs : list of variables
    given : dict
        The full values of its inputs.
    sharded : dict
        The axes along which inputs are sharded.
    ranks : sequence of int
    in_step : bool
        Whether loops of the serial program are executed in Python, too.

    Returns
    -------
    Divided
    """
    divided = Divided(outputs, sharded)
    (n_rows,) = {given[variable].shape[axis] for variable, axis in sharded.items()}
    serial = evaluate(outputs, {variable: [value] for variable, value in given.items()}, in_step=in_step)
    serial = {variable: value for variable, value in serial.items() if divided.walk.knows(variable)}
    for n_ranks in ranks:
        for how in ("even", "uneven"):
            if n_rows >= n_ranks:
                divided.compare(given, serial, shares(n_rows, n_ranks, how))
    divided.compare(given, serial, shares(n_rows, 2), alone=True)
    return divided
