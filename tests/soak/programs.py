"""Random programs: functions of random expressions, and random operations whose results are compared with NumPy's."""

import tempfile
from pathlib import Path

import numpy as np
from backend import T, theano
from fault_ops import NOTHING, Fault

import synkhronos as synk
from synkhronos.extensions import checkpoint

#: A mode that compiles quickly, because Theano's optimizations are not tested here.
PLAIN = theano.Mode(linker="py", optimizer=None)

#: Expressions of rows, the op that combines the ranks' results, and the same expression in NumPy.
EXPRESSIONS = (
    (lambda m: 2 * m, "gather", lambda m: 2 * m),
    (lambda m: m.sum(axis=1), "gather", lambda m: m.sum(axis=1)),
    (lambda m: m.sum(), "sum", np.sum),
    (lambda m: T.sqr(m).sum(axis=0), "sum", lambda m: (m**2).sum(axis=0)),
    (lambda m: T.gt(m, 0).sum(), "sum", lambda m: (m > 0).sum()),
    (lambda m: m.mean(), "avg", np.mean),
    (lambda m: m.mean(axis=0), "avg", lambda m: m.mean(axis=0)),
    (lambda m: m.max(), "max", np.max),
    (lambda m: m.min(axis=0), "min", lambda m: m.min(axis=0)),
)

