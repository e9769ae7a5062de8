"""Security: other users of the node can neither read nor write memory that ranks share, nor run code in ranks."""

import ctypes
import json
import os
import pickle
import re
import select
import socket
import stat
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from backend import T, theano
from process_state import shared_links, worker_pids
from scripts import run_script
from seccomp import needs_seccomp

import synkhronos as synk
from synkhronos._memory import channels, segments
from synkhronos._rank import messages

IN_OPEN, IN_CREATE = 0x20, 0x100
NOBODY = 65534
_built = {}


@pytest.fixture
def family(synchronize):
    """Return the process ids of the controller and the workers, after allocating memory of every kind."""
    synchronize(3)
    if not _built:
        x, w = T.dvector("x"), theano.shared(np.ones(50_000), "w")
        _built["f"], _built["w"] = synk.function([x], [(x * w[0], "gather"), (x.sum(), "sum")]), w
    _built["data"] = synk.data(np.arange(10_000.0))
    use()
    return [os.getpid(), *worker_pids()]


def use():
    """Use memory of every kind: staged inputs, answers, results, and buffers of collectives."""
    assert _built["f"](_built["data"], batch=[0, 5, 9])[1] == 14
    assert _built["f"](np.ones(20_000))[1] == 20_000
    synk.all_reduce(_built["w"], op="max")
    synk.all_gather(_built["w"])
    synk.broadcast(_built["w"], np.ones(50_000))


class Watch:
    """Watch of the names in a folder, or of a file, by inotify."""

    def __init__(self, path, mask):
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init()
        assert self.fd >= 0
        assert libc.inotify_add_watch(self.fd, os.fsencode(path), mask) >= 0, os.strerror(ctypes.get_errno())

    def names(self):
        """Return the names of the events so far, empty names if a file is watched, and end the watch."""
        names, data = [], b""
        while select.select([self.fd], [], [], 0.05)[0]:
            data += os.read(self.fd, 1 << 16)
        os.close(self.fd)
        while data:
            length = struct.unpack_from("iIII", data)[3]
            names.append(data[16 : 16 + length].rstrip(b"\0").decode())
            data = data[16 + length :]
        return names


# ---------------------------------------------------------------- shared memory


def test_the_watch_sees_names():
    watch = Watch("/dev/shm", IN_CREATE)
    name = f"synkhronos-test-{os.getpid()}"
    with open(f"/dev/shm/{name}", "w"):
        pass
    os.unlink(f"/dev/shm/{name}")
    assert name in watch.names()


def test_memory_never_has_a_name(family, synchronize):
    watch = Watch("/dev/shm", IN_CREATE)
    synk.close()
    synchronize(3)
    _built["data"] = synk.data(np.arange(10_000.0))
    use()
    _built["data"].set_length(40_000)
    use()
    synk.close()
    assert [name for name in watch.names() if f"-{os.getpid()}-" in name or name.startswith("sem.")] == []


def test_memory_is_for_this_user_alone(family):
    """Open descriptors and mappings of all ranks have mode 600, the user as owner, and no name."""
    kept = synk.data(np.ones(100))  # its descriptor is open until the next command
    assert len(kept) == 100
    found = 0
    for pid in family:
        links = shared_links(pid)
        if os.getuid() == 0:  # only the superuser can read map_files
            links += shared_links(pid, "map_files")
        for link in links:
            try:
                status = os.stat(link)
            except FileNotFoundError:
                continue
            found += 1
            assert stat.S_IMODE(status.st_mode) == 0o600, link
            assert status.st_uid == os.getuid()
            assert status.st_nlink == 0, "it has a name"
    assert found >= 1 + 8 * len(family) * (os.getuid() == 0)


def test_a_loose_umask_changes_nothing(family):
    before = os.umask(0)
    try:
        segment = segments.Segment.create(5000)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.fstat(segment.fileno()).st_mode) == 0o600
    segment.close_fd()


