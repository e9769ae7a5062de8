"""The report of `python -m synkhronos info`."""

import json
import os
import re
import sys
import sysconfig
import textwrap

import psutil
import pytest
from backend import theano_only
from fake_cuda_libraries import CC, build_driver, build_wheels
from made_up_costs import CONSTANTS
from scripts import ROOT, launch

import synkhronos as synk
from synkhronos import _backends
from synkhronos._cli import report as remedies
from synkhronos._cli.devices import ENGINES, OPTIONAL_PACKAGES
from synkhronos._cli.info import examine
from synkhronos._costs import Store

BACKEND = ENGINES[_backends.engine]


#: The marker of a package that every supported Python needs.
ALL = "; python_version < '3.15'"
STATES = ("ok", "missing", "unusable", "optional")


class TestInfo:
    def test_the_table(self, tmp_path):
        done = launch("info", "--gpu", cache=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert lines[0].startswith("Synkhronos ")
        assert "CPU cores: ready" in lines
        rows = [line.split() for line in lines]
        assert ["ok", BACKEND.title] in [row[:2] for row in rows]
        assert ["ok", "Python", sysconfig.get_config_var("py_version")] in [row[:3] for row in rows]
        names = ["NumPy", "BLAS", "NumPy's", "cores", "memory", "mpi4py"]
        if BACKEND.has_gpus:
            names += ["Lasagne", "pygpu", "NVRTC", "cuBLAS", "NCCL", "cuDNN", "libOpenCL"]
        found = {row[1]: line for row, line in zip(rows, lines) if len(row) > 1 and row[0] in STATES}
        assert found.keys() >= set(names)
        columns = {line.index(row[1], 2 + len(row[0])) for row, line in zip(rows, lines) if row and row[0] in STATES}
        assert len(columns) == 1, "the names do not stand below each other"
        speed = r"kernels: \d+ GFLOP/s on one core, \d+% of what its vector units can do"
        n_linked = 1 + ("linked by" in done.stdout)  # NumPy's, and the backend's
        assert len(re.findall(speed, done.stdout)) == n_linked

    def test_measured_costs_of_other_backends_and_versions_are_left_out(self, tmp_path):
        path, version = tmp_path / "costs.json", synk.__version__
        title = f"{BACKEND.title} 1"
        for of in (
            f"{title}; linker auto; Synkhronos {version}",
            f"{title}; Synkhronos 0",
            f"Other 1; Synkhronos {version}",
        ):
            Store(str(path)).put("machines", f"processor; {of}", value=CONSTANTS)
        report = json.loads(launch("info", "--json", cache=tmp_path, check=True, SYNKHRONOS_COSTS=str(path)).stdout)
        (costs,) = [part for part in report["parts"] if part["name"] == "costs of calls"]
        assert f"{title}; linker auto" in costs["note"]

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="Theano runs on this Python")
    def test_where_theano_cannot_be_installed(self, tmp_path):
        report = json.loads(launch("info", "--json", cache=tmp_path, check=True).stdout)
        (theano,) = [part for part in report["parts"] if part["name"] == "Theano"]
        assert theano["state"] == "optional" and "Python 3.9 to 3.11" in theano["note"]

    def test_a_machine_without_a_gpu(self, tmp_path):
        if os.path.exists("/proc/driver/nvidia/version"):
            pytest.skip("this machine has an NVIDIA driver")
        report = json.loads(launch("info", "--json", cache=tmp_path, check=True).stdout)
        assert {part["group"] for part in report["parts"]} == {"cpu"} and set(report["ready"]) == {"cpu"}
        parts = {part["name"]: part for part in report["parts"]}
        assert ("GPUs" in parts) == BACKEND.has_gpus
        if BACKEND.has_gpus:
            note = "no NVIDIA driver was found; `info --gpu` shows what GPUs need, also those of OpenCL"
            assert (parts["GPUs"]["state"], parts["GPUs"]["note"]) == ("ok", note)
        assert parts["mpi4py"]["state"] == "ok" and "MPI" in parts["mpi4py"]["note"]

    @theano_only("GPUs")
    def test_as_json_with_a_driver_that_crashes(self, tmp_path):
        if CC is None:
            pytest.skip("there is no C compiler")
        driver = build_driver(tmp_path / "driver", crash=1)
        site = build_wheels(tmp_path / "site", cuda=(9, 2))
        given = {"LD_LIBRARY_PATH": str(driver.parent), "PYTHONPATH": str(site)}
        done = launch("info", "--gpu", "--json", cache=tmp_path / "cache", **given)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(done.stdout)
        assert report["ready"]["cpu"] is True
        assert report["ready"]["cuda"] is False
        assert report["cores"] == len(os.sched_getaffinity(0))
        assert 0 < report["free_memory"] <= psutil.virtual_memory().total + psutil.swap_memory().total
        parts = {part["name"]: part for part in report["parts"]}
        assert parts["CUDA driver"]["state"] == "unusable"
        assert parts["CUDA driver"]["version"] == "390.157"
        assert parts["CUDA driver"]["path"] == str(driver)
        assert "supports CUDA 9.1; ended by signal 6" in parts["CUDA driver"]["note"]
        assert parts["NVRTC"]["state"] == "unusable"
        assert "libnvrtc.so.9 is newer than the driver's CUDA 9.1" in parts["NVRTC"]["note"]
        assert parts["NVRTC"]["remedy"] == "python -m pip install 'nvidia-cuda-nvrtc-cu9<9.2'"
        assert (parts["cuBLAS"]["state"], parts["cuBLAS"]["version"]) == ("ok", "9.2.1")
        assert (parts["NCCL"]["version"], parts["NCCL"]["remedy"]) == ("99.2.3", "")
        assert set(report["changed"]) >= {"LD_LIBRARY_PATH", "THEANO_FLAGS"}

    def test_missing_parts_are_listed_with_their_remedies(self, tmp_path, monkeypatch):
        (tmp_path / "bin").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no compiler
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        report = examine("0", os.environ, [str(tmp_path)])  # no packages
        parts = {part.name: part for part in report.parts}
        assert report.ready["cpu"] is False
        assert parts["C++ compiler"].state == ("missing" if BACKEND.module == "theano" else "optional")  # or numba
        assert parts["C++ compiler"].remedy.endswith("apt-get install g++")
        for name, module, requirement in BACKEND.packages:
            assert parts[name].state == ("optional" if module in OPTIONAL_PACKAGES else "missing")
            assert parts[name].remedy == remedies.pip(requirement)
        text = report.as_text()
        assert "CPU cores: not ready" in text
        assert BACKEND.packages[2][2].split("=")[0].rstrip(">") in text

    def test_devices_are_those_of_pygpu(self, tmp_path):
        program = """
            import json
            from pygpu import gpuarray
            names = [
                f"opencl{platform}:{device}"
                for platform in range(gpuarray.count_platforms("opencl"))
                for device in range(gpuarray.count_devices("opencl", platform))
            ]
            print(json.dumps(names))
        """
        done = launch("run", "-c", textwrap.dedent(program), cache=tmp_path)
        if done.returncode:
            pytest.skip("pygpu finds no OpenCL here: " + done.stderr.strip().splitlines()[-1])
        report = json.loads(launch("info", "--gpu", "--json", cache=tmp_path, check=True).stdout)
        devices = {device["name"]: device for device in report["devices"]}
        assert [name for name in devices if name.startswith("opencl")] == json.loads(done.stdout)
        assert all(device["memory"] > 0 and device["description"] for device in devices.values())
        usable = [
            device for device in devices.values() if device["state"] == "ok" and device["name"].startswith("opencl")
        ]
        complete = all(part["state"] != "missing" for part in report["parts"] if part["group"] in ("gpu", "opencl"))
        assert report["ready"]["opencl"] is bool(usable and complete)


