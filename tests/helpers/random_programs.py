"""Check random programs, divided by rows: every value on every rank equals the serial program's value.

Axes have few distinct lengths, often equal to the number of rows, so that an array placed wrongly has the right shape.
Values are small integers, so that sums are exact, and comparisons do not depend on the order of additions.

    python tests/helpers/random_programs.py 10000 [SEED]

This command checks 10,000 programs, and prints how often and why arrays were gathered.
"""

import collections
import contextlib
import random
import sys
import time
import traceback
import warnings

import numpy as np
from backend import T, theano
from random_arithmetic import Arithmetic
from random_loops import Loops
from random_shapes import Moves
from simulated_ranks import SENSELESS, check, evaluate

#: Errors that Theano raises for an invalid program.
WRONG = (*SENSELESS, AttributeError, MemoryError)


class Program(Arithmetic, Moves, Loops):
    """A random program; each step uses variables of earlier steps."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pick = pick = self.random.choice
        self.n_rows = pick([0, 1, 2, 3, 4, 4, 4, 6])
        rng = np.random.RandomState(seed % 2**32)
        integers = lambda *shape: rng.randint(-2, 3, shape) * 1.0  # noqa: E731
        length = lambda: pick([1, 2, 2, 3, self.n_rows])  # noqa: E731
        axis = pick([0, 0, 0, 1])
        x, v, y, s, c = T.dmatrix("x"), T.dvector("v"), T.lvector("y"), T.dtensor3("s"), T.dmatrix("c")
        shape, steps = [self.n_rows, length()], [self.n_rows, length(), length()]
        if axis:
            shape, steps = shape[::-1], [steps[1], steps[0], steps[2]]
        self.given = {
            x: integers(*shape),
            v: integers(self.n_rows),
            y: rng.randint(0, max(1, min(2, *shape, *steps)), self.n_rows),
            s: integers(*steps),
            c: integers(*shape),
        }
        self.sharded = {x: axis, v: 0, y: 0, s: axis}
        weights = [integers(length(), length()), integers(length()), integers(self.n_rows, length())]
        self.weights = weights = [theano.shared(value, "w") for value in weights]
        self.labels, self.inputs = y, [x, v, s, c]
        self.numbers = [x.shape[axis], v.shape[0], x.shape[1 - axis], s.shape[2]]
        self.values, self.pool = {}, []
        for variable in [x, v, s, c, *weights]:
            self.keep(variable)

    def keep(self, variable):
        """Add a variable to the pool if the serial program can compute it and its values are moderate."""
        known = {one: [value] for one, value in {**self.given, **self.values}.items()}
        try:
            with np.errstate(all="ignore"):
                value = evaluate([variable], known, in_step=True)[variable][0]
        except WRONG:
            return
        value = np.asarray(value)
        if value.size > 2000 or not np.isfinite(value).all() or np.abs(value).max(initial=0) > 1e6:
            return
        # Theano declares a part of a Split broadcastable, whatever its length.
        if all(length == 1 or not fixed for length, fixed in zip(value.shape, variable.broadcastable)):
            self.values[variable] = value
            self.pool.append(variable)

    def floats(self, *ndims):
        """Return the float64 variables of the pool, optionally only those with certain numbers of axes."""
        return [one for one in self.pool if one.dtype == "float64" and (not ndims or one.ndim in ndims)]

    def one(self, *ndims):
        found = self.floats(*ndims)
        return self.pick(found[-8:] + found[:3] if self.random.random() < 0.8 else found) if found else None

    def number(self):
        """Pick a number computed from shapes, or a constant."""
        n = self.pick(self.numbers)
        of_shapes = [n, n, n, n * 2, n + 1, n // 2, n - 1]
        return self.pick([*of_shapes, 1, 2, 3, self.n_rows, n * self.pick(self.numbers), T.as_tensor_variable(n)])

    def step(self):
        name = self.pick([name for name in dir(self) if name.startswith("do_")])
        try:
            made = getattr(self, name)()
        except WRONG:
            return
        if made is not None:
            self.keep(T.cast(made, "float64"))

    def outputs(self, n_steps):
        for _ in range(n_steps):
            self.step()
        outputs = self.pool[-4:]
        loss = sum(T.sin(one * 0.5).sum() for one in outputs)
        wanted = [*self.inputs, *self.weights]
        with contextlib.suppress(*WRONG, theano.gradient.NullTypeGradError):
            gradients = T.grad(loss, wanted, disconnected_inputs="ignore")
            outputs = [*outputs, *gradients]
            for weight, gradient in zip(wanted[-3:], gradients[-3:]):  # a step of Adam
                mean, square = 0.1 * gradient, 0.001 * gradient**2
                outputs += [square, weight - 0.01 * mean / (T.sqrt(square) + 1e-3)]
        return outputs


def run(seed, n_steps):
    """Check one program; return its gathered nodes, or None if it is invalid or refused."""
    program = Program(seed)
    ranks = random.Random(seed).sample((1, 2, 3, 5), 2)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = program.outputs(n_steps)
        try:
            evaluate(outputs, {variable: [value] for variable, value in program.given.items()}, in_step=True)
        except WRONG:
            return None  # a gradient that the serial program cannot compute
        try:
            return check(outputs, program.given, program.sharded, ranks, in_step=True).walk.gathered
        except ValueError as error:
            if "declare that axis broadcastable" in str(error):  # docs/exact.md lists these
                return None
            raise


def main(n_programs, first):
    """Check programs with consecutive seeds; return the number of those that disagree."""
    reasons, n_made, n_gathering, wrong = collections.Counter(), 0, 0, []
    started = time.monotonic()
    print(f"{n_programs} random programs from seed {first} on", flush=True)
    for seed in range(first, first + n_programs):
        try:
            gathered = run(seed, random.Random(seed).randint(3, 15))
        except Exception:
            wrong.append(seed)
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
            continue
        if gathered is not None:
            n_made += 1
            n_gathering += bool(gathered)
            reasons.update({f"{type(node.op).__name__}: {reason}" for node, reason in gathered})
        if (seed - first) % 500 == 499:
            print(f"{seed - first + 1} programs in {time.monotonic() - started:.0f} s, wrong: {wrong}", flush=True)
    print(f"{n_made} programs made sense, {n_gathering} of them gather something; how many for what:")
    for name, count in reasons.most_common(60):
        print(f"{count:7d}  {name}")
    print(f"{len(wrong)} disagree with the serial program: {wrong}")
    return len(wrong)


if __name__ == "__main__":
    arguments = list(map(int, sys.argv[1:]))
    sys.exit(main(arguments[0], arguments[1] if len(arguments) > 1 else random.SystemRandom().randrange(2**31)) > 0)
