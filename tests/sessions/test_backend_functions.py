"""Features of functions that depend on the backend, compared with the backend's own functions; some use numba."""

import functools
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from backend import RandomStreams, T, on_theano, theano
from scripts import ROOT

import synkhronos as synk
from synkhronos._backends import pack
from synkhronos._graph import VariableTable, dump, load

V = np.random.RandomState(0).rand(7, 3)
DEPTH = 4000

pytensor_only = pytest.mark.skipif(on_theano, reason="Theano has one compiler, and its own keywords")


def test_the_backend_has_a_name():
    assert synk.engine == ("theano" if on_theano else "pytensor")


def test_updates_do_not_depend_on_the_output_subset(two):
    x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    loss = T.sqr(x * w - 1).mean()
    ours = synk.function([x], [loss, (x.max(), "max")], updates=[(w, w - 0.1 * theano.grad(loss, w))])
    ours(V, output_subset=[1])
    some = synk.get_value(1, w)
    synk.broadcast(w, np.ones(3))
    ours(V)
    np.testing.assert_array_equal(synk.get_value(1, w), some)
    assert (some != 1).all()


@pytensor_only
def test_a_deep_graph_is_pickled_without_depth():
    # Pickling nested objects takes stack frames of Python and C for each level. A graph has too many levels for that.
    limit = sys.getrecursionlimit()
    x, w = T.dvector("x"), theano.shared(np.full(3, 0.99), "w")
    y = functools.reduce(lambda y, _: y * w + x, range(DEPTH), x)
    with theano.config.change_flags(cxx=""):
        function = theano.function([x], y, mode=theano.Mode("vm", None))
        nodes = pack(function)[0]
        seen = set()
        for node in nodes:
            assert all(var.owner is None or var.owner in seen for var in node.inputs)
            seen.add(node)
        assert len(nodes) >= 2 * DEPTH
        there = VariableTable(None)
        replica = load(dump({5: function}, VariableTable()), there, 0)[5]
        np.testing.assert_array_equal(replica(np.ones(3)), function(np.ones(3)))
        w.set_value(np.zeros(3))
        np.testing.assert_array_equal(replica(np.ones(3)) == function(np.ones(3)), np.zeros(3, bool))  # another w
    assert sys.getrecursionlimit() == limit


@pytensor_only
def test_ranks_draw_from_generators_that_jump(three):
    state = T.random.shared_rng(seed=5)
    following, draw = T.random.normal(size=(4,), rng=state, return_next_rng=True)
    f = synk.function([], [(draw, "gather")], updates={state: following})
    drawn = [f()[0].reshape(3, 4) for _ in range(2)]
    for rank in range(3):
        bits = np.random.default_rng(5).bit_generator
        generator = np.random.Generator(bits.jumped(rank) if rank else bits)
        for call in drawn:
            np.testing.assert_array_equal(call[rank], generator.normal(size=4))


@pytensor_only
def test_modes_that_ranks_cannot_use_are_refused(synchronize):
    synchronize(1)
    with pytest.raises(ValueError, match="JAXLinker cannot be used by ranks"):
        synk.function([], T.constant(1.0) * 2, mode="JAX")


@pytensor_only
def test_a_variable_of_static_length_has_no_rows_to_pick(two):
    data = theano.shared(np.zeros((4, 2)), "data", shape=(4, 2))
    f = synk.function([], (data.sum(), "sum"), sliceable_shareds=[data])
    with pytest.raises(TypeError, match="data has the static length 4"):
        f(batch_s=slice(0, 2))


@pytest.mark.numba
@pytensor_only
def test_functions_that_numba_compiles(two):
    x, w = T.dvector("x"), theano.shared(np.zeros(2), "w")
    f = synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")], updates=[(w, w + x.sum())], mode="NUMBA")
    values = np.arange(5.0)
    for _ in range(2):
        total, doubled = f(values)
        assert total == 10
        np.testing.assert_array_equal(doubled, 2 * values)
    np.testing.assert_array_equal(synk.gather(w), [[6, 6], [14, 14]])
    total, _ = f(synk.data(values), num_slices=2)
    assert total == 10
    np.testing.assert_allclose(synk.gather(w)[:, 0], [6 + (2 * 1 + 1 * 2) / 3, 14 + 3.5])


@pytest.mark.numba
@pytensor_only
def test_other_processes_find_numbas_cached_code(monkeypatch):
    from pytensor.link.numba.cache import CACHED_SRC_FUNCTIONS

    monkeypatch.setattr("synkhronos._backends.precompile", lambda function: None)
    x, y, w = T.dmatrix("x"), T.ivector("y"), theano.shared(np.ones((3, 3)), "w")
    out = T.nnet.softmax(T.tanh(x.dot(w)).dot(w))
    loss = -T.log(out[T.arange(y.shape[0]), y]).mean()
    drawn = RandomStreams(3).normal(size=(2,)).sum()
    for inputs, output in (([x, y], loss), ([x], drawn + x.sum()), ([x], x + np.ones((1, 1))[:, None][0])):
        updates = [(w, w - T.grad(loss, w))] if output is loss else []
        here = theano.function(inputs, output, updates=updates, mode="NUMBA")
        there = load(dump({0: here}, VariableTable()), VariableTable(), 1)[0]
        found, kept = (CACHED_SRC_FUNCTIONS[one.vm.jit_fn.py_func] for one in (there, here))
        assert found == kept


