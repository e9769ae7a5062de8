"""Run every collective on every dtype over one transport; `test_contract.py` starts this program.

    [mpiexec -n N] python run_collectives.py TRANSPORT DEVICES NODES FILE

TRANSPORT: "shared memory"; "mpi votes" or "mpi pieces" (arrays are sent with the leaders' votes, or in many pieces);
"mpi tickets" (all-reduces of equal weights go on in the background);
"host" (GPUs without NCCL); "nccl"; "stand-in" (for NCCL). DEVICES: names separated by commas. NODES: the number of
ranks on each node, separated by commas. FILE: receives the results of each collective, under the names of `name_of`.
"""

import importlib
import os
import sys

import numpy as np

import synkhronos._collectives.buckets as parts
import synkhronos._collectives.hierarchical as hierarchical
import synkhronos._session.lifecycle as lifecycle
from synkhronos._collectives import OPS

DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64")
SHAPES = {"vector": (7,), "matrix": (13, 9), "empty": (0, 3), "row": (1,)}
WEIGHTS = (3.0, 0.0, 1.25, 2.125, 0.5, 1.0, 0.5, 2.0)  # weighted averages of integers are never halves
WEIGHTED = "weighted avg"


def value(rank, dtype, shape_name):
    """Return the value of a variable on a rank."""
    random = np.random.RandomState([rank, DTYPES.index(dtype), sorted(SHAPES).index(shape_name)])
    return (random.rand(*SHAPES[shape_name]) * (2 if dtype == "bool" else 5)).astype(dtype)


def name_of(what, dtype, shape_name):
    return f"{what}/{dtype}/{shape_name}"


def has(op, dtype):
    """Return whether an op is tested on a dtype: booleans are only compared."""
    return not (dtype == "bool" and op in ("avg", "sum", "prod", WEIGHTED))


def fork_on_nodes(nodes, way):
    """Fork the given number of ranks on each node; return a list that records how arrays were sent between nodes."""
    import synkhronos as synk

    if way == "votes":
        parts._SMALL_BYTES = 1 << 20
    else:
        parts._SMALL_BYTES, parts.SHARED_BYTES, parts._LEAST_BYTES = 0, 16, 64
    ways, divide = [], hierarchical.divide

    def record(collective, are_small):
        with_votes, pieces = divide(collective, are_small)
        ways.extend(["votes"] * any(part.array.size for part in with_votes) + ["pieces"] * (len(pieces) > 1))
        return with_votes, pieces

    hierarchical.divide = record
    if way == "tickets":
        Transport, all_reduce = hierarchical.HierarchicalTransport, hierarchical.HierarchicalTransport.all_reduce

        def reduce_in_background(self, arrays, op, weights, layout=()):
            if weights is not None:
                return all_reduce(self, arrays, op, weights, layout)
            ways.append("tickets")
            for array in arrays:
                array[...] = self.start(array, op).wait()
            return False

        Transport.all_reduce = reduce_in_background
    own = nodes[int(os.environ["PMI_RANK"])]
    lifecycle.find_free_devices = lambda *_: ["cpu"] * own
    assert synk.fork(use_gpu=False, master_rank=own - 1, timeout=60) == sum(nodes)
    return ways


def main(transport, devices, nodes, path):
    if transport == "stand-in":
        import fake_nccl

        fake_nccl.install()
    import synkhronos as synk

    theano = importlib.import_module(synk.engine)

    names, nodes = devices.split(","), [int(n_ranks) for n_ranks in nodes.split(",")]
    n_ranks = sum(nodes)
    ways = []
    if len(nodes) > 1:
        ways = fork_on_nodes(nodes, transport.split()[-1])
    else:
        assert synk.fork(devices=names, master_rank=n_ranks - 1) == n_ranks
    nccl = transport in ("nccl", "stand-in")
    variables = {(dtype, shape): theano.shared(value(0, dtype, shape)) for dtype in DTYPES for shape in SHAPES}
    functions = [synk.function([], [(var, None) for var in variables.values()])]
    synk.distribute()
    on_gpu = [not isinstance(var.container.storage[0], np.ndarray) for var in variables.values()]
    assert all(on_gpu) if names[0] != "cpu" else not any(on_gpu)
    results = {}

    def reset():
        for rank in range(n_ranks):
            synk.set_value(rank, list(variables.values()), [value(rank, *key) for key in variables])

    def keep(what, keys, values):
        results.update({name_of(what, *key): np.asarray(one) for key, one in zip(keys, values)})

    def on_all_ranks(what, keys):
        for rank in range(n_ranks):
            keep(f"{what}/rank {rank}", keys, synk.get_value(rank, [variables[key] for key in keys]))

    for op in (*OPS, WEIGHTED):
        keys = [key for key in variables if has(op, key[0])]
        chosen = [variables[key] for key in keys]
        reset()
        if op == WEIGHTED:
            synk.all_reduce(chosen, nccl=nccl, weights=WEIGHTS[:n_ranks])
        else:
            keep(f"reduce {op}", keys, synk.reduce(chosen, op, in_place=False, nccl=nccl))
            synk.all_reduce(chosen, op, nccl=nccl)
        on_all_ranks(f"all_reduce {op}", keys)
        if op != WEIGHTED:
            reset()
            synk.reduce(chosen, op, nccl=nccl)
            on_all_ranks(f"reduce in place {op}", keys)
    keys = list(variables)
    reset()
    keep("gather", keys, synk.gather(list(variables.values()), 0, nccl=nccl))
    synk.broadcast(list(variables.values()), nccl=nccl)
    on_all_ranks("broadcast", keys)
    reset()
    many = [key for key in keys if key[1] != "row"]
    synk.all_gather([variables[key] for key in many], nccl=nccl)
    on_all_ranks("all_gather", many)
    results["ways between nodes"] = np.array(sorted(set(ways)))
    if transport == "stand-in":
        results["collectives of the stand-in"] = np.array(sorted(fake_nccl.done))
    del functions
    synk.close()
    np.savez(path, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
