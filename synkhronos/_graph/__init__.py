"""Graphs, compiled functions and shared variables, independent of the backend, and their pickling."""

from synkhronos._graph.definitions import Definitions
from synkhronos._graph.fast_call import are_of_kinds, run_function, variables_used
from synkhronos._graph.graph import (
    Graph,
    Variant,
    copy_of,
    default_of,
    expressions_of_all_rows,
    length_of,
    pairs_of,
    shared_leaves,
)
from synkhronos._graph.pickling import Bundle, Unpacked, bytes_variable, claim_stream, dump, has_own_stream, load
from synkhronos._graph.pickling import pack_values as pack
from synkhronos._graph.shared_variables import (
    IN_WORK,
    SentValue,
    VariableTable,
    adopt_array,
    copy_array,
    describe,
    first_set,
    get_array,
    host_array,
    is_host_variable,
    is_large,
    is_shared_variable,
    is_tensor_variable,
    memory_order,
    note_sent,
    set_array,
    shared_variables_of,
    start_worker,
    sync_of,
    updated_variables,
    uses,
    value_for_others,
)
