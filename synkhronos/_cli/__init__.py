"""Command-line tools (``python -m synkhronos``): report what a node can compute with, and start programs on nodes.

Nothing here imports Theano, NumPy or pygpu, or a module that does: these tools must help where those fail.
"""

from synkhronos._cli.info import examine
from synkhronos._cli.launcher import run
from synkhronos._cli.mpirun import run_on
