"""Several machines: one process of each, its leader, speaks MPI with the others; workers never do."""

from __future__ import annotations

from synkhronos._nodes.fleet import Fleet
from synkhronos._nodes.launch import own_part
from synkhronos._nodes.limit import StartLimit
from synkhronos._nodes.machines import Machines, find_machines
from synkhronos._nodes.silence import WARNING_SECONDS

__all__ = ["WARNING_SECONDS", "Fleet", "Machines", "StartLimit", "find_machines", "own_part"]