def test_the_requirements_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'^    "([^"]+)"', re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)[1], re.M)
    suits = {
        "theano": "; python_version < '3.12'",
        "pytensor": "; python_version >= '3.12' and python_version < '3.15'",
    }
    for name, backend in ENGINES.items():
        requirements = {requirement for _, module, requirement in backend.packages if module not in OPTIONAL_PACKAGES}
        missing = {one for one in requirements if {one, one + suits[name], one + ALL} & set(declared) == set()}
        assert missing == ({"numpy>=2", "scipy>=1", "numba>=0.58"} if name == "pytensor" else set())  # PyTensor's own
    assert all("python_version < '3.1" in one for one in declared)  # so pip rejects Synkhronos before building any
    assert f'lasagne = ["Lasagne==0.1{suits["theano"]}"]' in text
    optional = {one: requirement for _, one, requirement in ENGINES["pytensor"].packages if one in OPTIONAL_PACKAGES}
    assert set(optional) == {"pymc", "nutpie", "mpi4py"}
    for module in ("pymc", "nutpie"):
        assert f'"{optional[module]}"' in text
    assert f'mpi = ["{optional["mpi4py"]}"' in text


@theano_only("the flag device")
@pytest.mark.parametrize("in_file", [True, False])
def test_the_device_of_theanos_old_backend_is_reported(tmp_path, in_file):
    (tmp_path / ".theanorc").write_text(f"[global]\ndevice = {'gpu0' if in_file else 'cpu'}\n")
    flags = {} if in_file else {"THEANO_FLAGS": "device=gpu,floatX=float32"}
    done = launch("info", "--json", cache=tmp_path / "cache", HOME=str(tmp_path), **flags)
    report = json.loads(done.stdout)
    (device,) = [part for part in report["parts"] if part["name"] == "device"]
    assert (device["state"], device["version"]) == ("unusable", "gpu0" if in_file else "gpu")
    assert device["note"].startswith(str(tmp_path / ".theanorc") if in_file else "THEANO_FLAGS")
    assert report["ready"]["cpu"] is False and device["remedy"] == "export THEANO_FLAGS=device=cpu"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Theano needs Python 3.11 or earlier")
@pytest.mark.parametrize(
    ("bound", "is_warned"), [(">=1.25.0", True), (">1,>=1.99", True), (">=1.15.0", False), ("", False)]
)
def test_pymc_that_needs_a_later_numpy_is_named(tmp_path, bound, is_warned):
    (tmp_path / "pymc.py").write_text("")
    metadata = (
        f"Metadata-Version: 2.1\nName: pymc\nVersion: 9.0\nRequires-Dist: scipy>=9\nRequires-Dist: numpy{bound}\n"
    )
    (tmp_path / "pymc-9.0.dist-info").mkdir()
    (tmp_path / "pymc-9.0.dist-info" / "METADATA").write_text(metadata)
    done = launch("--version", cache=tmp_path / "cache", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and ("PyMC does not work in this environment" in done.stderr) == is_warned, done.stderr
