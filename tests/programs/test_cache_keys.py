"""Theano's compile cache: workers and other processes find compiled code, and all ranks run the same code."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from backend import T, on_theano, theano, theano_only
from interrupts import Interrupt, handled_by, interrupt

import synkhronos  # noqa: F401 - its corrections of Theano

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

#: A step with a clipped norm, whose rounding depends on how its parts were compiled.
STEP = f"""
import numpy as np
{"import theano, theano.tensor as T" if on_theano else "import pytensor as theano, pytensor.tensor as T"}

def step():
    k, t = T.lvector("k"), T.dvector("t")
    E = theano.shared(np.random.RandomState(0).randn(20, 4), "E")
    a = theano.shared(np.random.RandomState(1).randn(4), "a")
    loss = T.sqr(T.dot(E[k], a) - t).mean() + 1e-3 * T.sqr(E).sum()
    grads = T.grad(loss, [E, a])
    norm = T.sqrt(sum(T.sqr(grad).sum() for grad in grads))
    return [k, t], loss, [(var, var - 0.1 * grad / norm) for var, grad in zip([E, a], grads)]
"""

FRESH = """
import synkhronos as synk
rng = np.random.RandomState(0)
with synk.session(3):
    inputs, loss, updates = step()
    f = synk.function(inputs, loss, updates=updates, exact=True)
    for _ in range(50):
        f(rng.randint(0, 20, 8), rng.randn(8))
    differ = synk.check_replicas([var for var, _ in updates])
    assert not differ, differ
"""

#: A program without synkhronos.
ALONE = """
inputs, loss, updates = step()
theano.function(inputs, loss, updates=updates)(np.zeros(8, int), np.zeros(8))
"""

KEPT = """
import synkhronos as synk
rng = np.random.RandomState(0)
with synk.session(3):
    inputs, loss, updates = step()
    theano.function(inputs, [loss * 2, *(new for _, new in updates)])  # only the controller has compiled its parts
    f = synk.function([], [(loss, "avg")], bcast_inputs=inputs, updates=updates)
    for _ in range(50):
        f(rng.randint(0, 20, 8), rng.randn(8))
    differ = synk.check_replicas([var for var, _ in updates])
    assert not differ, differ
"""


def run(folder, script=SCRIPT):
    """Run a script with a compile cache of its own; return the names of the modules in the cache afterwards."""
    variable = "THEANO_FLAGS" if on_theano else "PYTENSOR_FLAGS"
    flags = ",".join([os.environ.get(variable, ""), f"base_compiledir={folder}"]).strip(",")
    command, environment = [sys.executable, "-W", "ignore", "-c", script], {**os.environ, variable: flags}
    done = subprocess.run(command, env=environment, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {entry.name for entry in folder.glob("*/tmp*")}


@theano_only("keys of Theano's compile cache")
def test_a_second_process_compiles_nothing(tmp_path):
    first = run(tmp_path)
    assert len(first) > 5
    assert run(tmp_path) == first


@pytest.mark.timeout(600)
def test_replicas_are_equal_in_the_first_session_on_a_machine(tmp_path):
    """The workers load code that the controller has just compiled."""
    run(tmp_path, STEP + FRESH)


@pytest.mark.timeout(600)
def test_replicas_are_equal_with_code_that_another_program_has_kept(tmp_path):
    run(tmp_path, STEP + ALONE)
    run(tmp_path, STEP + KEPT)


#: Another process compiles modules, which are then found; they are forgotten after their removal.
NEW = f"""
import os, shutil
from synkhronos._backends.common import find_new_modules
from {theano.__name__}.{"gof.cc" if on_theano else "link.c.basic"} import get_module_cache

cache = get_module_cache()
before = set(cache.module_hash_to_key_data)
if os.fork() == 0:
    theano.function([t := T.dvector()], T.sqr(t) * 3 + 1)
    os._exit(0)
os.wait()
find_new_modules(cache)
new = [str(data.get_entry()) for name, data in cache.module_hash_to_key_data.items() if name not in before]
assert new and all(map(os.path.exists, new))
for module in new:
    shutil.rmtree(os.path.dirname(module))
find_new_modules(cache)
assert set(cache.module_hash_to_key_data) == before
"""


@pytest.mark.timeout(600)
def test_modules_of_other_processes_are_found_and_removed_ones_forgotten(tmp_path):
    run(tmp_path, STEP + NEW)


class Uncached(theano.Op):
    """The identity, of which the compiled code is not cached, because it has no version."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0].copy()

    def c_code(self, node, name, inputs, outputs, sub):
        return f"Py_XDECREF({outputs[0]}); {outputs[0]} = {inputs[0]}; Py_INCREF({inputs[0]});"


@theano_only("PyTensor's lock has no such fault")
def test_an_interrupted_compilation_releases_the_lock_of_the_cache(monkeypatch):
    """Otherwise other processes would wait for it."""
    from theano.gof import cmodule, compilelock

    own = cmodule.output_subprocess_Popen

    def interrupted(command, **params):
        if "-shared" not in command:  # a question about the compiler
            return own(command, **params)
        assert compilelock.get_lock.n_lock
        raise KeyboardInterrupt

    monkeypatch.setattr(cmodule, "output_subprocess_Popen", interrupted)
    x = T.dvector()
    with pytest.raises(KeyboardInterrupt):
        theano.function([x], Uncached()(x))
    assert compilelock.get_lock.n_lock == 0


@theano_only("PyTensor's own function does this")
def test_a_compiler_ends_with_an_interrupted_compilation():
    from theano.gof import cmodule

    with handled_by(interrupt), pytest.raises(Interrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        cmodule.output_subprocess_Popen(["sleep", "100"])
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]
