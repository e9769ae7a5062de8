"""Serial programs, built twice: as they are, and under `parallelize`; they are compared after every step."""

import functools

import numpy as np
from backend import theano

import synkhronos as synk

N_STEPS = 20


class Program:
    """A program that calls `theano.function` in its constructor, and knows nothing of ranks.

    Attributes
    ----------
    functions : list
        Those that it has built.
    variables : list
        The shared variables that are compared.
    """

    functions = variables = ()
    options = ()  # of `parallelize`, as pairs

    def step(self, i):
        """The results of step ``i``: arrays."""
        raise NotImplementedError


class Twin:
    """A program, which can be started again."""

    def __init__(self, program):
        self.program = program()
        used = {var: var.get_value() for function in self.program.functions for var in function.get_shared()}
        self._first = {**used, **{var: var.get_value() for var in self.program.variables}}

    def begin(self):
        for var, value in self._first.items():
            var.set_value(value)


@functools.cache
def twins(program):
    with theano.change_flags(floatX="float64"):
        with synk.parallelize(**dict(program.options)):
            ours = Twin(program)
        return ours, Twin(program)


def check_alike(program, n_steps=N_STEPS, tolerance=1e-9):
    """Compare results and variables after each step; replicas must be the same to the bit in the end."""
    ours, theirs = twins(program)
    for twin in (ours, theirs):
        twin.begin()
    for i in range(n_steps):
        got, expected = ours.program.step(i), theirs.program.step(i)
        got = [*got, *(var.get_value() for var in ours.program.variables)]
        expected = [*expected, *(var.get_value() for var in theirs.program.variables)]
        assert len(got) == len(expected)
        for place, (one, other) in enumerate(zip(got, expected)):
            assert np.shape(one) == np.shape(other)
            assert np.isfinite(other).all()
            np.testing.assert_allclose(one, other, tolerance, tolerance, err_msg=f"step {i}, value {place}")
    assert not synk.check_replicas()
