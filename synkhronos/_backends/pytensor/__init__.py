"""Backend for PyTensor 3.3."""
