"""GPUs: the tests of `on_gpu.py`, failures in collectives, and the demos, each in its own process.

Without a GPU, `make test-opencl` installs PoCL, an OpenCL device on the CPU.
"""

import os
import re
import subprocess
import sys
import textwrap

import pytest
from backend import theano_only
from gpu_devices import gpus
from namespace_hosts import MPIEXEC
from scripts import ROOT

pytestmark = theano_only("GPUs")

#: Rewrites to GpuCrossentropySoftmaxArgmax1HotWithBias, which Theano cannot execute on OpenCL.
FUSED_CROSSENTROPY = "crossentropy_to_crossentropy_with_softmax:crossentropy_to_crossentropy_with_softmax_with_bias"

on_each_kind = pytest.mark.parametrize(
    "kind", [pytest.param("opencl", marks=pytest.mark.opencl), pytest.param("cuda", marks=pytest.mark.cuda)]
)
slow = [pytest.mark.slow, pytest.mark.timeout(660)]


def run(kind, arguments, n_ranks=2, flags="", launch=(), **environment):
    """Run Python with at least ``n_ranks`` devices, on CUDA with all GPUs; return the completed process."""
    there = gpus(kind)
    devices = (there * n_ranks)[: max(n_ranks, len(there) if kind == "cuda" else 0)]
    flags = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), flags]))
    environment = {**os.environ, "SYNKHRONOS_DEVICES": ",".join(devices), "THEANO_FLAGS": flags, **environment}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([*launch, sys.executable, *arguments], cwd=ROOT, env=environment, timeout=600, **streams)


def program(text):
    """Return Python's arguments that run a program given as text."""
    return ["-c", textwrap.dedent(text)]


class TestOnGpu:
    pytestmark = slow

    @on_each_kind
    def test_functions_and_variables(self, kind):
        self.run_tests(kind, 2)

    @on_each_kind
    def test_one_rank(self, kind):
        self.run_tests(kind, 1, self.COLLECTIVE)

    @pytest.mark.opencl
    def test_collectives_over_the_stand_in(self):
        self.run_tests("opencl", 3, self.COLLECTIVE, NCCL_STAND_IN="1")

    @pytest.mark.opencl
    @pytest.mark.skipif(not MPIEXEC.exists(), reason="mpiexec is not installed")
    def test_collectives_on_two_nodes(self):
        """Each node is a process with two ranks."""
        self.run_tests("opencl", 2, self.COLLECTIVE, launch=(MPIEXEC, "-n", "2"))

    #: Tests that depend on the number of ranks and nodes, and on NCCL. Compiling for OpenCL takes most of the time.
    COLLECTIVE = "every_op or TestVariables or collectives_inside or had_once"

    @staticmethod
    def run_tests(kind, n_ranks, chosen="", **environment):
        command = ["-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--timeout", "300", "-k", chosen]
        done = run(kind, [*command, "tests/gpu/on_gpu.py"], n_ranks, **environment)
        print(done.stdout)
        assert done.returncode == 0, done.stdout
        assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.opencl
