"""Compiled C code is found again: by workers, and by other processes that build the same functions."""

import os
import subprocess
import sys

from engine import theano_only

pytestmark = theano_only("keys of Theano's compile cache")

SCRIPT = """
import sys
import synkhronos as synk, numpy as np, theano, theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
synk.fork(2)
x, y = T.fmatrix("x"), T.ivector("y")
w = theano.shared(np.ones((3, 4), "float32"), "w")
noise = MRG_RandomStreams(1).normal((4,), dtype="float32")
p = T.nnet.softmax(T.dot(x, w) + noise.dimshuffle("x", 0))
loss = T.nnet.categorical_crossentropy(p, y).mean()
f = synk.function([x, y], loss, updates=[(w, w - T.grad(loss, w))])
f(np.ones((5, 3), "float32"), np.zeros(5, "int32"))
synk.close()
"""


def run(folder):
    """Run the script with a compile cache of its own; returns the names of the modules that are in it then."""
    flags = ",".join([os.environ.get("THEANO_FLAGS", ""), f"base_compiledir={folder}"]).strip(",")
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env={**os.environ, "THEANO_FLAGS": flags}, timeout=240)
    (cache,) = folder.iterdir()
    return {entry.name for entry in cache.iterdir() if entry.name.startswith("tmp")}


def test_a_second_process_compiles_nothing(tmp_path):
    first = run(tmp_path)
    assert len(first) > 5
    assert run(tmp_path) == first
