"""What is built on the public interface alone, as a user's own code would be.

``updates``     the update rules of gradient descent, each divided into a gradient part and a parameter part
``train``       joins the two into one callable that makes a training step on all ranks
``schedules``   linear scaling and warm-up of learning rates, as shared scalars
``checkpoint``  the values of shared variables on every rank, in a file
``pymc``        PyMC's models, divided by the rows of their data
"""
