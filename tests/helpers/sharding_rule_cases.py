"""Cases of each operation that has a sharding rule; see `sharding_rule_programs`."""

import functools
import itertools

import numpy as np
import scipy.sparse
from backend import T, ifelse, on_theano, pool_2d, theano
from sharding_rule_programs import Case

from synkhronos._backends import ops, scalar

FAMILIES = {}


def _exists(kind):
    return kind.__module__ != "synkhronos._backends.common"


class Family:
    """Cases of related operations. The rule of each operation is applied in at least one case."""

    def __init__(self, name, kinds, make):
        self.name, self._make = name, make
        self.ops = set(filter(_exists, kinds))

    @functools.cached_property
    def cases(self):
        cases = list(self._make())
        for case in cases:
            case.family = self.name
        return cases


def family(name, *kinds):
    """Register a function that yields the cases of some operations, if the backend has one of them."""

    def enter(make):
        made = Family(name, kinds, make)
        if made.ops:
            FAMILIES[name] = made
        return make

    return enter


def patterns(n):
    """Yield labels of two inputs with n axes, each of which is broadcast along no axis or in one of the inputs."""
    for kinds in itertools.product("=<>", repeat=n):
        pairs = [{"=": (x, x), "<": (x, "1"), ">": ("1", x)}[kind] for x, kind in zip("abcd", kinds)]
        yield " ".join("".join(each) or "." for each in zip(*pairs)) if n else ". ."


def subsets(n):
    """Return None, for all axes, and each non-empty subset of n axes."""
    return [None, *(axes for k in range(1, n + 1) for axes in itertools.combinations(range(n), k))]


LABELS = ["a", "ab", "abc", "abcd"]


@family("elementwise", ops.Elemwise)
def _elementwise():
    for n in range(5):
        for labels in patterns(n):
            yield Case(labels, lambda x, y: [x * y, x + y, T.maximum(x, y), T.second(x, y)], thorough=n <= 2)
    for labels in ("ab a1 1b", "ab ab ab", "1b a1 ab", "a . .", "ab . 11"):
        yield Case(labels, lambda c, x, y: [T.switch(c > 0, x, y), c + x - y], thorough=True)
    for labels in (".", *LABELS[:3]):
        linear = lambda x: [-x, x * 2, 3 * x, x / 4, x - 0.0, x + x, x + 1, T.exp(x), T.cast(x, "float32")]  # noqa: E731
        yield Case(labels, linear)
        yield Case(labels, lambda x: [-x, x * 2, x + x, T.cast(x, "int8"), x / 3, x % 2], "q")
        yield Case(labels, lambda x: [T.cast(x, "float64"), x * 2], "s")
        yield Case(labels, lambda x: [x, ~x if not on_theano else T.invert(x), T.cast(x, "int64")], "B")
    yield Case("ab", lambda x: [x.mean(0), x.mean(), x.mean(1, keepdims=True)])
    yield Case("ab", lambda x: [x - x.mean(0), x / x.sum(1, keepdims=True)])
    yield Case("a", lambda x: T.grad((T.tanh(x) ** 2).sum(), x))


@family("shuffles", ops.DimShuffle)
def _shuffles():
    for n in range(1, 5):
        for order in itertools.permutations(range(n)):
            places = range(n + 1) if n < 3 else [order[0]]
            orders = [order, *((*order[:i], "x", *order[i:]) for i in places)] if n < 4 else [order]
            yield Case(LABELS[n - 1], lambda x, orders=orders: [x.dimshuffle(one) for one in orders])
    yield Case("a1", lambda x: [x.dimshuffle(0), x.dimshuffle(1, 0), x.dimshuffle("x", 0, 1)])
    yield Case("1ab", lambda x: [x.dimshuffle(2, 1), x.dimshuffle(1, "x", 2)])
    if not on_theano:  # length 1 is known only at run time
        yield Case("ua", lambda x: x.dimshuffle(1))
        yield Case("ab", lambda x: x.dimshuffle(1))
        yield Case("au", lambda x: x.dimshuffle(0, "x"))


