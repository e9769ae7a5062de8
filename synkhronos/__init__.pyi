"""The public names: the one list, which `__init__.py` reads, in the groups that `help(synkhronos)` shows."""

"Sessions"
from ._backends import engine as engine
from ._session.submission import Future as Future
from ._session.lifecycle import close as close, distribute as distribute, fork as fork, get_n_gpu as get_n_gpu
from ._session.context_manager import sequence as sequence, session as session

"Functions"
from ._api.functions import Function as Function
from ._api.build import function as function
from ._api.parallel import parallelize as parallelize

"Data"
from ._api.data_arrays import Data as Data, data as data

"Collectives"
from ._api.collectives import all_gather as all_gather, broadcast as broadcast, gather as gather, scatter as scatter
from ._api.collectives import all_reduce as all_reduce, reduce as reduce
from ._api.variables import (
    check_replicas as check_replicas,
    get_lengths as get_lengths,
    get_shapes as get_shapes,
    get_value as get_value,
    set_value as set_value,
)

"In a graph"
from ._graph.ops.expressions import averaged as averaged, gathered as gathered, reduced as reduced, summed as summed

"Sharding rules (experimental)"
from ._sharding.placements import Partial as Partial, Replicate as Replicate, Shard as Shard
from ._sharding.propagate import register_sharding as register_sharding

"Training loops"
from ._api.loops import loop as loop
from ._api.run import Run as Run
from . import rules as rules

"Predictions"
from ._api.plans import Plan as Plan, plan as plan

"Instruments"
from ._session.profiles import Profile as Profile
from ._session.context_manager import memory as memory, profile as profile, trace as trace

"Errors"
from . import errors as errors
from .errors import DeviceError as DeviceError, NodeLost as NodeLost, SessionError as SessionError
from .errors import SynkhronosError as SynkhronosError, WorkerDied as WorkerDied, WorkerError as WorkerError
from .errors import WorkerRestarted as WorkerRestarted, WorkerTimeout as WorkerTimeout

"Extensions: training steps, update rules, schedules, checkpoints"
from . import extensions as extensions

__version__: str
