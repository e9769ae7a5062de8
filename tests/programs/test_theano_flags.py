"""Theano flags that turn the vector code off."""

import pytest
from backend import theano_only
from scripts import run_script

from synkhronos._theano_compat.flags import SWITCHES

pytestmark = theano_only("flags of Theano's configuration")

SOURCE = "import theano.tensor.signal.pool, theano.tensor.nnet.corr as c; print(c.theano.config.synkhronos.{})"


@pytest.mark.parametrize(("flags", "is_on"), [("", True), ("synkhronos.{}=False", False)], ids=["default", "off"])
@pytest.mark.parametrize("name", SWITCHES)
def test_theanos_flags_turn_vector_code_off(name, flags, is_on):
    out = run_script(SOURCE.format(name), environment={"THEANO_FLAGS": flags.format(name)})
    assert out == (f"{is_on}\n", "")
