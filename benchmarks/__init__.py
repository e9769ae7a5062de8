"""Benchmarks of Synkhronos beside plain Theano, PyTorch, MPICH and NumPy; ``make bench`` runs them all."""
