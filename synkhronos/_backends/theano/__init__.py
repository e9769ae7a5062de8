"""Backend for Theano 1.0.5."""

from synkhronos._backends.theano import ops as ops
from synkhronos._backends.theano.compile import *  # noqa: F403
from synkhronos._backends.theano.gpu import *  # noqa: F403
from synkhronos._backends.theano.graph import *  # noqa: F403
from synkhronos._backends.theano.pickling import *  # noqa: F403
from synkhronos._backends.theano.warmup import *  # noqa: F403
