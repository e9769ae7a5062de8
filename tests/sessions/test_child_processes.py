"""Processes that the user's program forks during a session."""

import multiprocessing
import subprocess
import sys
import warnings

import numpy as np
import pytest
from process_state import is_running, worker_pids
from scripts import run_script
from summing_function import built, summing

import synkhronos as synk

CONTEXT = multiprocessing.get_context("fork")


class TestChildren:
    @pytest.fixture(autouse=True)
    def three_ranks(self, no_session):
        synk.fork(3)
        assert summing()(np.ones(6)) == 6
        self.pids = worker_pids()
        yield
        assert [pid for pid in self.pids if is_running(pid)] == self.pids
        assert summing()(np.ones(6)) == 6

    @staticmethod
    def misuse():
        """Try to command the ranks, and return the messages of the errors."""
        errors = []
        for call in (lambda: summing()(np.ones(3)), lambda: synk.broadcast(built["w"]), synk.distribute):
            try:
                call()
            except synk.SessionError as error:
                errors.append(str(error))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            synk.close()
        return errors

    def test_a_process_of_multiprocessing(self):
        with CONTEXT.Pool(2) as pool:
            for errors in pool.map(_misuse, range(2)):
                assert len(errors) == 3
                assert all("forked from the controller" in error for error in errors)
        process = CONTEXT.Process(target=sys.exit, args=(0,))
        process.start()
        process.join()
        assert process.exitcode == 0

    @pytest.mark.parametrize("plan", ["rows", "controller"])
    def test_a_fork_while_another_thread_is_in_a_call(self, plan):
        """The thread holds the session's lock, but does not exist in the child."""
        out, _ = run_script(
            f"""
            import os, threading
            synk.fork(2)
            x = T.dmatrix("x")
            f = synk.function([x], T.exp(x).sum(), exact=True, plan="{plan}")
            rows = np.ones((300, 100))
            f(rows), f(rows)
            ended, in_calls = threading.Event(), threading.Event()

            def run():
                while not ended.is_set():
                    f(rows)
                    in_calls.set()

            thread = threading.Thread(target=run)
            thread.start()
            in_calls.wait()
            for _ in range(10):
                pid = os.fork()
                if not pid:
                    n_refused = 0
                    for call in (lambda: f(rows), synk.distribute, lambda: synk.function([x], x.sum())(rows)):
                        try:
                            call()
                        except synk.SessionError as error:
                            n_refused += "forked from the controller" in str(error)
                    os._exit(n_refused)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
            ended.set()
            thread.join()
            print(np.isclose(f(rows), np.exp(rows).sum()))
            """
        )
        assert out.split() == ["True"]

    @pytest.mark.parametrize("ending", ["os._exit", "sys.exit"])
    def test_os_fork(self, ending):
        out, _ = run_script(
            f"""
            synk.fork(3)
            x = T.dvector("x")
            f = synk.function([x], (x.sum(), "sum"))
            f(np.ones(3))
            pid = os.fork()
            if pid == 0:
                try:
                    f(np.ones(3))
                except synk.SessionError:
                    {ending}(0)
                os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
            print(f(np.ones(3)), f(np.ones(3)))
            """
        )
        assert out == "3.0 3.0\n"

    @pytest.mark.parametrize("daemon", [False, True])
    def test_a_child_has_a_session_of_its_own(self, daemon):
        queue = CONTEXT.SimpleQueue()
        process = CONTEXT.Process(target=_own_session, args=(queue,), daemon=daemon)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert queue.get() == (2, 9.0)

    def test_subprocess_inherits_no_memory(self):
        listing = "import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')])"
        command = [sys.executable, "-c", listing]
        assert b"synkhronos" not in subprocess.run(command, capture_output=True, check=True, close_fds=False).stdout

    def test_a_controller_that_reaps_all_its_children(self):
        """The death of a worker is detected although the user's program has waited for its exit status."""
        out, _ = run_script(
            """
            synk.fork(2)
            x = T.dvector("x")
            f = synk.function([x], (x.sum(), "sum"))
            f(np.ones(3))
            (pid,) = worker_pids()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
            try:
                f(np.ones(3))
            except synk.WorkerDied as error:
                print(error.rank, error.pid == pid)
            synk.close()
            """
        )
        assert out == "1 True\n"


def _misuse(_):
    return TestChildren.misuse()


def _own_session(queue):
    n_ranks = synk.fork(2)
    queue.put((n_ranks, float(summing()(np.full(3, 3.0)))))
    synk.close()
