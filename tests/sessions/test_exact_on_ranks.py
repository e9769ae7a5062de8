"""Small programs as exact functions on real ranks, after Theano has optimised the divided graph."""

import numpy as np
import pytest
from backend import theano
from example_expressions import PROGRAMS
from example_programs import ROWS, WHOLE, inputs_of, marked, outputs_of

import synkhronos as synk

#: One in seven, but for loops and convolutions, which must be compiled. `tests/unit/test_exact_programs.py` has all,
#: without ranks.
_LEFT_OUT = ("scan", "theano.map", "Print", "conv2d")
_CHOSEN = [program for program in PROGRAMS if not any(word in program for word in _LEFT_OUT)][::7]
_MODE = theano.Mode("py", "fast_run")  # optimised in full, and nothing compiled


@pytest.mark.parametrize("program", marked(_CHOSEN))
def test_program(three, program):
    outputs = outputs_of(program)
    sharded, whole = inputs_of(outputs)
    given = [{**ROWS, **WHOLE}[one] for one in (*sharded, *whole)]
    function = synk.function(sharded, outputs, bcast_inputs=whole, exact=True, mode=_MODE)
    reference = theano.function([*sharded, *whole], outputs, mode=_MODE)
    for got, expected in zip(function(*given), reference(*given)):
        assert np.shape(got) == np.shape(expected)
        tolerance = 1e-9 if np.asarray(expected).dtype.itemsize >= 8 else 1e-4
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
