"""A ``/dev/shm`` of limited size for a script, in a mount namespace of its own."""

import os
import shutil
import subprocess


def shrink_shared_memory(n_bytes):
    """Give this script a ``/dev/shm`` of its own: it starts again, in a mount namespace of its own."""
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