@family("views", *(getattr(ops, name) for name in ["ViewOp", "OutputGuard", "DeepCopyOp", "CpuContiguous"]))
def _views():
    for labels in (".", *LABELS):
        yield Case(labels, lambda x: [ops.ViewOp()(x), ops.DeepCopyOp()(x), ops.CpuContiguous()(x)])
        if on_theano:
            yield Case(labels, lambda x: ops.OutputGuard()(x))


GRADIENTS = (ops.ConsiderConstant, ops.DisconnectedGrad, ops.GradClip, ops.GradScale, ops.UndefinedGrad, ops.ZeroGrad)


@family("gradients", *GRADIENTS)
def _gradients():
    marks, gradient = ["disconnected_grad", "undefined_grad", "zero_grad"], theano.gradient
    for labels in (".", *LABELS):
        yield Case(labels, lambda x: [gradient.grad_clip(x, -1, 1), gradient.grad_scale(x, 2.0)])
        yield Case(labels, lambda x: [getattr(gradient, m)(x) for m in [*marks, *["consider_constant"] * on_theano]])


@family("rebroadcast", ops.Rebroadcast)
def _rebroadcast():
    for labels in LABELS[:3]:
        yield Case(labels, lambda x: T.patternbroadcast(x, (False,) * x.ndim))
        yield Case(f"1{labels}", lambda x: T.unbroadcast(x, 0))
        yield Case(f"u{labels}", lambda x: T.addbroadcast(x, 0))


@family("checks", ops.Assert, ops.CheckAndRaise)
def _checks():
    for labels in (".", *LABELS[:3]):
        check = ops.Assert("no")
        yield Case(f"{labels} a", lambda x, y, check=check: [check(x, T.ge(y.sum(), -99)), check(x, x.size > 0)])
        if not on_theano:
            yield Case(f"{labels} a", lambda x, y: ops.CheckAndRaise(ValueError, "no")(x, (y > -99).all()))


SUMS = (ops.Sum, ops.Prod, ops.ProdWithoutZeros)


@family("reductions", *SUMS, ops.All, ops.AnyOp, ops.Max, ops.Min, ops.CAReduce, ops.CAReduceDtype)
def _reductions():
    kinds, plain = [*SUMS, *filter(_exists, [ops.Min])], ops.CAReduce
    for n, labels in enumerate(LABELS, 1):
        for axes in subsets(n):
            yield Case(labels, lambda x, axes=axes: [*(kind(axes)(x) for kind in kinds), x.max(axes), x.min(axes)])
            yield Case(labels, lambda x, axes=axes: [ops.Sum(axes)(x), ops.Prod(axes)(x), x.max(axes)], "q")
            yield Case(labels, lambda x, axes=axes: [x.all(axes), x.any(axes), plain(scalar.xor, axes)(x)], "B")
            more = [plain(scalar.add, axes), *([ops.CAReduceDtype(scalar.add, axes)] if on_theano else [])]
            yield Case(labels, lambda x, more=more: [one(x) for one in more])
    yield Case("a1b", lambda x: [x.sum(1), x.sum((0, 1)), x.max(2), x.sum(0, keepdims=True)])
    if not on_theano:
        yield Case(". a", lambda x, y: [x.sum(0) * y, x.max(-1) + y])  # PyTensor reduces numbers along axis 0


@family("places of maxima", ops.Argmax, ops.MaxAndArgmax)
def _argmax():
    for n in range(1, 5):
        for axis in [None, *range(-1, n)]:
            largest = lambda x, axis=axis: [*T.max_and_argmax(x, axis), x.argmax(axis), x.max(axis)]  # noqa: E731
            yield Case(LABELS[n - 1], largest if on_theano else lambda x, axis=axis: x.argmax(axis))


def _solved(matrix, sides):
    """Solve triangular systems of equations with several right-hand sides."""
    return T.linalg.solve_triangular(matrix + 9 * T.eye(matrix.shape[-1]), sides, lower=True, b_ndim=2)


