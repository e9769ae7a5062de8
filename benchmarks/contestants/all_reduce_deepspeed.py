"""DeepSpeed's all_reduce in shared memory, for inference on CPUs; calls start after an untimed barrier."""

import glob
import os

import deepspeed
import numpy as np
import torch

from benchmarks.contestants._serve import compete, rank, size, timed


def make():
    """Join the process group; its kernels are compiled at their first use."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    group = {"init_method": os.environ["RENDEZVOUS"], "rank": rank(), "world_size": size()}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=True, **group)
    if not getattr(deepspeed.comm.comm.cdb, "shm_comm_op", None):
        raise RuntimeError("DeepSpeed's kernels of shared memory are not there: it would use gloo")

    torch.distributed.barrier()  # both have opened both: the names, which nobody removes, are not needed any more
    for path in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*{os.environ['MASTER_PORT']}*_{rank()}"):
        os.unlink(path)

    def run(n, steps):
        tensor = torch.from_numpy(np.random.RandomState(0).rand(n).astype("float32"))
        return timed(lambda: deepspeed.comm.inference_all_reduce(tensor), steps, before=torch.distributed.barrier)

    return run, {}


if __name__ == "__main__":
    compete(make)
