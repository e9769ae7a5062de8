"""Exchange of pieces between leaders, with a simulated MPI: values, failures at any step, and memory.

Each leader is a thread. The simulated MPI delivers messages in random order, and a send completes only when its
receiver has posted a receive, so that waits in a circle never end.
"""

import ctypes
import random
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from synkhronos._collectives.buckets import way_of
from synkhronos._collectives.pipeline import Pieces, Plan
from synkhronos._native import native
from synkhronos._processes import Deadline
from synkhronos.errors import CollectiveAborted

_SECONDS = 30  # for one exchange
BYTE = 7  # a datatype


class SimulatedMpi:
    """MPI between threads. The communicator of a leader is its number plus 1.

    Parameters
    ----------
    handle_bytes : int
        Size of handles: 4 (MPICH) or 8 (Open MPI).
    seed : int
    """

    def __init__(self, handle_bytes, seed):
        self.handle_bytes = handle_bytes
        self.chance = random.Random(seed)
        self.lock = threading.Lock()
        self.sent = defaultdict(deque)  # (source, destination, tag): data and request of each message
        self.posted = defaultdict(deque)  # the same: address, size and request of each receive
        self.counts = {}  # of the requests that are complete: bytes
        self.callers = {}  # leader: thread that is in MPI
        self.n_clashes = 0  # calls while another thread of the leader was in MPI
        self.requests = {}  # of each request: leader
        self.n_requests = 0
        self.n_delivered = defaultdict(int)  # the same
        self.most = {}  # the same: how many messages are delivered
        self.most_pending = 0  # largest number of bytes from one leader to another that were sent and not delivered
        handle = ctypes.c_int if handle_bytes == 4 else ctypes.c_void_p
        self.handle = ctypes.POINTER(handle)
        number, pointer = ctypes.c_int, ctypes.c_void_p
        message = [number, pointer, number, handle, number, number, handle, self.handle]
        self.functions = (
            ctypes.CFUNCTYPE(*message)(self.isend),
            ctypes.CFUNCTYPE(*message)(self.irecv),
            ctypes.CFUNCTYPE(number, self.handle, ctypes.POINTER(number), ctypes.POINTER(number))(self.test),
            ctypes.CFUNCTYPE(number, ctypes.POINTER(number), handle, ctypes.POINTER(number))(self.get_count),
        )

    def exchange(self, leader):
        """Return the exchange of a leader."""
        addresses = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in self.functions)
        return native.Exchange(self.handle_bytes, leader + 1, BYTE, addresses)

    def enter(self, leader):
        """Count whether another thread of a leader is in MPI; return a context for the call."""
        mpi, own = self, threading.get_ident()

        class Call:
            def __enter__(self):
                with mpi.lock:
                    mpi.n_clashes += mpi.callers.setdefault(leader, own) != own
                time.sleep(0)  # so that another thread may call

            def __exit__(self, *_):
                mpi.callers.pop(leader, None)

        return Call()

    def new_request(self, place, leader):
        self.n_requests += 1
        place[0] = self.n_requests
        self.requests[self.n_requests] = leader
        return self.n_requests

    def isend(self, data, count, kind, destination, tag, communicator, request):
        assert kind == BYTE
        leader = communicator - 1
        with self.enter(leader), self.lock:
            key = leader, destination, tag
            self.sent[key].append((ctypes.string_at(data, count), self.new_request(request, leader)))
            pending = (one for where, queue in self.sent.items() if where[:2] == key[:2] for one in queue)
            self.most_pending = max(self.most_pending, sum(len(content) for content, _ in pending))
        return 0

    def irecv(self, data, count, kind, source, tag, communicator, request):
        assert kind == BYTE
        leader = communicator - 1
        with self.enter(leader), self.lock:
            self.posted[source, leader, tag].append((data, count, self.new_request(request, leader)))
        return 0

    def deliver(self):
        """Deliver the first messages of some of the queues."""
        with self.lock:
            for key, messages in self.sent.items():
                is_held = self.n_delivered[key] >= self.most.get(key, np.inf)
                if messages and self.posted[key] and not is_held and self.chance.random() < 0.5:
                    self.n_delivered[key] += 1
                    (content, sent), (place, size, received) = messages.popleft(), self.posted[key].popleft()
                    assert len(content) <= size
                    ctypes.memmove(place, content, len(content))
                    self.counts[sent] = self.counts[received] = len(content)

    def test(self, request, is_done, status):
        with self.enter(self.requests[request[0]]), self.lock:
            count = self.counts.pop(request[0], None)
        is_done[0] = count is not None
        if count is not None:
            request[0], status[0] = 0, count
        return 0

    def get_count(self, status, kind, count):
        assert kind == BYTE
        count[0] = status[0]
        return 0