@family("products", ops.Dot, ops.BatchedDot, ops.Blockwise)
def _products():
    for labels in ("c c", "ac c", "c cb", "ac cb", "a1 1b", "1c cb", "ac c1", "1 1b", "a1 1"):
        yield Case(labels, T.dot)
        yield Case(labels, T.dot, "qq")
    yield Case("ac", lambda x: [T.dot(x, x.T), T.dot(x.T, x)])
    for labels in ("eac ecb", "eac ec", "ec ecb", "1ac 1cb", "eac ec1", "e1c ecb"):
        yield Case(labels, T.batched_dot, thorough=True)
        if on_theano or labels.count("e") + labels.count("1") == 2:
            yield Case(labels, lambda x, y: ops.BatchedDot()(x, y), thorough=True)
    contracted = {"abc cd": [[2], [0]], "abc cb": [[1, 2], [1, 0]], "abc ade": [[0], [0]], "ac bc": [[1], [1]]}
    for labels, axes in contracted.items():
        yield Case(labels, lambda x, y, axes=axes: T.tensordot(x, y, axes=axes))
    if on_theano:
        return
    for labels in ("a a", "ca a", "a ad", "ca ad"):
        yield Case(labels, T.matmul)
    for labels in ("cc cb", "ecc ecb", "cc ecb", "ecc cb"):
        yield Case(labels, _solved)
    for first, second_ in itertools.product(("", "e", "1", "de", "1e", "d1"), repeat=2):
        yield Case(f"{first}ac {second_}cb", T.matmul, thorough=len(first + second_) <= 2)
        yield Case(f"{first}ac {second_}cb", T.matmul, "qq", thorough=False)
    yield Case("ea eab", lambda x, y: T.vecmat(x, y), thorough=True)
    yield Case("eab eb", lambda x, y: T.matvec(x, y), thorough=True)
    for batch in ("", "e", "de"):
        yield Case(f"{batch}aa", lambda x: [T.linalg.inv(x + 9 * T.eye(x.shape[-1])), T.linalg.det(x)])
        yield Case(f"{batch}aa {batch}ab", lambda x, y: T.linalg.solve(x + 9 * T.eye(x.shape[-1]), y, b_ndim=2))
    yield Case("aa eab", lambda x, y: T.linalg.solve(x + 9 * T.eye(x.shape[-1]), y, b_ndim=2))
    yield Case("eaa 1ab", lambda x, y: T.linalg.solve(x + 9 * T.eye(x.shape[-1]), y, b_ndim=2))


BASIC = [
    np.s_[0], np.s_[-1], np.s_[1:], np.s_[:-1], np.s_[::-1], np.s_[:, 0], np.s_[:, 1:], np.s_[:, ::-1], np.s_[1, 1:],
    np.s_[:, 0, 1:], np.s_[0, :, -1], np.s_[:, :, 0], np.s_[1:, :, ::2], np.s_[:, 1, :, 0], np.s_[0, :, 1, 1:],
]  # fmt: skip


def _fitting(n):
    return [index for index in BASIC if len(index if isinstance(index, tuple) else (index,)) <= n]


@family("indices", ops.Subtensor)
def _indices():
    for n, labels in enumerate(LABELS, 1):
        for index in _fitting(n):
            yield Case(labels, lambda x, index=index: x[index])
        yield Case(labels, lambda x: [x[: x.shape[0]], x[0 : x.shape[0] : 1], x[: x.shape[0] - 1], x[: x.shape[-1]]])
    yield Case("ab c", lambda x, y: [x[: y.shape[0]], x[:, : y.shape[0]], x[T.cast((y * 0).sum(), "int64")]])


@family("changed parts", ops.IncSubtensor)
def _changed():
    both = (T.set_subtensor, T.inc_subtensor)
    for n, labels in enumerate(LABELS[:3], 1):
        for index in _fitting(n):
            put = lambda x, y, index=index: [how(x[index], y) for how in both]  # noqa: E731
            kept = _kept(labels, index)
            for of_y in {kept, kept[1:], "1" + kept[1:] if kept else "", kept[:-1] + "1" if kept else "", ""}:
                yield Case(f"{labels} {of_y or '.'}", put)
    put = lambda x, y: [how(x[:, 1], y) for how in both]  # noqa: E731
    yield Case("abcd acd", put)
    yield Case("abcd cd", put)
    yield Case("ab a", lambda x, y: T.set_subtensor(T.AllocEmpty("float64")(x.shape[0], x.shape[1])[:], x * y[:, None]))
    yield Case("ab ab", lambda x, y: T.inc_subtensor(T.zeros_like(x)[1:], y[1:]))
    yield Case("ab ab", lambda x, y: T.set_subtensor(T.zeros_like(x)[:], y))


