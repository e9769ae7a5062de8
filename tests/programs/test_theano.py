"""Theano's features that `_theano_compat` must preserve, alone and on ranks, compared with NumPy and plain Theano."""

import functools
import shutil
import subprocess
import sys

import numpy as np
import pytest
from backend import theano_only
from comparison import assert_close
from scripts import ROOT

import synkhronos as synk

import theano  # isort: skip
import theano.tensor as T  # isort: skip
from theano.tensor.signal.pool import pool_2d  # isort: skip

pytestmark = theano_only("Theano's features, one by one")


def powers(x, n, coefficients):
    """Return ``sum(c[k] * x ** k)`` by a loop whose steps compute each power in an inner loop."""

    def power(k, x):
        steps, _ = theano.scan(lambda p, x: p * x, outputs_info=T.ones_like(x), non_sequences=x, n_steps=k)
        return steps[-1]

    exponents = T.arange(1, n + 1)
    terms, _ = theano.scan(lambda k, c, x: c * power(k, x), sequences=[exponents, coefficients], non_sequences=x)
    return terms.sum(axis=0)


@pytest.mark.timeout(300)  # with an empty compile cache
class TestNestedLoops:
    """A scan in a scan, and derivatives for which Theano creates loops."""

    C = np.array([2.0, -1.0, 0.5])
    X = np.array([0.5, -1.5, 2.0, 1.0])

    @classmethod
    @functools.lru_cache
    def graph(cls):
        x, v = T.dvector("x"), T.dvector("v")
        return x, v, powers(x, 3, theano.shared(cls.C))

    def test_derivatives_in_one_process_and_on_ranks(self, synchronize):
        synchronize(2)
        x, _, y = self.graph()
        wanted = [y, T.grad(y.sum(), x), theano.gradient.jacobian(y, x), theano.gradient.hessian(y.sum(), x)]
        mode = theano.compile.get_default_mode().excluding("fusion", "inplace")  # compiles less
        function = synk.function([x], [(one, "gather") for one in wanted], mode=mode)
        slopes, curvatures = 2 - 2 * self.X + 1.5 * self.X**2, -2 + 3 * self.X
        for call, parts in ((function.as_theano, [slice(4)]), (function, [slice(2), slice(2, 4)])):
            value, gradient, jacobian, hessian = call(self.X)
            assert_close(value, 2 * self.X - self.X**2 + 0.5 * self.X**3)
            assert_close(gradient, slopes)
            assert_close(jacobian, np.vstack([np.diag(slopes[part]) for part in parts]))
            assert_close(hessian, np.vstack([np.diag(curvatures[part]) for part in parts]))

    def test_r_and_l_operators(self):
        x, v, y = self.graph()
        direction = np.arange(4.0)
        results = theano.function([x, v], [T.Rop(y, x, v), T.Lop(y, x, v)])(self.X, direction)
        for result in results:
            assert_close(result, (2 - 2 * self.X + 1.5 * self.X**2) * direction)


def product_cases():
    """Return shapes of products with at least one empty axis, and two without."""
    sizes = (0, 1, 3)
    return [(m, k, n) for m in sizes for k in sizes for n in sizes if 0 in (m, k, n)] + [(3, 1, 3), (1, 3, 3)]


