"""Compiled functions of Theano's."""

from __future__ import annotations

import inspect

from theano import In, Out
from theano.compile.function import function as compile_function  # programs may set theano.function to synk.function

__all__ = ["KEYWORDS", "In", "Out", "compile_function"]

#: The arguments of `theano.function`.
KEYWORDS = tuple(inspect.signature(compile_function).parameters)