def _kept(labels, index):
    """Return the labels of an indexed array; ``"1"`` for axes that the index changes."""
    index = index if isinstance(index, tuple) else (index,)
    entries = [*index, *[slice(None)] * (len(labels) - len(index))]
    kept = [(label, one) for label, one in zip(labels, entries) if isinstance(one, slice)]
    return "".join(label if one in (slice(None), np.s_[::-1]) else "1" for label, one in kept)


POINTS = [
    # labels of an array and of index arrays, kinds, and the operation
    ("ab c", "fi", lambda x, i: [x[i], x[:, i]]),
    ("ab cd", "fi", lambda x, i: [x[i], x[:, i]]),
    ("ab c1", "fi", lambda x, i: [x[i]]),
    ("abc d", "fi", lambda x, i: [x[i], x[:, i], x[:, :, i], x[i, 0], x[0, :, i], x[:, 1:, i]]),
    ("abcd e", "fi", lambda x, i: [x[:, i], x[:, :, i], x[i, :, i], x[:, i, i], x[i, :, :, i]]),
    ("ab c c", "fii", lambda x, i, j: [x[i, j]]),
    ("ab c1 1d", "fii", lambda x, i, j: [x[i, j]]),
    ("ab cd d", "fii", lambda x, i, j: [x[i, j]]),
    ("abc d d", "fii", lambda x, i, j: [x[i, j], x[i, :, j], x[:, i, j], x[i, 1:, j]]),
    ("abcd e e", "fii", lambda x, i, j: [x[:, i, j], x[:, i, :, j], x[i, :, :, j], x[:, 1:, i, j]]),
    ("ab .", "fi", lambda x, i: [x[i], x[:, i], x[[1, 0], i], x[T.arange(x.shape[0]), i]]),
    ("ab a", "fi", lambda x, i: [x[T.arange(x.shape[0]), i], x[T.arange(i.shape[0]), i], x[T.arange(i.shape[0])]]),
    ("abc a", "fi", lambda x, i: [x[T.arange(i.shape[0]), i], x[T.arange(x.shape[0]), i, i]]),
    ("bac a", "fi", lambda x, i: [x[i, T.arange(i.shape[0])], x[:, T.arange(i.shape[0]), i]]),
    ("ab a", "fi", lambda x, i: [x[T.arange(i.shape[0])[::-1], i]]),
    ("ab", "f", lambda x: [x[[1, 0, 1]], x[:, [1, 0]], x[[0, 1], [1, 0]], x[T.arange(x.shape[0])], x[x[:, 0] > 0]]),
    ("ab ab", "fB", lambda x, m: [x[m], x[T.nonzero(m)]]),
]  # fmt: skip


@family("points", ops.AdvancedSubtensor1, ops.AdvancedSubtensor)
def _points():
    for labels, kinds, take in POINTS:
        yield Case(labels, take, kinds, thorough=len(labels) <= 7)


