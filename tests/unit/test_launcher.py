"""Finding CUDA's libraries, the environment that `run` prepares, and the report of `info`.

The libraries are built by the C compiler, export what NVIDIA's export, and lie where drivers, wheels, toolkits and
conda put them. In the tests of whole commands they are of CUDA 9, so that none of a machine with a real GPU suits.
"""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import psutil
import pytest
from engine import theano_only
from support import ROOT, is_running, wait_until

import synkhronos
from synkhronos import _backends
from synkhronos._cli import gpu_libraries as libraries
from synkhronos._cli import launcher
from synkhronos._cli import probes as probing
from synkhronos._cli import report as remedies
from synkhronos._cli.backends import ENGINES
from synkhronos._cli.gpu_libraries import Finder, Gpu, ask_gpus, private_folder, survey
from synkhronos._cli.info import examine
from synkhronos._cli.launcher import interpreter_options, package_links, variables

ENGINE = ENGINES[_backends.name]
CC = shutil.which("gcc") or shutil.which("cc")

needs_compiler = pytest.mark.skipif(CC is None, reason="the libraries are built by a C compiler, and there is none")

SOURCES = {
    "cuda": """
        #include <string.h>
        #include <stdlib.h>
        int cuDriverGetVersion(int *version) { *version = NUMBER; return 0; }
        int cuInit(unsigned flags) { if (CRASH) abort(); return FAILS; }
        int cuDeviceGetCount(int *count) { *count = 2; return 0; }
        int cuDeviceGet(int *device, int index) { *device = index; return 0; }
        int cuDeviceGetName(char *name, int size, int device) { strcpy(name, device ? "Second" : "First"); return 0; }
        int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(16 + device) << 30; return 0; }
        int cuDeviceGetAttribute(int *value, int which, int device)
        { int both = device ? 90 : CAPABILITY; *value = which == 75 ? both / 10 : both % 10; return 0; }
        int cuGetErrorString(int error, const char **text) { *text = "no device is there"; return 0; }
    """,
    "nvrtc": """
        static int architectures[] = {ARCHITECTURES};
        int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = MINOR; return 0; }
        int nvrtcGetNumSupportedArchs(int *count) { *count = sizeof architectures / sizeof(int); return 0; }
        int nvrtcGetSupportedArchs(int *found)
        { for (unsigned i = 0; i < sizeof architectures / sizeof(int); i++) found[i] = architectures[i]; return 0; }
    """,
    "cublas": """
        int cublasLtIsThere(void);
        int cublasGetProperty(int kind, int *value)
        { int version[] = {MAJOR, MINOR, cublasLtIsThere()}; *value = version[kind]; return 0; }
    """,
    "nccl": "int ncclGetVersion(int *version) { *version = NUMBER; return 0; }",
    "cudnn": "#include <stddef.h>\nsize_t cudnnGetVersion(void) { return NUMBER; }",
}


def build(path, source, *options, **macros):
    """Compile a library to this path; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    command = [CC, "-shared", "-fPIC", "-w", f"-Wl,-soname,{path.name}", *defined, "-x", "c", "-", "-o", str(path)]
    subprocess.run([*command, "-x", "none", *options], input=source, text=True, check=True, timeout=60)
    return path


def build_driver(folder, number=9010, capability=70, fails=0, crash=0):
    """A driver's library, as NVIDIA installs it; returns the file."""
    macros = {"NUMBER": number, "CAPABILITY": capability, "FAILS": fails, "CRASH": crash}
    file = build(folder / "libcuda.so.390.157", SOURCES["cuda"], **macros)
    (folder / "libcuda.so.1").symlink_to(file.name)
    return file


def build_nvrtc(folder, major, minor, architectures="50, 60, 70, 90"):
    """NVRTC beside its builtins, as in NVIDIA's wheels."""
    build(folder / f"libnvrtc-builtins.so.{major}.{minor}", "int builtins;")
    macros = {"MAJOR": major, "MINOR": minor, "ARCHITECTURES": architectures}
    return build(folder / f"libnvrtc.so.{major}", SOURCES["nvrtc"], **macros)


def build_cublas(folder, major, minor):
    """cuBLAS, which needs cuBLASLt from its own folder, as in NVIDIA's wheels."""
    lt = build(folder / f"libcublasLt.so.{major}", "int cublasLtIsThere(void) { return 1; }")
    origin = ["-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags"]
    return build(folder / f"libcublas.so.{major}", SOURCES["cublas"], str(lt), *origin, MAJOR=major, MINOR=minor)


