"""Speed limits of the machine: two processes copy, add and multiply, and pass a flag back and forth."""

import ctypes
import mmap
import os
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.contestants._kernels import of_theano
from benchmarks.contestants._serve import compete, rank, timed
from benchmarks.limits import SIDE, TURNS, N


def compiled():
    """Compile `_limits.c` for this processor, and load it."""
    source = Path(__file__).with_name("_limits.c")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/limits.so"
        subprocess.check_call(["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, str(source)])
        return ctypes.CDLL(library)


def flag():
    """Return an integer in memory that both processes map."""
    descriptor = os.open(urlsplit(os.environ["RENDEZVOUS"]).path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    return ctypes.c_uint.from_buffer(memory)


def product():
    """Return a function that multiplies two float32 matrices by the BLAS that Theano is linked to."""
    import synkhronos  # noqa: F401  links Theano to a BLAS

    import theano  # isort: skip

    a, b = np.random.RandomState(0).rand(2, SIDE, SIDE).astype("float32")
    left, right = theano.tensor.fmatrices("a", "b")
    inputs = [theano.In(left, borrow=True), theano.In(right, borrow=True)]
    multiply = theano.function(inputs, theano.Out(left.dot(right), borrow=True))
    return lambda: multiply(a, b)


def make():
    """Allocate arrays, and compile functions."""
    library, word = compiled(), flag()
    to, one, other = (np.ones(N, "float32") for _ in range(3))
    array = np.ctypeslib.ndpointer("float32", 1, flags="C")
    library.copy.argtypes = [array, array, ctypes.c_size_t]
    library.add.argtypes = [array, array, array, ctypes.c_size_t]

    def turns():
        if library.pass_flag(ctypes.byref(word), rank(), TURNS):
            raise TimeoutError("the other process did not pass the flag")

    work = {
        "copy": lambda: library.copy(to, one, N),
        "add": lambda: library.add(to, one, other, N),
        "product": product(),
        "flag": turns,
    }

    def run(what, steps):
        return timed(work[what], steps)

    return run, {"kernels": of_theano()}


if __name__ == "__main__":
    compete(make)