OPS = {"avg": np.mean, "sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


class Lost(Exception):
    """A wrong result, or an error that was not expected."""


def expect(condition, what):
    """Raise `Lost` if a condition is false."""
    if not condition:
        raise Lost(what)


class Program:
    """A few functions, variables and data, and operations on them.

    Parameters
    ----------
    rng : numpy.random.RandomState
        Source of all random numbers.
    """

    def __init__(self, rng):
        self.rng = rng
        self.n_ranks = 0  # number of ranks of the current session
        self.data, self.functions = [], []
        self.fault, self.w = theano.shared(np.int64(NOTHING), "fault"), theano.shared(np.zeros(4), "w")
        self.rows = theano.shared(np.zeros((1, 2)), "rows")
        x = T.dvector("x")
        self.total = synk.function([x], (Fault()(x, self.fault).sum(), "sum"), mode=PLAIN)
        self.picked = synk.function([], (self.rows, "gather"), sliceable_shareds=[self.rows], mode=PLAIN)
        self.do_new_function()

    def restore(self):
        """Make replicas equal again by a broadcast, as error messages advise."""
        synk.broadcast([self.fault, self.w, self.rows], [NOTHING, np.zeros(4), np.zeros((1, 2))])

    def operations(self):
        """Return the names of the operations; a name that occurs several times is chosen more often."""
        often = ["call", "call", "function", "function", "function", "update", "collective", "scatter", "pick", "churn"]
        return [*often, "data", "bad call", "checkpoint", "new function"]

    def work(self, name):
        """Run an operation, and compare its results with NumPy's."""
        getattr(self, "do_" + name.replace(" ", "_"))()

    def integers(self, *shape):
        """Return small random integers as float64, whose sums are exact."""
        return self.rng.randint(-50, 50, shape).astype("float64")

    def do_call(self):
        values = self.integers(self.rng.randint(1, 3000))
        expect(self.total(values) == values.sum(), "sum of a call")

    def do_new_function(self):
        """Build a function of one to three expressions, combined by ops or collectives, with an update or without."""
        m, chosen = T.dmatrix("m"), self.rng.randint(0, len(EXPRESSIONS), self.rng.randint(1, 4))
        updates = [(self.w, self.w + m.sum())] if self.rng.randint(2) else []
        outputs = [(make(m), op) for make, op, _ in (EXPRESSIONS[i] for i in chosen)]
        if self.rng.randint(2):
            outputs = [(synk.gathered(y) if op == "gather" else synk.reduced(y, op), None) for y, op in outputs]
        function = synk.function([m], outputs, updates=updates, mode=PLAIN)
        self.functions = [*self.functions[-3:], (function, [EXPRESSIONS[i][2] for i in chosen])]

    def do_function(self):
        """Call a function on all, a range, a list or a mask of the rows of an array or data, with 1 to 3 slices."""
        function, references = self.functions[self.rng.randint(len(self.functions))]
        values = self.integers(self.rng.randint(1, 400), 3)
        n = len(values)
        ways = [
            None,
            slice(self.rng.randint(n + 1)),
            slice(0, n, 2),
            self.rng.randint(0, n, 40),
            self.rng.rand(n) < 0.5,
        ]
        batch = ways[self.rng.randint(len(ways))]
        chosen = values if batch is None else values[batch]
        if not len(chosen):
            return
        given = synk.data(values) if self.rng.randint(2) else values
        results = function(given, batch=batch, num_slices=int(self.rng.randint(1, 4)))
        for result, reference in zip(results, references):
            expected = reference(chosen)
            expect(np.shape(result) == np.shape(expected), "the shape of an output")
            expect(np.allclose(result, expected, rtol=1e-12, atol=1e-12), "an output of a function")

    def do_update(self):
        """Call a function with an update, which uses only the rows of each rank."""
        m, start = T.dmatrix("m"), float(self.rng.randint(0, 9))
        values = np.arange(3.0 * self.rng.randint(1, 50)).reshape(-1, 3)
        synk.broadcast(self.w, np.full(4, start))
        synk.function([m], [], updates=[(self.w, self.w + m.sum())], mode=PLAIN)(values)
        shares = [part.sum() for part in np.array_split(values, self.n_ranks)]
        expect((synk.gather(self.w)[:, 0] == start + np.array(shares)).all(), "an update on each rank")

    def do_collective(self):
        n = int(self.rng.choice([1, 10, 1000, 200_000, 1_100_000]))
        values = [np.arange(n) % 7 + float(rank) for rank in range(self.n_ranks)]
        op = sorted(OPS)[self.rng.randint(len(OPS))]
        for rank, value in enumerate(values):
            synk.set_value(rank, self.w, value)
        synk.all_reduce(self.w, op=op)
        expected = OPS[op](values, axis=0)
        copies = [synk.get_value(rank, self.w) for rank in range(self.n_ranks)]
        expect(np.allclose(copies[0], expected, rtol=1e-12), f"all_reduce {op}")
        expect(all((copy == copies[0]).all() for copy in copies), f"all_reduce {op}: the same on all ranks")
        synk.broadcast(self.w, np.zeros(4))

    def do_scatter(self):
        values = self.integers(self.rng.randint(1, 60), 2)
        synk.scatter(self.rows, values)
        expect((synk.gather(self.rows, nd_up=0) == values).all(), "gather of what was scattered")
        synk.all_gather(self.rows)
        expect((synk.gather(self.rows) == values).all(), "all_gather")

    def do_pick(self):
        values = self.integers(self.n_ranks * self.rng.randint(3, 20), 2)
        synk.scatter(self.rows, values)
        expected = np.concatenate([part[[2, 0]] for part in np.array_split(values, self.n_ranks)])
        expect((self.picked(batch_s=[2, 0]) == expected).all(), "rows picked on each rank")

    def do_churn(self):
        """Use all data, and create or drop one of them."""
        for each in self.data:
            expect(self.total(each) == each.data.sum(), "sum of data")
        if len(self.data) > 4 or (self.data and self.rng.rand() < 0.5):
            dropped = self.data.pop(self.rng.randint(len(self.data)))
            if self.rng.rand() < 0.5:
                dropped.free_memory()
        else:
            self.data.append(synk.data(self.integers(self.rng.randint(1, 100_000))))

    def do_data(self):
        """Change the length of data: the common part keeps its contents, and the rest is zeros."""
        if self.data:
            data = self.data[self.rng.randint(len(self.data))]
            before, length = data.data.copy(), int(self.rng.randint(1, 100_000))
            data.set_length(length)
            common = min(length, len(before))
            expect((data[:common] == before[:common]).all() and not data[common:].any(), "contents after a resize")
            expect(self.total(data, batch=common) == before[:common].sum(), "sum of resized data")

    def do_bad_call(self):
        for call, errors in (
            (lambda: self.total(np.ones((2, 2))), TypeError),
            (lambda: self.total(np.ones(5), batch=[5]), IndexError),
            (lambda: synk.all_reduce(self.w, op="mean"), ValueError),
            (lambda: synk.set_value(99, self.w, np.ones(4)), ValueError),
        ):
            try:
                call()
            except errors:
                continue
            raise Lost("a bad call was accepted")

    def do_checkpoint(self):
        """Save and load a checkpoint; a failed save leaves no temporary file."""
        with tempfile.TemporaryDirectory() as folder:
            path, value = Path(folder) / "state.npz", self.integers(1000)
            synk.broadcast(self.w, value)
            try:
                checkpoint.save(path, [self.w])
            finally:
                left = [each.name for each in Path(folder).iterdir()]
                expect(left in ([], ["state.npz"]), f"left next to a checkpoint: {left}")
            synk.broadcast(self.w, np.zeros(4))
            checkpoint.load(path, [self.w])
            expect((synk.gather(self.w) == value).all(), "a checkpoint")
            synk.broadcast(self.w, np.zeros(4))
