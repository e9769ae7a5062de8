"""The flags of Theano's that turn the vector code off."""

import pytest
from backend import theano_only
from scripts import run_script

from synkhronos._compat.switches import SWITCHES

pytestmark = theano_only("switches of Theano's configuration")

SOURCE = "import theano.tensor.signal.pool, theano.tensor.nnet.corr as c; print(c.theano.config.synkhronos.{})"


@pytest.mark.parametrize("name", SWITCHES)
def test_theanos_flags_turn_it_off(name):
    for flags, is_on in (("", True), (f"synkhronos.{name}=False", False)):
        assert run_script(SOURCE.format(name), environment={"THEANO_FLAGS": flags}) == (f"{is_on}\n", "")
