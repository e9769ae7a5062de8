"""The start of a job: if one process never calls `fork`, the job ends by itself, and the message names the node."""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from backend import theano_only
from mpi_jobs import needs_mpi, run_processes
from namespace_hosts import MPIEXEC

import synkhronos as synk
from synkhronos._cli.mpirun import Supervisor
from synkhronos._utils.rendezvous import ENDED, WAITS, Report

pytestmark = [needs_mpi, theano_only("the start of a job, which does not depend on the backend")]

#: Runs a program that must end within a minute, also where a node never comes. What is tested begins with the import.
run = functools.partial(run_processes, timeout=60, fresh=True)

#: A program in which the processes `ranks` execute `action` before `fork`.
PROGRAM = """
    import os, signal, sys, time, warnings
    warnings.simplefilter("ignore")
    rank = int(os.environ.get("PMI_RANK", 0))
    {before}
    import synkhronos as synk
    if rank in {ranks}:
        {action}
    try:
        synk.fork(1, use_gpu=False, start_timeout={limit})
    except synk.NodeLost as error:
        print("NodeLost", error.machine, error, flush=True)
        {caught}
    print("forked", flush=True)
"""

RESTART = "; start the program again\n"


def write(action="pass", ranks=(1,), limit=None, caught="sys.exit(7)", before=""):
    return textwrap.dedent(PROGRAM).format(action=action, ranks=ranks, limit=limit, caught=caught, before=before)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise FileNotFoundError('data.npy')", ": FileNotFoundError: data.npy"),
        ("raise ValueError('two\\nlines, and ä' + 'x' * 9000)", ": ValueError: two lines, and äxxxxxxxxxx"),
        ("sys.exit(0)", ""),
        ("sys.exit('a reason')", ""),
        ("time.sleep(2); sys.exit(3)", ""),
        ("synk.fork, sys.modules.update(mpi4py=None)", ": DeviceError: this is one of 2 processes"),
        ("from mpi4py import MPI; raise OSError('after MPI_Init')", ": OSError: after MPI_Init"),
    ],
    ids=["error", "long", "exit", "text", "late", "mpi4py", "initialized"],
)  # fmt: skip
def test_a_node_that_ends_before_fork_is_reported(action, reason):
    before = "from mpi4py import MPI" if "MPI;" in action else ""
    code, out, err = run(write(action, before=before))
    text = f"NodeLost 1 node 1 ({socket.gethostname()}) ended without calling fork(){reason}"
    assert text in out, out + err
    assert "forked" not in out
    assert code != 0


@pytest.mark.parametrize("n", [2, 3])
def test_another_node_reports_that_node_0_has_ended(n):
    code, out, err = run(write("raise KeyError('x')", ranks=(0,)), n=n)
    text = f"synkhronos.fork: node 0 ({socket.gethostname()}) ended without calling fork(): KeyError: 'x'{RESTART}"
    assert 1 <= err.count(text) < n, err  # two nodes that call `fork` at the same time both report it
    assert (code, out) == (1, "")


def test_an_error_that_is_not_caught_is_one_line():
    code, _, err = run(write("sys.exit(0)", caught="raise"))
    assert err == f"synkhronos.fork: node 1 ({socket.gethostname()}) ended without calling fork(){RESTART}"
    assert code == 1


def test_a_script_that_catches_the_error_continues_alone():
    code, out, _ = run(write("sys.exit(0)", caught="pass"))
    assert code == 0
    assert out.startswith("NodeLost 1 ") and out.endswith(f"{RESTART}forked\n")


@pytest.mark.parametrize("before", ["", "from mpi4py import MPI", "__import__('atexit').register(sys.stdout.close)"])
@pytest.mark.parametrize("code", [0, 3])
def test_programs_that_never_fork_are_not_affected(code, before):
    program = write(f"time.sleep(rank); sys.exit({code})", ranks=(0, 1, 2), before=before)
    assert run(program, n=3) == (code, "", "")


def test_programs_of_which_one_process_imports_the_package_are_not_affected():
    program = "import os, time\nif os.environ['PMI_RANK'] == '1': import synkhronos\ntime.sleep(0.5); print('x')"
    assert run(program) == (0, "x\nx\n", "")
    program = "import os, time, synkhronos\nif os.environ['PMI_RANK'] == '1': os._exit(0)\ntime.sleep(0.5); print('x')"
    assert run(program) == (0, "x\n", "")


