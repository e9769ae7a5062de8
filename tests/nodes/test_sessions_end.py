"""Sessions on two nodes that end early, or in unusual environments: the next one works, and all processes end."""

from mpi_jobs import HELPERS, needs_mpi, output_of

pytestmark = needs_mpi

PRELUDE = f"""
    import gc, os, signal, sys, threading, time
    import numpy as np
    sys.path.insert(0, {str(HELPERS)!r})
    from fault_ops import LONG_SLEEP, NOTHING, Fault
    from deadline import scaled, wait_for
    from process_state import worker_pids
    from backend import T, theano
    import synkhronos as synk

    class Alarm(Exception):
        pass

    def give_alarm(*_):
        raise Alarm

    def build():
        x, fault = T.dvector("x"), theano.shared(np.int64(NOTHING), "fault")
        return synk.function([x], (Fault()(x, fault).sum(), "sum"), name="f"), fault
"""


def run(source):
    """Run a program as if on two nodes, in new interpreters, and return what the script printed."""
    return output_of(PRELUDE, source, fresh=True)


def test_an_interrupted_call_while_a_worker_of_another_node_computes():
    """A leader that waits for a computing worker gets the message that the session ends."""
    out = run(
        """
        synk.fork(2, use_gpu=False)
        f, fault = build()
        f(np.ones(4))
        synk.set_value(3, fault, LONG_SLEEP)
        signal.signal(signal.SIGALRM, give_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        began = time.monotonic()
        try:
            f(np.ones(4))
        except Alarm:
            print("Alarm")
        synk.close()
        print(synk.fork(2, use_gpu=False), f(np.ones(4)), time.monotonic() - began < scaled(15))
        """
    )
    assert out == "Alarm\n4 4.0 True\n"


def test_a_leader_that_is_slow_while_sessions_begin_and_end():
    """While node 0 waits for a leader, it checks its own workers, even if they are not started yet or have ended."""
    out = run(
        """
        from synkhronos._multinode import leader_comm as line

        line._LOOK_SECONDS = 0.0  # as if every answer took long
        for each in (2, 1, 2):
            print(synk.fork(each, use_gpu=False), end=" ")
            f, _ = build()
            print(f(np.ones(4)), end=" ")
            synk.close()
        """
    )
    assert out == "4 4.0 2 4.0 4 4.0 "


def test_a_worker_of_another_node_that_does_not_stop_is_killed():
    out = run(
        """
        import psutil

        synk.fork(2, use_gpu=False)
        f, fault = build()
        f(np.ones(4))
        own = psutil.Process()
        (leader,) = [one for one in own.parent().children() if one.cmdline() == own.cmdline() and one != own]
        (victim,) = leader.children()
        victim.suspend()
        synk.close()
        print(synk.fork(2, use_gpu=False), f(np.ones(4)), victim.is_running())
        """
    )
    assert out == "4 4.0 False\n"


def test_a_handler_that_closes_the_session_at_any_instant():
    out = run(
        """
        x, w = T.dmatrix("x"), theano.shared(np.zeros((300, 300)), "w")
        n, X, came = synk.fork(1, use_gpu=False), np.ones((600, 10)), []
        f = synk.function([x], (x.sum(), "sum"), updates=[(w, w + synk.averaged(T.zeros((300, 300)) + x.mean()))])
        f(X)

        def close(*_):
            began = time.monotonic()
            synk.close()
            came.append(time.monotonic() - began)

        signal.signal(signal.SIGALRM, close)
        for i in range(25):
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.0011 * i)
            try:
                while True:
                    f(X)
            except synk.SessionError:
                pass
            assert len(came) == i + 1
            synk.fork(1, use_gpu=False)
        print(f(X) == X.sum(), max(came) < 4)
        """
    )
    assert out == "True True\n"


def test_an_interrupted_fork_leaves_no_ranks():
    out = run(
        """
        import psutil

        signal.signal(signal.SIGALRM, give_alarm)
        for i in range(12):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.01 * i)
                synk.fork(2, use_gpu=False)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                pass
            else:
                synk.close()
        synk.fork(2, use_gpu=False)
        f, fault = build()
        assert f(np.ones(4)) == 4
        synk.close()

        def launched():
            return [one for one in psutil.Process(os.getppid()).children(recursive=True) if one.status() != "zombie"]

        wait_for(lambda: len(launched()) == 2, lambda: f"the end of all but the script and the leader: {launched()}")
        print("fine")
        """
    )
    assert out == "fine\n"


def test_unusual_environments():
    out = run(
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if os.environ["PMI_RANK"] == "1":
            sys.stdout = None
        n = synk.fork(1, use_gpu=False)
        try:
            synk.fork(1, use_gpu=False)
        except synk.SessionError:
            print("refused", flush=True)
        f, fault = build()
        f(np.ones(4))
        child = os.fork()
        if not child:  # its session has one node
            print(synk.fork(1, use_gpu=False), flush=True)
            synk.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(n, f(np.ones(4)))
        """
    )
    assert out == "refused\n1\n2 4.0\n"


def test_fork_in_a_thread():
    out = run(
        """
        def work():
            n = synk.fork(1, use_gpu=False)
            f, fault = build()
            print(n, f(np.ones(4)), flush=True)
            synk.close()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print("end")
        """
    )
    assert out == "2 4.0\nend\n"


def test_memory_of_earlier_sessions_is_freed():
    out = run(
        """
        def shared():
            with open("/proc/meminfo") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("Shmem:"))

        x, before = T.dmatrix("x"), 0
        for i in range(4):
            synk.fork(1, use_gpu=False)
            f = synk.function([x], (x.sum(), "sum"))
            data = synk.data(np.ones((1000, 12_500)))  # 100 MB, of which the other node needs half
            assert f(data) == 12_500_000
            data.free_memory()
            del data
            synk.close()
            before = before or shared()
        print(shared() - before < 60_000)
        """
    )
    assert out == "True\n"


def test_new_workers_get_classes_that_were_defined_after_fork():
    out = run(
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        synk.fork(2, use_gpu=False, restart_workers=True)

        class Deadly(Fault):
            def perform(self, node, inputs, outputs):
                if inputs[0].min() < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                outputs[0][0] = 2 * inputs[0]

        x = T.dvector("x")
        f = synk.function([x], (Deadly()(x, 0).sum(), "sum"))
        assert f(np.ones(4)) == 8
        for rank in (3, 1):
            try:
                f(1.0 - 2 * np.eye(4)[rank])
            except synk.WorkerRestarted as error:
                print(error.ranks, f(np.ones(4)))
        """
    )
    assert out == "(3,) 8.0\n(1,) 8.0\n"
