"""What a machine has to compute with, and the environment in which programs can use it: ``python -m synkhronos``.

Nothing here imports anything else of synkhronos, nor Theano, NumPy or pygpu: it is there to help where these fail.
"""
