"""The graph engine under Theano's names, whichever it is, and the mark of tests of what only Theano has."""

import numpy
import parallel  # the engine's flags, before all
import pytest

import synkhronos  # it mends Theano, which therefore comes after it
from synkhronos import _backends

assert parallel and synkhronos

on_theano = _backends.name == "theano"

if on_theano:
    import lasagne
    import theano
    import theano.tensor as T
    from theano.compile.monitormode import MonitorMode
    from theano.compile.nanguardmode import NanGuardMode
    from theano.ifelse import ifelse
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    from theano.tensor.raw_random import uniform
    from theano.tensor.shared_randomstreams import RandomStreams
    from theano.tensor.signal.pool import pool_2d, pool_3d

    random_state = numpy.random.RandomState
else:
    from pytensor_names import (
        MonitorMode,
        MRG_RandomStreams,
        NanGuardMode,
        RandomStreams,
        T,
        ifelse,
        lasagne,
        pool_2d,
        pool_3d,
        random_state,
        theano,
        uniform,
    )

__all__ = [
    "MRG_RandomStreams",
    "MonitorMode",
    "NanGuardMode",
    "RandomStreams",
    "T",
    "ifelse",
    "lasagne",
    "on_theano",
    "pool_2d",
    "pool_3d",
    "random_state",
    "theano",
    "theano_only",
    "uniform",
]


def theano_only(reason):
    """Mark tests, or as ``pytestmark`` a module, of what PyTensor has not; the table of engines gives the reason."""
    return pytest.mark.theano_only(reason)
