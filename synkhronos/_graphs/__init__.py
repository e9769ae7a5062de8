"""Functions and shared variables as the floors above see them, whatever engine computes them."""

from __future__ import annotations

from synkhronos._graphs.changes import note_sent, sync_of
from synkhronos._graphs.definitions import Definitions
from synkhronos._graphs.diversion import variables_used
from synkhronos._graphs.functions import Graph
from synkhronos._graphs.inputs import pairs_of
from synkhronos._graphs.packing import Unpacked, bytes_variable
from synkhronos._graphs.packing import pack_values as pack
from synkhronos._graphs.picking import minibatches
from synkhronos._graphs.pickling import Bundle, dump, load
from synkhronos._graphs.random import claim_stream
from synkhronos._graphs.running import run_function
from synkhronos._graphs.shared import (
    VariableTable,
    copy_array,
    describe,
    get_array,
    host_array,
    is_shared_variable,
    is_tensor_variable,
    memory_order,
    set_array,
    shared_variables_of,
    start_worker,
    updated_variables,
    uses,
)
from synkhronos._graphs.variants import Variant

__all__ = [
    "Bundle",
    "Definitions",
    "Graph",
    "Unpacked",
    "VariableTable",
    "Variant",
    "bytes_variable",
    "claim_stream",
    "copy_array",
    "describe",
    "dump",
    "get_array",
    "host_array",
    "is_shared_variable",
    "is_tensor_variable",
    "load",
    "memory_order",
    "minibatches",
    "note_sent",
    "pack",
    "pairs_of",
    "run_function",
    "set_array",
    "shared_variables_of",
    "start_worker",
    "sync_of",
    "updated_variables",
    "uses",
    "variables_used",
]