@family("changed points", ops.AdvancedIncSubtensor1, ops.AdvancedIncSubtensor)
def _changed_points():
    inc, put = T.inc_subtensor, T.set_subtensor
    for of_y in ("cb", "b", "1b", "c1", "."):
        yield Case(f"ab c {of_y}", lambda x, i, y: [inc(x[i], y), inc(T.zeros_like(x)[i], y), put(x[i], y)], "fif")
    for of_y in ("ac", "c", "a1", "1c", "."):
        yield Case(f"ab c {of_y}", lambda x, i, y: [inc(x[:, i], y), put(x[:, i], y)], "fif")
    for of_y in ("c", "1", "."):
        yield Case(f"ab c c {of_y}", lambda x, i, j, y: [inc(x[i, j], y), inc(T.zeros_like(x)[i, j], y)], "fiif")
    for of_y in ("ade", "de", "e", "d1", "a1e"):
        yield Case(f"abe d {of_y}", lambda x, i, y: [inc(x[:, i], y), put(x[:, i], y)], "fif")
    for of_y in ("da", "a", "d1", "1"):
        yield Case(f"bac d d {of_y}", lambda x, i, j, y: [inc(x[i, :, j], y), put(x[i, :, j], y)], "fiif")
    for of_y in ("cdb", "db", "b", "c1b", "1d1"):
        yield Case(f"ab cd {of_y}", lambda x, i, y: [inc(x[i], y)], "fif")
    for of_y in ("a", "1", "."):
        points = lambda x, i, y: [inc(x[T.arange(i.shape[0]), i], y), put(x[T.arange(x.shape[0]), i], y)]  # noqa: E731
        yield Case(f"ab a {of_y}", points, "fif", thorough=True)
    for of_y in ("ab", "b", "1b"):
        yield Case(f"adb a {of_y}", lambda x, i, y: [inc(x[T.arange(i.shape[0]), i], y)], "fif", thorough=True)
    yield Case("ab c cb", lambda x, i, y: [inc(x[i], y)], "qiq")
    if not on_theano:
        yield Case("ab c cb", lambda x, i, y: [inc(x[i], y, ignore_duplicates=True)], "fif")


@family("joins", ops.Join)
def _joins():
    for n, labels in enumerate(LABELS, 1):
        for axis in range(-1, n):
            place = axis % n
            for other in {labels[:place] + one + labels[place + 1 :] for one in (labels[place], "1", "e")}:
                yield Case(f"{labels} {other}", lambda x, y, axis=axis: [T.join(axis, x, y)], thorough=n <= 2)
    yield Case("ab ab ab", lambda x, y, z: [T.concatenate([x, y, z], 1), T.stack([x, y, z])])
    yield Case("a1 a1", lambda x, y: [T.concatenate([x, y], 1), T.concatenate([x, y], 0)])
    yield Case("ab", lambda x: T.concatenate([x, T.zeros((x.shape[0], 2))], 1))
    yield Case("ab", lambda x: T.concatenate([x, T.ones((1, x.shape[1]))]))
    yield Case("a a", lambda x, y: [T.stack([x.sum(), y.sum(), 2.0]), T.concatenate([x, [1.0]])])


@family("splits", ops.Split)
def _splits():
    for n, labels in enumerate(LABELS, 1):
        for axis in range(-1, n):
            yield Case(labels, lambda x, axis=axis: T.split(x, [1, x.shape[axis] - 1], 2, axis))
    yield Case("ab .", lambda x, i: T.split(x, [i, x.shape[1] - i], 2, 1), "fi")


@family("repeats", ops.RepeatOp)
def _repeats():
    for n, labels in enumerate(LABELS[:3], 1):
        for axis in [None, *range(-1, n)]:
            yield Case(labels, lambda x, axis=axis: T.repeat(x, 2, axis))
        for axis in range(-1, n):
            yield Case(f"{labels} {labels[axis]}", lambda x, i, axis=axis: ops.RepeatOp(axis)(x, i), "fi")
    yield Case("ab", lambda x: [T.tile(x, (2, 1)), T.tile(x, (1, 2))])


@family("shapes", ops.Shape, ops.Shape_i)
def _shapes():
    for labels in (".", *LABELS):
        yield Case(labels, lambda x: [ops.Shape()(x), *(ops.Shape_i(i)(x) for i in range(x.ndim))])
    yield Case("ab", lambda x: [x.size, T.prod(x.shape), x.shape[0] * 2 + 1, x / x.shape[0], x * T.arange(x.shape[1])])


