"""Distribution of functions: those that cannot be replicated, classes defined after the fork, foreign attributes."""

import gc
import pickle

import numpy as np
import pytest
from backend import MonitorMode, NanGuardMode, T, theano
from fault_ops import Copy, Unloadable
from scripts import run_script

import synkhronos as synk
from synkhronos._graph import VariableTable, dump, load
from synkhronos._utils.interrupts import FinalizerQueue


class TestOneThatCannotBeLoaded:
    """A function that workers cannot unpickle raises an error with its name, and other functions still work."""

    @pytest.fixture(autouse=True)
    def session(self, synchronize, tmp_path):
        synchronize(3)
        self.file = tmp_path / "there"
        self.file.touch()
        self.x, self.w = T.dvector("x"), theano.shared(np.ones(1), "w")

    def stuck(self):
        copy = Unloadable(str(self.file))(self.x)
        return synk.function([self.x], ((copy * self.w.sum()).sum(), "sum"), name="stuck")

    def another(self):
        return synk.function([self.x], ((self.x * self.w.sum()).sum(), "sum"))

    def test_fails_alone_and_by_name(self):
        stuck = self.stuck()
        x, s = self.x, theano.shared(np.zeros(2), "s")
        with pytest.raises(synk.WorkerError, match=r"the function stuck\(x\) cannot be loaded: rank \d") as caught:
            synk.distribute()
        assert "LookupError: cannot be unpickled here" in str(caught.value)
        assert "broadcast" not in str(caught.value)  # no replica has changed
        later = synk.function([x], updates=[(s, s + x.sum())])
        synk.distribute()  # the failure was reported before
        synk.broadcast(s, [1.0, 2.0])
        assert later(np.ones(3)) == []
        assert synk.gather(s).tolist() == [[2, 3]] * 3
        assert self.another()(np.ones(6)) == 6
        synk.broadcast(self.w, [2.0])
        for _ in range(2):
            with pytest.raises(synk.WorkerError, match=r"stuck\(x\) cannot be loaded"):
                stuck(np.ones(6))
        self.file.unlink()
        assert stuck(np.ones(6)) == 12
        synk.broadcast(self.w, [3.0])
        assert stuck(np.ones(6)) == self.another()(np.ones(6)) == 18

    def test_and_that_is_distributed_with_others(self):
        stuck = self.stuck()
        others = [self.another() for _ in range(2)]
        with pytest.raises(synk.WorkerError, match="stuck"):
            synk.distribute()
        assert [other(np.ones(6)) for other in others] == [6, 6]
        self.file.unlink()
        assert stuck(np.ones(6)) == 6

    def test_is_forgotten_when_it_is_dropped(self):
        stuck = self.stuck()
        with pytest.raises(synk.WorkerError, match="stuck"):
            stuck(np.ones(6))
        del stuck
        gc.collect()
        for _ in range(2):
            assert self.another()(np.ones(6)) == 6
            synk.distribute()

    def test_and_that_is_dropped_before_it_is_tried(self):
        stuck = self.stuck()
        other = self.another()
        del stuck
        gc.collect()
        assert other(np.ones(6)) == 6
        synk.distribute()
        synk.broadcast(self.w)

    def test_that_alone_uses_a_variable(self):
        stuck = self.stuck()
        with pytest.raises(synk.WorkerError, match="stuck"):
            synk.gather(self.w)
        self.file.unlink()
        assert synk.gather(self.w).tolist() == [[1]] * 3
        assert stuck(np.ones(6)) == 6


