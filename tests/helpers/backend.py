"""The installed backend under Theano's names, and the mark of tests that only Theano can run."""

# ruff: noqa: F401, F403  (its imports are the names that tests use)

import backend_flags  # the engine's flags, before all
import numpy
import pytest

import synkhronos  # it patches Theano, which therefore comes after it
from synkhronos import _backends

assert backend_flags and synkhronos

on_theano = _backends.engine == "theano"

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
    from pytensor_as_theano import *


def theano_only(reason):
    """Mark tests, or as ``pytestmark`` a module, of what PyTensor has not; the table of engines gives the reason."""
    return pytest.mark.theano_only(reason)


def cpp_codes(function, chosen):
    """The C++ code of each node of a Theano function that is ``chosen(node)``, of which there must be some, by node."""
    nodes = [node for node in function.maker.fgraph.toposort() if chosen(node)]
    assert nodes
    graphs = {node: theano.gof.FunctionGraph(node.inputs, node.outputs) for node in nodes}
    return {node: theano.gof.CLinker().accept(graph).get_src_code() for node, graph in graphs.items()}