@family("allocations", ops.Alloc, ops.AllocEmpty, ops.Elemwise)
def _allocations():
    alloc = T.alloc
    for labels in ("ab", "1b", "a1", "b", ".", "11"):
        yield Case(f"{labels} ac bd", lambda v, x, y: alloc(v, x.shape[0], y.shape[0]))
        yield Case(f"{labels} ac bd", lambda v, x, y: alloc(v, 2, x.shape[0], y.shape[0]))
    yield Case("a a", lambda v, x: [alloc(v, x.shape[0]), alloc(v, 3, x.shape[0])])
    yield Case("a a .", lambda v, x, i: alloc(v, i + 1, x.shape[0]), "ffi")
    yield Case("ab", lambda x: [T.zeros_like(x) + 1, T.ones((x.shape[0],)), T.zeros((2, x.shape[0] * 2))])
    yield Case("ab", lambda x: [T.eye(x.shape[0]), T.zeros((x.shape[1], x.shape[0], x.shape[0]))])
    yield Case("ab", lambda x: [T.zeros((x.shape[0] + 1,)), T.zeros((3,))])
    empty = T.AllocEmpty("float64")
    fill = lambda v, x: T.set_subtensor(empty(x.shape[0], x.shape[1])[:], v)  # noqa: E731
    for labels in ("ab", "b", ".", "1b"):
        yield Case(f"{labels} ab", fill)
    yield Case("a", lambda x: [alloc(T.constant(1)) * x.sum(), T.zeros((), dtype="int64") + x, T.fill(x.sum(), 2.0)])


