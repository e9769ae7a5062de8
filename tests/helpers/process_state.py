"""State of processes: the resources that this one holds, its workers, and waiting for conditions."""

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

_BEGAN = time.time() - 1  # what is older is nothing of these tests


class ProcessState:
    """What this process has now: children, shared memory, descriptors, threads."""

    def __init__(self):
        self.children = {child.pid for child in psutil.Process().children(recursive=True)} - {fork_server.pid}
        self.shared = shared_memory_names()
        self.threads = threading.active_count()
        self.descriptors = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                self.descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue

    def beyond(self, before):
        """What is here that was not there `before`: a list of descriptions."""
        extra = [f"child process {pid}" for pid in sorted(self.children - before.children)]
        extra += [f"/dev/shm/{name}" for name in sorted(self.shared - before.shared)]
        if self.threads > before.threads:
            extra.append(f"{self.threads - before.threads} threads")
        fresh = [target for name, target in self.descriptors.items() if before.descriptors.get(name) != target]
        extra += [f"descriptor of {target}" for target in fresh if "/memfd:synkhronos" in target]
        if len(self.descriptors) > len(before.descriptors) + 3:
            extra.append(f"descriptors of {fresh}")
        return extra


def shared_memory_names():
    """The names that sessions of this process, or of processes that are gone, have left in /dev/shm lately."""
    names = set()
    for name in os.listdir("/dev/shm"):
        ours = re.fullmatch(r"(sem\.)?synkhronos-(\d+)-.*", name)
        with contextlib.suppress(FileNotFoundError):
            if not ours or os.lstat(f"/dev/shm/{name}").st_mtime < _BEGAN:
                continue
            pid = int(ours.group(2))
            if pid == os.getpid() or not psutil.pid_exists(pid) or os.getpid() in _ancestors(pid):
                names.add(name)
    return names


def _ancestors(pid):
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.NoSuchProcess:
        return set()


def is_running(pid):
    """Whether a process is there and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids):
    """Wait until no process of ``pids`` runs any more."""
    wait_for(lambda: not any(map(is_running, pids)), lambda: f"the end of processes {[*filter(is_running, pids)]}")


def wait_for_a_call(pid=None):
    """Wait until a rank of the session of a process, this one unless another is named, computes."""
    (status,) = [one.status for one in find_sessions() if one.pid == (pid or os.getpid())]
    wait_for(lambda: "computes" in status.look(), "a call")


def worker_pids():
    """The process ids of the workers of this process's session, in the order of their ranks."""
    children = {child.pid for child in psutil.Process().children()} - {fork_server.pid}
    return sorted(filter(is_running, children))


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for_end(pids)


def shared_sizes(pid):
    """The bytes of each segment that a process has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "/memfd:synkhronos" in line]
    return [int(end, 16) - int(start, 16) for start, end in ranges]


def shared_links(pid, kind="fd"):
    """The links in /proc to segments that a process has open, or mapped (``map_files``, for the superuser)."""
    links = []
    for name in os.listdir(f"/proc/{pid}/{kind}"):
        with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
            if os.readlink(f"/proc/{pid}/{kind}/{name}").startswith("/memfd:synkhronos"):
                links.append(f"/proc/{pid}/{kind}/{name}")
    return links


def shared_bytes(pid):
    """Bytes of the segments that a process has mapped."""
    return sum(shared_sizes(pid))


def later(seconds, action, *arguments):
    """Do something after a while, and note when that was."""
    happened = []

    def act():
        happened.append(time.monotonic())
        action(*arguments)

    threading.Timer(seconds, act).start()
    return happened