def build_wheels(site, cuda=(9, 1), nccl=990203, cudnn=None):
    """NVIDIA's wheels, installed in this folder."""
    build_nvrtc(site / "nvidia" / "cuda_nvrtc" / "lib", *cuda)
    build_cublas(site / "nvidia" / "cublas" / "lib", *cuda)
    build(site / "nvidia" / "nccl" / "lib" / "libnccl.so.2", SOURCES["nccl"], NUMBER=nccl)
    if cudnn:
        build(site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.7", SOURCES["cudnn"], NUMBER=cudnn)
    return site


@pytest.fixture
def empty_cache(tmp_path):
    """A cache of the loader that knows no folder."""
    return build_cache(tmp_path / "cache-of-nothing")


def build_cache(path, *folders):
    """A cache of the loader, made by ldconfig, that knows these folders; returns its path."""
    if not os.access("/sbin/ldconfig", os.X_OK):
        pytest.skip("there is no ldconfig here")
    configuration = path.with_suffix(".conf")
    configuration.write_text("\n".join(map(str, folders)))
    command = ["/sbin/ldconfig", "-X", "-C", str(path), "-f", str(configuration), "-i"]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return str(path)


class TestFinder:
    pytestmark = needs_compiler

    @pytest.mark.parametrize(
        ("place", "variable"),
        [
            ("site/nvidia/cublas/lib", None),
            ("site/nvidia/cu13/lib", None),
            ("environment/lib", "CONDA_PREFIX"),
            ("toolkit/lib64", "CUDA_HOME"),
            ("toolkit/lib", "CUDA_PATH"),
            ("any/folder", "LD_LIBRARY_PATH"),
            ("usr/local/cuda/lib64", None),
            ("usr/local/cuda-12.4/lib64", None),
            ("usr/local/nvidia/lib64", None),
            ("usr/lib/wsl/lib", None),
            ("usr/lib64", None),
        ],
    )
    def test_finds_libraries_where_they_are_installed(self, tmp_path, empty_cache, place, variable):
        file = build(tmp_path / place / "libcublas.so.12.4.5", "int cublas;")
        (file.parent / "libcublas.so.12").symlink_to(file.name)
        value = file.parent if variable == "LD_LIBRARY_PATH" else file.parent.parent
        environment = {variable: str(value)} if variable else {}
        finder = Finder(environment, [str(tmp_path / "site")], str(tmp_path), empty_cache)
        assert finder.candidates("cublas")[:1] == [str(file)]

    def test_finds_what_the_loader_knows(self, tmp_path):
        file = build(tmp_path / "opt" / "libnccl.so.2", SOURCES["nccl"], NUMBER=21805)
        cache = build_cache(tmp_path / "cache", file.parent)
        finder = Finder({}, [], str(tmp_path / "root"), cache)
        assert str(file) in finder.candidates("nccl")
        assert finder.loaded_as("libnccl.so.2") == str(file)
        assert finder.loaded_as("libnccl.so") is None

    def test_the_loader_prefers_ld_library_path(self, tmp_path):
        first = build(tmp_path / "first" / "libnccl.so", SOURCES["nccl"], NUMBER=21805)
        second = build(tmp_path / "second" / "libnccl.so", SOURCES["nccl"], NUMBER=21805)
        cache = build_cache(tmp_path / "cache", second.parent)
        assert Finder({}, [], str(tmp_path), cache).loaded_as("libnccl.so") == str(second)
        environment = {"LD_LIBRARY_PATH": f"{tmp_path}/none:{first.parent}"}
        finder = Finder(environment, [], str(tmp_path), cache)
        assert finder.loaded_as("libnccl.so") == str(first)
        assert finder.candidates("nccl")[:2] == [str(first), str(second)]

    def test_leaves_out_what_cannot_be_loaded(self, tmp_path, empty_cache):
        folder = tmp_path / "libraries"
        good = build(folder / "libnccl.so.2", SOURCES["nccl"], NUMBER=21805)
        (folder / "libnccl.so").write_text("GROUP ( libnccl.so.2 )")  # a script for the linker
        foreign = bytearray(good.read_bytes())
        foreign[18:20] = b"\x08\x00"  # the processor: MIPS
        (folder / "libnccl.so.1").write_bytes(foreign)
        (folder / "libnccl.so.3").symlink_to("nowhere")
        (folder / "libnccl_static.so.2").write_bytes(good.read_bytes())
        (folder / "stubs").mkdir()
        shutil.copy(good, folder / "stubs" / "libnccl.so.4")
        environment = {"LD_LIBRARY_PATH": f"{folder}/stubs:{folder}"}
        found = Finder(environment, [], str(tmp_path), empty_cache).candidates("nccl")
        assert [path for path in found if path.startswith(str(tmp_path))] == [str(good)]


class TestVersions:
    pytestmark = needs_compiler

    @pytest.mark.parametrize(
        ("name", "number", "version"),
        [
            ("nccl", 2708, (2, 7, 8)),
            ("nccl", 21805, (2, 18, 5)),
            ("nccl", 23203, (2, 32, 3)),
            ("cudnn", 5110, (5, 1, 10)),
            ("cudnn", 7605, (7, 6, 5)),
        ],
    )
    def test_versions_in_one_number(self, tmp_path, empty_cache, name, number, version):
        file = build(tmp_path / "usr/local/cuda/lib64" / f"lib{name}.so.2", SOURCES[name], NUMBER=number)
        found = survey(Finder({}, [], str(tmp_path), empty_cache), os.environ)
        assert (found.chosen[name].path, found.chosen[name].version) == (str(file), version)

    @pytest.mark.parametrize(("number", "version"), [(8907, "8.9.7"), (90100, "9.1.0"), (4008, "4.0.8")])
    def test_a_cudnn_that_theano_cannot_speak_to(self, tmp_path, empty_cache, number, version):
        build(tmp_path / "usr/local/cuda/lib64/libcudnn.so.8", SOURCES["cudnn"], NUMBER=number)
        found = survey(Finder({}, [], str(tmp_path), empty_cache), os.environ)
        assert "cudnn" not in found.chosen
        assert [reason for library, reason in found.refused if library.name == "cudnn"] == [f"is version {version}"]

    @pytest.mark.parametrize(
        ("driver", "chosen"), [(12040, (12, 4)), (12080, (12, 4)), (12090, (12, 9)), (13000, (13, 0)), (12030, None)]
    )
    def test_the_newest_nvrtc_that_the_driver_can_read(self, tmp_path, empty_cache, driver, chosen):
        build_driver(tmp_path / "usr/local/nvidia/lib64", driver, capability=90)
        for major, minor in ((12, 9), (13, 0), (12, 4)):
            build_nvrtc(tmp_path / f"usr/local/cuda-{major}.{minor}" / "lib64", major, minor)
        build_cublas(tmp_path / "site/nvidia/cublas/lib", 12, 9)
        build_cublas(tmp_path / "site/nvidia/cu13/lib", 13, 10)
        finder = Finder({}, [str(tmp_path / "site")], str(tmp_path), empty_cache)
        found = survey(finder, os.environ)
        assert found.driver.version == (driver // 1000, driver % 1000 // 10)
        assert (found.chosen["nvrtc"].version if chosen else found.chosen.get("nvrtc")) == chosen
        assert found.chosen["cublas"].version == ((13, 10, 1) if chosen == (13, 0) else (12, 9, 1))
        refused = {library.path: reason for library, reason in found.refused}
        if driver < 13000:
            newest = str(tmp_path / "usr/local/cuda-13.0/lib64/libnvrtc.so.13")
            assert refused[newest] == f"is newer than the driver's CUDA {driver // 1000}.{driver % 1000 // 10}"

    def test_nvrtc_must_compile_for_every_gpu(self, tmp_path, empty_cache):
        build_driver(tmp_path / "usr/local/nvidia/lib64", 13000, capability=70)
        build_nvrtc(tmp_path / "site/nvidia/cuda_nvrtc/lib", 12, 9, "50, 60, 70, 75, 80, 90")
        build_nvrtc(tmp_path / "site/nvidia/cu13/lib", 13, 0, "75, 80, 90")
        build_cublas(tmp_path / "site/nvidia/cublas/lib", 12, 9)
        build_cublas(tmp_path / "site/nvidia/cu13/lib", 13, 0)
        finder = Finder({}, [str(tmp_path / "site")], str(tmp_path), empty_cache)
        for gpus in (None, [Gpu("a", 1, 70), Gpu("b", 1, 90)]):  # asked for, as the choice depends on them, or given
            found = survey(finder, os.environ, gpus)
            assert found.chosen["nvrtc"].version == (12, 9)
            assert found.chosen["cublas"].version == (12, 9, 1)
            assert "does not compile for compute capability 7.0" in dict(found.refused).values()
        assert survey(finder, os.environ, [Gpu("b", 1, 90)]).chosen["nvrtc"].version == (13, 0)

    def test_the_gpus_of_a_driver(self, tmp_path):
        driver = build_driver(tmp_path / "good", capability=86)
        assert ask_gpus(str(driver), os.environ) == ([Gpu("First", 2**34, 86), Gpu("Second", 17 * 2**30, 90)], "")
        failing = build_driver(tmp_path / "failing", fails=100)
        assert ask_gpus(str(failing), os.environ) == ([], "CUDA error 100: no device is there")
        crashing = build_driver(tmp_path / "crashing", crash=1)
        gpus, error = ask_gpus(str(crashing), os.environ)
        assert gpus == [] and error.startswith(f"ended by signal {signal.SIGABRT.value}")

    def test_broken_libraries_are_refused_and_others_chosen(self, tmp_path, empty_cache, monkeypatch):
        monkeypatch.setattr(libraries, "_LIBRARIES_SECONDS", 5.0)
        folder = tmp_path / "usr/local/cuda/lib64"
        lasting = "#include <unistd.h>\n__attribute__((constructor)) void start(void) { sleep(60); }"
        build(
            folder / "libnccl.so.2", "#include <stdlib.h>\n__attribute__((constructor)) void start(void) { abort(); }"
        )
        build(folder / "libcublas.so.12", lasting)
        build(folder / "libnvrtc.so.11", "int not_nvrtc;")
        good = build_nvrtc(tmp_path / "usr/local/cuda-12.4/lib64", 12, 4)
        found = survey(Finder({}, [], str(tmp_path), empty_cache), os.environ)
        assert found.driver is None
        assert found.chosen["nvrtc"].path == str(good)
        reasons = {Path(library.path).name: reason for library, reason in found.refused}
        assert "ended by signal 6" in reasons["libnccl.so.2"]
        assert "no answer within 5 seconds" in reasons["libcublas.so.12"]
        assert "nvrtcVersion" in reasons["libnvrtc.so.11"]

    def test_no_library_is_loaded_here(self, tmp_path, empty_cache):
        build_driver(tmp_path / "usr/local/nvidia/lib64")
        survey(Finder({}, [], str(tmp_path), empty_cache), os.environ)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_what_a_question_started_is_ended_with_it(tmp_path):
    note = tmp_path / "pid"
    program = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "60"])  # it keeps the standard output open
        open({str(note)!r}, "w").write(str(child.pid))
        print('{{"known": 1}}', flush=True)
        time.sleep(60)
    """
    answer = probing.ask({"it": probing.python(textwrap.dedent(program))}, os.environ, 3)["it"]
    assert answer.record == {"known": 1}
    assert answer.error == "no answer within 3 seconds"
    assert wait_until(lambda: not is_running(int(note.read_text())), 5)


class TestPrivateFolder:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path, monkeypatch):
        """The folder of temporary files, to which the search falls back."""
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        temporary.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        self.fallback = str(temporary / f"synkhronos-{os.geteuid()}")

    def make(self, tmp_path, links, **environment):
        return private_folder(links, {"XDG_CACHE_HOME": str(tmp_path / "cache"), **environment})

    def test_holds_the_links_and_is_private(self, tmp_path):
        folder = self.make(tmp_path, {"lib/libcuda.so": "/a/libcuda.so.1", "python/six.py": "/b/six.py"})
        assert os.path.dirname(folder) == str(tmp_path / "cache" / "synkhronos")
        assert os.readlink(f"{folder}/lib/libcuda.so") == "/a/libcuda.so.1"
        assert os.readlink(f"{folder}/python/six.py") == "/b/six.py"
        for path in (folder, f"{folder}/lib", f"{folder}/python"):
            status = os.stat(path)
            assert stat.S_IMODE(status.st_mode) == 0o700
            assert status.st_uid == os.geteuid()
        assert os.listdir(os.path.dirname(folder)) == [os.path.basename(folder)]

    def test_its_name_comes_from_its_contents(self, tmp_path):
        one = self.make(tmp_path, {"a": "/x", "b": "/y"})
        before = os.stat(one).st_ino
        assert self.make(tmp_path, {"b": "/y", "a": "/x"}) == one
        assert os.stat(one).st_ino == before
        others = [{"a": "/x"}, {"a": "/x", "b": "/z"}, {"a": "/x", "c": "/y"}]
        assert len({one, *(self.make(tmp_path, links) for links in others)}) == 4

    def test_a_damaged_one_is_mended(self, tmp_path):
        folder = self.make(tmp_path, {"lib/a": "/x", "lib/b": "/y"})
        os.unlink(f"{folder}/lib/a")
        os.unlink(f"{folder}/lib/b")
        os.symlink("/elsewhere", f"{folder}/lib/b")
        assert self.make(tmp_path, {"lib/a": "/x", "lib/b": "/y"}) == folder
        assert sorted(os.listdir(f"{folder}/lib")) == ["a", "b"]
        assert os.readlink(f"{folder}/lib/a") == "/x"
        assert os.readlink(f"{folder}/lib/b") == "/y"

    def test_home_is_used_without_a_cache_folder(self, tmp_path):
        for cache in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
            folder = private_folder({"a": "/x"}, {"HOME": str(tmp_path), **cache})
            assert os.path.dirname(folder) == str(tmp_path / ".cache" / "synkhronos")
        assert os.path.dirname(private_folder({"a": "/x"}, {})) == self.fallback

    @pytest.mark.parametrize("what", ["synkhronos", "."])
    def test_a_place_that_others_can_write_to_is_not_used(self, tmp_path, what):
        (tmp_path / "cache" / "synkhronos").mkdir(parents=True)
        (tmp_path / "cache" / what).chmod(0o777)
        assert os.path.dirname(self.make(tmp_path, {"a": "/x"})) == self.fallback

    def test_a_folder_that_others_can_write_to_is_not_used(self, tmp_path):
        os.chmod(self.make(tmp_path, {"a": "/x"}), 0o770)
        assert os.path.dirname(self.make(tmp_path, {"a": "/x"})) == self.fallback

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_what_somebody_else_owns_is_not_used(self, tmp_path, level):
        folder = Path(self.make(tmp_path, {"a": "/x"}))
        os.chown([folder, *folder.parents][level], 12345, 12345)
        assert os.path.dirname(self.make(tmp_path, {"a": "/x"})) == self.fallback

    def test_a_link_in_its_place_is_not_followed(self, tmp_path):
        (tmp_path / "trap").mkdir(mode=0o700)
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "synkhronos").symlink_to(tmp_path / "trap")
        assert os.path.dirname(self.make(tmp_path, {"a": "/x"})) == self.fallback
        assert not os.listdir(tmp_path / "trap")

    def test_an_error_if_there_is_no_safe_place(self, tmp_path):
        (tmp_path / "cache" / "synkhronos").mkdir(parents=True)
        (tmp_path / "cache" / "synkhronos").chmod(0o777)
        os.mkdir(self.fallback)
        os.chmod(self.fallback, 0o777)
        with pytest.raises(PermissionError, match="XDG_CACHE_HOME"):
            self.make(tmp_path, {"a": "/x"})

    def test_many_at_once(self, tmp_path):
        program = """
            import sys
            from synkhronos._cli.gpu_libraries import private_folder
            sys.stdin.read()  # until all are there
            print(private_folder({f"lib/{i}": f"/{i}" for i in range(200)}, {"XDG_CACHE_HOME": sys.argv[1]}))
        """
        command = without_the_package(program, str(tmp_path / "cache"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for _ in range(8)]
        for process in processes:
            process.stdin.close()
            process.stdin = None
        folders = {process.communicate(timeout=60)[0].strip() for process in processes}
        assert [process.returncode for process in processes] == [0] * 8
        (folder,) = folders
        assert os.listdir(tmp_path / "cache" / "synkhronos") == [os.path.basename(folder)]
        assert len(os.listdir(f"{folder}/lib")) == 200


def without_the_package(program, *arguments):
    """The command that executes a program in which the package's modules can be imported without the package."""
    stand_in = """
        import sys, types
        package = sys.modules["synkhronos"] = types.ModuleType("synkhronos")
        package.__path__ = [PATH]
    """
    source = textwrap.dedent(stand_in).replace("PATH", repr(str(ROOT / "synkhronos"))) + textwrap.dedent(program)
    return [sys.executable, "-c", source, *arguments]


