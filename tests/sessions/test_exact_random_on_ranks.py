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


def compare(seed, mode):
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
            expected = theano.function([*sharded, *others], outputs, **options)(*given)
        except (*WRONG, theano.gof.utils.MethodNotDefined):
            pytest.skip("the serial program is invalid, or has an operation that Theano must compile")
        options.update(bcast_inputs=others, shard=sharded, exact=True)
        for plan in ("rows", "controller"):
            function = synk.function(list(sharded), outputs, plan=plan, **options)
            for got, right in zip(function(*given), expected):
                assert np.shape(got) == np.shape(right)
                np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9 * max(1, np.abs(right).max(initial=0)))
