"""PyTensor 3.3."""

from synkhronos._engine.on_pytensor import ops as ops
from synkhronos._engine.on_pytensor.functions import *  # noqa: F403
from synkhronos._engine.on_pytensor.graph import *  # noqa: F403
