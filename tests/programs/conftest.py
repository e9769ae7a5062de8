"""Fixtures for tests of code that replaces Theano's."""

import pytest
from backend import theano


@pytest.fixture
def switch(request, monkeypatch):
    """Return a function that switches a test module's ``SWITCH`` on or off for functions compiled later."""
    return lambda is_on: monkeypatch.setattr(theano.config.synkhronos, request.module.SWITCH, is_on)


@pytest.fixture
def on_and_off(switch):
    """Return a function that calls another one with the replacement and without, and returns both results."""

    def both(make):
        made = make()
        switch(False)
        return made, make()

    return both
