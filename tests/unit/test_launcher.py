"""`python -m synkhronos run`: the environment that it prepares, and how it runs programs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from fake_cuda_libraries import build_driver, build_nvrtc, build_wheels, needs_compiler
from scripts import ROOT, launch, without_the_package

import synkhronos
from synkhronos._cli import launcher
from synkhronos._cli.gpu_libraries import Finder, survey
from synkhronos._cli.launcher import interpreter_options, package_links, variables


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
    def prepare(self, tmp_path, empty_cache, monkeypatch):
        """Return a function of the user's variables that returns those that `run` sets where there is a driver."""
        monkeypatch.setattr(launcher, "SYSTEM_PACKAGES", str(tmp_path / "dist-packages"))
        build_driver(tmp_path / "usr/local/nvidia/lib64")
        site = build_wheels(tmp_path / "site")

        def changed(**environment):
            environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), **environment}
            finder = Finder(environment, [str(site)], str(tmp_path), empty_cache)
            return variables(environment, finder, survey(finder, environment))

        return changed

    def test_links_with_their_companions(self, tmp_path, prepare):
        changed = prepare()
        folder = changed["LD_LIBRARY_PATH"]
        nvidia, driver = tmp_path / "site" / "nvidia", tmp_path / "usr/local/nvidia/lib64/libcuda.so.390.157"
        names = {
            **{f"libcuda.so{number}": driver for number in ("", ".1", ".390.157")},
            **{f"libnvrtc.so{number}": nvidia / "cuda_nvrtc/lib/libnvrtc.so.9" for number in ("", ".9")},
            "libnvrtc-builtins.so.9.1": nvidia / "cuda_nvrtc/lib/libnvrtc-builtins.so.9.1",
            **{f"libcublas.so{number}": nvidia / "cublas/lib/libcublas.so.9" for number in ("", ".9")},
            "libcublasLt.so.9": nvidia / "cublas/lib/libcublasLt.so.9",
            **{f"libnccl.so{number}": nvidia / "nccl/lib/libnccl.so.2" for number in ("", ".2")},
        }
        found = {name: os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
        assert found == {name: str(path) for name, path in names.items()}

    def test_what_the_loader_finds_gets_no_link(self, tmp_path, prepare):
        toolkit = tmp_path / "toolkit"
        shutil.copytree(tmp_path / "site/nvidia/cuda_nvrtc/lib", toolkit)
        (toolkit / "libnvrtc.so").symlink_to("libnvrtc.so.9")
        folder = prepare(LD_LIBRARY_PATH=f"{toolkit}:/x")["LD_LIBRARY_PATH"].split(":")[0]
        assert "libcublas.so" in os.listdir(folder)
        assert not [name for name in os.listdir(folder) if "nvrtc" in name]

    def test_the_users_folders_follow(self, prepare):
        first, *rest = prepare(LD_LIBRARY_PATH="/x:/y")["LD_LIBRARY_PATH"].split(":")
        assert first.endswith("/lib") and rest == ["/x", "/y"]

    def test_once_set_nothing_is_to_be_set(self, tmp_path, prepare):
        assert prepare(**prepare()) == {}

    def test_cudnn_is_switched_off_unless_the_user_chose(self, tmp_path, prepare):
        assert prepare()["THEANO_FLAGS"] == "dnn.enabled=False"
        assert prepare(THEANO_FLAGS="floatX=float32,")["THEANO_FLAGS"] == "dnn.enabled=False,floatX=float32,"
        assert "THEANO_FLAGS" not in prepare(THEANO_FLAGS="floatX=float32, dnn.enabled =auto")
        configuration = tmp_path / "theanorc"
        configuration.write_text("[dnn]\nenabled = True\n")
        assert "THEANO_FLAGS" not in prepare(THEANORC=f"/none:{configuration}")
        configuration.write_text("[dnn]\nlibrary_path = /x\n")
        assert prepare(THEANORC=str(configuration))["THEANO_FLAGS"] == "dnn.enabled=False"
        (tmp_path / ".theanorc").write_text("[dnn]\nenabled = auto\n")
        assert "THEANO_FLAGS" not in prepare()
        (tmp_path / ".theanorc").write_text("no section\n")
        assert prepare()["THEANO_FLAGS"] == "dnn.enabled=False"

    def test_a_cudnn_that_theano_supports_is_linked(self, tmp_path, prepare):
        build_wheels(tmp_path / "site", cudnn=7605)
        changed = prepare()
        assert "THEANO_FLAGS" not in changed
        assert {"libcudnn.so", "libcudnn.so.7"} <= set(os.listdir(changed["LD_LIBRARY_PATH"]))

    def test_nothing_changes_without_a_driver(self, tmp_path, prepare):
        shutil.rmtree(tmp_path / "usr")
        assert prepare() == {}


class TestPygpu:
    @pytest.fixture
    def packages(self, tmp_path, monkeypatch):
        """Return a function that creates Debian's packages, and pygpu with extension modules of the given suffix."""
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

    def test_missing_packages_of_the_system_are_linked(self, tmp_path, packages):
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

    def test_packages_for_another_version_of_python_are_not_linked(self, tmp_path, packages):
        packages(".cpython-27-x86_64-linux-gnu.so")
        assert package_links([str(tmp_path / "site")]) == {}

    def test_the_systems_pygpu_works_when_linked(self, tmp_path):
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
    """Return a package of the system's Python that this environment lacks, or None."""
    path = Path(launcher.SYSTEM_PACKAGES)
    names = [file.parent.name for file in path.glob("*/__init__.py") if file.parent.name not in launcher.PYGPU]
    return next((name for name in sorted(names) if not launcher.package_path(name, sys.path)), None)


class TestRun:
    def test_a_script_runs_as_python_would_run_it(self, tmp_path):
        script = tmp_path / "scripts" / "script.py"
        script.parent.mkdir()
        (script.parent / "sibling.py").write_text("here = True")
        text = """
            import sibling, json, os, sys
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
        environment.pop("LC_CTYPE", None), expected.pop("LC_CTYPE", None)  # Python sets it in the C locale
        assert environment == expected
        assert path[0] == str(ROOT) and len(path) <= 2  # pygpu's folder, if it is added

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
            cublas = ctypes.CDLL("libcublas.so")  # loads cuBLASLt, too
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
    def test_one_line_is_printed_where_cuda_cannot_work(self, tmp_path):
        driver = build_driver(tmp_path / "driver", number=8000)  # older than any installed NVRTC
        site = build_wheels(tmp_path / "site", cuda=(9, 2))
        given = {"LD_LIBRARY_PATH": str(driver.parent), "PYTHONPATH": str(site)}
        done = launch("run", "-c", "print('ran')", cache=tmp_path / "cache", **given)
        assert (done.returncode, done.stdout) == (0, "ran\n")
        assert done.stderr.startswith("CUDA cannot be used: ")
        assert "is newer than the driver's CUDA 8.0" in done.stderr
        assert "python -m synkhronos info" in done.stderr
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize(
        ("words", "usage", "reason"),
        [
            ([], " [-h] [--version] COMMAND ...", "the following arguments are required: COMMAND"),
            (["go"], " [-h] [--version] COMMAND ...", "argument COMMAND: invalid choice: 'go' (choose from "),
            (["run"], " run SCRIPT [ARGUMENT ...]", "got no program; use python -m synkhronos run SCRIPT"),
            (["run", "--hosts", "a"], " run SCRIPT [ARGUMENT ...]", "got no program"),
            (["run", "--hosts"], " run SCRIPT [ARGUMENT ...]", "argument --hosts: expected one argument"),
            (["run", "--host", "a", "x.py"], " run SCRIPT [ARG", "unknown option --host; did you mean --hosts?"),
            (["info", "--yaml"], " info [-h] [--json] [--gpu]", "unrecognized arguments: --yaml"),
            (["top", "once"], " top [-h] [--once]", "unrecognized arguments: once"),
            (["plan"], " plan SCRIPT [OPTION ...] [ARGUMENT ...]", "the following arguments are required: SCRIPT"),
            (["plan", "x.py", "--line"], " plan SCRIPT [OPTION ...]", "argument --line: expected one argument"),
        ],
    )
    def test_wrong_commands_show_the_usage_of_the_command(self, tmp_path, words, usage, reason):
        done = launch(*words, cache=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"usage: python -m synkhronos{usage}")
        command = f" {words[0]}" if words and words != ["go"] else ""
        assert f"\npython -m synkhronos{command}: error: {reason}" in done.stderr

    def test_names_that_are_far_off_are_not_suggested(self, tmp_path):
        done = launch("run", "--bogus", cache=tmp_path)
        assert done.returncode == 2 and "did you mean" not in done.stderr

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    @pytest.mark.parametrize("words", [["info"], ["info", "--json"], ["plan", "script.py"]], ids=str)
    def test_output_that_is_not_read(self, tmp_path, words, unbuffered):
        (tmp_path / "script.py").write_text("print('the program')")
        read, write = os.pipe()
        os.close(read)
        surroundings = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        surroundings["PYTHONUNBUFFERED"] = unbuffered
        command = [sys.executable, "-m", "synkhronos", *words]
        pipes = {"stdout": write, "stderr": subprocess.PIPE}
        done = subprocess.run(command, **pipes, text=True, env=surroundings, cwd=tmp_path, timeout=110)
        os.close(write)
        assert (done.returncode, done.stderr) == (141, "")

    def test_help(self, tmp_path):
        done = launch("run", "--help", cache=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("usage: python -m synkhronos run SCRIPT [ARGUMENT ...]\n")
        done = launch("--help", cache=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "info" in done.stdout and "run" in done.stdout

    def test_as_a_command(self, tmp_path):
        """The installed command ``synkhronos`` behaves as ``python -m synkhronos``."""
        declared = re.search(r'^synkhronos = "(.*):(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
        assert declared.groups() == ("synkhronos.__main__", "main")
        command = tmp_path / "bin" / "synkhronos"
        command.parent.mkdir()
        command.write_text(f"#!{sys.executable}\nimport sys\nfrom synkhronos.__main__ import main\nsys.exit(main())\n")
        command.chmod(0o755)
        (command.parent / "sibling.py").write_text("")
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

        def execute(*words):
            return subprocess.run([command, *words], capture_output=True, text=True, env=environment, timeout=60)

        assert execute("--version").stdout == f"Synkhronos {synkhronos.__version__}\n"
        assert execute("go").stderr.startswith("usage: synkhronos [-h] [--version] COMMAND ...\n")
        program = "import sys; print(sys.argv[1:]); import sibling"
        done = execute("run", "-c", program, "--version", "-x")
        assert done.stdout == "['--version', '-x']\n"
        assert "No module named 'sibling'" in done.stderr
