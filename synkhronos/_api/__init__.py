"""Public functions and classes: functions on all ranks, arrays in shared memory, collectives on shared variables."""

from synkhronos._api.build import function
from synkhronos._api.collectives import all_gather, all_reduce, broadcast, gather, reduce, scatter
from synkhronos._api.data_arrays import Data, data
from synkhronos._api.functions import Function
from synkhronos._api.loops import inputs_of_loop, loop
from synkhronos._api.parallel import parallelize
from synkhronos._api.run import Run
from synkhronos._api.step_measurements import Target
from synkhronos._api.variables import check_replicas, get_lengths, get_shapes, get_value, set_value
from synkhronos._session import Session as Session
