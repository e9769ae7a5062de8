"""``python -m synkhronos top``: its contents, without the participation of ranks."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import psutil
import pytest
from deadline import wait_for
from process_state import worker_pids
from scripts import ROOT, launch, start_script

import synkhronos as synk
from synkhronos._cli import top as _top
from synkhronos._cli.top import find_sessions, measure, program_of


def own_session():
    return [one for one in find_sessions() if one.pid == os.getpid()]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
def test_session_of_this_process_is_seen_with_its_ranks(synchronize, n_ranks):
    synchronize(n_ranks)
    (one,) = own_session()
    assert one.status.pids[0] == one.pid and sorted(one.status.pids[1:]) == worker_pids()
    wait_for(lambda: one.status.look() == ["Python", *["waits for a command"] * (n_ranks - 1)], "idle ranks")
    lines = measure([one], 0.05)
    assert [line[1] for line in lines] == ["0 controller", *map(str, range(1, n_ranks))]
    assert [line[4] for line in lines] == ["0 %", *["100 %"] * (n_ranks - 1)]
    assert all(float(line[5].split()[0].replace(",", "")) > 1 for line in lines)
    assert {line[6] for line in lines} == {program_of(psutil.Process().cmdline())} - {""}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "/home/user/train.py", "--lr", "1"], "train.py"),
        (["/usr/bin/python3.11", "-X", "dev", "-W", "error", "-m", "package.train", "7"], "package.train"),
        (["python", "-c", "print()"], "-c"),
        (["python", "-uc", "import os\nprint()", "x"], "-c"),
        (["python", "-um", "train"], "train"),
        (["/opt/bin/jupyter", "lab"], "jupyter"),
        (["python"], ""),
        ([], ""),
    ],
)
def test_program_is_named_by_its_script_or_module(command, name):
    assert program_of(command) == name


def test_closed_session_is_not_shown(synchronize):
    synchronize(2)
    (one,) = own_session()
    synk.close()
    assert [line[3:5] for line in measure([one], 0.02)][1] == ("ended", "-")
    del one  # it holds a descriptor of the mapping in this process, the controller
    assert own_session() == []


SCRIPT = """
    assert synk.fork(2, use_gpu=False) == 2
    x, fault = T.dvector("x"), theano.shared(0, "fault")
    f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    synk.set_value(1, fault, LONG_SLEEP)
    print("ready", flush=True)
    if sys.argv[1] == "call":
        f(np.zeros(4))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pass
"""


@pytest.mark.parametrize(
    ("what", "controller", "worker"),
    [("call", "waits for ranks +[0-9]+ %", "computes +0 %"), ("python", "Python +0 %", "waits for a command +100 %")],
)
def test_command_line_shows_a_session_whose_controller_is_busy(what, controller, worker, tmp_path):
    process = start_script(SCRIPT, what)
    try:
        assert process.stdout.readline() == "ready\n"

        def shown():
            done = launch("top", "--once", cache=tmp_path)
            assert (done.returncode, done.stderr) == (0, "")
            lines = [line for line in done.stdout.splitlines() if line.startswith(f"{process.pid} ")]
            return re.search(rf"0 controller +{process.pid} +{controller}", lines[0]) and re.search(worker, lines[1])

        wait_for(shown, "the table")
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_live_view_follows_a_session_until_ctrl_c():
    process = start_script(SCRIPT, "python")
    view, terminal = None, None
    try:
        assert process.stdout.readline() == "ready\n"
        terminal, its_end = pty.openpty()
        os.set_blocking(terminal, False)
        fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        command = [sys.executable, "-m", "synkhronos", "top"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        view = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, cwd=ROOT, env=environment)
        os.close(its_end)
        seen = []

        def tables():
            with contextlib.suppress(OSError):  # no output yet, or `top` has ended
                seen.append(os.read(terminal, 1 << 16).decode(errors="replace"))
            return len(re.findall(rf"{process.pid} .*1 .*waits for a command .*100 %", "".join(seen)))

        wait_for(lambda: tables() >= 2 or view.poll() is not None, lambda: f"a second table:\n{''.join(seen)}")
        assert view.poll() is None, "".join(seen)
        assert re.search("session.*rank.*pid.*doing.*waiting.*memory", "".join(seen))
        view.send_signal(signal.SIGINT)
        assert view.wait(30) == 0
        tables()
        assert "Traceback" not in "".join(seen)
        assert "\x1b[?25h" in "".join(seen)  # the cursor is shown again
    finally:
        for one in filter(None, (view, process)):
            one.kill()
            one.wait(30)
        process.communicate(timeout=30)
        if terminal is not None:
            os.close(terminal)


def test_live_view_ends_with_the_last_session(monkeypatch, capsys, synchronize):
    synchronize(2)
    looks = [own_session(), own_session(), []]
    monkeypatch.setattr(_top, "find_sessions", lambda: looks.pop(0))
    monkeypatch.setattr(_top, "program_of", lambda command: "a[/b].py")
    assert _top.top(once=False, seconds=0.01) == 0
    shown = capsys.readouterr().out
    assert "0 controller" in shown and "a[/b].py" in shown and looks == []


def test_without_a_session_it_prints_a_message(monkeypatch, capsys):
    monkeypatch.setattr(_top, "find_sessions", list)
    assert _top.top(once=True) == 1
    assert "no session of this user" in capsys.readouterr().err


def test_without_rich_the_exit_code_is_another_one(monkeypatch, capsys, synchronize):
    synchronize(1)
    monkeypatch.setattr(_top, "find_sessions", own_session)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert _top.top(once=False) == 3
    assert "pip install rich" in capsys.readouterr().err
