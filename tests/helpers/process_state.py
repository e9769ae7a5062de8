"""State of processes: resources that they hold, workers, and waits for their end."""

import contextlib
import os
import re
import signal
import threading
import time

import psutil
from deadline import wait_for
from scripts import fork_server

from synkhronos._cli.top import find_sessions

_BEGAN = time.time() - 1  # older files are not from this test run


class ProcessState:
    """Snapshot of this process's resources: children, shared memory, descriptors and threads."""

    def __init__(self):
        self.children = {child.pid for child in psutil.Process().children(recursive=True)} - {fork_server.pid}
        self.shared = shared_memory_names(of_ended=True)
        self.threads = threading.active_count()
        self.descriptors = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                self.descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue

    def beyond(self, before):
        """Return descriptions of the resources that an earlier snapshot does not have."""
        extra = [f"child process {pid}" for pid in sorted(self.children - before.children)]
        extra += [f"/dev/shm/{name}" for name in sorted(self.shared - before.shared)]
        if self.threads > before.threads:
            extra.append(f"{self.threads - before.threads} threads")
        fresh = [target for name, target in self.descriptors.items() if before.descriptors.get(name) != target]
        extra += [f"descriptor of {target}" for target in fresh if "/memfd:synkhronos" in target]
        if len(self.descriptors) > len(before.descriptors) + 3:
            extra.append(f"descriptors of {fresh}")
        return extra


def shared_memory_names(of_ended=False):
    """Return new names in /dev/shm that sessions of this process and its descendants have left there.

    With ``of_ended``, the names of ended processes are included. They may belong to a test that runs at the same time,
    and vanish soon: wait for the end of those that were not there before.
    """
    names = set()
    for name in os.listdir("/dev/shm"):
        ours = re.fullmatch(r"(sem\.)?synkhronos-(\d+)-.*", name)
        with contextlib.suppress(FileNotFoundError):
            if not ours or os.lstat(f"/dev/shm/{name}").st_mtime < _BEGAN:
                continue
            pid = int(ours.group(2))
            is_ours = pid == os.getpid() or os.getpid() in _ancestors(pid)
            if is_ours or (of_ended and not psutil.pid_exists(pid)):
                names.add(name)
    return names


def _ancestors(pid):
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.NoSuchProcess:
        return set()


def is_running(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids):
    """Wait until all processes of ``pids`` have ended."""
    wait_for(lambda: not any(map(is_running, pids)), lambda: f"the end of processes {[*filter(is_running, pids)]}")


def wait_for_a_call(pid=None):
    """Wait until a rank of a process's session computes; the default is this process."""
    (status,) = [one.status for one in find_sessions() if one.pid == (pid or os.getpid())]
    wait_for(lambda: "computes" in status.look(), "a call")


def worker_pids():
    """Return the process ids of this process's workers, in ascending order."""
    children = {child.pid for child in psutil.Process().children()} - {fork_server.pid}
    return sorted(filter(is_running, children))


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for_end(pids)


def shared_sizes(pid):
    """Return the size in bytes of each segment that a process has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "/memfd:synkhronos" in line]
    return [int(end, 16) - int(start, 16) for start, end in ranges]


def shared_links(pid, kind="fd"):
    """Return the links in /proc to segments that a process has open or, with kind ``map_files`` as root, mapped."""
    links = []
    for name in os.listdir(f"/proc/{pid}/{kind}"):
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            if os.readlink(f"/proc/{pid}/{kind}/{name}").startswith("/memfd:synkhronos"):
                links.append(f"/proc/{pid}/{kind}/{name}")
    return links


def shared_bytes(pid):
    """Return the total size in bytes of the segments that a process has mapped."""
    return sum(shared_sizes(pid))


def later(seconds, action, *arguments):
    """Call ``action`` after some seconds in a thread; return a list that receives the time of the call."""
    happened = []

    def act():
        happened.append(time.monotonic())
        action(*arguments)

    threading.Timer(seconds, act).start()
    return happened