def test_the_launcher_imports_nothing_heavy():
    program = """
        import sys
        import synkhronos._cli.launcher, synkhronos.__main__
        print(sorted({"theano", "numpy", "pygpu", "scipy", "threadpoolctl", "ctypes", "json.tool"} & set(sys.modules)))
    """
    done = subprocess.run(without_the_package(program), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_run_does_not_import_theano(tmp_path):
    done = launch("run", "-c", "pass", cache=tmp_path, options=["-X", "importtime"], check=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "synkhronos._cli.launcher" in imported
    assert not {"theano", "numpy"} & imported


@pytest.mark.parametrize(
    ("command_line", "options"),
    [
        ("python -m synkhronos", ""),
        ("python -X dev -W error -m synkhronos", "-X dev -W error"),
        ("python -Oum synkhronos", "-Ou"),
        ("python -O -msynkhronos", "-O"),
        ("python -Omsynkhronos", "-O"),
        ("python -m synkhronos.__main__", ""),
        ("python -u /bin/synkhronos", "-u"),
    ],
)
def test_options_of_the_interpreter(command_line, options):
    assert interpreter_options(command_line.split()) == options.split()


class TestVariables:
    pytestmark = needs_compiler

    @pytest.fixture
    def machine(self, tmp_path, empty_cache, monkeypatch):
        """A function that makes the environment on a machine with a driver, of what the user has set."""
        monkeypatch.setattr(launcher, "SYSTEM_PACKAGES", str(tmp_path / "dist-packages"))
        build_driver(tmp_path / "usr/local/nvidia/lib64")
        site = build_wheels(tmp_path / "site")

        def changed(**environment):
            environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), **environment}
            finder = Finder(environment, [str(site)], str(tmp_path), empty_cache)
            return variables(environment, finder, survey(finder, environment))

        return changed

    def test_links_with_their_companions(self, tmp_path, machine):
        changed = machine()
        folder = changed["LD_LIBRARY_PATH"]
        nvidia, driver = tmp_path / "site" / "nvidia", tmp_path / "usr/local/nvidia/lib64/libcuda.so.390.157"
        names = {
            "libcuda.so": driver,
            "libcuda.so.1": driver,
            "libcuda.so.390.157": driver,
            "libnvrtc.so": nvidia / "cuda_nvrtc/lib/libnvrtc.so.9",
            "libnvrtc.so.9": nvidia / "cuda_nvrtc/lib/libnvrtc.so.9",
            "libnvrtc-builtins.so.9.1": nvidia / "cuda_nvrtc/lib/libnvrtc-builtins.so.9.1",
            "libcublas.so": nvidia / "cublas/lib/libcublas.so.9",
            "libcublas.so.9": nvidia / "cublas/lib/libcublas.so.9",
            "libcublasLt.so.9": nvidia / "cublas/lib/libcublasLt.so.9",
            "libnccl.so": nvidia / "nccl/lib/libnccl.so.2",
            "libnccl.so.2": nvidia / "nccl/lib/libnccl.so.2",
        }
        assert {name: os.readlink(f"{folder}/{name}") for name in os.listdir(folder)} == {
            name: str(path) for name, path in names.items()
        }

    def test_what_the_loader_finds_gets_no_link(self, tmp_path, machine):
        toolkit = tmp_path / "toolkit"
        shutil.copytree(tmp_path / "site/nvidia/cuda_nvrtc/lib", toolkit)
        (toolkit / "libnvrtc.so").symlink_to("libnvrtc.so.9")
        folder = machine(LD_LIBRARY_PATH=f"{toolkit}:/x")["LD_LIBRARY_PATH"].split(":")[0]
        assert "libcublas.so" in os.listdir(folder)
        assert not [name for name in os.listdir(folder) if "nvrtc" in name]

    def test_the_users_folders_follow(self, machine):
        first, *rest = machine(LD_LIBRARY_PATH="/x:/y")["LD_LIBRARY_PATH"].split(":")
        assert first.endswith("/lib") and rest == ["/x", "/y"]

    def test_once_set_nothing_is_to_be_set(self, tmp_path, machine):
        assert machine(**machine()) == {}

    def test_cudnn_is_switched_off_unless_the_user_chose(self, tmp_path, machine):
        assert machine()["THEANO_FLAGS"] == "dnn.enabled=False"
        assert machine(THEANO_FLAGS="floatX=float32,")["THEANO_FLAGS"] == "dnn.enabled=False,floatX=float32,"
        assert "THEANO_FLAGS" not in machine(THEANO_FLAGS="floatX=float32, dnn.enabled =auto")
        configuration = tmp_path / "theanorc"
        configuration.write_text("[dnn]\nenabled = True\n")
        assert "THEANO_FLAGS" not in machine(THEANORC=f"/none:{configuration}")
        configuration.write_text("[dnn]\nlibrary_path = /x\n")
        assert machine(THEANORC=str(configuration))["THEANO_FLAGS"] == "dnn.enabled=False"
        (tmp_path / ".theanorc").write_text("[dnn]\nenabled = auto\n")
        assert "THEANO_FLAGS" not in machine()
        (tmp_path / ".theanorc").write_text("no section\n")
        assert machine()["THEANO_FLAGS"] == "dnn.enabled=False"

    def test_a_cudnn_that_theano_speaks_to_is_linked(self, tmp_path, machine):
        build_wheels(tmp_path / "site", cudnn=7605)
        changed = machine()
        assert "THEANO_FLAGS" not in changed
        assert {"libcudnn.so", "libcudnn.so.7"} <= set(os.listdir(changed["LD_LIBRARY_PATH"]))

    def test_nothing_changes_without_a_driver(self, tmp_path, machine):
        shutil.rmtree(tmp_path / "usr")
        assert machine() == {}