def test_definitions_of_the_main_program_after_fork_are_sent_completely():
    out, err = run_script(
        """
        as_op = theano.compile.ops.as_op

        class Twice(Fault):
            def perform(self, node, inputs, outputs):
                outputs[0][0] = 2 * inputs[0]

        class Outer:
            class Inner(Twice):
                pass

        x, zero = T.dvector("x"), T.constant(0)
        vector = dict(itypes=[T.dvector], otypes=[T.dvector])

        @as_op(**vector)
        def before(value):
            return value + 1

        def build(op, *more):
            return synk.function([x], (op(x, *more), "gather"), name=type(op).__name__)

        synk.fork(3, use_gpu=False, restart_workers=True)
        old, never_called = build(Twice(), zero), build(Twice(), zero)
        assert old([1.0, 2.0, 3.0]).tolist() == [2, 4, 6]
        assert build(Outer.Inner(), zero)([1.0, 2.0, 3.0]).tolist() == [2, 4, 6]
        assert build(before)([1.0, 2.0, 3.0]).tolist() == [2, 3, 4]

        offset = np.array([0.5])

        def shifted(value):
            return value + offset

        class Late(Outer.Inner):
            def perform(self, node, inputs, outputs):
                super().perform(node, inputs, outputs)
                outputs[0][0] = shifted(outputs[0][0])

        late = build(Late(), zero)
        assert late([1.0, 2.0, 3.0]).tolist() == [2.5, 4.5, 6.5]
        assert build(Late(), zero)([1.0, 2.0, 3.0]).tolist() == [2.5, 4.5, 6.5]

        def cell(factor):
            class Twice(Fault):
                def perform(self, node, inputs, outputs):
                    outputs[0][0] = factor * inputs[0]

            return Twice

        for factor in (5, 7):  # the cell of a notebook is run again, twice
            Twice = cell(factor)
            again = build(Twice(), zero)
            assert again([1.0, 2.0, 3.0]).tolist() == [factor, 2 * factor, 3 * factor]

        @as_op(**vector, infer_shape=lambda node, shapes: shapes)
        def before(value):
            return value + 9

        newest = build(before)
        assert newest([1.0, 2.0, 3.0]).tolist() == [10, 11, 12]
        assert old([1.0, 2.0, 3.0]).tolist() == [2, 4, 6]
        assert never_called([1.0, 2.0, 3.0]).tolist() == [2, 4, 6]
        os.kill(worker_pids()[-1], signal.SIGKILL)
        try:
            old([1.0, 2.0, 3.0])
        except synk.WorkerRestarted:
            pass
        for function, right in ((old, 4), (late, 4.5), (again, 14), (newest, 11)):
            assert function([1.0, 2.0, 3.0])[1] == right
        synk.close()
        synk.fork(2, use_gpu=False)
        for function, right in ((old, 4), (late, 4.5), (again, 14), (newest, 11)):
            assert function([1.0, 2.0])[1] == right
        print("done")
        """
    )
    assert out == "done\n"
    assert "Traceback" not in err


def test_the_base_of_an_op_that_is_imported_after_fork_is_known():
    out, _ = run_script(
        """
        import importlib
        synk.fork(2, use_gpu=False)
        on_theano = synk.engine == "theano"
        Op = importlib.import_module("theano.gof" if on_theano else "pytensor.graph.op").Op
        Apply = importlib.import_module("theano.gof" if on_theano else "pytensor.graph.basic").Apply

        class Twice(Op):
            __props__ = ()

            def make_node(self, x):
                return Apply(self, [x], [x.type()])

            def perform(self, node, inputs, outputs):
                outputs[0][0] = 2 * inputs[0]

        x = T.dvector("x")
        print(synk.function([x], (Twice()(x).sum(), "sum"))([1.0, 2.0]))
        """
    )
    assert out == "6.0\n"


def test_an_op_of_a_module_that_is_reloaded_is_refused(tmp_path):
    (tmp_path / "ops_of_mine.py").write_text("from fault_ops import Fault\nclass Mine(Fault):\n    pass\n")
    (tmp_path / "later_ops.py").write_text("from fault_ops import Fault\nclass Later(Fault):\n    pass\n")
    out, _ = run_script(
        f"""
        import importlib
        sys.path.insert(0, {str(tmp_path)!r})
        import ops_of_mine
        synk.fork(2, use_gpu=False)
        import later_ops  # each worker imports it, too
        x = T.dvector("x")
        assert synk.function([x], (later_ops.Later()(x, 0).sum(), "sum"))([1.0, 2.0]) == 3
        importlib.reload(ops_of_mine)
        try:
            synk.function([x], (ops_of_mine.Mine()(x, 0).sum(), "sum"))([1.0, 2.0])
        except TypeError as error:
            print(error)
        """
    )
    assert "ops_of_mine.Mine was defined after synkhronos.fork()" in out


def test_workers_search_modules_in_the_order_of_the_controller(tmp_path):
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        source = "from fault_ops import Fault\nclass Mine(Fault):\n    pass\n"
        if folder == "old":
            source += "    def perform(self, node, inputs, outputs):\n        outputs[0][0] = 10 * inputs[0]\n"
        (tmp_path / folder / "ops_in_two_folders.py").write_text(source)
    out, _ = run_script(
        f"""
        sys.path.append({str(tmp_path / "old")!r})
        synk.fork(2, use_gpu=False)
        sys.path.insert(0, {str(tmp_path / "new")!r})
        from ops_in_two_folders import Mine
        x = T.dvector("x")
        print(synk.function([x], (Mine()(x, 0).sum(), "sum"))([1.0, 2.0]))
        """
    )
    assert out == "3.0\n"


@pytest.mark.parametrize(
    ("mode", "expression", "bad", "words"),
    [
        (NanGuardMode(True, False, False), T.log, -1.0, "NaN detected"),
        (NanGuardMode(False, True, False), T.log, 0.0, "Inf detected"),
        (NanGuardMode(False, False, True, optimizer="fast_compile"), T.exp, 700.0, "Big value detected"),
    ],
)
def test_nan_guard_mode(session, mode, expression, bad, words):
    x, values = T.dvector("x"), np.ones(2 * session)
    function = synk.function([x], (expression(x).sum(), "sum"), mode=mode)
    assert function(values) == pytest.approx(float(function.as_theano(values)))
    values[-1] = bad
    with pytest.raises(synk.WorkerError, match=words) as caught:
        function(values)
    assert caught.value.rank == session - 1
    values[-1] = 2.0
    assert np.isfinite(function(values))