@needs_seccomp
def test_names_where_the_kernel_needs_them_are_unguessable():
    """Without ``memfd_create``, memory has a private, random name for the time between two system calls."""
    out, _ = run_script(
        """
        import json, posix_ipc, stat
        from seccomp import refuse
        refuse("memfd_create")
        os.umask(0)
        seen, make = [], posix_ipc.SharedMemory
        def notice(name, *rest, **named):
            made = make(name, *rest, **named)
            seen.append([name, stat.S_IMODE(os.stat("/dev/shm" + name).st_mode)])
            return made
        posix_ipc.SharedMemory = notice
        synk.fork(3)
        x = T.dvector("x")
        f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
        data = [synk.data(np.ones(1000)) for _ in range(20)]
        assert all(f(each) == 1000 for each in data)
        assert not shared_memory_names()
        synk.close()
        print(json.dumps(seen))
        """
    )
    seen = json.loads(out)
    assert len(seen) > 20
    randoms = []
    for name, mode in seen:
        assert mode == 0o600
        randoms.append(re.fullmatch(r"/synkhronos-\d+-([0-9a-f]{32})", name).group(1))  # 128 bits
    assert len(set(randoms)) == len(randoms)
    digits = "".join(randoms)
    assert all(0.5 < digits.count(digit) * 16 / len(digits) < 1.6 for digit in "0123456789abcdef")


@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can start a process of another user")
def test_another_user_cannot_reach_the_memory(family):
    kept = synk.data(np.ones(100))
    assert len(kept) == 100
    attempts = [f"/proc/{pid}/{name}" for pid in family for name in ("mem", "environ", "maps")]
    attempts += [link for pid in family for link in shared_links(pid)]
    assert len(attempts) > 3 * len(family)
    nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}

    def run_as_nobody(script, *arguments):
        command = ["sh", "-c", script, "sh", *map(str, arguments)]
        return subprocess.run(command, text=True, capture_output=True, timeout=30, **nobody)

    script = 'for path; do (exec 3<"$path") && echo "read $path"; (exec 3>>"$path") && echo "wrote $path"; done; id -u'
    done = run_as_nobody(script, *attempts)
    assert done.stdout == f"{NOBODY}\n"
    assert done.stderr.count("ermission denied") >= len(attempts)
    assert run_as_nobody("for pid; do kill -9 $pid && echo killed; done", *family).stdout == ""
    use()


# ---------------------------------------------------------------- files of others in /dev/shm


class Trap:
    """An object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def foreign_files(tmp_path):
    """Yield names of files of other programs in /dev/shm that look like the library's; each contains a trap."""
    trap = pickle.dumps(Trap(str(tmp_path / "sprung")))
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    random = "0123456789abcdef" * 2
    names = {
        "fresh": f"synkhronos-{os.getpid()}-{random}",
        "dead": f"synkhronos-{finished.pid}-{random}",
        "of another user": f"synkhronos-{finished.pid}-{random[::-1]}",
        "no pid": f"synkhronos-x-{random}",
        "short": "synkhronos-",
        "unlike": f"synkhronos{finished.pid}-{random}",
    }
    for name in names.values():
        with open(f"/dev/shm/{name}", "wb") as file:
            file.write(trap * 100)
        os.chmod(f"/dev/shm/{name}", 0o666)
    for name in {*names.values()} - {names["fresh"]}:
        os.utime(f"/dev/shm/{name}", (time.time() - 3600,) * 2)
    if os.getuid() == 0:
        os.chown(f"/dev/shm/{names['of another user']}", NOBODY, NOBODY)
    names["link"] = f"synkhronos-{finished.pid}-link"
    (tmp_path / "precious").write_text("keep")
    os.symlink(tmp_path / "precious", f"/dev/shm/{names['link']}")
    yield names
    for name in names.values():
        if os.path.lexists(f"/dev/shm/{name}"):
            os.unlink(f"/dev/shm/{name}")


