"""PyTensor 3.3."""

from synkhronos._engine.on_pytensor import ops as ops
from synkhronos._engine.on_pytensor.blas import offer_blas
from synkhronos._engine.on_pytensor.diversion import *  # noqa: F403
from synkhronos._engine.on_pytensor.functions import *  # noqa: F403
from synkhronos._engine.on_pytensor.gpu import *  # noqa: F403
from synkhronos._engine.on_pytensor.graph import *  # noqa: F403
from synkhronos._engine.on_pytensor.pickling import *  # noqa: F403
from synkhronos._engine.on_pytensor.processes import *  # noqa: F403
from synkhronos._engine.on_pytensor.random import *  # noqa: F403
from synkhronos._engine.on_pytensor.variables import *  # noqa: F403

offer_blas()