def test_a_mode_with_a_function_of_its_own(synchronize):
    synchronize(3)
    x = T.dvector("x")
    monitored = synk.function([x], (x.sum(), "sum"), mode=MonitorMode(post_func=lambda *what: None))
    assert monitored(np.arange(7.0)) == 21


# ---------------------------------------------------------------- attributes that other libraries set on variables


class Layer:
    """An object that raises an error when it is pickled."""

    def __reduce__(self):
        raise AssertionError("a foreign attribute was pickled")


def test_foreign_attributes_are_not_sent(session):
    layer = Layer()
    x, w = T.dmatrix("x"), theano.shared(np.ones(3), "w")
    constant = T.constant(np.arange(3.0))
    y = T.dot(x, w) + (x * constant).sum(axis=1)
    for var in (x, w, y, constant):
        var._keras_history = (layer, 0, 0)
        var._uses_learning_phase = True
        var.tag.annotations = [layer]
    y.owner.tag.brick = layer
    total, rate = theano.shared(0.0, "total"), T.dscalar("rate")
    rate._keras_shape = layer
    function = synk.function([x], [(y, "gather")], bcast_inputs=[rate], updates=[(total, total + rate * y.sum())])
    values = np.arange(21.0).reshape(7, 3)
    expected = values.sum(axis=1) + values @ np.arange(3.0)
    for num_slices in (1, 2):
        np.testing.assert_allclose(function(values, 2.0, num_slices=num_slices)[0], expected)
    for var in (x, w, y, constant):
        assert var._keras_history == (layer, 0, 0)
        assert var.tag.annotations == [layer]
        assert "trace" in vars(var.tag) or var is not y
    assert y.owner.tag.brick is layer


def test_modules_that_only_foreign_attributes_need_are_not_imported():
    out, _ = run_script(
        """
        import types
        synk.fork(2, use_gpu=False)
        keras = types.ModuleType("keras_of_the_test")  # no worker can import it
        exec("class Layer: pass", keras.__dict__)
        sys.modules["keras_of_the_test"] = keras
        x = T.dvector("x")
        x._keras_history = (keras.Layer(), 0, 0)
        print(synk.function([x], (x.sum(), "sum"))(np.ones(4)))
        """
    )
    assert out == "4.0\n"


def test_attributes_of_a_users_own_variables_are_sent():
    x = T.dvector("x")
    x.__class__ = Own
    x.own, x.tag.trace = 5, []
    function = theano.function([x], x + 1)
    (replica,) = load(dump({0: function}, VariableTable(None)), VariableTable(None), 0).values()
    assert replica.maker.inputs[0].variable.own == 5
    assert replica(np.ones(2)).tolist() == [2, 2]


class Own(T.TensorVariable):
    """A class of variables that the user defines."""


def test_equal_traces_are_pickled_once():
    """Errors on workers report the line that created the failing node, and pickles of its trace are small."""
    x = y = T.dvector("x")
    for _ in range(40):
        y = Copy()(y)
    function = theano.function([x], y, mode=theano.Mode("py", None))
    (replica,) = load(dump({0: function}, VariableTable(None)), VariableTable(None), 0).values()
    tags, copies = ([node.outputs[0].tag for node in one.maker.fgraph.toposort()] for one in (function, replica))
    assert [tag.trace for tag in copies] == [tag.trace for tag in tags]
    assert any(__file__ in str(frame) for frame in copies[0].trace[-1])
    with_traces = len(dump({0: function}, VariableTable(None)).pickled)
    one_trace = len(pickle.dumps(copies[0].trace))
    for tag in tags:
        tag.trace = []
    assert with_traces - len(dump({0: function}, VariableTable(None)).pickled) < one_trace + 25 * len(tags)


def test_variables_may_end_at_any_step_of_a_distribution(no_garbage_collection):
    """The garbage collector may run whenever Python allocates, and end variables that are in reference cycles."""

    class Shared(type(theano.shared(0.0))):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            gc.collect()

    table = VariableTable(FinalizerQueue())
    kept = theano.shared(1.0)
    alias = Shared(name="alias", type=kept.type, value=None, strict=None, container=kept.container)
    table.put(0, alias)
    del alias  # `items` creates it again
    gc.collect()
    ended = theano.shared(2.0)
    ended.container.cycle = ended.container
    table.put(1, ended)
    del ended
    variables = table.items()
    assert variables[0].container is kept.container
    assert variables[1].get_value() == 2