def test_children_of_a_process_of_the_job_report_nothing():
    child = "import synkhronos, sys; sys.exit(5)"
    action = f"import subprocess as s; assert s.run([sys.executable, '-c', {child!r}]).returncode == 5"
    action += "; os.fork() or sys.exit(0); os.wait(); time.sleep(1)"
    code, out, err = run(write(action))
    assert (code, out) == (0, "forked\n"), err


@pytest.mark.parametrize("how", ["a shell script", "os.system"])
def test_programs_that_run_before_the_one_that_forks_report_nothing(how):
    check, program = f"{sys.executable} -c 'import synkhronos'", write()
    if how == "os.system":  # its child inherits all descriptors
        command = [sys.executable, "-c", f"import os\nassert os.system({check!r}) == 0\n{program}"]
    else:
        command = ["sh", "-c", f'{check} && "$0" -c "$1"', sys.executable, program]
    done = subprocess.run([MPIEXEC, "-n", "2", *command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "forked\n"), done.stderr


@pytest.mark.parametrize("ranks", [(1,), (0,), (1, 2)])
def test_nodes_that_never_call_fork_are_reported_after_start_timeout(ranks):
    code, out, err = run(write("time.sleep(1000)", ranks, limit=2), n=1 + len(ranks))
    names = " and ".join(f"node {rank} of {1 + len(ranks)}" for rank in ranks)
    text = f"{names} did not call fork() within start_timeout=2 seconds{RESTART}"
    assert (text in err) if 0 in ranks else out.startswith(f"NodeLost 1 {text}"), out + err
    assert "forked" not in out
    assert code != 0


def test_a_launcher_that_is_frozen_for_three_seconds_continues(tmp_path):
    come = str(tmp_path / "come")
    action = f"synk.fork; os.write(1, b'waits\\n')\n    while rank and not os.path.exists({come!r}): time.sleep(0.01)"
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", write(action, ranks=(0, 1))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert [job.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
            job.send_signal(signal.SIGSTOP)
            time.sleep(3)
            job.send_signal(signal.SIGCONT)
            (tmp_path / "come").touch()
            out, err = job.communicate(timeout=60)
        finally:
            job.kill()
    assert (job.returncode, out) == (0, "forked\n"), err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_that_hangs_within_mpi_is_ended(rank):
    action = "import synkhronos._multinode.launch as launch; launch._initialize = lambda *_: time.sleep(1000)"
    code, out, err = run(write(action, ranks=(rank,), limit=1))
    host = socket.gethostname()
    assert f"start_timeout=1 seconds: MPI has not connected node 0 ({host}) with node 1 ({host}); see" in err
    assert (code, "forked" in out) == (1, False)


def test_a_node_that_does_not_start_its_ranks_is_reported():
    action = "import synkhronos._multinode.node_leader as leader; leader.start_ranks = lambda *_: time.sleep(1000)"
    code, out, err = run(write(action, limit=2, caught="synk.fork(1)"))
    assert f"node 1 ({socket.gethostname()}) did not start ranks within start_timeout=2 seconds{RESTART}" in out
    assert "SessionError: a node is lost, or did not answer when the last session was closed; start the program" in err
    assert code == 1


@pytest.mark.parametrize("value", [0, -1, "10", True])
def test_an_invalid_start_timeout_is_refused(value):
    with pytest.raises(ValueError, match=r"start_timeout is .*; expected a positive number of seconds, or None"):
        synk.fork(1, start_timeout=value)


@pytest.fixture
def script(tmp_path):
    """Return the path of a program's file, in its own folder."""
    (tmp_path / "script").mkdir()
    return tmp_path / "script" / "script.py"


@pytest.fixture
def launch(hosts, script):
    """Return a function that runs a program on two hosts by `synkhronos run`: it returns stdout, stderr, exit code."""

    def launched(program):
        script.write_text(program)
        command = (sys.executable, "-m", "synkhronos", "run", "--hosts", "hosta,hostb", str(script))
        job = hosts.begin("hosta", *command)
        return (*job.communicate(timeout=60), job.returncode)

    return launched


@pytest.mark.parametrize("action", ["os._exit(0)", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_launcher_names_a_node_that_ends_without_a_report(launch, action):
    out, err, code = launch(write(action))
    assert "forked" not in out
    assert code != 0
    assert err.endswith("synkhronos run: node 1 (hostb) ended without calling fork()\n"), out + err


@pytest.mark.parametrize("missing", ["script", "package"])
def test_the_launcher_names_a_node_on_which_something_is_missing(hosts, script, launch, missing):
    place = script.parent if missing == "script" else os.path.dirname(synk.__file__)
    hosts.inside("hostb", "mount", "-t", "tmpfs", "none", place)
    if missing == "package":  # the package may also be installed in another folder
        hosts.inside("hostb", "sh", "-c", f"echo 'raise ImportError(\"No package\")' > {place}/__init__.py")
    try:
        out, err, code = launch(write())
    finally:
        hosts.inside("hostb", "umount", place)
    assert "No such file or directory" in err if missing == "script" else "No package" in err
    assert "NodeLost 1 node 1 (hostb) ended without calling fork()" in out, out + err
    assert err.endswith("synkhronos run: node 1 (hostb) ended without calling fork()\n"), err
    assert code != 0


def test_the_error_names_the_host_of_a_node_that_never_calls_fork(launch):
    out, err, code = launch(write("time.sleep(1000)", limit=2))
    text = f"NodeLost 1 node 1 (hostb) did not call fork() within start_timeout=2 seconds{RESTART}"
    assert out.startswith(text), out + err
    assert code != 0


@pytest.mark.parametrize("by", ["run", "mpiexec"])
def test_the_exit_code_is_that_of_a_script_that_ends_at_once(hosts, launch, by):
    source = "import os, synkhronos as synk\nsynk.fork(1, use_gpu=False)\nprint('forked', flush=True)\nos._exit(5)"
    if by == "run":
        out, err, code = launch(source)
        end = "run: the process on node 0 (hosta) died, or was killed, and the job ended with it\n"
    else:
        job = hosts.start(sys.executable, "-c", source)
        (out, err), code, end = job.communicate(timeout=60), job.returncode, ""
    assert (code, out) == (5, "forked\n"), out + err
    assert err.endswith(end)


def test_host_names_that_do_not_resolve_are_reported():
    command = [sys.executable, "-m", "synkhronos", "run", "--hosts", "nosuch.invalid,localhost,nor.invalid", "x.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    text = "--hosts: no address found for nosuch.invalid, nor.invalid; check the spelling, DNS and /etc/hosts"
    assert (done.returncode, done.stderr) == (2, f"python -m synkhronos run: {text}\n")


@pytest.mark.parametrize(
    "report", [Report(WAITS, "a"), Report(ENDED, "b.c", "Error: with = and  spaces, ä")], ids=["waits", "ended"]
)
def test_reports_are_single_words(report):
    word = report.encode()
    assert word.isascii() and not set(word) & set(" =\n")
    assert Report.decode(word) == report


def test_long_reports_are_truncated_and_other_words_are_not_reports():
    assert len(Report(ENDED, "a", "ä" * 5000).encode()) < 900
    assert Report.decode(Report(ENDED, "a", "ä" * 5000).encode()).reason == "ä" * 296
    assert all(Report.decode(word) is None for word in ("", "a", "abc", "%", "YQ"))


def test_the_supervisor_ignores_processes_of_other_jobs():
    supervisor = Supervisor()
    supervisor.start()
    *_, address = supervisor.command("python", [])
    host, port, secret = address.split(":")

    def connect(greeting):
        connection = socket.create_connection((host, int(port)), 5)
        connection.sendall(greeting)
        return connection

    for greeting in (
        b"wrong 1 b\n",
        b"\n",
        b"x" * 20_000,
        f"{secret}\n".encode(),
        f"{secret} 1 b\nlook -1 x\n".encode(),
    ):
        with connect(greeting) as stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with connect(f"{secret} 0 a\nlook 1\nlook 7\nlook x\n".encode()) as process, process.makefile() as lines:
        said = [lines.readline() for _ in range(3)]
        assert Report.decode(said[0].strip()) == Report(ENDED, "b")
        assert said[1:] == ["\n", "\n"]
    supervisor.close()
    assert supervisor.loss == "node 1 (b) ended without calling fork()"


def test_a_supervisor_that_has_stopped_listening_can_be_closed():
    supervisor = Supervisor()
    supervisor.start()
    supervisor._listening.shutdown(socket.SHUT_RDWR)  # `accept` fails, as it does when no more files can be opened
    supervisor._thread.join(30)
    assert not supervisor._thread.is_alive()
    supervisor.close()
    assert not supervisor.loss
