"""Benchmarks of Synkhronos compared with plain Theano, PyTorch, MPICH and NumPy; ``make bench`` runs them all."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests/helpers"))  # its modules import each other
