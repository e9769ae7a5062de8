"""A Slurm cluster of simulated hosts, with its controller on the first host and a daemon on each."""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from deadline import wait_for

_SETTINGS = """
ClusterName=tests
SlurmctldHost={first}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/%n-tmp
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SwitchType=switch/none
MailProg=/bin/true
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def what_is_missing():
    """Return the first of Slurm's programs that is not installed, or ``None`` if all are installed."""
    found = os.environ.get("PATH", os.defpath) + ":/usr/sbin"
    programs = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
    return next((program for program in programs if shutil.which(program, path=found) is None), None)


def has_pmix():
    """Return whether Debian's Slurm finds PMIx's library, which it opens by a name of the package `libpmix-dev`."""
    return any(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so"))


class Slurm:
    """Start Slurm on some hosts, as a context manager.

    Parameters
    ----------
    hosts : Hosts

    Attributes
    ----------
    environment : dict
        Environment variables for Slurm's commands, which run on the first host.
    """

    def __init__(self, hosts):
        self._hosts = hosts
        self._daemons = []

    def __enter__(self):
        self._folder = folder = Path(tempfile.mkdtemp(prefix="synkhronos-slurm-"))
        first, *_ = self._hosts.names
        (folder / "state").mkdir()
        for name in self._hosts.names:
            (folder / f"{name}-tmp").mkdir()  # for PMIx's files
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        nodes = [f"NodeName={name} CPUs={os.cpu_count()} State=UNKNOWN\n" for name in self._hosts.names]
        settings = folder / "slurm.conf"
        settings.write_text(_SETTINGS.format(first=first, folder=folder) + "".join(nodes))
        self.environment = {"SLURM_CONF": str(settings), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        munged = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
        munged += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"]
        try:
            self._start(first, *munged)
            self._until(lambda: (folder / "munge.socket").exists())
            self._start(first, "slurmctld", "-D", "-i")
            for name in self._hosts.names:
                self._start(name, "slurmd", "-D", "-N", name)
            self._until(lambda: self._states() == ["idle"] * len(self._hosts.names))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, name, *command):
        log = (self._folder / f"{command[0]}-{name}.out").open("w")
        command = ["setpriv", "--pdeathsig", "KILL", *self._hosts.enter(name), *command]
        environment = {**os.environ, **self.environment}
        self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
        log.close()

    def _states(self):
        command = [*self._hosts.enter(self._hosts.names[0]), "sinfo", "-h", "-N", "-o", "%t"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **self.environment}
        )
        return done.stdout.split()

    def _until(self, condition):
        def logs():
            return [path.read_text()[-1000:] for path in self._folder.glob("*.out")]

        def held():
            assert all(one.poll() is None for one in self._daemons), logs()
            return condition()

        wait_for(held, logs, 60)

    def __exit__(self, *_):
        for daemon in reversed(self._daemons):
            os.killpg(daemon.pid, signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        shutil.rmtree(self._folder)
