"""The end of the controller: in all cases, workers end and no shared memory is left."""

import os
import signal

import pytest
from deadline import wait_for
from process_state import is_running, shared_memory_names, wait_for_end
from scripts import SESSION, python, read_pids, run_script, start_script

HOGGING = """
def main():
    synk.fork(3)
    x = T.dvector("x")
    f = synk.function([x], (Hog(os.getpid())(x).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    child = {child}
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, *{{*worker_pids()}} - {{child}}, flush=True)
    {before}
    f(np.ones(3))
    time.sleep(60)
"""

ENDINGS_IN_A_CALL = {
    "SIGKILL": "later(0.5, os.kill, os.getpid(), signal.SIGKILL)",
    "SIGTERM": "later(0.5, os.kill, os.getpid(), signal.SIGTERM)",
    "os._exit": "later(0.5, os._exit, 4)",
    "sys.exit": "signal.signal(signal.SIGALRM, lambda *some: sys.exit(3)); signal.setitimer(signal.ITIMER_REAL, 0.5)",
    "exception": "signal.signal(signal.SIGALRM, lambda *some: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.5)",
}


@pytest.mark.parametrize(
    ("ending", "thread", "child"),
    [
        *((ending, False, False) for ending in ENDINGS_IN_A_CALL),
        *((ending, True, False) for ending in ("SIGKILL", "os._exit")),
        ("SIGKILL", True, True),
    ],
)
def test_the_controller_ends_while_workers_compute(ending, thread, child):
    """Workers end, also if a thread forked them; a child process of the user does not end."""
    before = shared_memory_names(of_ended=True)
    call = "t = threading.Thread(target=main, daemon=True); t.start(); t.join()" if thread else "main()"
    process = start_script(HOGGING.format(before=ENDINGS_IN_A_CALL[ending], child="os.fork()" if child else -1) + call)
    other, *pids = read_pids(process, 3)
    try:
        process.wait(timeout=20)
        wait_for_end(pids)
        assert not child or is_running(other)
    finally:
        for pid in filter(is_running, [*pids, other] if child else pids):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    wait_for(lambda: shared_memory_names(of_ended=True) <= before, "the removal of names in /dev/shm")


KILLED_ANYWHERE = """
x = T.dvector("x")
mode = theano.Mode(linker="py", optimizer=None)
rng = np.random.RandomState(int(sys.argv[1]))
total = (x.sum(), "sum")

def live():
    while True:
        synk.fork(3)
        f = synk.function([x], total, mode=mode)
        data = [synk.data(np.ones(100 * 2**i)) for i in range(8)]
        synk.distribute()
        assert f(data[3]) == 800
        for each in data:
            each.set_length(2 * len(each))
        f(np.ones(30_000))
        del data
        synk.close()

def left(pids):  # names of other processes belong to tests that run at the same time
    own = re.compile(f"(sem.)?synkhronos-({'|'.join(map(str, pids))})-")
    return list(filter(own.match, os.listdir("/dev/shm")))

left_behind = 0
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        live()
    time.sleep(0.01 + 0.25 * rng.rand())
    family = psutil.Process(pid).children()
    os.setpgid(pid, pid) if not family else None
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for_end([one.pid for one in family])
    left_behind += len(left([pid, *(one.pid for one in family)]))
print(left_behind)
"""


@pytest.mark.slow
def test_nothing_is_left_after_the_process_group_is_killed_at_any_instant():
    out, _ = run_script(KILLED_ANYWHERE, 1, 50)
    assert out == "0\n"


ENDINGS = {
    "return": ("", 0),
    "exception": ("raise KeyError('the end')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "SIGTERM": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL": ("signal.raise_signal(signal.SIGKILL)", -signal.SIGKILL),
    "SIGSEGV": ("signal.raise_signal(signal.SIGSEGV)", -signal.SIGSEGV),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_controller_that_ends_without_close_leaves_nothing(ending):
    code, returncode = ENDINGS[ending]
    before = shared_memory_names(of_ended=True)
    process = start_script(SESSION + code)
    pids = read_pids(process)
    _, err = process.communicate(timeout=30)
    assert process.returncode == returncode
    wait_for_end(pids)
    wait_for(lambda: shared_memory_names(of_ended=True) <= before, "the removal of names in /dev/shm")
    if ending in ("return", "sys.exit", "os._exit"):
        assert err == ""
    if ending == "exception":
        assert err.count("Traceback") == 1
        assert "KeyError: 'the end'" in err


SHUTDOWNS = {
    "after a session": "synk.fork(2); at_exit = AtExit()",
    "without a session": "at_exit = AtExit()",
    "after an error class only": "synk.SessionError; at_exit = AtExit()",
    "in a cycle": "synk.fork(2); at_exit = AtExit(); at_exit.me = at_exit",
    "in atexit": "import atexit; atexit.register(lambda: synk.close()); synk.fork(2)",
    "in atexit, before the library's": "import atexit; synk.fork(2); atexit.register(lambda: synk.close())",
}


@pytest.mark.parametrize("how", SHUTDOWNS)
def test_closing_while_python_shuts_down_prints_nothing(how):
    """`close` does not need names that are imported on first use, because Python cannot import them at that time."""
    assert python(
        f"""
        import synkhronos as synk
        class AtExit:
            def __del__(self):
                synk.close()
        {SHUTDOWNS[how]}
        """
    ) == ("", "")


def test_other_calls_while_python_shuts_down_raise_session_errors():
    _, err = python(
        """
        import synkhronos as synk
        class AtExit:
            def __del__(self):
                for call in (synk.distribute, synk.memory, synk.fork, lambda: synk.get_value(0, None)):
                    try:
                        call()
                    except synk.SessionError:
                        pass
        synk.fork(2)
        at_exit = AtExit()
        """
    )
    assert err == ""