class TestPygpu:
    @pytest.fixture
    def packages(self, tmp_path, monkeypatch):
        """A function that puts packages, and pygpu for a Python with these modules, where Debian's lie."""
        folder = tmp_path / "dist-packages"
        monkeypatch.setattr(launcher, "SYSTEM_PACKAGES", str(folder))

        def install(suffix):
            for name in ("pygpu", "mako", "other"):
                (folder / name).mkdir(parents=True)
                (folder / name / "__init__.py").write_text("")
            (folder / "six.py").write_text("")
            (folder / "pygpu" / f"gpuarray{suffix}").write_text("")
            return folder

        return install

    def test_what_is_not_there_anyway_is_lent(self, tmp_path, packages):
        folder = packages(EXTENSION_SUFFIXES[0])
        links = {name: str(folder / name) for name in ("pygpu", "mako", "six.py")}
        assert package_links([str(tmp_path / "site")]) == links
        (tmp_path / "with-mako" / "mako").mkdir(parents=True)
        (tmp_path / "with-mako" / "mako" / "__init__.py").write_text("")
        del links["mako"]
        assert package_links([str(tmp_path / "site"), str(tmp_path / "with-mako")]) == links
        (tmp_path / "with-pygpu" / "pygpu").mkdir(parents=True)
        (tmp_path / "with-pygpu" / "pygpu" / "__init__.py").write_text("")
        assert package_links([str(tmp_path / "with-pygpu")]) == {}

    def test_not_to_another_version_of_python(self, tmp_path, packages):
        packages(".cpython-27-x86_64-linux-gnu.so")
        assert package_links([str(tmp_path / "site")]) == {}

    def test_the_systems_pygpu_works_when_lent(self, tmp_path):
        if not launcher.system_pygpu():
            pytest.skip("python3-pygpu for this version of Python is not installed")
        foreign = foreign_package()
        program = "import pygpu, sys; print(pygpu.__version__)"
        done = launch("run", "-c", program, cache=tmp_path)
        assert re.fullmatch(r"0\.7\.\d+", done.stdout.strip()), done.stderr
        if foreign:
            done = launch("run", "-c", f"import {foreign}", cache=tmp_path)
            assert f"No module named '{foreign}'" in done.stderr


