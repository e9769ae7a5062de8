"""What a machine has to compute with, and the environment in which programs can use it: ``python -m synkhronos``.

Nothing here imports Theano, NumPy or pygpu, nor what imports them: it is there to help where these fail.
"""

from __future__ import annotations

from synkhronos._cli.info import examine
from synkhronos._cli.launcher import run
from synkhronos._cli.mpirun import run_on

__all__ = ["examine", "run", "run_on"]