class TestProductsWithoutElements:
    """Products with empty arrays, which a rank without rows computes."""

    @staticmethod
    @functools.lru_cache
    def functions(dtype):
        a, b, c = (T.TensorType(dtype, (False, False))(name) for name in "abc")
        p, q = (T.TensorType(dtype, (False,) * 3)(name) for name in "pq")
        v, w = (T.TensorType(dtype, (False,))(name) for name in "vw")
        two, three = np.asarray(2, dtype), np.asarray(3, dtype)
        return {
            "dot": theano.function([a, b], T.dot(a, b)),
            "of transposes": theano.function([a, b], T.dot(b.T, a.T)),
            "scaled": theano.function([a, b], three * T.dot(a, b)),
            "added": theano.function([a, b, c], two * c + three * T.dot(a, b)),
            "gradient": theano.function([a, b], T.grad(T.dot(a, b).sum(), [a, b])),
            "batched": theano.function([p, q], T.batched_dot(p, q)),
            "batched vectors": theano.function([a, q], T.batched_dot(a, q)),
            "tensordot": theano.function([p, q], T.tensordot(p, q, [[1, 2], [0, 1]])),
            "gemv": theano.function([w, a, v], two * w + three * T.dot(a, v)),
            "ger": theano.function([a, w, v], a + T.outer(w, v)),
        }

    @pytest.mark.parametrize("shape", product_cases(), ids="{0[0]}x{0[1]}x{0[2]}".format)
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_as_in_numpy(self, dtype, shape, order):
        m, k, n = shape
        rng = np.random.RandomState(0)
        f = self.functions(dtype)

        def array(*shape):
            return np.asarray(rng.rand(*shape).astype(dtype), order=order)

        a, b, c, v, w = array(m, k), array(k, n), array(m, n), array(k), array(m)
        assert_close(f["dot"](a, b), a @ b)
        assert_close(f["of transposes"](a, b), (a @ b).T)
        assert_close(f["scaled"](a, b), 3 * (a @ b))
        assert_close(f["added"](a, b, c), 2 * c + 3 * (a @ b))
        ones = np.ones((m, n), dtype)
        for result, expected in zip(f["gradient"](a, b), [ones @ b.T, a.T @ ones]):
            assert_close(result, expected)
        assert_close(f["gemv"](w, a, v), 2 * w + 3 * (a @ v))
        assert_close(f["ger"](a, w, v), a + np.outer(w, v))
        for size in (0, 2):
            p, q, rows = array(size, m, k), array(size, k, n), array(size, k)
            assert_close(f["batched"](p, q), p @ q)
            assert_close(f["batched vectors"](rows, q), np.einsum("ik,ikn->in", rows, q))
            q = array(m, k, n)
            assert_close(f["tensordot"](p, q), np.tensordot(p, q, [[1, 2], [0, 1]]))

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
    def test_in_place_again_and_again(self, dtype, shape):
        m = theano.shared(np.zeros(shape, dtype))
        v, w = (T.TensorType(dtype, (False,))(name) for name in "vw")
        a, b = (T.TensorType(dtype, (False, False))(name) for name in "ab")
        rank_1 = theano.function([v, w], [], updates=[(m, m + T.outer(v, w))])
        product = theano.function([a, b], m.sum(), updates=[(m, m + T.dot(a, b))])
        for _ in range(3):
            rank_1(np.ones(shape[0], dtype), np.ones(shape[1], dtype))
            assert product(np.ones((shape[0], 2), dtype), np.ones((2, shape[1]), dtype)) == 0
        assert m.get_value().shape == shape

    @pytest.mark.parametrize("n_ranks", [1, 2])
    def test_a_step_without_rows_changes_nothing(self, dtype, n_ranks, synchronize):
        synchronize(n_ranks)
        rng = np.random.RandomState(0)
        weights = [theano.shared(rng.randn(*shape).astype(dtype)) for shape in [(4, 5), (5, 3), (3,)]]
        before = [one.get_value() for one in weights]
        x, y = T.TensorType(dtype, (False, False))("x"), T.ivector("y")
        hidden = T.nnet.sigmoid(T.dot(x, weights[0]))
        loss = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(hidden, weights[1]) + weights[2]), y).sum()
        steps = zip(weights, T.grad(loss, weights))
        train = synk.function([x, y], (loss, "sum"), updates=[(one, one - step) for one, step in steps])
        value = train(np.zeros((0, 4), dtype), np.zeros(0, "int32"))
        assert value == 0
        for one, old in zip(weights, before):
            for rank in range(n_ranks):
                assert_close(synk.get_value(rank, one), old)


class TestTopK:
    """`topk`, `argtopk` and `topk_and_argtopk`."""

    X = np.array([[[3.0, 1.0], [2.0, 5.0], [7.0, 0.0]], [[6.0, 4.0], [9.0, 8.0], [-1.0, -2.0]]])

    @pytest.mark.parametrize("axis", [-1, 0, 1, None])
    @pytest.mark.parametrize("k", [1, 2, -1, -2, "all"])
    def test_as_sorted(self, axis, k, dtype):
        x = self.X.astype(dtype)
        length = x.size if axis is None else x.shape[axis]
        k = length if k == "all" else k
        variable = T.TensorType(dtype, (False,) * 3)("x")
        both = T.topk_and_argtopk(variable, k, axis, sorted=False, idx_dtype="int32")
        kinds = [T.topk(variable, k, axis, sorted=False), T.argtopk(variable, k, axis, sorted=False), *both]
        values, indices, *pair = theano.function([variable], kinds)(x)
        along, axis = (x.ravel(), 0) if axis is None else (x, axis)
        part = [slice(None)] * along.ndim
        part[axis] = slice(-k, None) if k > 0 else slice(-k)
        expected = np.sort(along, axis)[tuple(part)]
        for result in [values, np.take_along_axis(along, indices, axis), pair[0]]:
            assert_close(np.sort(result, axis), expected)
        assert_close(np.take_along_axis(along, pair[1], axis), pair[0])
        assert (indices.dtype, pair[1].dtype, values.dtype) == ("int64", "int32", dtype)

    def test_the_gradient_is_that_of_the_chosen(self):
        x = T.dmatrix("x")
        gradient = theano.function([x], T.grad((T.topk(x, 2, sorted=False) ** 2).sum(), x))
        assert_close(gradient([[1.0, 3.0, 2.0], [5.0, -1.0, 4.0]]), [[0, 6, 4], [10, 0, 8]])

    def test_how_many_may_be_unsigned_and_come_as_an_input(self):
        x, k = T.dvector("x"), T.bscalar("k")
        top = theano.function([x, k], T.topk(x, T.cast(k, "uint8"), sorted=False))
        assert sorted(top([4.0, 1.0, 3.0], 2)) == [3.0, 4.0]

    @pytest.mark.parametrize(("k", "message"), [(0, "cannot be zero"), (4, "larger than"), (-4, "larger than")])
    def test_too_many_or_none_is_an_error(self, k, message):
        x, n = T.dvector("x"), T.iscalar("n")
        with pytest.raises(ValueError, match=message):
            theano.function([x, n], T.topk(x, n, sorted=False))([4.0, 1.0, 3.0], k)

    def test_on_ranks(self, synchronize):
        synchronize(3)
        x = T.dmatrix("x")
        function = synk.function([x], [(one, "gather") for one in T.topk_and_argtopk(x, 1, sorted=False)])
        array = np.arange(20.0).reshape(5, 4) % 7
        values, indices = function(array)
        assert_close(values.ravel(), array.max(axis=1))
        assert_close(indices.ravel(), array.argmax(axis=1))


