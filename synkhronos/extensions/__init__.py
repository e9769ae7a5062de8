"""Extensions that use the public interface alone, as user code does.

``updates``     update rules of gradient descent, each split into a gradient part and a parameter part
``train``       training steps on all ranks, which join the two parts
``schedules``   linear scaling and warm-up of learning rates, as shared scalars
``checkpoint``  the values of shared variables on every rank, in a file
``pymc``        PyMC's models, sharded by the rows of their data
"""
