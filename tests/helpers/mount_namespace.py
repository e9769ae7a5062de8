"""A ``/dev/shm`` of limited size for a script, in a mount namespace of its own."""

import os
import shutil
import subprocess


def shrink_shared_memory(n_bytes):
    """Restart this script in a mount namespace of its own, with a ``/dev/shm`` of ``n_bytes``."""
    if "SYNKHRONOS_TEST_SHRUNK" in os.environ:
        return
    os.environ["SYNKHRONOS_TEST_SHRUNK"] = "1"
    with open("/proc/self/cmdline") as file:
        command = file.read().split("\0")[:-1]
    mount = f'mount -t tmpfs -o size={n_bytes} tmpfs /dev/shm && exec "$@"'
    os.execvp("unshare", [*unshare(), "sh", "-c", mount, "sh", *command])


def unshare():
    return ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-r", "-m"]


def may_mount():
    if shutil.which("unshare") is None:
        return False
    command = [*unshare(), "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
