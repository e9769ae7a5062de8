"""Search for CUDA's libraries and their versions, and the private folder of links to them."""

import os
import shutil
import signal
import stat
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest
from fake_cuda_libraries import SOURCES, build, build_cache, build_cublas, build_driver, build_nvrtc, needs_compiler
from process_state import wait_for_end
from scripts import without_the_package

from synkhronos._cli import gpu_libraries as libraries
from synkhronos._cli import probes as probing
from synkhronos._cli import report as remedies
from synkhronos._cli.gpu_libraries import Finder, Gpu, ask_gpus, private_folder, survey


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

    @pytest.mark.parametrize("folder", ["opt", "opt\udce9"], ids=["ASCII", "no UTF-8"])
    def test_finds_libraries_in_the_loader_cache(self, tmp_path, folder):
        file = build(tmp_path / folder / "libnccl.so.2", SOURCES["nccl"], NUMBER=21805)
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
        (folder / "libnccl.so").write_text("GROUP ( libnccl.so.2 )")  # a linker script
        foreign = bytearray(good.read_bytes())
        foreign[18:20] = b"\x08\x00"  # built for MIPS
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
    def test_a_cudnn_that_theano_does_not_support(self, tmp_path, empty_cache, number, version):
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
        for gpus in (None, [Gpu("a", 1, 70), Gpu("b", 1, 90)]):  # queried from the driver, or given
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
        start = "#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) void start(void)"
        build(folder / "libnccl.so.2", start + " { abort(); }")
        build(folder / "libcublas.so.12", start + " { sleep(60); }")
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


def test_processes_started_by_a_probe_end_with_it(tmp_path):
    note = tmp_path / "pid"
    program = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "60"])  # keeps standard output open
        open({str(note)!r}, "w").write(str(child.pid))
        print('{{"known": 1}}', flush=True)
        time.sleep(60)
    """
    answer = probing.ask({"it": probing.python(textwrap.dedent(program))}, os.environ, 3)["it"]
    assert answer.record == {"known": 1}
    assert answer.error == "no answer within 3 seconds"
    wait_for_end([int(note.read_text())])


class TestPrivateFolder:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path, monkeypatch):
        """Set a folder of temporary files, the fallback of `private_folder`."""
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
        for status in map(os.stat, (folder, f"{folder}/lib", f"{folder}/python")):
            assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.geteuid())
        assert os.listdir(os.path.dirname(folder)) == [os.path.basename(folder)]

    def test_its_name_comes_from_its_contents(self, tmp_path):
        one = self.make(tmp_path, {"a": "/x", "b": "/y"})
        before = os.stat(one).st_ino
        assert self.make(tmp_path, {"b": "/y", "a": "/x"}) == one
        assert os.stat(one).st_ino == before
        others = [{"a": "/x"}, {"a": "/x", "b": "/z"}, {"a": "/x", "c": "/y"}]
        assert len({one, *(self.make(tmp_path, links) for links in others)}) == 4

    def test_a_damaged_one_is_replaced(self, tmp_path):
        folder = self.make(tmp_path, {"lib/a": "/x", "lib/b": "/y"})
        os.unlink(f"{folder}/lib/a")
        os.unlink(f"{folder}/lib/b")
        os.symlink("/elsewhere", f"{folder}/lib/b")
        assert self.make(tmp_path, {"lib/a": "/x", "lib/b": "/y"}) == folder
        found = {name: os.readlink(f"{folder}/lib/{name}") for name in os.listdir(f"{folder}/lib")}
        assert found == {"a": "/x", "b": "/y"}

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

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can change a file's owner")
    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_folders_of_another_user_are_not_used(self, tmp_path, level):
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
            sys.stdin.read()  # until all processes have started
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
