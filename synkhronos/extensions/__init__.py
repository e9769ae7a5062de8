"""Extensions for training and for PyMC, which use only the public interface, as user code does.

``updates``     update rules of gradient descent, each split into a gradient part and a parameter part
``train``       training steps on all ranks, which combine the two parts
``schedules``   linear scaling and warm-up of learning rates
``checkpoint``  save and load every rank's values of shared variables
``pymc``        PyMC models, sharded by the rows of their data
"""
