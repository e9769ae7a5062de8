"""Published times of steps on several GPUs, and their predictions from the time of one.

Given are the seconds on one GPU, the number of parameters, and the rate of the bus. Exchange does not overlap, and
messages have no latency.
"""

from synkhronos._costs import Cluster, Link, Workload
from synkhronos._costs.kernels import Spread, fit_row_times
from synkhronos._costs.predict import predict_step

_NO_NODES = Link(0.0, 1.0)  # all GPUs are on one node

#: Numbers of parameters. AlexNet has two groups of convolutions, GoogLeNet both auxiliary classifiers.
PARAMETERS = {"AlexNet": 60_965_224, "GoogLeNet": 13_378_280, "VGG16": 138_357_544, "ResNet50": 25_557_032}

#: README of Theano-MPI (2017; arXiv:1605.08325): seconds per 5,120 images on Tesla K80 GPUs of one node, with NCCL.
#: Rows of a GPU in a step, seconds on 1 GPU, and on 2, 4 and 8: training, and exchange.
K80 = {
    "AlexNet": (128, 20.50, {2: (10.35, 0.78), 4: (5.13, 0.54), 8: (2.63, 0.61)}),
    "GoogLeNet": (32, 63.89, {2: (31.40, 1.00), 4: (15.51, 0.71), 8: (7.69, 0.80)}),
    "VGG16": (32, 343.37, {2: (169.12, 7.14), 4: (86.97, 4.80), 8: (43.29, 5.41)}),
    "ResNet50": (64, 163.15, {2: (80.09, 0.81), 4: (40.25, 0.56), 8: (20.12, 0.57)}),
}
#: The same table's VGG-16 with 16 rows, from which the rates of the bus are derived, and which is not predicted.
VGG16_OF_16_ROWS = {2: 13.90, 4: 9.28, 8: 12.59}

#: Bytes per second of the bus: VGG16_OF_16_ROWS has 5120 / 16 / P exchanges of 2(P - 1) / P · 553 MB.
K80_BUS = 3.08e9  # 8 GPUs, on both sockets
K80_SOCKET = 7.16e9  # 4 GPUs, on one socket
IMAGES = 5120


def published(name, n_ranks, bus):
    """Return the prediction for K80s, in seconds per 5,120 images, given those of 1 GPU: step, and exchange."""
    rows, alone, _ = K80[name]
    work = Workload((fit_row_times([rows], [alone * rows / IMAGES]),), 4 * PARAMETERS[name])
    step = predict_step(work, Cluster(_NO_NODES, Link(0.0, bus)), 1, n_ranks, n_ranks * rows)
    n_steps = IMAGES / (n_ranks * rows)
    return n_steps * step.seconds, n_steps * step.exposed


#: A. Stooke and P. Abbeel (2017), arXiv:1710.04162, table 1 and section 6: ResNet-50 on a DGX-1 with Tesla P100 GPUs.
#: Seconds of a run on 1 GPU and on 8, and those of its parts; 1.75 steps of 64 rows per second on 1 GPU.
DGX1 = {"alone": 395.1, "eight": 52.6, "all-reduce": 0.46, "straggler": 1.0, "steps per second": 1.75, "rows": 64}
#: Seconds of the function, and the part of them that copies inputs to GPUs, on 1 GPU and on 8.
DGX1_FUNCTION, DGX1_COPIES = (382.5, 49.5), (0.018, 0.036)
#: The four NVLinks of a P100 at once, each 20 GB/s in each direction (NVIDIA, white paper on the DGX-1, WP-08437-001).
DGX1_NVLINK = 80e9


def dgx1(spread=None, copies=None):
    """Return the prediction for 8 GPUs: seconds of the run, those of exchange, and the number of steps."""
    n_steps = DGX1["alone"] * DGX1["steps per second"] / 8
    kernels = (fit_row_times([DGX1["rows"]], [1 / DGX1["steps per second"]]), *([copies] if copies else []))
    work = Workload(kernels, 4 * PARAMETERS["ResNet50"], spread=spread or Spread())
    step = predict_step(work, Cluster(_NO_NODES, Link(0.0, DGX1_NVLINK)), 1, 8, 8 * DGX1["rows"])
    return n_steps * step.seconds, n_steps * step.exposed
