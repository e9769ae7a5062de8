"""Contents of the wheel and the sdist; the wheel works in an otherwise empty environment."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

from synkhronos import __version__, engine

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # downloads packages


def run(*command, directory, timeout=600):
    """Run a command without access to this checkout and environment, and return its output."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    options = {"text": True, "timeout": timeout, "env": environment, "cwd": directory}
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the wheel and the sdist from a copy, because building leaves files behind; return their folder."""
    pytest.importorskip("build")
    source = tmp_path_factory.mktemp("source") / "synkhronos"
    left_out = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "data"
    )
    shutil.copytree(ROOT, source, ignore=left_out)
    output = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", output, source, directory=output)
    return output


def files_of_the_package():
    """Return the paths of the package's modules in this checkout, relative to its root."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / "synkhronos").rglob("*.py")}


def test_the_wheel_holds_the_package_and_the_start_up_hook(built):
    (wheel,) = built.glob("*.whl")
    assert re.fullmatch(rf"synkhronos-{re.escape(__version__)}-cp3\d+-cp3\d+-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "synkhronos/_native/native" + sysconfig.get_config_var("EXT_SUFFIX") in names
    assert names >= files_of_the_package() | {"synkhronos/py.typed", "_synkhronos_start.py", "synkhronos-start.pth"}
    hook = {"_synkhronos_start.py", "synkhronos-start.pth"}
    assert {name.split("/")[0] for name in names} == {"synkhronos", f"synkhronos-{__version__}.dist-info", *hook}
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_sdist_holds_what_developers_need(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert names >= files_of_the_package()
    for folder in ("demos", "docs", "tests"):
        files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")]
        assert names >= {str(file) for file in files if "_build" not in file.parts}
    assert names >= {str(path.relative_to(ROOT)) for path in (ROOT / "synkhronos").rglob("*.[ch]")}
    assert not [name for name in names if name.endswith(".so")]
    for name in ("LICENSE", "README.md", "Makefile", "setup.py", "synkhronos-start.pth", "_synkhronos_start.py"):
        assert name in names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/"))]


def test_registries_can_show_the_description(built, tmp_path):
    said = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), directory=tmp_path)
    assert said.count("PASSED") == 2, said


def other_pythons():
    found = [shutil.which(f"python3.{minor}") for minor in range(9, 15)]
    found += Path.home().glob(".pyenv/versions/3.*/bin/python")
    code = f"import ensurepip, sys; sys.exit(sys.version_info[:2] == {sys.version_info[:2]})"
    works = [str(path) for path in found if path and subprocess.run([path, "-c", code]).returncode == 0]
    return works[-1:] or [pytest.param("", marks=pytest.mark.skip(reason="there is no other Python"))]


@pytest.mark.parametrize("python", other_pythons())
def test_a_wheel_for_another_python_is_refused_in_one_line(built, tmp_path, python):
    run(python, "-m", "venv", tmp_path / "env", directory=tmp_path)
    pip = [tmp_path / "env" / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--dry-run"]
    (wheel,) = built.glob("*.whl")
    done = subprocess.run([*map(str, pip), str(wheel)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert "is not a supported wheel on this platform" in line
    assert "Traceback" not in done.stderr + done.stdout


def test_a_missing_compiler_is_named(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(sdist)]
    environment = {**os.environ, "CC": str(tmp_path / "cc")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "Traceback" not in output
    assert "synkhronos has a part in C, and it could not be compiled" in output
    assert "install a C compiler (on Debian and Ubuntu: apt-get install gcc libc6-dev), or name yours in CC" in output


def test_missing_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda **given: None)
    build_core = runpy.run_path("setup.py")["BuildCore"]
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=r"Python's headers are not here .*: apt-get install python3\.\d+-dev\)"):
        build_core(setuptools.Distribution()).build_extensions()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused_in_one_sentence(monkeypatch, platform):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.platform", platform)
    expected = f"^synkhronos is for Linux, and this is {platform}: install it in a Linux container or, .* WSL 2$"
    with pytest.raises(SystemExit, match=expected):
        runpy.run_path("setup.py")


def test_the_wheel_works_in_an_empty_environment(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "env", directory=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    extra, orders = "", ("pytensor, synkhronos", "synkhronos, pytensor")
    if engine == "theano":
        extra, orders = "[lasagne]", ("theano, lasagne, synkhronos", "lasagne, synkhronos", "synkhronos, theano")
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", directory=tmp_path)
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}{extra}", directory=tmp_path)
    for order in orders:
        program = f"import {order}; print(synkhronos.__file__)"
        assert str(tmp_path) in run(python, "-c", program, directory=tmp_path)
    shutil.copy(ROOT / "demos" / "demo_1.py", tmp_path)
    run(python, "demo_1.py", directory=tmp_path)
