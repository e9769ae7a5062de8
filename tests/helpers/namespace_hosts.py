"""Simulated hosts for tests of several nodes: network namespaces on a bridge, each with its own name and ``/dev/shm``.

They need root. `Hosts` removes everything at its end, including processes that run in it, also after a failed test.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import string
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from deadline import wait_for

MPIEXEC = Path(sys.executable).with_name("mpiexec")
HAS_MPI = importlib.util.find_spec("mpi4py") is not None and MPIEXEC.exists()

#: A program that launchers call like ssh, with HOST and a command; it runs the command in the host's namespaces.
_ENTER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter --target "$(cat {folder}/$host)" {spaces} sh -c "$*"
"""


#: Environment variables in which launchers look for their ssh program.
SHELLS = ("HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC", "OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")

#: Makes each MPI use that program and the hosts' network interfaces. Open MPI needs two variables to run as root.
_LAUNCHING = {
    "HYDRA_LAUNCHER": "ssh",
    "HYDRA_IFACE": "eth0",
    "I_MPI_HYDRA_BOOTSTRAP": "ssh",
    "I_MPI_HYDRA_IFACE": "eth0",
    "I_MPI_FABRICS": "ofi",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_MCA_oob_tcp_if_include": "eth0",
    "PRTE_MCA_prte_if_include": "eth0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def reason_to_skip():
    """Return why hosts cannot be created here, or ``None`` if they can."""
    if not HAS_MPI:
        return "mpi4py or mpiexec is not installed"
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "nsenter", "setpriv", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    name = f"st{os.getpid()}"
    inside = f"mount --make-rprivate / && mount -t tmpfs none /dev/shm && hostname {name} && ip link set lo up"
    tried = (
        f"ip link add {name} type bridge && ip link del {name} && "
        f"unshare --net --uts --ipc --mount sh -c '{inside} && ip link add {name} type veth peer name {name}x'"
    )
    done = subprocess.run(["sh", "-c", tried], capture_output=True, text=True, check=False, timeout=60)
    return None if not done.returncode else f"network namespaces cannot be created: {done.stderr.strip()}"


DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"]
#: Makes MPICH send by the hosts' network interfaces.
ENVIRONMENT = {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}


def sweep():
    """Remove the bridges of processes that were killed before they removed them."""
    for link in json.loads(_ip("-json", "link", "show", "type", "bridge")):
        found = re.fullmatch(r"sb(\d+)[a-z]", link["ifname"])
        if found and not psutil.pid_exists(int(found.group(1))):
            _ip("link", "del", link["ifname"])


#: Distinguish the bridges of one process.
_LETTERS = itertools.cycle(string.ascii_lowercase)


class Hosts:
    """Several simulated hosts, as a context manager.

    Parameters
    ----------
    n : int
    ahead : sequence of int, optional
        Seconds by which each host's monotonic clock is ahead of this machine's.

    Attributes
    ----------
    names : list of str
    """

    def __init__(self, n, ahead=()):
        self._name()
        self.names = [f"host{chr(ord('a') + i)}" for i in range(n)]
        self._ahead = ahead
        self._spaces = ["--net", "--uts", "--ipc", "--mount", *(["--time"] if ahead else [])]
        self._keepers = []  # a process in each host that keeps its namespaces alive
        self._jobs = []

    def _name(self):
        self._tag = f"{os.getpid()}{next(_LETTERS)}"
        self._bridge = f"sb{self._tag}"

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="synkhronos-hosts-"))
        try:
            sweep()
            while Path(f"/sys/class/net/{self._bridge}").exists():  # made by another import of this module
                self._name()
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for i, name in enumerate(self.names):
                self._make(i, name)
            self._launcher = self._folder / "enter"
            self._launcher.write_text(_ENTER.format(folder=self._folder, spaces=" ".join(self._spaces)))
            self._launcher.chmod(0o755)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self, i, name):
        hosts = "".join(f"10.77.0.{k + 1} {one}\n" for k, one in enumerate(self.names))
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        setup = (
            f"hostname {name} && mount --make-rprivate / && mount -t tmpfs none /dev/shm && ip link set lo up && "
            f"mount --bind {self._folder}/hosts /etc/hosts && exec sleep infinity"
        )
        clock = ["--monotonic", str(self._ahead[i])] if self._ahead else []
        keeper = subprocess.Popen([*DIES_WITH_US, "unshare", *self._spaces, *clock, "sh", "-c", setup])
        self._keepers.append(keeper)
        wait_for(lambda: psutil.Process(keeper.pid).name() == "sleep", "the namespaces of a host")
        (self._folder / name).write_text(str(keeper.pid))
        outside, inside = f"so{self._tag}{i}", f"si{self._tag}{i}"
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("link", "set", inside, "netns", str(keeper.pid))
        self.inside(name, "ip", "link", "set", inside, "name", "eth0")
        self.inside(name, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
        self.inside(name, "ip", "link", "set", "eth0", "up")

    def enter(self, name):
        """Return the first words of a command line that runs a command on a host."""
        target = (self._folder / name).read_text()
        return ["nsenter", "--target", target, *self._spaces]

    def inside(self, name, *command):
        """Run a command on a host, and return its standard output."""
        done = subprocess.run([*self.enter(name), *command], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def limit(self, rate):
        """Limit the rate at which each host sends, such as ``"1gbit"``; ``None`` removes the limit."""
        for name in self.names:
            if rate is not None:
                bucket = ("tbf", "rate", rate, "burst", "128kb", "latency", "20ms")
                self.inside(name, "tc", "qdisc", "replace", "dev", "eth0", "root", *bucket)
            elif "tbf" in self.inside(name, "tc", "qdisc", "show", "dev", "eth0"):
                self.inside(name, "tc", "qdisc", "del", "dev", "eth0", "root")

    def cut(self, name):
        """Set a host's network interface down."""
        self.inside(name, "ip", "link", "set", "eth0", "down")

    def drop(self, name):
        """Drop all packets to and from a host, silently: no link goes down, no connection is reset."""
        self._queue("replace", name)

    def reconnect(self, name):
        """Undo `cut` and `drop`."""
        self.inside(name, "ip", "link", "set", "eth0", "up")
        if "blackhole" in self.inside(name, "tc", "qdisc", "show", "dev", "eth0"):
            self._queue("del", name)

    def _queue(self, what, name):
        rest = ["root", "blackhole"] if what == "replace" else ["root"]
        _run("tc", "qdisc", what, "dev", f"so{self._tag}{self.names.index(name)}", *rest)
        self.inside(name, "tc", "qdisc", what, "dev", "eth0", *rest)

    def leader(self, name):
        """Return the node leader's process on a host."""
        return next(one for one in self.processes(name) if one.parent() and "pmi_proxy" in one.parent().name())

    def launch(self, per_host=1):
        """Return the first words of a command line that runs a program on all hosts, by mpiexec on the first host."""
        launcher = ("-launcher", "ssh", "-launcher-exec", str(self._launcher), "-iface", "eth0")
        where = ("-hosts", ",".join(self.names), "-ppn", str(per_host))
        return [*DIES_WITH_US, *self.enter(self.names[0]), str(MPIEXEC), *launcher, *where]

    def start(self, *command, per_host=1, **environment):
        """Start a program on all hosts by `launch`, and return the process."""
        return self._start([*self.launch(per_host), *command], environment)

    def begin(self, name, *command, **environment):
        """Start a program on one host, from which MPI's launchers reach the others, and return the process."""
        shells = {variable: str(self._launcher) for variable in SHELLS}
        return self._start([*DIES_WITH_US, *self.enter(name), *command], {**_LAUNCHING, **shells, **environment})

    def _start(self, command, environment):
        pipes, environment = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}, {**ENVIRONMENT, **environment}
        job = subprocess.Popen(command, **pipes, text=True, env={**os.environ, **environment}, start_new_session=True)
        self._jobs.append(job)
        return job

    def processes(self, name):
        """Return the processes on a host, except the one that keeps its namespaces alive."""
        keeper = int((self._folder / name).read_text())
        own, found = os.readlink(f"/proc/{keeper}/ns/uts"), []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if pid != keeper and os.readlink(f"/proc/{pid}/ns/uts") == own:
                    found.append(psutil.Process(pid))
        return found

    def left(self):
        """Return descriptions of what programs have left on the hosts: processes, and files in ``/dev/shm``."""
        processes = [f"{name}: {one}" for name in self.names for one in self.processes(name)]
        return processes + [
            f"{name}: {one}" for name in self.names for one in self.inside(name, "ls", "/dev/shm").split()
        ]

    def __exit__(self, *_):
        for job in self._jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.communicate()
        for name in self.names:
            if (self._folder / name).exists():
                for one in self.processes(name):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait()
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)
        shutil.rmtree(self._folder)


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def _ip(*arguments):
    return _run("ip", *arguments) or "[]"