@family("new shapes", ops.Reshape)
def _reshapes():
    for labels in ("a", "ab", "abc", "abcd", "a1b"):
        yield Case(labels, lambda x: [x.flatten(), x.reshape((-1, x.shape[-1])), x.reshape((x.shape[0], -1))])
        yield Case(labels, lambda x: [x.flatten(2) if x.ndim > 1 else x, x.reshape(x.shape[::-1], ndim=x.ndim)])
        yield Case(
            labels,
            lambda x: [x.reshape((-1, 2)), x.reshape((2, -1)), x.reshape((x.shape[0], 1, -1)), x.reshape((1, -1))],
        )
    for labels in ("abc", "abcd"):
        for i in range(len(labels) - 1):
            yield Case(labels, lambda x, i=i: _merged(x, i), thorough=True)
    yield Case("ad", lambda x: [x.reshape((x.shape[0], 2, x.shape[1] // 2)), x.reshape((x.shape[0], 3, -1))])
    yield Case("ad", lambda x: x.reshape((x.shape[0] * 2, -1)))
    yield Case("ab cd", lambda x, y: [x.reshape((y.shape[0], -1)), x.reshape((-1, y.shape[1]))])
    yield Case("ab cd", lambda x, y: [x.reshape(x.shape), x.reshape(y.shape)])
    yield Case("a b", lambda x, i: x.reshape(T.cast(T.stack([i.sum() * 0 + 1, -1]), "int64")), "fi")


def _merged(x, i):
    shape = [x.shape[k] for k in range(x.ndim)]
    merged = x.reshape([*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]], ndim=x.ndim - 1)
    return [merged, merged.reshape(shape, ndim=x.ndim), merged.reshape([shape[i + 1], shape[i], -1], ndim=3)]


@family("specified shapes", ops.SpecifyShape)
def _specified():
    for labels in ("ab", "b", "abc"):
        yield Case(labels, lambda x: T.specify_shape(x, x.shape))
        yield Case(labels, lambda x: T.specify_shape(x, (x.shape[0], *[None] * (x.ndim - 1))))
        yield Case(labels, lambda x: T.specify_shape(x, (*[None] * (x.ndim - 1), x.shape[-1])))
    yield Case("ab ac", lambda x, y: T.specify_shape(x, (y.shape[0], None)))


@family("joined and split axes", *ops.EXPRESSED if not on_theano else ())
def _axes():
    for labels in LABELS[1:]:
        for axis in range(len(labels) - 1):
            yield Case(labels, lambda x, axis=axis: T.join_dims(x, axis, 2), thorough=True)
    for labels, axis in (("d", 0), ("ad", 1), ("da", 0), ("adb", 1)):
        yield Case(labels, lambda x, axis=axis: T.split_dims(x, (2, x.shape[axis] // 2), axis), thorough=True)
    yield Case("ab c", lambda x, y: T.split_dims(T.join_dims(x, 0, 2), x.shape, 0))


@family("orders", ops.SortOp, ops.ArgSortOp, ops.CumOp)
def _orders():
    for n, labels in enumerate(LABELS, 1):
        for axis in [None, *range(-n, n)]:
            orders = [T.sort, T.argsort, T.cumsum, T.extra_ops.cumprod]
            yield Case(labels, lambda x, axis=axis, orders=orders: [order(x, axis) for order in orders])


@family("diagonals", ops.ExtractDiag)
def _diagonals():
    for labels, axes in (
        ("ab", (0, 1)),
        ("abc", (0, 1)),
        ("abc", (0, 2)),
        ("abc", (2, 1)),
        ("aab", (0, 1)),
        ("1bc", (1, 2)),
    ):
        for offset in (0, 1, -1):
            yield Case(labels, lambda x, offset=offset, axes=axes: T.diagonal(x, offset, *axes))


@family("branches", ops.IfElse)
def _branches():
    choose = lambda x, y, z: ifelse(T.gt(z.sum(), 0), x, T.unbroadcast(y, 0) if on_theano else y)  # noqa: E731
    for labels in ("a a a", "ab ab b", "ab 1b a", "ab bc a"):
        yield Case(labels, choose, thorough=len(labels) < 7)
    yield Case("ab ab", lambda x, y: ifelse(T.gt(x.sum(), 0), [x, y.sum()], [y, x.sum()]), thorough=False)
    yield Case("ab a", lambda x, y: ifelse(T.gt(x.sum(), 0), x[:, 0], y), thorough=False)


@family("inner graphs", ops.OpFromGraph)
def _inner_graphs():
    h, m = T.dmatrix(), T.dmatrix()
    yield Case("ab bc", theano.OpFromGraph([h, m], [T.tanh(T.dot(h, m)), h.sum(0), m.T]))


@family("loops", ops.Scan)
def _loops():
    scan = lambda step, *a, **k: theano.scan(step, *a, **k)[0]  # noqa: E731
    yield Case("ab", lambda x: scan(lambda r: [T.exp(r), r.sum()], [x]), thorough=False)
    yield Case("ab b", lambda x, w: scan(lambda r, w: r * w, [x], non_sequences=[w]), thorough=False)
    yield Case("ab ac", lambda x, y: scan(lambda r, s: r.sum() + s, [x, y]), thorough=False)
    yield Case("abc bc", lambda x, h: scan(lambda r, h: T.tanh(r + h), [x], [h]), thorough=False)
    net = lambda x, h, w: scan(lambda r, h, w: T.tanh(r + T.dot(h, w)), [x], [h], non_sequences=[w])  # noqa: E731
    yield Case("abc bc cc", net, thorough=False)
    yield Case("abc c", lambda x, h: scan(lambda r, h: r.mean(0) + h * 0.5, [x], [h]), thorough=False)
    yield Case("abc c", lambda x, h: scan(lambda r, h: [h + r.sum(0), r * 2 + h], [x], [h, None]), thorough=False)


@family("softmax", ops.Softmax, ops.LogSoftmax)
def _softmax():
    if on_theano:
        for labels in ("ab", "1b"):
            yield Case(labels, lambda x: [T.nnet.softmax_op(x), T.nnet.logsoftmax(x)], thorough=True)
            yield Case(labels, lambda x: T.grad(T.sqr(T.nnet.softmax_op(x)).sum(), x))
        return
    for n, labels in enumerate(LABELS, 1):
        for axis in [None, *range(-1, n)]:
            yield Case(labels, lambda x, axis=axis: [T.special.softmax(x, axis), T.special.log_softmax(x, axis)])


@family(
    "classes",
    ops.SoftmaxGrad,
    ops.SoftmaxWithBias,
    ops.CrossentropyCategorical1Hot,
    ops.CrossentropyCategorical1HotGrad,
    ops.CrossentropySoftmaxArgmax1HotWithBias,
    ops.CrossentropySoftmax1HotWithBiasDx,
)
def _classes():
    nnet = T.nnet
    yield Case("ab ab", lambda d, s: ops.SoftmaxGrad()(d, s))
    yield Case("ab b", lambda x, b: ops.SoftmaxWithBias()(x, b))
    yield Case("1b b", lambda x, b: ops.SoftmaxWithBias()(x, b))
    yield Case("ab a", lambda p, y: nnet.crossentropy_categorical_1hot(p, y), "py", thorough=True)
    yield Case("a ab a", lambda g, p, y: ops.CrossentropyCategorical1HotGrad()(g, p, y), "fpy")
    yield Case("ab b a", lambda x, b, y: ops.CrossentropySoftmaxArgmax1HotWithBias()(x, b, y), "ffy")
    for labels in ("a ab a", ". ab a", "u ab a", "1 ab a"):
        yield Case(labels, lambda d, s, y: ops.CrossentropySoftmax1HotWithBiasDx()(d, s, y), "fpy")


@family("normalization", *ops.EXPRESSED if on_theano else ())
def _normalization():
    bn = T.nnet.bn
    for labels, axes in (("ab 1b 1b", (0,)), ("abc 1bc 1bc", (0,)), ("ab a1 a1", (1,)), ("abXX 1b11 1b11", (0, 2, 3))):

        def train(x, g, b, axes=axes):
            out = bn.batch_normalization_train(x, g, b, axes)[:3]
            return [*out, *T.grad(T.sqr(out[0]).sum(), [x, g])]

        yield Case(labels, train, thorough=False)
        test = lambda x, g, b, axes=axes: bn.batch_normalization_test(x, g, b, b, abs(g) + 1, axes)  # noqa: E731
        yield Case(labels, test, thorough=False)


@family("convolutions", ops.AbstractConv2d, ops.AbstractConv2d_gradInputs, ops.AbstractConv2d_gradWeights,
        ops.AbstractConv3d, ops.AbstractConv3d_gradInputs, ops.AbstractConv3d_gradWeights)  # fmt: skip
def _convolutions():
    for options in ({}, {"border_mode": "half"}, {"subsample": (2, 2)}, {"filter_flip": False}):
        convolve = lambda x, w, o=options: _with_gradients(T.nnet.conv2d(x, w, **o), x, w)  # noqa: E731
        yield Case("abXY cbKK", convolve, thorough=not options)
    volume = lambda x, w: _with_gradients(T.nnet.conv3d(x, w), x, w)  # noqa: E731
    yield Case("abXYX cbKKK", volume, thorough=False)
    yield Case("1bXY cbKK", lambda x, w: _with_gradients(T.nnet.conv2d(x, w), x, w))


def _with_gradients(output, *inputs):
    return [output, *T.grad(T.sqr(output).sum(), list(inputs))]


@family("pooling", ops.Pool, ops.AveragePoolGrad, ops.MaxPoolGrad, ops.DownsampleFactorMaxGradGrad, ops.MaxPoolRop)
def _pooling():
    for labels in ("XY", "aXY", "abXY"):
        for mode in ("max", "sum", "average_exc_pad"):
            pool = lambda x, mode=mode: _with_gradients(pool_2d(x, (2, 2), ignore_border=True, mode=mode), x)  # noqa: E731
            yield Case(labels, pool, thorough=True)

        def again(x, z):
            gradient = T.grad(T.sqr(pool_2d(x, (2, 2), ignore_border=True)).sum(), x)
            return [T.grad((gradient * z).sum(), x), ops.MaxPoolRop(ignore_border=True)(x, z, (2, 2))]

        yield Case(f"{labels} {labels}", again, thorough=len(labels) < 4)


@family("sparse", ops.SparseDot, ops.StructuredDot, ops.StructuredDotGradCSC, ops.StructuredDotGradCSR)
def _sparse():
    rng, sparse = np.random.default_rng(4), theano.sparse
    for form in ("csc", "csr"):
        matrix = theano.shared(_matrix(rng, form), "matrix")
        yield Case("ab", lambda x, m=matrix: sparse.dot(x, m))
        yield Case("cb", lambda x, m=matrix: [sparse.structured_dot(m, x), sparse.dot(m, x)])

        def gradients(x, m=matrix):
            loss = T.sqr(sparse.structured_dot(m, x)).sum()
            return [sparse.csm_data(T.grad(loss, m)), T.grad(loss, x)]

        yield Case("ca", gradients)


def _matrix(rng, form):
    return getattr(scipy.sparse, f"{form}_matrix")(rng.binomial(1, 0.6, (3, 4)) * rng.normal(size=(3, 4)))
