"""Sessions on several nodes. One process of each node, the node leader, communicates over MPI; workers never do."""

from synkhronos._multinode.heartbeat import WARNING_SECONDS
from synkhronos._multinode.launch import StartLimit, own_part
from synkhronos._multinode.node_group import MultiNodeGroup, Nodes, find_nodes
from synkhronos._multinode.node_messages import Options
