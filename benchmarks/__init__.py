"""Benchmarks of Synkhronos compared with plain Theano, PyTorch, MPICH and NumPy; ``make bench`` runs them all."""
