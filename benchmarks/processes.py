"""Contestants, and the processes in which they run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import find_mpiexec
from tests.helpers.namespace_hosts import DIES_WITH_US, ENVIRONMENT, Hosts

ROOT = Path(__file__).resolve().parent.parent


class ContestantFailed(RuntimeError):
    """Raised if a contestant fails, ends, or takes too long; the first line of the message states the cause."""


@dataclass(frozen=True)
class Contestant:
    """Program to measure.

    Parameters
    ----------
    name : str
        Name in tables and pictures.
    module : str
        Module that calls `benchmarks.contestants._serve.compete`.
    arguments : dict
        Arguments of the module's ``make``.
    processes : int
        Number of its processes that the harness controls. Programs that fork have one.
    threads : int
        Maximum number of threads of OpenMP and BLAS in each process.
    needs : tuple of str
        Packages that it requires.
    mpi : bool
        Whether ``mpiexec`` starts it.
    peer : bool
        Whether it is another framework. If a peer cannot take part, the figure is measured without it, with a gap.
    environment : dict
        Additional environment variables.
    hosts : Hosts, optional
        Hosts on which it runs, with equally many processes on each, and with `mpi` at least one.
    """

    name: str
    module: str
    arguments: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    threads: int = 1
    needs: tuple[str, ...] = ()
    mpi: bool = False
    peer: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    hosts: Hosts | None = None

    def commands(self, command: list[str]) -> list[list[str]]:
        """Return the commands to start, which run `command` in each of its processes."""
        if self.hosts is None:
            mpiexec = [str(find_mpiexec()), "-n", str(self.processes)]
            return [[*mpiexec, *command]] if self.mpi else [command] * self.processes
        names = self.hosts.names
        if self.mpi:
            return [[*self.hosts.launch(max(1, self.processes // len(names))), *command]]
        where = [names[rank * len(names) // self.processes] for rank in range(self.processes)]
        return [[*DIES_WITH_US, *self.hosts.enter(name), *command] for name in where]


class Running:
    """Processes of a contestant, which the constructor starts, and the connections to them.

    Parameters
    ----------
    contestant : Contestant
    seconds : float
        Time limit until it is ready.

    Attributes
    ----------
    facts : dict
        Facts that the contestant's first process reports about it.

    Raises
    ------
    ContestantFailed
        If it does not start within the time limit.
    """

    def __init__(self, contestant: Contestant, seconds: float) -> None:
        self.contestant = contestant
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `stop`
        self._connections: list[socket.socket] = []
        self._streams: list[Any] = []
        address = str(Path(self._directory.name) / "socket")
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                self._start(address)
                self.facts: dict[str, Any] = self._accept(listener, seconds)[0]
        except BaseException:
            self.stop()
            raise

    def _start(self, address: str) -> None:
        one = self.contestant
        program = [sys.executable, "-m", one.module, address, json.dumps(one.arguments)]
        for rank, command in enumerate(one.commands(program)):
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(rank),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # A process group, not a session: the kernel gives each session an equal share of a busy machine, so
                # contestants of several processes would get more than those that fork.
                preexec_fn=os.setpgrp,
            )
            self._processes.append(process)

    def _environment(self, rank: int) -> dict[str, str]:
        one = self.contestant
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(one.threads)
        rendezvous = f"file://{self._directory.name}/rendezvous"
        environment.update(RANK=str(rank), WORLD_SIZE=str(one.processes), RENDEZVOUS=rendezvous)
        if one.hosts is not None:
            environment.update(ENVIRONMENT, GLOO_SOCKET_IFNAME="eth0")
        environment.update(one.environment)
        # The benchmarks have their own compile cache, because the time to read a cache grows with its size.
        flags = (
            os.environ.get("THEANO_FLAGS"),
            f"base_compiledir={sys.prefix}/theano",
            one.environment.get("THEANO_FLAGS"),
        )
        environment["THEANO_FLAGS"] = ",".join(filter(None, flags))
        return environment

    def _accept(self, listener: socket.socket, seconds: float) -> list[dict[str, Any]]:
        facts: list[dict[str, Any]] = []
        listener.settimeout(0.2)
        deadline = time.monotonic() + seconds
        while len(self._connections) < self.contestant.processes:
            try:
                connection, _ = listener.accept()
            except socket.timeout:
                if any(process.poll() is not None for process in self._processes) or time.monotonic() > deadline:
                    raise self._failed("did not start") from None
            else:
                self._connections.append(connection)
                self._streams.append(connection.makefile("rw"))
                facts.append(self._answer(-1, "facts", seconds))
        return facts

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to each process."""
        for stream in self._streams:
            try:
                print(json.dumps(message), file=stream, flush=True)
            except OSError:
                raise self._failed("ended") from None

    def wait(self, key: str, seconds: float) -> list[Any]:
        """Wait for an answer of each process, and return the values under `key`.

        Raises
        ------
        ContestantFailed
            If a process fails, ends, or does not answer in time.
        """
        return [self._answer(i, key, seconds) for i in range(len(self._streams))]

    def _answer(self, i: int, key: str, seconds: float) -> Any:
        self._connections[i].settimeout(seconds)
        try:
            line = self._streams[i].readline()
        except socket.timeout:
            raise self._failed(f"did not answer within {seconds:.0f} s") from None
        except OSError:
            line = ""
        answer = json.loads(line or "{}")
        if key not in answer:
            raise self._failed(answer.get("error", "ended"))
        return answer[key]

    def _failed(self, why: str) -> ContestantFailed:
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace")[-3000:]
        return ContestantFailed(f"{self.contestant.name}: {why}\n{printed}")

    def stop(self) -> None:
        """Disconnect, so that the processes end; kill those that do not end."""
        for stream, connection in zip(self._streams, self._connections):
            stream.close()
            connection.close()
        for process in self._processes:
            try:
                process.wait(10 if self._streams else 0.1)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._log.close()
        self._directory.cleanup()
