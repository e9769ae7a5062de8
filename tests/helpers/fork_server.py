"""Fork server for the scripts of tests: a process that has imported all modules and is prepared to fork.

A script in a new interpreter spends 2.5 s on importing Theano and reading its compile cache before its first line
runs. Here a script is a fork of this process. Otherwise it is like ``python -c SCRIPT``: it has its own ``__main__``
and standard streams, exit code or signal, atexit functions, and threads that Python joins at exit.

    pytest ──Popen── server ──fork── agent   ──fork── script      the agent waits, and sends the status to pytest

`ForkServer` runs in pytest, `serve` in the server. If another program starts the script, such as mpiexec, it starts
`stand_in.py` in its place, which connects to the server, passes on what it has inherited, and ends as the script ends.
If it is killed, so is the script.
"""

import array
import contextlib
import fcntl
import gc
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
_LENGTH = 8  # bytes of the length before each request
_MOST_DESCRIPTORS = 250  # that the kernel passes in one message
_FREE = 500  # no program inherits descriptors from this number on


class Script:
    """A running script, with the part of the interface of `subprocess.Popen` that tests use. Its streams are text."""

    def __init__(self, pid, streams, status):
        self.pid = pid
        self.stdin, self.stdout, self.stderr = streams
        self.returncode = None
        self._status = status

    def wait(self, timeout=None):
        """Wait for the end, and return the exit code, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a script", timeout)
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self._status, 32)))
            os.close(self._status)
        return self.returncode

    def poll(self):
        """Return the exit code, or `None` while the script runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def communicate(self, text="", timeout=None):
        """Write to standard input, wait for the end, and return the rest of standard output and standard error.

        Theano's messages about waiting for another process to compile are removed, because several processes run tests.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.stdin:
            self.stdin.write(text)
            self.stdin.close()
        found = {self.stdout: [], self.stderr: []}
        reading = {stream for stream in found if not stream.closed}
        while reading:
            left = None if deadline is None else max(0, deadline - time.monotonic())
            ready = select.select(list(reading), [], [], left)[0]
            if not ready:
                raise subprocess.TimeoutExpired("a script", timeout)
            for stream in ready:
                data = os.read(stream.fileno(), 65536)
                found[stream].append(data)
                if not data:
                    reading.discard(stream)
        self.wait(None if deadline is None else max(0, deadline - time.monotonic()))
        for stream in found:
            stream.close()
        out, err = (b"".join(parts).decode() for parts in found.values())
        return out, re.sub(r"INFO \(theano\.gof\.compilelock\).*\n", "", err)

    def send_signal(self, number):
        """Send a signal to the script if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the script has just ended
                os.kill(self.pid, number)

    def kill(self):
        """Kill the script by SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _flags():
    return [os.environ.get(name) for name in ("THEANO_FLAGS", "PYTENSOR_FLAGS")]


class ForkServer:
    """Client of the fork server, in pytest's process. It starts the server with the first script."""

    def __init__(self):
        self.process = self._socket = self._flags = self._folder = None

    @property
    def pid(self):
        """Process id of the server, `None` before the first script."""
        return None if self.process is None else self.process.pid

    def outdated(self):
        """Return whether the backend's flags have changed since the server was started."""
        return self.process is not None and _flags() != self._flags

    def stand_in(self, source, environment):
        """Return a command that another program executes in place of ``python -c SOURCE``."""
        self._start_server(environment)
        return [sys.executable, "-I", "-S", str(HELPERS / "stand_in.py"), self._address, source]

    @property
    def _address(self):
        return str(Path(self._folder.name) / "socket")

    def _start_server(self, environment):
        if self.process is not None:
            return
        self._socket, theirs = socket.socketpair()
        self._folder = tempfile.TemporaryDirectory(prefix="synkhronos-forks-")
        self._flags = _flags()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            descriptors = [theirs.fileno(), listener.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, str(HELPERS / "fork_server.py"), *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        theirs.close()
        os.register_at_fork(after_in_child=self._socket.close)  # workers do not keep it open

    def start(self, source, arguments, environment, stdin=None, new_session=False):
        """Start a script, and return its `Script`."""
        self._start_server(environment)
        pipes = [os.pipe() for _ in range(4)]  # standard input, output and error; the exit status
        (in_reader, in_writer), (out_reader, out_writer), (err_reader, err_writer), (reader, writer) = pipes
        if stdin is None:
            os.close(in_reader)
            in_reader = os.open(os.devnull, os.O_RDONLY)
        given = in_reader if stdin in (None, subprocess.PIPE) else stdin
        request = json.dumps([source, list(map(str, arguments)), os.getcwd(), environment, new_session]).encode()
        descriptors = array.array("i", [given, out_writer, err_writer, writer]).tobytes()
        self._socket.sendmsg(
            [len(request).to_bytes(_LENGTH, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )
        self._socket.sendall(request)
        pid = int.from_bytes(_read(self._socket, _LENGTH), "big")
        for descriptor in (in_reader, out_writer, err_writer, writer):
            os.close(descriptor)
        input_ = os.fdopen(in_writer, "w") if stdin == subprocess.PIPE else os.close(in_writer)
        return Script(pid, (input_, os.fdopen(out_reader), os.fdopen(err_reader)), reader)

    def close(self):
        """Stop the server if it was started."""
        if self.process is not None:
            self._socket.close()
            self.process.wait()
            self._folder.cleanup()
            self.process = None


def _read(connection, n_bytes):
    data = b""
    while len(data) < n_bytes:
        part = connection.recv(n_bytes - len(data))
        if not part:
            raise EOFError("the other side has ended")
        data += part
    return data


def serve(connection, listener):
    """Fork scripts until pytest ends. In a script, return its source and arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap agents automatically
    while True:
        if connection not in select.select([connection, listener], [], [])[0]:
            with listener.accept()[0] as asking:
                if os.fork() == 0:
                    connection.close()
                    listener.close()
                    return _agent_of_stand_in(asking)
            continue
        length, ancillary, _, _ = connection.recvmsg(_LENGTH, socket.CMSG_SPACE(4 * 4))
        if not length:
            os._exit(0)
        request = json.loads(_read(connection, int.from_bytes(length, "big")))
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        if os.fork() == 0:
            listener.close()
            script = _agent(connection, list(descriptors), *request)
            if script is not None:
                return script
        for descriptor in descriptors:
            os.close(descriptor)


def _agent(connection, descriptors, source, arguments, folder, environment, new_session):
    """Fork the script; send its pid, and its status at its end. In the script, return its source and arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # signals to the script's group
            signal.signal(number, signal.SIG_IGN)
        connection.sendall(pid.to_bytes(_LENGTH, "big"))
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptors[3], str(status).encode())
        os._exit(0)
    if new_session:
        os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return source, arguments


def _agent_of_stand_in(asking):
    """Fork the script, send its status at its end, and kill it if the stand-in ends. In the script, return its source.

    The script has the environment, the folder and all descriptors of the stand-in.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, received, _, _ = socket.recv_fds(asking, _LENGTH, _MOST_DESCRIPTORS)
    source, folder, environment, numbers = json.loads(_read(asking, int.from_bytes(length, "big")))
    pid = os.fork()
    if pid:
        for descriptor in received:
            os.close(descriptor)
        end = os.pidfd_open(pid)
        if end not in select.select([end, asking], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            asking.sendall(str(status).encode())
        os._exit(0)
    asking.close()
    os.setpgid(0, 0)
    free = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(free, numbers):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    rendezvous.rendezvous.__init__(os.environ)
    rendezvous._WITH_OTHERS = rendezvous.rendezvous.size > 1
    return source, []


def run(source, arguments):
    """Execute the source of a script in this process."""
    random.seed()
    numpy.random.seed()  # noqa: NPY002  (the generator that scripts use)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(source, "<string>", "exec"), main.__dict__)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__.tb_next)
        sys.exit(1)


if __name__ == "__main__":
    # all modules that scripts import
    import comparison  # noqa: F401
    import deadline  # noqa: F401
    import fault_ops  # noqa: F401
    import numpy
    import process_state  # noqa: F401

    import synkhronos
    import synkhronos._api
    import synkhronos._backends
    from synkhronos._utils import rendezvous

    synkhronos._backends.prepare_fork()
    gc.collect()
    gc.freeze()  # garbage collection in scripts copies no pages of these objects
    run(*serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:])))
