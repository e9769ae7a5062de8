"""Theano 1.0.5."""

from synkhronos._engine.on_theano import ops as ops
from synkhronos._engine.on_theano.diversion import *  # noqa: F403
from synkhronos._engine.on_theano.functions import *  # noqa: F403
from synkhronos._engine.on_theano.gpu import *  # noqa: F403
from synkhronos._engine.on_theano.graph import *  # noqa: F403
from synkhronos._engine.on_theano.pickling import *  # noqa: F403
from synkhronos._engine.on_theano.processes import *  # noqa: F403
from synkhronos._engine.on_theano.random import *  # noqa: F403
from synkhronos._engine.on_theano.variables import *  # noqa: F403
