"""Fixtures of tests of code that takes the place of Theano's."""

import pytest
from backend import theano


@pytest.fixture
def switch(request, monkeypatch):
    """Turn the replacement that a module is about, its ``SWITCH``, on or off for what is compiled from now on."""
    return lambda is_on: monkeypatch.setattr(theano.config.synkhronos, request.module.SWITCH, is_on)


@pytest.fixture
def on_and_off(switch):
    """A function that returns what another one makes with the replacement, and what it makes without."""

    def both(make):
        made = make()
        switch(False)
        return made, make()

    return both
