"""Comparison of serial programs after every step, run unchanged and under `parallelize`."""

import functools

import numpy as np
from backend import theano

import synkhronos as synk

N_STEPS = 20


class Program:
    """A serial program that calls `theano.function` in its constructor.

    Attributes
    ----------
    functions : list
        The functions that it has built.
    variables : list
        The shared variables that are compared.
    """

    functions = variables = ()
    options = ()  # arguments of `parallelize`, as pairs

    def step(self, i):
        """Execute step ``i``, and return its results as a list of arrays."""
        raise NotImplementedError


class Twin:
    """A program that can be restarted from its first state."""

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
    """Assert that results and variables agree after each step, and that replicas are bitwise equal at the end."""
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