def test_names_of_others_are_neither_read_nor_removed(no_session, foreign_files, tmp_path):
    watches = {
        name: Watch(f"/dev/shm/{name}", IN_OPEN) for what, name in foreign_files.items() if what not in ("link", "dead")
    }
    synk.fork(3)
    x = T.dvector("x")
    f = synk.function([x], [(x, "gather"), (x.sum(), "sum")], mode="FAST_COMPILE")
    assert f(synk.data(np.ones(1000)))[1] == 1000
    assert f(np.ones(100_000))[1] == 100_000
    synk.close()
    assert not (tmp_path / "sprung").exists()
    assert (tmp_path / "precious").read_text() == "keep"
    for name, watch in watches.items():
        assert watch.names() == [], f"{name} was opened"
    left = {what for what, name in foreign_files.items() if os.path.lexists(f"/dev/shm/{name}")}
    expected = {"fresh", "no pid", "short", "unlike"} | ({"of another user"} if os.getuid() == 0 else set())
    assert left - {"link"} == expected  # only files that a dead process of this user had left were removed


# ---------------------------------------------------------------- what processes open and unpickle


def test_ranks_open_nothing_that_others_could_reach(tmp_path):
    """Ranks open no files of shared memory by name, start no programs, and have only socket pairs without addresses.

    Python's audit hooks record each `open`, socket and program of the controller and the workers.
    """
    out, _ = run_script(
        """
        log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        armed = []
        def hook(event, arguments):
            if armed and (event.startswith(("socket.", "subprocess.", "os.system", "os.exec")) or event == "open"):
                what = arguments[1:2] if event.startswith("socket.") else arguments[0]
                os.write(log, f"{os.getpid()} {event} {what!r}\\n".encode())
        sys.addaudithook(hook)
        x, w = T.dvector("x"), theano.shared(np.ones(10), "w")
        theano.function([x], [x * w[0], x.sum()])  # compile all modules now
        synk.fork(2); synk.close()
        armed.append(1)
        synk.fork(3, restart_workers=True)
        f = synk.function([x], [(x * w[0], "gather"), (x.sum(), "sum")])
        data = [synk.data(np.ones(1000)) for _ in range(10)]
        assert all(f(each)[1] == 1000 for each in data)
        assert f(np.ones(100_000))[1] == 100_000
        synk.all_gather(w)
        os.kill(worker_pids()[0], signal.SIGKILL)
        try:
            f(data[0])
        except synk.WorkerRestarted:
            pass
        assert f(data[0])[1] == 1000
        armed.clear()
        import psutil
        family = [psutil.Process(pid) for pid in (os.getpid(), *worker_pids())]
        print(os.getpid())
        print([one for process in family for one in process.connections("all") if one.raddr or one.laddr])
        """,
        tmp_path / "log",
    )
    controller, with_an_address = out.splitlines()
    assert with_an_address == "[]"
    lines = [line.split(None, 2) for line in (tmp_path / "log").read_text().splitlines()]
    assert len({pid for pid, _, _ in lines}) >= 3
    assert controller in {pid for pid, _, _ in lines}
    sockets = {(event, what) for _, event, what in lines if event != "open"}
    assert sockets == {("socket.__new__", f"({socket.AF_UNIX},)"), ("socket.sendmsg", "(None,)")}
    opened = [path for _, event, path in lines if event == "open"]
    assert not [path for path in opened if path.startswith(("'/dev/shm/", "'/proc/")) and "/fd" in path]


def test_messages_are_read_only_from_inherited_memory(family, monkeypatch):
    """The controller unpickles only messages in memory that it created before the fork, or that a worker created."""
    sources, loaded = [], []
    get, loads = channels.Mailbox.get, pickle.loads

    def noted(box, channel):
        sources.append(get(box, channel))
        return sources[-1]

    def strict(message, *rest, **named):
        loaded.append(message)
        return loads(message, *rest, **named)

    monkeypatch.setattr(channels.Mailbox, "get", noted)
    monkeypatch.setattr(messages.pickle, "loads", strict)
    use()
    assert loaded
    assert all(any(message is source or message in source for source in sources) for message in loaded)
    with open("/proc/self/maps") as maps:
        shared = [line for line in maps if "/memfd:synkhronos" in line]
    assert all("(deleted)" in line for line in shared)  # other processes cannot open it by a name
