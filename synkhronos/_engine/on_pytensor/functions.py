"""Compiled functions of PyTensor's."""

from __future__ import annotations

import inspect

from pytensor.compile.io import In, Out
from pytensor.compile.maker import function as compile_function  # programs may set pytensor.function to synk.function

__all__ = ["KEYWORDS", "In", "Out", "compile_function"]

#: The arguments of `pytensor.function`.
KEYWORDS = tuple(inspect.signature(compile_function).parameters)
