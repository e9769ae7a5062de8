"""An OpenSSH daemon on each host, and a program that calls ssh with a key for them."""

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from deadline import wait_for
from namespace_hosts import DIES_WITH_US

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

_SERVER = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
"""

_CLIENT = """#!/bin/sh
exec ssh -F none -i {folder}/key -o BatchMode=yes -o UserKnownHostsFile={folder}/known -o StrictHostKeyChecking=no \\
    -o LogLevel=ERROR "$@"
"""


@contextlib.contextmanager
def ssh(hosts, within=None):
    """Start a daemon on each host within the block; yield the path of a program that launchers call instead of ssh.

    Parameters
    ----------
    hosts : Hosts
    within : callable, optional
        Takes the name of a host, and returns the first words of the command of its daemon. Default: `Hosts.enter`.
    """
    folder = Path(tempfile.mkdtemp(prefix="synkhronos-ssh-"))
    daemons = []
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True, timeout=60)
        (folder / "settings").write_text(_SERVER.format(folder=folder))
        client = folder / "ssh"
        client.write_text(_CLIENT.format(folder=folder))
        client.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires this folder
        for name in hosts.names:
            command = [*DIES_WITH_US, *(within or hosts.enter)(name), SSHD, "-D", "-e", "-f", folder / "settings"]
            with (folder / f"{name}.log").open("w") as log:
                daemons.append(subprocess.Popen(command, stderr=log, start_new_session=True))
        for log in [folder / f"{name}.log" for name in hosts.names]:
            wait_for(lambda log=log: "listening" in log.read_text(), log.read_text)
        yield str(client)
    finally:
        for one in daemons:
            one.terminate()
            one.wait(20)
        shutil.rmtree(folder)
