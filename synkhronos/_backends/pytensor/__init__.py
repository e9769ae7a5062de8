"""Backend for PyTensor 3.3."""

from synkhronos._backends.pytensor import ops as ops
from synkhronos._backends.pytensor.compile import *  # noqa: F403
from synkhronos._backends.pytensor.gpu import *  # noqa: F403
from synkhronos._backends.pytensor.graph import *  # noqa: F403
from synkhronos._backends.pytensor.pickling import *  # noqa: F403
from synkhronos._backends.pytensor.warmup import *  # noqa: F403
from synkhronos._backends.pytensor.warmup import offer_blas

offer_blas()
