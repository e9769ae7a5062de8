"""The installed backend under Theano's names, and the mark of tests that only Theano can run."""

# ruff: noqa: F401, F403  (its imports are the names that tests use)

import backend_flags  # sets the backend's flags, so it comes first
import numpy
import pytest
from shared_modules import share_modules

import synkhronos  # patches Theano, so it comes before Theano
from synkhronos import _backends

assert backend_flags and synkhronos

on_theano = _backends.engine == "theano"

if on_theano:
    import lasagne
    import theano
    import theano.tensor as T
    from theano.compile.monitormode import MonitorMode
    from theano.compile.nanguardmode import NanGuardMode
    from theano.gof import cmodule
    from theano.ifelse import ifelse
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    from theano.tensor.raw_random import uniform
    from theano.tensor.shared_randomstreams import RandomStreams
    from theano.tensor.signal.pool import pool_2d, pool_3d

    random_state = numpy.random.RandomState
else:
    from pytensor.link.c import cmodule
    from pytensor_as_theano import *

share_modules(cmodule)


def theano_only(reason):
    """Mark tests, or as ``pytestmark`` a module, that need Theano; the table of backends shows the reason."""
    return pytest.mark.theano_only(reason)


def cpp_codes(function, chosen):
    """Return the C++ code of a Theano function's Apply nodes with ``chosen(node)``, by node; fail without any."""
    nodes = [node for node in function.maker.fgraph.toposort() if chosen(node)]
    assert nodes
    graphs = {node: theano.gof.FunctionGraph(node.inputs, node.outputs) for node in nodes}
    return {node: theano.gof.CLinker().accept(graph).get_src_code() for node, graph in graphs.items()}
