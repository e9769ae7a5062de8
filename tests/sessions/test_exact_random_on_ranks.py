"""Random programs as exact functions on real ranks, with optimised partitioned graphs."""

import warnings

import numpy as np
import pytest
from backend import theano
from random_programs import WRONG, Program

import synkhronos as synk

_MODE = theano.Mode("py", "fast_run")  # fully optimised, not compiled


@pytest.mark.parametrize("seed", range(12))
def test_random_program(three, seed):
    compare(seed, _MODE)


@pytest.mark.numba
@pytest.mark.parametrize("seed", [1, 6])
def test_random_program_compiled(session, seed):
    """The default linker (C or numba) gives the serial results, too."""
    compare(seed, None)


@pytest.mark.parametrize("seed", range(6))
def test_random_program_with_updates(session, seed, monkeypatch):
    """Variables of any size are updated by slices with the plan "rows", from the outputs of a program."""
    monkeypatch.setattr("synkhronos._sharding.slices.LEAST_BYTES", 1)
    monkeypatch.setattr("synkhronos._graph.shared_variables.LEAST_BYTES", 1)
    compare(seed, _MODE, with_updates=True)


def variables_like(outputs, values):
    """Return variables of the types and shapes of some outputs, by output."""
    pairs = [(one, np.asarray(value)) for one, value in zip(outputs, values) if one.dtype == "float64" and one.ndim]
    return {one: theano.shared(np.ones_like(value), broadcastable=one.broadcastable) for one, value in pairs}


def compare(seed, mode, with_updates=False):
    """Check that a program gives the same results by each plan as in one process."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = Program(seed)
        outputs = program.outputs(8)
        sharded = program.sharded
        others = [one for one in program.given if one not in sharded]
        given = [program.given[one] for one in (*sharded, *others)]
        options = {"mode": mode, "on_unused_input": "ignore", "no_default_updates": True}
        try:
            values = theano.function([*sharded, *others], outputs, **options)(*given)
        except (*WRONG, theano.gof.utils.MethodNotDefined):
            pytest.skip("the serial program is invalid, or has an operation that Theano must compile")

        def results(build, *arguments, **kwargs):
            made = variables_like(outputs, values) if with_updates else {}
            updates = [(var, 0.5 * var + one / (1 + abs(one))) for one, var in made.items()]
            function = build(*arguments, outputs, updates=updates, **options, **kwargs)
            found = [*function(*given), *function(*given)]
            return [*found, *(var.get_value() for var in made.values())]

        expected = results(theano.function, [*sharded, *others])
        for plan in ("rows", "controller"):
            exact = {"plan": plan, "bcast_inputs": others, "shard": sharded, "exact": True}
            for got, right in zip(results(synk.function, list(sharded), **exact), expected):
                assert np.shape(got) == np.shape(right)
                np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9 * max(1, np.abs(right).max(initial=0)))
