"""Check sharding rules on small graphs: values and shapes on ranks equal those of the serial program.

A `Case` is an operation on inputs whose axes have labels, as in `numpy.einsum`; axes with equal labels have equal
lengths. It is divided once for each way to shard one input or a pair of them: rows lie along an axis, or are part of a
longer axis, or are summed over. `tests/helpers/sharding_rule_cases.py` has the cases of each operation.

    python tests/helpers/sharding_rule_programs.py [SHARE [FAMILY ...]]

This command checks all programs, or a share of them (such as 0.1), of all families or of some. With
``SYNKHRONOS_CHECK_SHARDING=1``, each Apply node also checks its shape.
"""

import collections
import itertools
import random
import sys
import time
import traceback
import warnings
import zlib

import numpy as np
from backend import T, on_theano
from simulated_ranks import SENSELESS, Divided, evaluate, shares

from synkhronos._backends import TensorType
from synkhronos._sharding.placements import Replicate, Shard
from synkhronos._sharding.rules import REPLICATED_RULES, RULES

N_ROWS = 5
#: Lengths of axes by label. Upper-case labels are for operations that need a certain length.
LENGTHS = {"a": 2, "b": 3, "c": 4, "d": 6, "e": 2, "X": 6, "Y": 7, "K": 2, "u": 1, "1": 1}

_DTYPES = {"f": "float64", "p": "float64", "s": "float32", "i": "int64", "q": "int64", "y": "int32", "B": "bool"}


class Case:
    """An operation on inputs with labelled axes.

    Parameters
    ----------
    labels : str
        Labels of each input's axes, separated by blanks: ``"1"`` for a broadcastable axis, ``"."`` without axes.
    build : callable
        Takes the inputs, and returns an output or a list of outputs.
    kinds : str
        Kind of each input's values: ``f`` floats, ``p`` positive floats, ``s`` float32, ``i`` indices, ``q`` integers,
        ``y`` classes, ``B`` bools. By default floats.
    thorough : bool
        Whether rows are also parts of longer axes, and summed over.
    """

    def __init__(self, labels, build, kinds="", thorough=None):
        self.labels = [each.strip(".") for each in labels.split()]
        self.build = build
        self.kinds = kinds or "f" * len(self.labels)
        self.thorough = sum(map(len, self.labels)) <= 4 if thorough is None else thorough
        self.family = ""

    def placements(self):
        """Yield each way to shard one input or two: a dict from an input's position to ``(how, axis)``."""
        options = []
        for labels in self.labels:
            axes = [axis for axis, label in enumerate(labels) if label not in "1u"]
            hows = ("rows", "inner", "outer") if self.thorough else ("rows",)
            options.append([(how, axis) for how in hows for axis in axes] + [("sum", None)] * self.thorough)
        for i, own in enumerate(options):
            yield from ({i: one} for one in own)
        for i, j in itertools.combinations(range(len(options)), 2):
            yield from ({i: one, j: other} for one, other in itertools.product(options[i], options[j]))

    def ways(self):
        """Yield each placement with distinct lengths of the other axes, and with equal lengths."""
        for placement in self.placements():
            yield placement, False
            if all(how == "rows" for how, _ in placement.values()):
                yield placement, True

    def lengths(self, placement, alike):
        """Return lengths by label, or None if they conflict. With ``alike``, other axes have `N_ROWS`, too."""
        found = {}
        for i, (how, axis) in placement.items():
            if axis is not None:
                length = N_ROWS if how == "rows" else 2 * N_ROWS
                if found.setdefault(self.labels[i][axis], length) != length:
                    return None
        others = {label: N_ROWS if alike and label in "abcde" else length for label, length in LENGTHS.items()}
        return {**others, **found}