@pytest.mark.parametrize("mode", ["max", "sum", "average_inc_pad", "average_exc_pad"])
def test_pooling_in_python_is_that_in_c(mode):
    x, v = T.dtensor4("x"), T.dtensor4("v")
    pooled = pool_2d(x, (2, 3), ignore_border=False, stride=(2, 2), mode=mode)
    outputs = [pooled, T.grad((pooled**2).sum(), x)]
    if mode == "max":
        outputs.append(T.Rop(pooled, x, v))
    arrays = np.random.RandomState(0).rand(2, 2, 1, 5, 6)
    modes = [theano.Mode(linker) for linker in ("py", "cvm")]
    functions = [theano.function([x, v], outputs, mode=mode, on_unused_input="ignore") for mode in modes]
    for in_python, in_c in zip(*(function(*arrays) for function in functions)):
        assert_close(in_python, in_c)


@functools.lru_cache
def functions_that_need_rows():
    """Return functions that compute the sum of squares, and the sum of all elements by a loop over rows."""
    x = T.dtensor3("x")
    sums, _ = theano.scan(lambda row, total: total + row.sum(), sequences=x, outputs_info=T.zeros((), "float64"))
    return [synk.function([x], (y.sum(), "sum")) for y in (x.flatten(2) ** 2, sums[-1])]


class TestNoDataPoints:
    """A rank without rows computes nothing; a call without rows on any rank is an error."""

    @pytest.mark.parametrize("which", [0, 1], ids=["flatten", "scan"])
    def test_fewer_rows_than_ranks(self, which, synchronize):
        synchronize(3)
        function = functions_that_need_rows()[which]
        assert_close(function(np.ones((2, 2, 2))), 8.0)
        assert function.counts == (1, 1, 0)

    @pytest.mark.parametrize("which", [0, 1], ids=["flatten", "scan"])
    def test_no_rows_at_all(self, which, synchronize):
        synchronize(2)
        function = functions_that_need_rows()[which]
        with pytest.raises(synk.WorkerError, match="There are no data points in this call"):
            function(np.ones((0, 2, 2)))
        assert_close(function(np.ones((1, 2, 2)), num_slices=2), 4.0)

    def test_other_errors_do_not_mention_rows(self, synchronize):
        synchronize(2)
        a, b = T.dmatrices("ab")
        function = synk.function([a], T.dot(a, b).sum(), bcast_inputs=[b])
        with pytest.raises(synk.WorkerError) as caught:
            function(np.ones((2, 3)), np.ones((2, 3)))
        assert "no data points" not in str(caught.value)


def test_the_list_of_theanos_failing_tests_is_checked(tmp_path):
    """``tests/theano/run.py`` fails if a listed test passes or does not exist."""
    for name in ("run.py", "pytest.ini"):
        shutil.copy(ROOT / "tests" / "theano" / name, tmp_path)
    test = "tests/test_config.py::T_config::test_invalid_default"

    def run(expected):
        (tmp_path / "expected.txt").write_text(expected)
        command = [sys.executable, str(tmp_path / "run.py"), "theano.tests.test_config"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        return done.returncode, done.stdout

    assert run("# a reason\n")[0] == 0
    status, out = run(f"# a reason\n{test}\n")
    assert status == 1 and "[XPASS(strict)] a reason" in out
    status, out = run("# a reason\ntests/test_config.py::gone_*\n")
    assert status == 1 and "tests/test_config.py::gone_* is expected to fail, and there is no such test" in out
    assert run(f"# a reason\n{test} 3.8\ntests/test_rop.py::gone\n")[0] == 0  # another Python and another module
