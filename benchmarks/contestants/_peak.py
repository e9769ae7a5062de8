"""Watch the memory of some processes: ``python -m benchmarks.contestants._peak PID …`` until its input ends.

Prints a line when it is ready, and at the end the highest total seen, in bytes. The processes are stopped while they
are measured: a page that one of them maps in between would count twice.
"""

import select
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import psutil


def total_memory(processes):
    """Give the bytes that processes take together; pages that they share count once."""
    return sum(process.memory_full_info().pss for process in processes)


@contextmanager
def watched(processes):
    """Have a process watch these meanwhile; gives a list to which the highest total is appended at the end."""
    command = [sys.executable, "-m", __name__, *(str(process.pid) for process in processes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        watcher.stdout.readline()
        peaks = []
        yield peaks
        watcher.stdin.close()
        peaks.append(int(watcher.stdout.readline()))


def watch(pids):
    """Measure again and again, with 2 ms in between for the processes to go on."""
    processes, peak, ready = [psutil.Process(pid) for pid in pids], 0, False
    while not (ready and select.select([sys.stdin], [], [], 0.002)[0]):
        with ExitStack() as stack:
            for process in processes:
                process.send_signal(signal.SIGSTOP)
                stack.callback(process.send_signal, signal.SIGCONT)
            peak = max(peak, total_memory(processes))
        if not ready:
            ready = True
            print("ready", flush=True)
    print(peak)


if __name__ == "__main__":
    watch([int(pid) for pid in sys.argv[1:]])