class Leader:
    """The part of `LeaderComm` that the exchange of pieces uses."""

    def __init__(self, mpi, node):
        self.node = node
        self.exchange = mpi.exchange(node)

    def reserve_tags(self, n):
        return 0

    def begin_piece(self, number, sends, receives, reduction, narrowing, has_failed):
        return self.exchange.begin(
            4 * number, sends[0], receives[0], sends[1], receives[1], reduction, narrowing, has_failed
        )

    def complete(self, is_done, check, is_leaving):
        while not is_done():
            check()
            time.sleep(0)


class Stuck(Exception):
    pass


def run(n, plans, contributions, *, failing=None, handle_bytes=4, seed=0, short="", polling=False):
    """Exchange pieces between ``n`` leaders; return the results of each, or the error, or "failed".

    Parameters
    ----------
    plans : list of Plan
    contributions : list of list of array
        Of each leader, for each piece.
    failing : dict of int to int
        Leaders that fail, and the number of pieces that each begins before.
    """
    mpi, failing = SimulatedMpi(handle_bytes, seed), failing or {}
    end = time.monotonic() + _SECONDS
    results = [None] * n
    has_ended = threading.Event()

    def check():
        if time.monotonic() > end or has_ended.is_set():
            raise Stuck

    def lead(node):
        comm, chance = Leader(mpi, node), random.Random(seed * 100 + node)
        pieces = Pieces(comm, plans, Deadline(None), check, short)
        outs = []
        try:
            for k, (plan, given) in enumerate(zip(plans, contributions[node])):
                if failing.get(node) == k:
                    comm.exchange.rest()
                    pieces.fill_in()
                    results[node] = "failed"
                    return
                outs.append(np.empty(plan.length, plan.how.returned))
                pieces.begin(given, outs[-1], lambda what, size, dtype: np.empty(size, dtype))
                if polling:
                    comm.exchange.poll()
                for _ in range(chance.randrange(4)):
                    pieces._advance()
                    comm.exchange.pause()
                    with mpi.enter(node):  # a call of MPI by this thread
                        time.sleep(0)
                    comm.exchange.resume()
            if failing.get(node) == len(plans):
                pieces.fill_in()
                results[node] = "failed"
                return
            pieces.finish(len(plans))
            results[node] = outs
        except (CollectiveAborted, Stuck) as error:
            results[node] = error
        finally:
            comm.exchange.rest()

    with ThreadPoolExecutor(n) as pool:
        leaders = [pool.submit(lead, node) for node in range(n)]
        while not all(one.done() for one in leaders):
            mpi.deliver()
            time.sleep(0)
            if time.monotonic() > end + 1:
                has_ended.set()
        for one in leaders:
            one.result()
    assert not mpi.n_clashes
    assert not any(isinstance(one, Stuck) for one in results), "leaders wait for ever"
    assert not any(mpi.sent.values()) and not any(mpi.posted.values())
    return results


def made(n, lengths, dtype="float32", seed=0):
    """Return plans of sums over ``n`` leaders, contributions, and expected results."""
    draw = np.random.RandomState(seed)
    way = way_of("sum", np.dtype(dtype), np.dtype(dtype), (1.0,) * n, (1,) * n)[0]
    given = [[draw.rand(length).astype(dtype) for length in lengths] for _ in range(n)]
    expected = []
    for k in range(len(lengths)):
        total = given[0][k].copy()
        for node in range(1, n):
            total += given[node][k]
        expected.append(total)
    return [Plan(way, length, np.dtype(dtype)) for length in lengths], given, expected


LENGTHS = [1, 300_000, 7, 70_000, 1_000_003, 40]


@pytest.mark.parametrize("polling", [False, True], ids=["called", "thread"])
@pytest.mark.parametrize("handle_bytes", [4, 8])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_sums_in_node_order(n, handle_bytes, polling):
    plans, given, expected = made(n, LENGTHS)
    results = run(n, plans, given, handle_bytes=handle_bytes, polling=polling)
    for outs in results:
        assert all(np.array_equal(*both) for both in zip(outs, expected))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_leaders_that_fail_at_any_piece(n):
    """All leaders end; each has either the right sums, or an error."""
    chance = random.Random(n)
    n_aborted = 0
    for seed in range(12):
        lengths = [chance.choice(LENGTHS) for _ in range(chance.randrange(1, 6))]
        failing = {chance.randrange(n): chance.randrange(len(lengths) + 1) for _ in range(chance.choice((1, 1, 2)))}
        plans, given, expected = made(n, lengths, seed=seed)
        results = run(n, plans, given, failing=failing, seed=seed, polling=seed % 2)
        for node, outs in enumerate(results):
            if node in failing:
                assert outs == "failed"
            elif isinstance(outs, CollectiveAborted):
                n_aborted += 1
            else:
                assert all(np.array_equal(*both) for both in zip(outs, expected))
    assert n_aborted


