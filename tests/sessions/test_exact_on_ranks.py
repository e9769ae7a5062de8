"""Small programs as exact functions on real ranks, with optimised partitioned graphs."""

import numpy as np
import pytest
from backend import theano
from example_expressions import PROGRAMS
from example_programs import ROWS, WHOLE, inputs_of, marked, outputs_of

import synkhronos as synk

#: One program in seven, without loops and convolutions, which need a compiler. `tests/unit/test_exact_programs.py`
#: runs all programs, without ranks.
_LEFT_OUT = ("scan", "theano.map", "Print", "conv2d")
_CHOSEN = [program for program in PROGRAMS if not any(word in program for word in _LEFT_OUT)][::7]
_MODE = theano.Mode("py", "fast_run")  # fully optimised, not compiled


@pytest.mark.parametrize("program", marked(_CHOSEN))
def test_program(three, program):
    outputs = outputs_of(program)
    sharded, replicated = inputs_of(outputs)
    given = [{**ROWS, **WHOLE}[one] for one in (*sharded, *replicated)]
    function = synk.function(sharded, outputs, bcast_inputs=replicated, exact=True, mode=_MODE)
    reference = theano.function([*sharded, *replicated], outputs, mode=_MODE)
    for got, expected in zip(function(*given), reference(*given)):
        assert np.shape(got) == np.shape(expected)
        tolerance = 1e-9 if np.asarray(expected).dtype.itemsize >= 8 else 1e-4
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
