"""Sample the memory of processes until the standard input ends: ``python -m benchmarks.contestants._peak PID …``.

The script prints a line when it is ready, and the highest total in bytes at the end. It stops the processes while it
reads their memory, because a page that one of them maps meanwhile could count twice.
"""

import select
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import psutil


def total_memory(processes):
    """Return the bytes of memory that processes use together; shared pages count once."""
    return sum(process.memory_full_info().pss for process in processes)


@contextmanager
def watched(processes):
    """Sample the memory in another process during the block; yield a list that gets the highest total at its end."""
    command = [sys.executable, "-m", __name__, *(str(process.pid) for process in processes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        watcher.stdout.readline()
        peaks = []
        yield peaks
        watcher.stdin.close()
        peaks.append(int(watcher.stdout.readline()))


def watch(pids):
    """Sample the memory repeatedly, and let the processes run for 2 ms after each sample."""
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
