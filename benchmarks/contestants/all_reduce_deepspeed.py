"""DeepSpeed's all-reduce in shared memory, for inference on CPUs; an untimed barrier precedes each call."""

import glob
import os

import deepspeed
import numpy as np
import torch

from benchmarks.contestants._serve import compete, rank, size, timed


def make():
    """Join the process group; DeepSpeed compiles its kernels at their first use."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    group = {"init_method": os.environ["RENDEZVOUS"], "rank": rank(), "world_size": size()}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=True, **group)
    if not getattr(deepspeed.comm.comm.cdb, "shm_comm_op", None):
        raise RuntimeError("DeepSpeed has no kernels for shared memory here, and would use gloo")

    # Remove the names of the buffers, which DeepSpeed leaves, once both processes have opened both buffers.
    torch.distributed.barrier()
    for path in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*{os.environ['MASTER_PORT']}*_{rank()}"):
        os.unlink(path)

    def run(n, steps):
        tensor = torch.from_numpy(np.random.RandomState(0).rand(n).astype("float32"))
        return timed(lambda: deepspeed.comm.inference_all_reduce(tensor), steps, before=torch.distributed.barrier)

    return run, {}


if __name__ == "__main__":
    compete(make)
