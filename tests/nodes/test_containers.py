"""A session of two containers, each with the network of its host, an ssh daemon, and this file system as its image."""

import shutil
import subprocess
import sys
import textwrap

import pytest
from mpi_jobs import HELPERS, PRELUDE
from namespace_hosts import SHELLS
from ssh_daemons import SSHD, ssh

PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")
RUN = (*PODMAN, "run", "--rm", "--network=host", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")

PROGRAM = """
    n = synk.fork(2, use_gpu=False)
    x = T.dmatrix("x")
    f = synk.function([x], T.sqrt((x * x).mean()), exact=True)
    X = np.random.RandomState(0).rand(1300, 30)
    assert np.allclose(f(X), np.sqrt((X * X).mean()))
    say(n)
    sys.exit(7)
"""


def why_not():
    """Return why no container can run here; ``None`` if one can."""
    if SSHD is None or shutil.which("podman") is None:
        return "podman or openssh-server is not installed here: make test-launchers"
    tried = subprocess.run([*RUN, "--rootfs", "/:O", "true"], capture_output=True, text=True, timeout=100, check=False)
    return None if not tried.returncode else f"podman runs no container here: {tried.stderr.strip()}"


def test_a_session_of_containers(hosts, tmp_path):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    script = tmp_path / "program.py"
    script.write_text("".join(map(textwrap.dedent, [PRELUDE, PROGRAM])))
    names = {name: f"synkhronos-{tmp_path.parent.name}-{name}" for name in hosts.names}

    def within(name):
        shared = ("--volume=/tmp:/tmp", "--volume=/run/sshd:/run/sshd")
        return (*hosts.enter(name), *RUN, "--name", names[name], *shared, "--rootfs", "/:O")

    try:
        with ssh(hosts, within) as client:
            variables = [f"--env={name}={client}" for name in SHELLS]
            variables += ["--env=HYDRA_IFACE=eth0", "--env=UCX_NET_DEVICES=eth0"]
            run = (sys.executable, "-m", "synkhronos", "run", "--hosts", "hosta,hostb", script)
            job = hosts.begin("hosta", *PODMAN, "exec", *variables, "--workdir", HELPERS, names["hosta"], *run)
            out, err = job.communicate(timeout=120)
            assert job.returncode == 7, out + err
            assert [line.split()[2] for line in out.splitlines()] == ["4", "parts"], out
    finally:
        for name in names.values():
            subprocess.run([*PODMAN, "rm", "--force", "--time=2", name], capture_output=True, check=False, timeout=60)
