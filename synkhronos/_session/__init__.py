"""The controller's side of a session: sends commands to the ranks, tracks their state, and reports failures."""

from synkhronos._session.context_manager import memory, profile, sequence, session, trace
from synkhronos._session.diagnostics import warn
from synkhronos._session.ledger import Place, Staged, can_be_read
from synkhronos._session.lifecycle import PLANS, close, current, distribute, flush, fork, functions, get_n_gpu, held
from synkhronos._session.profiles import Profile
from synkhronos._session.replicas import Updates, distances
from synkhronos._session.shards import Origin, origin_of
from synkhronos._session.state import Session
from synkhronos._session.submission import Future