class TestFailuresInsideNccl:
    """Failures with `fake_nccl`, which waits for dead ranks as NCCL does."""

    pytestmark = slow

    START = """
        import os, signal, sys, time
        sys.path.insert(0, "tests/helpers")
        import fake_nccl
        from deadline import scaled
        from process_state import worker_pids
        fake_nccl.install()
        import numpy as np, theano, synkhronos as synk
        n = synk.fork()
        w = theano.shared(np.ones(5, "float32"), "w")
        f = synk.function([], (w, "sum"))
        assert np.asarray(f()).tolist() == [n] * 5
    """

    def run(self, text):
        done = run("opencl", program(textwrap.dedent(self.START) + textwrap.dedent(text)))
        assert done.returncode == 0, done.stdout
        return done.stdout

    def test_a_rank_that_dies(self):
        out = self.run("""
            (worker,) = worker_pids()
            fake_nccl.before[0] = lambda: os.kill(worker, signal.SIGKILL)
            began = time.monotonic()
            try:
                synk.all_reduce(w, "sum")
            except synk.WorkerDied as error:
                print("WorkerDied", error.rank, error.exitcode, error.pid == worker)
            assert time.monotonic() - began < scaled(5)
            assert w.get_value().tolist() == [1] * 5  # the controller's device still works
            try:
                f()
            except synk.SessionError as error:
                print("SessionError")
            synk.close()
        """)
        assert "WorkerDied 1 -9 True" in out
        assert "SessionError" in out

    def test_a_rank_that_fails(self):
        out = self.run("""
            def fail():
                raise MemoryError("the failure that the test ordered")
            fake_nccl.before[0] = fail
            for attempt in range(2):
                try:
                    synk.all_reduce(w, "sum")
                except synk.WorkerError as error:
                    print("WorkerError", error)
            synk.all_reduce(w, "sum", nccl=False)  # collectives in host memory still work
            print(w.get_value())
            synk.close()
        """)
        assert "the failure that the test ordered" in out
        assert "nccl=False" in out
        assert "[2. 2. 2. 2. 2.]" in out

    def test_shapes_that_differ(self):
        out = self.run("""
            synk.scatter(w, np.arange(5, dtype="float32"))
            for collective in (synk.all_reduce, synk.reduce):
                try:
                    collective(w)
                except ValueError as error:
                    print("ValueError", error)
            print(synk.gather(w, 0))
            synk.broadcast(w)
            synk.all_reduce(w, "sum")
            print(w.get_value())
            synk.close()
        """)
        assert out.count("ValueError") == 2
        assert "[0. 1. 2. 3. 4.]" in out
        assert "[0. 2. 4.]" in out


class TestDemos:
    pytestmark = slow

    @pytest.mark.parametrize(
        ("kind", "number"),
        [
            pytest.param("opencl", 3, marks=pytest.mark.opencl),  # calls all collectives
            *[pytest.param("cuda", number, marks=pytest.mark.cuda) for number in range(1, 6)],
        ],
    )
    def test_demo(self, kind, number):
        done = run(kind, [f"demos/demo_{number}.py"])
        assert done.returncode == 0, done.stdout
        assert "agree" in done.stdout.splitlines()[-1]

    @on_each_kind
    @pytest.mark.parametrize(("model", "script"), [("mlp", "gpu_data"), ("cnn", "cpu_data")])
    def test_mnist(self, kind, model, script):
        flags = "floatX=float32"
        if kind == "opencl":
            flags += f",optimizer_excluding={FUSED_CROSSENTROPY}"
        arguments = ["--model", model, "--epochs", "1", "--data", "digits"]
        done = run(kind, [f"demos/lasagne_mnist/train_mnist_{script}.py", *arguments], flags=flags)
        assert done.returncode == 0, done.stdout
        assert float(re.search(r"test accuracy: ([\d.]+) %", done.stdout)[1]) > 70


class TestRefusals:
    pytestmark = slow

    @on_each_kind
    def test_a_device_that_is_not_there(self, kind):
        done = run(
            kind,
            program("""
                import synkhronos as synk
                for device in ("cuda99", "opencl9:9", "opencl0:9"):
                    try:
                        synk.fork(devices=device)
                    except synk.DeviceError as error:
                        print("DeviceError", error)
            """),
        )
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("DeviceError") == 3

    @on_each_kind
    def test_a_process_that_has_used_a_gpu(self, kind):
        done = run(
            kind,
            program("""
                import os, synkhronos as synk, numpy as np, theano
                synk.fork()
                f = synk.function([], (theano.shared(np.ones(3)).sum(), "sum"))
                f()
                synk.close()
                for arguments in ({}, {"devices": os.environ["SYNKHRONOS_DEVICES"].split(",")}):
                    try:
                        synk.fork(**arguments)
                    except synk.DeviceError as error:
                        print("DeviceError", error)
                print(synk.fork(2, use_gpu=False))
                try:
                    f()
                except synk.SessionError as error:
                    print("SessionError", error)
                print(type(theano.shared(np.ones(3))).__name__)
            """),
        )
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("DeviceError this process has already used") == 2
        assert "SessionError" in done.stdout
        assert done.stdout.splitlines()[-1] == "TensorSharedVariable"

    @on_each_kind
    def test_workers_on_gpus_are_not_replaced(self, kind):
        done = run(kind, program("import synkhronos as synk; synk.fork(restart_workers=True)"))
        assert "ValueError: got restart_workers on GPUs" in done.stdout
