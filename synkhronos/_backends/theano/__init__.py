"""Backend for Theano 1.0.5."""