def foreign_package():
    """A package of the system's Python that this environment does not have; None if it has all."""
    path = Path(launcher.SYSTEM_PACKAGES)
    names = [file.parent.name for file in path.glob("*/__init__.py") if file.parent.name not in launcher.PYGPU]
    return next((name for name in sorted(names) if not launcher.package_path(name, sys.path)), None)


def launch(*arguments, cache, options=(), timeout=110, directory=None, check=False, stdin=None, **environment):
    """Execute ``python -m synkhronos`` with these arguments, and a cache folder of its own."""
    surroundings = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
    return subprocess.run(
        [sys.executable, *options, "-m", "synkhronos", *map(str, arguments)],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=timeout,
        env=surroundings,
        cwd=directory,
        check=check,
    )


class TestRun:
    def test_a_script_runs_as_python_would_run_it(self, tmp_path):
        script = tmp_path / "scripts" / "script.py"
        script.parent.mkdir()
        (script.parent / "beside.py").write_text("here = True")
        text = """
            import beside, json, os, sys
            options = [sys.flags.optimize, sys.warnoptions]
            print(json.dumps([sys.argv, __name__, sys.path[0], options, sys.stdin.read(), os.getcwd()]))
            print("said", file=sys.stderr)
            sys.exit(37)
        """
        script.write_text(textwrap.dedent(text))
        words = ["run", str(script), "one", "--two", "-m", "", "thr ee"]
        done = launch(*words, cache=tmp_path, options=["-O", "-W", "once"], stdin="typed", directory=tmp_path)
        expected = [words[1:], "__main__", str(script.parent), [1, ["once"]], "typed", str(tmp_path)]
        assert json.loads(done.stdout) == expected
        assert (done.returncode, done.stderr) == (37, "said\n")

    def test_it_becomes_the_program(self, tmp_path):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        program = "import os, signal, sys; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
        command = [sys.executable, "-m", "synkhronos", "run", "-c", program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        out, _ = process.communicate(timeout=60)
        assert int(out) == process.pid
        assert process.returncode == -signal.SIGKILL

    def test_modules_and_failures(self, tmp_path):
        (tmp_path / "module.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit('a reason')")
        done = launch("run", "-m", "module", "-x", cache=tmp_path, directory=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (1, "__main__ ['-x']\n", "a reason\n")
        done = launch("run", tmp_path / "none.py", cache=tmp_path)
        assert done.returncode == 2
        assert "can't open file" in done.stderr

    def test_the_environment_stays_as_it_is_without_cuda(self, tmp_path):
        program = "import json, os; print(json.dumps(dict(os.environ)))"
        finder = Finder(os.environ, sys.path)
        if finder.candidates("cuda"):
            pytest.skip("there is a CUDA driver here")
        environment = json.loads(launch("run", "-c", program, cache=tmp_path, check=True).stdout)
        expected = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        path = environment.pop("PYTHONPATH").split(":")
        del expected["PYTHONPATH"]
        environment.pop("LC_CTYPE", None), expected.pop("LC_CTYPE", None)  # Python sets it itself in the C locale
        assert environment == expected
        assert path[0] == str(ROOT) and len(path) <= 2  # pygpu's folder, if it is to be lent

    def test_a_gpu_opened_by_the_launcher_does_not_block_the_program(self, tmp_path):
        program = "import os; print(os.environ.get('THEANO_GPU_IS_ALREADY_ACTIVE'))"
        done = launch("run", "-c", program, cache=tmp_path, THEANO_GPU_IS_ALREADY_ACTIVE="Yes")
        assert done.stdout == "None\n"

    @needs_compiler
    def test_the_libraries_can_be_opened_by_their_names(self, tmp_path):
        driver = build_driver(tmp_path / "driver")
        site = build_wheels(tmp_path / "site")
        build_nvrtc(tmp_path / "site/nvidia/cu13/lib", 9, 2)  # too new
        program = """
            import ctypes, json, os
            value, opened = ctypes.c_int(), []
            for name, ask in (("cuda", "cuDriverGetVersion"), ("nccl", "ncclGetVersion")):
                getattr(ctypes.CDLL(f"lib{name}.so"), ask)(ctypes.byref(value))
                opened.append(value.value)
            nvrtc, minor = ctypes.CDLL("libnvrtc.so"), ctypes.c_int()
            nvrtc.nvrtcVersion(ctypes.byref(value), ctypes.byref(minor))
            ctypes.CDLL(f"libnvrtc-builtins.so.{value.value}.{minor.value}")
            opened.append([value.value, minor.value])
            cublas = ctypes.CDLL("libcublas.so")  # and with it cuBLASLt
            cublas.cublasGetProperty(0, ctypes.byref(value))
            print(json.dumps([*opened, value.value, os.environ["LD_LIBRARY_PATH"], os.environ["THEANO_FLAGS"]]))
        """
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(program))
        flags = os.environ.get("THEANO_FLAGS", "floatX=float32")
        given = {"LD_LIBRARY_PATH": str(driver.parent), "PYTHONPATH": str(site), "THEANO_FLAGS": flags}
        done = launch("run", script, cache=tmp_path / "cache", **given)
        assert (done.returncode, done.stderr) == (0, "")
        *opened, path, theano_flags = json.loads(done.stdout)
        assert opened == [9010, 990203, [9, 1], 9]
        folder, rest = path.split(":")
        assert folder.startswith(str(tmp_path / "cache" / "synkhronos" / "links-"))
        assert rest == str(driver.parent)
        assert theano_flags == f"dnn.enabled=False,{flags}"

    @needs_compiler
    def test_a_word_where_cuda_cannot_work(self, tmp_path):
        driver = build_driver(tmp_path / "driver", number=8000)  # older than any NVRTC that a machine may have
        site = build_wheels(tmp_path / "site", cuda=(9, 2))
        given = {"LD_LIBRARY_PATH": str(driver.parent), "PYTHONPATH": str(site)}
        done = launch("run", "-c", "print('ran')", cache=tmp_path / "cache", **given)
        assert (done.returncode, done.stdout) == (0, "ran\n")
        assert done.stderr.startswith("CUDA cannot be used: ")
        assert "is newer than the driver's CUDA 8.0" in done.stderr
        assert "python -m synkhronos info" in done.stderr
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            ([], "the following arguments are required: COMMAND"),
            (["run"], "run: name a program: python -m synkhronos run SCRIPT"),
            (["run", "--hosts", "a"], "run: name a program"),
            (["run", "--host", "a", "x.py"], "run: --host? The option is --hosts"),
            (["go"], "argument COMMAND: invalid choice: 'go' (choose from "),
            (["info", "--yaml"], "unrecognized arguments: --yaml"),
        ],
    )
    def test_wrong_commands(self, tmp_path, words, reason):
        done = launch(*words, cache=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("usage: python -m synkhronos [-h] [--version] COMMAND ...\n")
        assert f"python -m synkhronos: error: {reason}" in done.stderr

    def test_help(self, tmp_path):
        done = launch("run", "--help", cache=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("usage: python -m synkhronos run SCRIPT [ARGUMENT ...]\n")
        done = launch("--help", cache=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "info" in done.stdout and "run" in done.stdout

    def test_version(self, tmp_path):
        done = launch("--version", cache=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"Synkhronos {synkhronos.__version__}\n", "")

    def test_as_a_command(self, tmp_path):
        """What pip installs as ``synkhronos`` does what ``python -m synkhronos`` does."""
        declared = re.search(r'^synkhronos = "(.*):(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
        assert declared.groups() == ("synkhronos.__main__", "main")
        command = tmp_path / "bin" / "synkhronos"
        command.parent.mkdir()
        command.write_text(f"#!{sys.executable}\nimport sys\nfrom synkhronos.__main__ import main\nsys.exit(main())\n")
        command.chmod(0o755)
        (command.parent / "beside.py").write_text("")
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

        def execute(*words):
            return subprocess.run([command, *words], capture_output=True, text=True, env=environment, timeout=60)

        assert execute("--version").stdout == f"Synkhronos {synkhronos.__version__}\n"
        assert execute("go").stderr.startswith("usage: synkhronos [-h] [--version] COMMAND ...\n")
        program = "import sys; print(sys.argv[1:]); import beside"
        done = execute("run", "-c", program, "--version", "-x")
        assert done.stdout == "['--version', '-x']\n"
        assert "No module named 'beside'" in done.stderr


#: Where each Python that suits needs a package.
ALL = "; python_version < '3.15'"
STATES = ("ok", "missing", "unusable", "optional")


class TestInfo:
    def test_the_table(self, tmp_path):
        done = launch("info", cache=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert lines[0].startswith("Synkhronos ")
        assert "CPU cores: ready" in lines
        rows = [line.split() for line in lines]
        assert ["ok", ENGINE.title] in [row[:2] for row in rows]
        assert ["ok", "Python", sysconfig.get_config_var("py_version")] in [row[:3] for row in rows]
        names = ["NumPy", "BLAS", "NumPy's", "cores", "memory"]
        if ENGINE.has_gpus:
            names += ["Lasagne", "pygpu", "NVRTC", "cuBLAS", "NCCL", "cuDNN", "libOpenCL"]
        found = {row[1]: line for row, line in zip(rows, lines) if len(row) > 1 and row[0] in STATES}
        assert found.keys() >= set(names)
        columns = {line.index(row[1], 2 + len(row[0])) for row, line in zip(rows, lines) if row and row[0] in STATES}
        assert len(columns) == 1, "the names do not stand below each other"
        speed = r"kernels: \d+ GFLOP/s on one core, \d+% of what its vector units can do"
        n_linked = 1 + ("linked by" in done.stdout)  # NumPy's, and the engine's
        assert len(re.findall(speed, done.stdout)) == n_linked

    @theano_only("GPUs")
    def test_as_json_with_a_driver_that_crashes(self, tmp_path):
        if CC is None:
            pytest.skip("there is no C compiler")
        driver = build_driver(tmp_path / "driver", crash=1)
        site = build_wheels(tmp_path / "site", cuda=(9, 2))
        given = {"LD_LIBRARY_PATH": str(driver.parent), "PYTHONPATH": str(site)}
        done = launch("info", "--json", cache=tmp_path / "cache", **given)
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
        assert "speaks CUDA 9.1; ended by signal 6" in parts["CUDA driver"]["note"]
        assert parts["NVRTC"]["state"] == "unusable"
        assert "libnvrtc.so.9 is newer than the driver's CUDA 9.1" in parts["NVRTC"]["note"]
        assert parts["NVRTC"]["remedy"] == "python -m pip install 'nvidia-cuda-nvrtc-cu9<9.2'"
        assert (parts["cuBLAS"]["state"], parts["cuBLAS"]["version"]) == ("ok", "9.2.1")
        assert (parts["NCCL"]["version"], parts["NCCL"]["remedy"]) == ("99.2.3", "")
        assert set(report["changed"]) >= {"LD_LIBRARY_PATH", "THEANO_FLAGS"}

    def test_what_is_missing_on_a_bare_machine(self, tmp_path, monkeypatch):
        (tmp_path / "bin").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no compiler
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        report = examine("0", os.environ, [str(tmp_path)])  # no packages
        parts = {part.name: part for part in report.parts}
        assert report.ready["cpu"] is False
        assert parts["C++ compiler"].state == ("missing" if ENGINE.module == "theano" else "optional")  # numba serves
        assert parts["C++ compiler"].remedy.endswith("apt-get install g++")
        for name, module, requirement in ENGINE.packages:
            assert parts[name].state == ("optional" if module == "lasagne" else "missing")
            assert parts[name].remedy == remedies.pip(requirement)
        text = report.as_text()
        assert "CPU cores: not ready" in text
        assert ENGINE.packages[2][2].split("=")[0].rstrip(">") in text

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
        report = json.loads(launch("info", "--json", cache=tmp_path, check=True).stdout)
        devices = {device["name"]: device for device in report["devices"]}
        assert [name for name in devices if name.startswith("opencl")] == json.loads(done.stdout)
        assert all(device["memory"] > 0 and device["description"] for device in devices.values())
        usable = [
            device for device in devices.values() if device["state"] == "ok" and device["name"].startswith("opencl")
        ]
        complete = all(part["state"] != "missing" for part in report["parts"] if part["group"] in ("gpu", "opencl"))
        assert report["ready"]["opencl"] is bool(usable and complete)


@pytest.mark.parametrize(
    ("name", "cuda", "oldest", "wanted"),
    [
        ("cuda-nvrtc", (13, 0), 90, "'nvidia-cuda-nvrtc<13.1'"),
        ("cuda-nvrtc", (13, 0), 70, "nvidia-cuda-nvrtc-cu12"),
        ("cuda-nvrtc", (12, 4), 70, "'nvidia-cuda-nvrtc-cu12<12.5'"),
        ("cuda-nvrtc", None, None, "nvidia-cuda-nvrtc-cu12"),
        ("cublas", (13, 0), 90, "'nvidia-cublas<14'"),
        ("cublas", (12, 4), 90, "nvidia-cublas-cu12"),
        ("nccl", (13, 2), 90, "nvidia-nccl-cu13"),
        ("nccl", (12, 2), 90, "nvidia-nccl-cu12"),
    ],
)
def test_wheels_that_go_with_the_driver(name, cuda, oldest, wanted):
    assert remedies.cuda_wheel(name, cuda, oldest) == f"python -m pip install {wanted}"


def test_the_requirements_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'^    "([^"]+)"', re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)[1], re.M)
    suits = {
        "theano": "; python_version < '3.12'",
        "pytensor": "; python_version >= '3.12' and python_version < '3.15'",
    }
    for name, engine in ENGINES.items():
        requirements = {requirement for _, module, requirement in engine.packages if module != "lasagne"}
        missing = {one for one in requirements if {one, one + suits[name], one + ALL} & set(declared) == set()}
        assert missing == ({"numpy>=2", "scipy>=1", "numba>=0.58"} if name == "pytensor" else set())  # PyTensor's own
    assert all("python_version < '3.1" in one for one in declared)  # pip refuses Synkhronos before it builds any
    assert f'lasagne = ["Lasagne==0.1{suits["theano"]}"]' in text