COMPILED_ONCE = """
import os, sys, tempfile
os.environ["PYTENSOR_FLAGS"] = "linker=numba,base_compiledir=" + tempfile.mkdtemp()
from numba.core import event
from backend import RandomStreams, T, theano
import numpy as np, synkhronos as synk

read, write = os.pipe()


class Listener(event.Listener):
    def on_start(self, begun):
        if getattr(begun.data["dispatcher"], "__name__", "") == "numba_funcified_fgraph":  # no callback into Python
            os.write(write, b"master " if os.getpid() == master else b"worker ")

    def on_end(self, ended):
        pass


master = os.getpid()
event.register("numba:compile", Listener())
synk.fork(3)
x, w = T.dvector("x"), theano.shared(np.zeros(2), "w")
noise = RandomStreams(3).normal(size=(2,))
f = synk.function([x], [(x.sum(), "sum"), (noise, "gather")], updates=[(w, w + synk.summed(x.sum()))])
synk.distribute()
os.write(write, b"called ")
for values in (np.arange(5.0), np.arange(12.0)[::2], synk.data(np.arange(6.0))):
    total, drawn = f(values)
    assert total == np.sum(np.asarray(values)) and len(set(drawn)) == 6
w.set_value(np.ones(2))
synk.broadcast(w)
f(np.ones(3))
synk.all_reduce(w)
f(np.ones(3))
assert (synk.gather(w) == 7).all(), synk.gather(w)
synk.close()
os.close(write)
*reports, last = os.read(read, 1000).split()
assert (set(reports), last) == ({b"master"}, b"called"), reports
"""


@pytest.mark.numba
@pytensor_only
def test_numba_compiles_in_one_process():
    run(COMPILED_ONCE)


CHOICES = """
import os, sys, types, pytest
from synkhronos._backends import choose
here = choose()
os.environ["SYNKHRONOS_ENGINE"] = "jax"
with pytest.raises(RuntimeError, match="SYNKHRONOS_ENGINE='jax': expected 'theano' or 'pytensor'"):
    choose()
other = {"theano": "pytensor", "pytensor": "theano"}[here]
finders, sys.meta_path[:] = list(sys.meta_path), []
saved = {name: sys.modules.pop(name, None) for name in ("theano", "pytensor")}
for asked, complaint in (("pytensor", "is not installed"), ("", "neither Theano nor PyTensor is installed")):
    os.environ["SYNKHRONOS_ENGINE"] = asked
    with pytest.raises(ImportError, match=complaint):
        choose()
for name in ("theano", "pytensor"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = types.SimpleNamespace(origin="here")
with pytest.raises(RuntimeError, match="both Theano and PyTensor are imported: name one of them in SYNKHRONOS_ENGINE"):
    choose()
for name in ("theano", "pytensor"):
    os.environ["SYNKHRONOS_ENGINE"] = name
    assert choose() == name
os.environ["SYNKHRONOS_ENGINE"] = ""
del sys.modules["theano"]
assert choose() == "pytensor"
"""


def test_the_backend_is_chosen_or_requested():
    run(CHOICES)


@pytensor_only
def test_without_theano_nothing_is_patched():
    run(
        """
        import sys
        import synkhronos as synk
        assert synk.engine == "pytensor" and "theano" not in sys.modules
        assert not [one for one in sys.meta_path if getattr(one, "synkhronos_role", None) == "patch"]
        """
    )


def run(program):
    program = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests' / 'helpers')!r})\n" + textwrap.dedent(program)
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytensor_only
def test_static_lengths_of_types(two):
    few, row, wide = (
        T.tensor(shape=shape, name=name) for shape, name in (((4, 3), "few"), ((1, 3), "row"), ((None, 3), "wide"))
    )
    with pytest.raises(ValueError, match=r"few .*cannot be divided: its type says that axis 0 has length 4"):
        synk.function([few], few.sum())
    f = synk.function([wide], (wide.sum(axis=0), "sum"), bcast_inputs=[few, row], on_unused_input="ignore")
    np.testing.assert_allclose(f(V, np.ones((4, 3)), V[:1]), V.sum(axis=0))
    data = synk.data(V), synk.data(np.ones((4, 3))), synk.data(V[:1])
    np.testing.assert_allclose(f(*data), V.sum(axis=0))
    for position, name, axis, length in ((0, "wide", 1, 3), (1, "few", 0, 4), (2, "row", 0, 1)):
        wrong = [*data[:position], synk.data(np.ones((5, 2) if position == 0 else (5, 3))), *data[position + 1 :]]
        with pytest.raises(TypeError, match=f"input {name}: got .* expected length {length} along axis {axis}"):
            f(*wrong)
