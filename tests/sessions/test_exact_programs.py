"""Small programs as exact functions on real ranks, after Theano has optimised what was divided."""

import numpy as np
import pytest
import theano
from small_programs import PROGRAMS, ROWS, WHOLE, inputs_of, outputs_of

import synkhronos as synk

#: Ones that Theano cannot optimise itself, or whose loops would have to be compiled.
_LEFT_OUT = ("scan", "theano.map", "Print")
_CHOSEN = [program for program in PROGRAMS if not any(word in program for word in _LEFT_OUT)]
_MODE = theano.Mode("py", "fast_run")  # optimised in full, and nothing compiled
_GROUP = 12


@pytest.mark.parametrize("start", range(0, len(_CHOSEN), _GROUP))
def test_programs(synchronize, start):
    synchronize(3)
    outputs, names = [], []
    for program in _CHOSEN[start : start + _GROUP]:
        made = outputs_of(program)
        outputs += made
        names += [program] * len(made)
    sharded, whole = inputs_of(outputs)
    values = {**ROWS, **WHOLE}
    given = [values[one] for one in (*sharded, *whole)]
    function = synk.function(sharded, outputs, bcast_inputs=whole, exact=True, mode=_MODE)
    reference = theano.function([*sharded, *whole], outputs, mode=_MODE)
    for name, got, expected in zip(names, function(*given), reference(*given)):
        assert np.shape(got) == np.shape(expected), name
        tolerance = 1e-9 if np.asarray(expected).dtype.itemsize >= 8 else 1e-4
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance, err_msg=name)
