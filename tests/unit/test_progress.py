"""The progress bar: shown on terminals and in notebooks only, and removed at the end."""

import io
import re
import sys
import threading
import time
import types

import pytest
from deadline import wait_for

import synkhronos as synk
from synkhronos._utils import display as _progress
from synkhronos._utils.display import counted, progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(_progress, "DELAY", 0.01)
    monkeypatch.setattr(_progress, "_STEP", 0.01)


def write_to(monkeypatch, stream):
    """Replace standard error by a stream. Fixtures cannot do this: pytest replaces it again when the test starts."""
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def shown(text):
    """Return what a terminal shows of a text without line ends."""
    screen = []
    for part in text.split("\r"):
        screen[: len(part)] = part
    return "".join(screen).rstrip()


def test_long_work_is_shown_and_the_line_is_erased(quickly, monkeypatch):
    terminal = write_to(monkeypatch, Terminal())
    with progress("baking", 3) as work:
        wait_for(lambda: "| 0 of 3 [00:0" in terminal.getvalue(), "the bar")
        work.done += 1
        with progress("stirring"):
            wait_for(lambda: re.search(r"synkhronos: baking:  33%.*\| 1 of 3 ", shown(terminal.getvalue())), "the bar")
    assert shown(terminal.getvalue()) == ""
    assert "stirring" not in terminal.getvalue()


def test_short_work_is_not_shown(monkeypatch):
    terminal = write_to(monkeypatch, Terminal())
    with progress("baking"):
        pass
    assert terminal.getvalue() == ""


def test_an_exception_removes_the_bar(quickly, monkeypatch):
    terminal = write_to(monkeypatch, Terminal())
    with pytest.raises(ZeroDivisionError), progress("baking"):
        wait_for(terminal.getvalue, "the bar")
        1 / 0  # noqa: B018
    assert shown(terminal.getvalue()) == ""
    with progress("eating"):  # the next bar is shown
        wait_for(lambda: "eating" in terminal.getvalue(), "the bar")


@pytest.mark.parametrize("notebook", [False, True])
def test_notebooks_show_the_bar_and_logs_do_not(quickly, monkeypatch, notebook):
    stream = write_to(monkeypatch, io.StringIO())
    if notebook:
        shell = type("ZMQInteractiveShell", (), {})()
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    with progress("baking"):
        if notebook:
            wait_for(stream.getvalue, "the bar")
        else:
            time.sleep(0.1)  # long enough for a bar to appear
    assert ("baking" in stream.getvalue()) is notebook


def test_a_program_that_closed_its_terminal(quickly, monkeypatch):
    terminal = write_to(monkeypatch, Terminal())
    with progress("baking"):
        wait_for(terminal.getvalue, "the bar")
        terminal.close()
    with progress("baking"):
        pass
    write_to(monkeypatch, None)
    with progress("baking"):
        pass


def test_parts_are_shown_without_a_thread(quickly, monkeypatch):
    terminal = write_to(monkeypatch, Terminal())
    n_threads = threading.active_count()
    with pytest.raises(ZeroDivisionError), counted("starting workers", "abc") as parts:
        assert next(parts) == "a"
        time.sleep(0.02)
        assert next(parts) == "b"
        assert re.match(r"synkhronos: starting workers:  33%.*\| 1 of 3 ", shown(terminal.getvalue()))
        assert threading.active_count() == n_threads
        1 / 0  # noqa: B018
    assert shown(terminal.getvalue()) == ""
    stream = write_to(monkeypatch, io.StringIO())
    with counted("starting workers", "abc") as parts:
        for _ in parts:
            time.sleep(0.02)
    assert stream.getvalue() == ""


def test_fork_shows_its_workers(quickly, monkeypatch, synchronize):
    terminal = write_to(monkeypatch, Terminal())
    synchronize(2)
    synk.close()
    monkeypatch.setattr(_progress, "DELAY", 0.0)
    synk.fork(5, use_gpu=False)
    try:
        counts = re.findall(r"starting workers: .*?([0-4]) of 4", terminal.getvalue())
        assert counts[-1] == "4" and counts == sorted(counts)
        assert shown(terminal.getvalue()) == ""
    finally:
        synk.close()
