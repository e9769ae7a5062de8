"""Command-line tools (``python -m synkhronos``): report what a node can compute with, and start programs on nodes.

No module here imports Theano, NumPy or pygpu, even indirectly, because these tools must work if those are broken.
`plan`, which executes a program, does so when it is called.
"""

from synkhronos._cli.info import examine
from synkhronos._cli.launcher import run
from synkhronos._cli.mpirun import run_on
from synkhronos._cli.plan import plan_program, watch_program
