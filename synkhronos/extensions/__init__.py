"""What is built on the public interface alone, as a user's own code would be.

``updates`` has the update rules of gradient descent, each divided into a gradient part and a
parameter part; ``train`` joins the two into one callable that makes a training step on all ranks.
"""
