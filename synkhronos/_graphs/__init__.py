"""The graph engine: the only package that knows Theano's insides; everything else sees functions and arrays."""

from __future__ import annotations

from synkhronos._graphs._functions import PLAIN, Graph, Variant
from synkhronos._graphs._pickling import Bundle, dump, load
from synkhronos._graphs._shared import (
    VariableTable,
    copy_array,
    describe,
    get_array,
    is_shared_variable,
    is_tensor_variable,
    prepare_fork,
    set_array,
    shared_variables_of,
    start_worker,
)

__all__ = [
    "PLAIN",
    "Bundle",
    "Graph",
    "VariableTable",
    "Variant",
    "copy_array",
    "describe",
    "dump",
    "get_array",
    "is_shared_variable",
    "is_tensor_variable",
    "load",
    "prepare_fork",
    "set_array",
    "shared_variables_of",
    "start_worker",
]
