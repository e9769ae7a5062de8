"""The graph engine: the only package that knows Theano's insides; everything else sees functions and arrays."""

from __future__ import annotations

from synkhronos._graphs.changes import changed, note_told
from synkhronos._graphs.definitions import Definitions
from synkhronos._graphs.diversion import divert, variables_used
from synkhronos._graphs.functions import THEANO_KEYWORDS, Graph, Variant, compile_function
from synkhronos._graphs.gpu import as_asked, bind, bound, is_device_array, read, to_device, to_host, unbind
from synkhronos._graphs.pickling import Bundle, dump, load
from synkhronos._graphs.random import claim_stream
from synkhronos._graphs.running import run_function
from synkhronos._graphs.shared import (
    VariableTable,
    copy_array,
    describe,
    get_array,
    host_array,
    is_random_state,
    is_shared_variable,
    is_tensor_variable,
    make_printable,
    memory_order,
    prepare_fork,
    set_array,
    shared_variables_of,
    start_worker,
    updates_variables,
    uses,
)

__all__ = [
    "THEANO_KEYWORDS",
    "Bundle",
    "Definitions",
    "Graph",
    "VariableTable",
    "Variant",
    "as_asked",
    "bind",
    "bound",
    "changed",
    "claim_stream",
    "compile_function",
    "copy_array",
    "describe",
    "divert",
    "dump",
    "get_array",
    "host_array",
    "is_device_array",
    "is_random_state",
    "is_shared_variable",
    "is_tensor_variable",
    "load",
    "make_printable",
    "memory_order",
    "note_told",
    "prepare_fork",
    "read",
    "run_function",
    "set_array",
    "shared_variables_of",
    "start_worker",
    "to_device",
    "to_host",
    "unbind",
    "updates_variables",
    "uses",
    "variables_used",
]
