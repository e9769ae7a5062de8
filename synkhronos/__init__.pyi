"""The public names: the one list, which `__init__.py` reads, in the groups that `help(synkhronos)` shows."""

"Sessions"
from ._backends import engine as engine
from ._session import Future as Future, close as close, distribute as distribute, fork as fork
from ._session import get_n_gpu as get_n_gpu, sequence as sequence, session as session

"Functions"
from ._api import Function as Function, function as function, parallelize as parallelize

"Data"
from ._api import Data as Data, data as data

"Collectives"
from ._api import all_gather as all_gather, all_reduce as all_reduce, broadcast as broadcast
from ._api import check_replicas as check_replicas, gather as gather, reduce as reduce, scatter as scatter
from ._api import get_lengths as get_lengths, get_shapes as get_shapes, get_value as get_value, set_value as set_value

"In a graph"
from ._graph.ops import averaged as averaged, gathered as gathered, reduced as reduced, summed as summed

"Sharding rules (experimental)"
from ._sharding import Partial as Partial, Replicate as Replicate, Shard as Shard
from ._sharding import register_sharding as register_sharding

"Instruments"
from ._session import Profile as Profile, memory as memory, profile as profile, trace as trace

"Errors"
from . import errors as errors
from .errors import DeviceError as DeviceError, NodeLost as NodeLost, SessionError as SessionError
from .errors import SynkhronosError as SynkhronosError, WorkerDied as WorkerDied, WorkerError as WorkerError
from .errors import WorkerRestarted as WorkerRestarted, WorkerTimeout as WorkerTimeout

"Extensions: training steps, update rules, schedules, checkpoints"
from . import extensions as extensions

__version__: str