def test_a_full_window_does_not_keep_the_oldest_piece_from_going_on():
    """A leader waits with its second step, and fills its window with pieces that the other does not begin."""
    mpi = SimulatedMpi(4, 0)
    plans, given, expected = made(2, [400_000, 4_000_000])
    outs = [[np.empty(plan.length, "float32") for plan in plans] for _ in range(2)]
    pieces = [Pieces(Leader(mpi, node), plans, Deadline(None), list, "") for node in range(2)]

    def go_on(is_done):
        end = time.monotonic() + _SECONDS
        while not is_done():
            assert time.monotonic() < end
            mpi.deliver()
            for one in pieces:
                one._advance()

    mpi.most[1, 0, 0] = 400_000 // 2 * 4 // (128 << 10)  # leader 0 receives all chunks of the first step but the last
    for node, k in ((0, 0), (1, 0), (0, 1)):
        pieces[node].begin(given[node][k], outs[node][k], lambda what, size, dtype: np.empty(size, dtype))
    go_on(lambda: len(mpi.sent[0, 1, 4]) > 2)
    mpi.most.clear()
    go_on(lambda: [one._n_complete for one in pieces] == [1, 1])
    assert np.array_equal(outs[0][0], expected[0]) and np.array_equal(outs[1][0], expected[0])
    pieces[1].begin(given[1][1], outs[1][1], lambda what, size, dtype: np.empty(size, dtype))
    go_on(lambda: [one._n_complete for one in pieces] == [2, 2])
    assert np.array_equal(outs[0][1], expected[1]) and np.array_equal(outs[1][1], expected[1])


def test_mpi_has_few_bytes_at_a_time():
    """Otherwise acknowledgements and votes would wait behind them, and the windows of leaders would differ for long."""
    mpi = SimulatedMpi(4, 0)
    plans, given, expected = made(2, [4_000_000] * 2)
    outs = [[np.empty(plan.length, "float32") for plan in plans] for _ in range(2)]
    pieces = [Pieces(Leader(mpi, node), plans, Deadline(None), list, "") for node in range(2)]
    for node in range(2):
        for k in range(2):
            pieces[node].begin(given[node][k], outs[node][k], lambda what, size, dtype: np.empty(size, dtype))
    end = time.monotonic() + _SECONDS
    while [one._n_complete for one in pieces] != [2, 2]:
        assert time.monotonic() < end
        mpi.deliver()
        for one in pieces:
            one._advance()
    assert all(np.array_equal(outs[node][k], expected[k]) for node in range(2) for k in range(2))
    assert (1 << 19) < mpi.most_pending <= (1 << 20) + 3 * (128 << 10)  # one chunk of each step may come on top


def test_few_pieces_of_a_long_queue_are_in_transfer():
    mpi = SimulatedMpi(4, 0)
    plans, given, expected = made(2, [10_000] * 30)
    outs = [[np.empty(plan.length, "float32") for plan in plans] for _ in range(2)]
    pieces = [Pieces(Leader(mpi, node), plans, Deadline(None), list, "") for node in range(2)]
    for node, one in enumerate(pieces):
        for number in range(30):
            one.begin(given[node][number], outs[node][number], lambda what, size, dtype: np.empty(size, dtype))
    end, most = time.monotonic() + _SECONDS, 0
    while [one._advance() for one in pieces] != [30, 30]:
        assert time.monotonic() < end
        most = max(most, len({tag // 4 for (_, to, tag), receives in mpi.posted.items() if receives and not to}))
        mpi.deliver()
    assert most == 8
    for results in outs:
        assert all(np.array_equal(*both) for both in zip(results, expected))


@pytest.mark.parametrize("short", ["float16", "bfloat16"])
def test_sixteen_bits_on_the_wire(short):
    plans, given, expected = made(3, [1000, 300_000])
    results = run(3, plans, given, short=short)
    for outs in results:
        assert all(np.array_equal(a, b) for a, b in zip(outs, results[0]))
        assert all(np.allclose(a, b, rtol=2e-2) for a, b in zip(outs, expected))