class Program:
    """A case with one placement: its graph, the values of its inputs, and the axes of sharded inputs."""

    def __init__(self, case, placement, alike=False):
        self.case, self.placement, self.alike = case, placement, alike
        self.given, self.sharded = {}, {}
        lengths = case.lengths(placement, alike)
        self.is_possible = lengths is not None
        if self.is_possible:
            seed = f"{case.family} {case.labels} {sorted(placement.items())} {alike}"
            self.rng = np.random.default_rng(zlib.crc32(seed.encode()))
            inputs = [self._input(i, labels, lengths) for i, labels in enumerate(case.labels)]
            outputs = case.build(*inputs)
            self.outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

    def __str__(self):
        what = " ".join(labels or "." for labels in self.case.labels)
        return f"{self.case.family}: {what} of {self.case.kinds}, rows {self.placement}" + ", alike" * self.alike

    def _input(self, i, labels, lengths):
        kind, name = self.case.kinds[i], f"input {i}"
        how, axis = self.placement.get(i, ("", None))
        shape = [lengths[label] for label in labels]
        if how == "sum":
            extra = self._new(kind, [N_ROWS, *shape], [False, *(label == "1" for label in labels)], 0, name)
            return extra.sum(0, dtype=extra.dtype) if kind != "B" else extra.any(0)
        ones = [label == "1" for label in labels]
        if how in ("inner", "outer"):
            split = [N_ROWS, 2] if how == "inner" else [2, N_ROWS]
            place = axis + (how == "outer")
            full, flags = [*shape[:axis], *split, *shape[axis + 1 :]], [*ones[:axis], False, False, *ones[axis + 1 :]]
            extra = self._new(kind, full, flags, place, name)
            sizes = [extra.shape[k] for k in range(extra.ndim)]
            joined = extra.reshape([*sizes[:axis], sizes[axis] * sizes[axis + 1], *sizes[axis + 2 :]], ndim=len(shape))
            return T.addbroadcast(joined, *[k for k, one in enumerate(ones) if one]) if any(ones) else joined
        return self._new(kind, shape, ones, axis if how else None, name)

    def _new(self, kind, shape, ones, axis, name):
        """Create an input variable, and draw its value."""
        dtype = _DTYPES[kind]
        lengths = ones if on_theano else tuple(1 if one else None for one in ones)
        variable = T.TensorType(dtype, lengths)(name)
        if kind in "iy":
            value = self.rng.integers(0, 2, shape)
        elif kind in "qB":
            value = self.rng.integers(-3, 4, shape) if kind == "q" else self.rng.integers(0, 2, shape)
        elif kind == "s":  # sums are exact in float32 and float64
            value = self.rng.integers(-8, 9, shape) / 4
        else:
            value = self.rng.normal(size=shape)
        self.given[variable] = np.asarray(abs(value) + 0.1 if kind == "p" else value, dtype)
        if axis is not None:
            self.sharded[variable] = axis
        return variable

    def check(self, ranks=(1, 2, 3), checks_shapes=False):
        """Compare results on ranks with the serial program; return the propagation, or None for an invalid program."""
        given = {variable: [value] for variable, value in self.given.items()}
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                serial = evaluate(self.outputs, given, in_step=True)
            except SENSELESS:
                return None
            divided = Divided(self.outputs, self.sharded, checks_shapes)
            serial = {variable: value for variable, value in serial.items() if divided.walk.knows(variable)}
            for n_ranks in ranks:
                divided.compare(self.given, serial, shares(N_ROWS, n_ranks, "uneven" if n_ranks == 3 else "even"))
        return divided.walk


def programs(cases, share=1.0, seed=0):
    """Yield a random share of at least 12 programs, as ``(True, program)``, then others as ``(False, program)``."""
    every = [(case, placement, alike) for case in cases for placement, alike in case.ways()]
    random.Random(seed).shuffle(every)
    n_asked = len(every) if share >= 1 else max(12, int(len(every) * share))
    made = ((place < n_asked, _made(*one)) for place, one in enumerate(every))
    return ((is_asked, program) for is_asked, program in made if program is not None)


def _made(case, placement, alike):
    """Return a program, or None if the backend cannot build it or lengths conflict."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = Program(case, placement, alike)
        except SENSELESS:
            return None
    return program if program.is_possible and program.sharded else None


class Applied:
    """Counts of Apply nodes by operation: divided by their rule, or gathered for a reason."""

    def __init__(self):
        self.divided, self.gathered, self.compared = collections.Counter(), collections.Counter(), 0

    def note(self, walk):
        """Count the Apply nodes of a divided graph."""
        self.compared += 1
        reasons = {node for node, _ in walk.gathered}
        seen = set()
        for variable, _ in walk.items():
            node = variable.owner
            if node is None or node in seen or not all(map(walk.knows, node.inputs)):
                continue
            seen.add(node)
            is_replicated = all(isinstance(walk.placement(one), Replicate) for one in node.inputs)
            if node in reasons:
                self.gathered[type(node.op)] += 1
            elif type(node.op) in (REPLICATED_RULES if is_replicated else RULES):
                made = [walk.placement(one) for one in node.outputs if isinstance(one.type, TensorType)]
                self.divided[type(node.op)] += not is_replicated or any(isinstance(one, Shard) for one in made)


def run(family, share=1.0, seed=0, each=Program.check):
    """Check a share of a family's programs, and further ones until each of its rules has been applied.

    Parameters
    ----------
    family : Family
    share : float
    seed : int
    each : callable
        Checks a program, and returns its propagation or None.

    Returns
    -------
    applied : Applied
    wrong : list of (program, traceback)
    """
    applied, wrong = Applied(), []
    for is_asked, program in programs(family.cases, share, seed):
        if not is_asked and family.ops <= applied.divided.keys():
            break
        try:
            walk = each(program)
        except Exception:
            wrong.append((program, traceback.format_exc(limit=-4)))
        else:
            if walk is not None:
                applied.note(walk)
    return applied, wrong


def main(share, names):
    """Check a share of the programs of some families, or of all; return the number of wrong programs."""
    from sharding_rule_cases import FAMILIES

    n_wrong, total, started = 0, 0, time.monotonic()
    for name in names or FAMILIES:
        began, family = time.monotonic(), FAMILIES[name]
        applied, wrong = run(family, share, random.randrange(2**31))
        for program, trace in wrong:
            print(f"{program}\n{trace}")
        total += applied.compared
        n_wrong += len(wrong)
        counts = ", ".join(f"{kind.__name__} {applied.divided[kind]}" for kind in family.ops)
        print(f"{name}: {applied.compared} in {time.monotonic() - began:.0f} s; divided: {counts}", flush=True)
    print(f"{total} programs agree in {time.monotonic() - started:.0f} s; {n_wrong} are wrong")
    return n_wrong


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if sys.argv[1:] else 1.0, sys.argv[2:]) > 0)
