"""Training rules next to PyTorch's averagers and optimizer; they run where PyTorch is installed (`make test-torch`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rule_simulator
from rule_simulator import N, Quadratic, simulate

from synkhronos import rules

torch = pytest.importorskip("torch")

N_RANKS, STEPS, RATE, WARM_UP = 4, 24, 0.1, 5
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32"])
#: A process of PyTorch, which trains with an averager and prints its parameters.
PROCESS = f"""
import json, sys, warnings
from collections import OrderedDict
import numpy as np, torch
from rule_simulator import Quadratic
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

kind, dtype, rank, file = sys.argv[1:]
rank, problem = int(rank), Quadratic({N_RANKS}, dtype)
torch.distributed.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size={N_RANKS})
theta = torch.nn.Parameter(torch.tensor(problem.x0))
theta.grad = torch.zeros_like(theta)
optimizer = torch.optim.SGD([theta], lr={RATE})
if kind == "periodic":
    averager, first = PeriodicModelAverager(4, warmup_steps={WARM_UP}), {WARM_UP}
else:
    averager, first = HierarchicalModelAverager(OrderedDict([(3, 2), (6, {N_RANKS})])), 0
    averager.average_parameters([theta])  # of step 0, before the training
for step in range(1, {STEPS} + 1):
    theta.grad.copy_(torch.tensor(problem.gradient(rank, theta.detach().numpy(), step)))
    if step <= first:
        torch.distributed.all_reduce(theta.grad)
        theta.grad /= {N_RANKS}
    optimizer.step()
    averager.average_parameters([theta])
print(json.dumps(theta.tolist()))
"""


def assert_close(found, expected, dtype):
    scale = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=scale * max(1, np.abs(expected).max()))


@DTYPES
@pytest.mark.parametrize(
    "kind, rule",
    [
        # PyTorch's first average is that after the step that follows the first steps.
        ("periodic", rules.LocalSGD(every=4, start=WARM_UP + 1)),
        ("hierarchical", rules.Hierarchical({3: "node", 6: "all"})),
    ],
)
def test_averages_are_those_of_pytorch(kind, rule, dtype, tmp_path):
    problem = Quadratic(N_RANKS, dtype)
    run = simulate(
        rule,
        lambda rank, x, step: x - np.asarray(RATE, dtype) * problem.gradient(rank, x, step),
        problem.x0,
        N_RANKS,
        STEPS,
        nodes=[0, 0, 1, 1],
    )
    helpers = str(Path(rule_simulator.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([helpers, *sys.path]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, kind, dtype, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(N_RANKS)
    ]
    try:
        for process, x in zip(processes, run.x):
            output, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
            assert_close(x, json.loads(output), dtype)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@DTYPES
def test_diloco_is_sgd_of_pytorch(dtype):
    rng = np.random.RandomState(0)
    theta = torch.tensor(rng.randn(N).astype(dtype), requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    rule, x = rules.DiLoCo(4), theta.detach().numpy().copy()
    state = rule.begin(x, 3)
    for _ in range(20):
        mean = x + rng.randn(N).astype(dtype)
        theta.grad = theta.detach() - torch.tensor(mean)
        optimizer.step()
        x = rule.after(mean, mean, mean, 0, state)
        assert x.dtype == dtype
        assert_close(x, theta.detach().numpy(), dtype)
