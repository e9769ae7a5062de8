"""What surrounds a program is not always as it should be: closed streams, refused system calls, low limits."""

import time

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import run_script, worker_pids

import synkhronos as synk

# ---------------------------------------------------------------- exceptions that cannot be shown


class Unspeakable(Exception):
    """An exception whose message is a fault of its own."""

    def __str__(self):
        raise RuntimeError("no message either")


class Speechless(theano.Op):
    """Raises an `Unspeakable` on the ranks whose second input is not 0."""

    __props__ = ()

    def make_node(self, x, fault):
        return theano.Apply(self, [x, T.as_tensor_variable(fault)], [x.type()])

    def perform(self, node, inputs, outputs):
        if inputs[1]:
            raise Unspeakable
        outputs[0][0] = inputs[0].copy()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_whose_message_fails_is_told_by_its_class(synchronize, rank):
    synchronize(3)
    x, fault = T.dvector("x"), theano.shared(np.int64(0), "fault")
    f = synk.function([x], (Speechless()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
    synk.distribute()
    pids = worker_pids()
    synk.set_value(rank, fault, 1)
    with pytest.raises(synk.WorkerError, match=rf"rank {rank} .*(Unspeakable|no message either)") as caught:
        f(np.ones(6))
    assert caught.value.rank == rank
    synk.broadcast(fault, 0)
    assert f(np.ones(6)) == 6
    assert worker_pids() == pids


class Unpicklable(theano.Op):
    """Cannot be pickled, and cannot be told why."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0].copy()

    def __getstate__(self):
        raise Unspeakable


def test_a_function_whose_pickling_fails_without_a_message(no_session):
    synk.fork(2)
    x = T.dvector("x")
    f = synk.function([x], Unpicklable()(x).sum(), mode="FAST_COMPILE")
    with pytest.raises(TypeError, match=r"cannot be pickled.*Unspeakable"):
        f(np.ones(4))


# ---------------------------------------------------------------- data with very many rows


def test_the_rows_of_very_long_data_cost_nothing(synchronize):
    synchronize(2)
    x = T.bvector("x")
    f = synk.function([x], [(x[:1].sum(), "sum"), (x[:1].mean(), "avg")], mode="FAST_COMPILE")
    short, long = synk.data(np.ones(100, np.int8)), synk.data(shape=(200_000_000,), dtype="int8")
    assert f(short)[0] == 2
    seconds = []
    for stop in (200_000_000, 199_999_998, 199_999_996):
        began = time.perf_counter()
        assert f(long, batch=slice(0, stop))[0] == 0
        seconds.append(time.perf_counter() - began)
        assert f.counts == (stop // 2, stop // 2)
    assert min(seconds) < 0.1


# ---------------------------------------------------------------- output streams

STREAMS = {
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "none": "sys.stdout = sys.stderr = None",
    "closed descriptors": "os.close(1); os.close(2)",
    "without flush": "sys.stdout = sys.stderr = type('Stream', (), {'write': lambda self, text: None})()",
    "full": "sys.stdout = sys.stderr = open('/dev/full', 'w'); sys.stdout.write('never to be seen')",
}


@pytest.mark.parametrize("how", STREAMS)
def test_output_streams_that_cannot_be_written_to(how, tmp_path):
    run_script(
        f"""
        result = open(sys.argv[1], "w")
        {STREAMS[how]}
        synk.fork(3, profile=True, restart_workers=True)
        x, fault = T.dvector("x"), theano.shared(np.int64(NOTHING), "fault")
        f = synk.function([x], (Fault()(x, fault).sum(), "sum"), mode="FAST_COMPILE")
        data = synk.data(np.ones(6))
        print(f(data), file=result)
        synk.set_value(1, fault, KILL)
        try:
            f(data)
        except synk.WorkerRestarted:
            synk.broadcast(fault, NOTHING)
            print(f(data), file=result)
        synk.close()
        print(worker_pids(), file=result)
        result.close()
        os._exit(0)
        """,
        tmp_path / "result",
    )
    assert (tmp_path / "result").read_text().split() == ["6.0", "6.0", "[]"]


def test_descriptors_of_closed_streams_are_not_taken_for_memory(tmp_path):
    """A program started without standard streams: what something prints later must not land in shared memory."""
    run_script(
        """
        for number in (0, 1, 2):
            os.close(number)
        synk.fork(2)
        data = [synk.data(np.zeros(100)) for _ in range(5)]
        kept = {name: os.readlink(f"/proc/self/fd/{name}") for name in "012" if os.path.exists(f"/proc/self/fd/{name}")}
        for number in (1, 2):
            try:
                os.write(number, b"printed by a library")
            except OSError:
                pass
        x = T.dvector("x")
        f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
        with open(sys.argv[1], "w") as file:
            print([float(f(each)) for each in data], file=file)
            print([each for each in kept.values() if "synkhronos" in each or "shm" in each], file=file)
        synk.close()
        os._exit(0)
        """,
        tmp_path / "result",
    )
    assert (tmp_path / "result").read_text() == "[0.0, 0.0, 0.0, 0.0, 0.0]\n[]\n"
