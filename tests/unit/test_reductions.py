"""The compiled reductions: bitwise equal to models in NumPy, on every instruction set; and invalid arguments."""

import functools
import sys
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synkhronos._collectives import OPS, combine, result_dtype
from synkhronos._native import native

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES += ("float16", "float32", "float64", "complex64", "complex128")
LENGTHS = (0, 1, 7, 1025, 20_001)
WEIGHTS = ([1] * 5, [3, 1, 2, 0, 7], [0.1, 0.7, 0.3, 1e-3, 1], [1e-300, 1, 1e300, 5e-324, 1], [0] * 5, [0, 4, 0, 0, 0])
WEIGHTS += ([2**40 + 1, 3, 2**41, 1, 5],)


def drawn(dtype, length, seed, special):
    """Return random numbers of moderate size, or with ``special`` of every size, with infinities and NaNs."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return random.random(length) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        low, high = (info.min, info.max) if special else (max(info.min, -9), 9)
        return random.integers(low, high, length, dtype, endpoint=True)
    if dtype.kind == "c":
        real = np.dtype(f"f{dtype.itemsize // 2}")
        return drawn(real, 2 * length, seed, special).view(dtype)
    values = random.uniform(-9, 9, length).astype(dtype)
    if special:
        info = np.finfo(dtype)
        few = [0.0, -0.0, np.inf, -np.inf, np.nan, info.max, -info.max, info.max / 2, info.tiny, -info.tiny * info.eps]
        where = random.random(length) < 0.5
        values[where] = random.choice(np.array(few, dtype), where.sum())
    return values


def same(got, wanted):
    """Return whether arrays are bitwise equal, apart from the bits of NaNs."""
    if got.dtype.kind == "c":
        got, wanted = (one.view(f"f{one.dtype.itemsize // 2}") for one in (got, wanted))
    bits = f"u{got.dtype.itemsize}"
    equal = got.view(bits) == wanted.view(bits)
    return bool((equal | ((got != got) & (wanted != wanted))).all()) and got.dtype == wanted.dtype


def ordered(above, a, b):
    """Return the maximum or minimum as NumPy does: the first NaN, otherwise the extreme, the first of equal ones."""
    if a.dtype.kind == "c":
        first = above(a.real, b.real) & ~np.isnan(b.imag)
        keep = np.isnan(a) | first | ((a.real == b.real) & (above(a.imag, b.imag) | (a.imag == b.imag)))
    else:
        keep = np.isnan(a) | above(a, b) | (a == b) if a.dtype.kind == "f" else above(a, b)
    return np.where(keep, a, b)


def multiplied(a, b):
    if a.dtype.kind != "c":
        return np.multiply(a, b)
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


STEPS = {"sum": np.add, "prod": multiplied}
STEPS.update(max=functools.partial(ordered, np.greater), min=functools.partial(ordered, np.less))


def mean_of_floats(values, weights):
    """Compute the mean of floats by the algorithm of `reductions.c`, in NumPy."""
    dtype = values[0].dtype
    if dtype.kind == "c":
        real = f"f{dtype.itemsize // 2}"
        return mean_of_floats([one.view(real) for one in values], weights).view(dtype)
    weights = weights if any(weights) else [1] * len(weights)
    shares = [share for share in native.normalized(weights) if share]
    values = [one for one, weight in zip(values, weights) if weight]
    exact = [Fraction(weight) for weight in weights if weight]
    if len(values) == 1:
        return values[0]
    relative = [share / max(shares) for share in shares]
    work = np.dtype("float32") if dtype == "float16" else dtype
    if work == "float32" and min(relative) < np.finfo("float32").tiny:
        work = np.dtype("float64")
    total = sum(exact) / functools.reduce(_common_divisor, exact)
    by, operation = work.type(max(shares)), np.multiply
    if min(relative) < 1 and total <= 1 << np.finfo(work).nmant:
        factors = [int(one * total / sum(exact)) for one in exact]
        by, operation = work.type(int(total)), np.divide
    else:
        factors = relative
    terms = [one.astype(work) * work.type(factor) for one, factor in zip(values, factors)]
    mean = operation(functools.reduce(np.add, terms), by)
    bounded = None
    for one, share in zip(values, shares):
        term = one.astype(work) * work.type(share)
        before, bounded = bounded, term if bounded is None else bounded + term
        if before is not None:
            rounded = np.isinf(bounded) & np.isfinite(before) & np.isfinite(term)
            bounded = np.where(rounded, np.copysign(np.finfo(work).max, bounded), bounded)
    return np.where(np.isfinite(mean), mean, bounded).astype(dtype)


def _common_divisor(a, b):
    return _common_divisor(b, a % b) if b else a


def mean_of_integers(values, weights, returned):
    exact = [Fraction(weight) for weight in (weights if any(weights) else [1] * len(weights))]
    means = [sum(w * int(one) for w, one in zip(exact, column)) / sum(exact) for column in zip(*values)]
    return np.array([float(mean) if returned == "float64" else round(mean) for mean in means], returned)


@pytest.mark.parametrize("op", [op for op in OPS if op != "avg"])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30)
@given(
    n=st.sampled_from([1, 2, 3, 5]),
    length=st.sampled_from(LENGTHS),
    seed=st.integers(0, 2**31),
    special=st.booleans(),
    widened=st.booleans(),
)
def test_each_op_is_applied_in_the_order_of_the_operands(dtype, op, n, length, seed, special, widened):
    values = [drawn(dtype, length, (seed + i) % 2**32, special) for i in range(n)]
    returned = result_dtype(np.dtype(dtype), op) if widened else np.dtype(dtype)
    with np.errstate(all="ignore"):
        work = np.float32 if dtype == "float16" else returned  # float16 is accumulated in float32
        wanted = functools.reduce(STEPS[op], [one.astype(work) for one in values]).astype(returned)
        if dtype.startswith("complex") and op in ("max", "min"):
            np.testing.assert_array_equal(wanted, functools.reduce(getattr(np, f"{op}imum"), values))
    out = np.empty(length, returned)
    native.Reduction(op, dtype, returned, [1] * n)(values, [out])
    assert same(out, wanted)
    if returned == dtype:
        native.Reduction(op, dtype, dtype, [1] * n)(values, [*values, out])
        assert all(same(one, wanted) for one in [*values, out])


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10)
@given(
    n=st.sampled_from([1, 2, 3, 5]),
    length=st.sampled_from(LENGTHS[:-1]),
    seed=st.integers(0, 2**31),
    special=st.booleans(),
    last=st.booleans(),
)
def test_averages_are_those_of_the_model(dtype, weights, n, length, seed, special, last):
    values = [drawn(dtype, length, (seed + i) % 2**32, special) for i in range(n)]
    whole = np.dtype(dtype).kind in "iub"
    if whole:
        returned = np.empty(length, "float64")
        native.Reduction("avg", dtype, "float64", weights[:n])(values, [returned])
        wanted = mean_of_integers(values, weights[:n], "float64")
        assert (abs(returned - wanted) <= np.maximum(2 * np.spacing(abs(wanted)), 2.0**-36 * (1e-300 in weights))).all()
        wanted = mean_of_integers(values, weights[:n], dtype)
    else:
        with np.errstate(all="ignore"):
            wanted = mean_of_floats(values, weights[:n])
    out = np.empty(length, dtype)
    native.Reduction("avg", dtype, dtype, weights[:n])(values, [out])
    assert same(out, wanted)
    outs = values[-1:] if last else values
    native.Reduction("avg", dtype, dtype, weights[:n])(values, outs)
    assert all(same(one, wanted) for one in outs)


def test_every_number_of_half_precision_is_converted_as_numpy_does():
    halves = np.arange(2**16, dtype="uint16").view("float16")
    out = np.empty_like(halves)
    native.Reduction("max", "float16", "float16", [1, 1])([halves, halves], [out])
    assert same(out, halves)
    random = np.random.RandomState(0)
    for _ in range(20):  # sums and averages are rounded
        others = random.permutation(halves)
        with np.errstate(all="ignore"):
            native.Reduction("sum", "float16", "float16", [1, 1])([halves, others], [out])
            assert same(out, halves + others)
            native.Reduction("avg", "float16", "float16", [1, 1])([halves, others], [out])
            mean = (halves.astype("float32") + others.astype("float32")) * np.float32(0.5)
            assert same(out, mean.astype("float16"))


def test_operands_may_lie_anywhere():
    memory = np.zeros(4 * 5001 + 1, "uint8")
    apart = memory[1:].view("float32")
    apart[:] = np.arange(5001)
    out = np.empty(5001, "float32")
    native.Reduction("sum", "float32", "float32", [1, 1])([apart, apart], [out])
    assert (out == 2 * np.arange(5001)).all()
    swapped, reversed_ = np.arange(7.0).astype(">f8"), np.arange(14.0)[::-2]
    assert combine([swapped, reversed_], "sum", (), "it").tolist() == [13.0, 12, 11, 10, 9, 8, 7]


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(8), np.zeros(8, ">f4"), np.zeros(16, "float32")[::2], [0.0] * 8],
    ids=["other dtype", "other byte order", "strided", "list"],
)
def test_only_contiguous_arrays_of_the_dtype_are_reduced(wrong):
    floats = np.zeros(8, "float32")
    with pytest.raises(TypeError, match="C-contiguous arrays"):
        native.Reduction("sum", "float32", "float32", [1, 1])([floats, wrong], [floats])


def test_wrong_outputs_and_numbers_of_operands_are_refused():
    add, floats = native.Reduction("sum", "float32", "float32", [1, 1]), np.zeros(8, "float32")
    constant = np.zeros(8, "float32")
    constant.setflags(write=False)
    with pytest.raises(TypeError, match="writable"):
        add([floats, constant], [constant])
    with pytest.raises(ValueError, match="same size"):
        add([floats, floats[:7]], [floats])
    with pytest.raises(ValueError, match="2 operands"):
        add([floats], [floats])
    with pytest.raises(ValueError, match="an out"):
        add([floats, floats], [])
    with pytest.raises(ValueError, match="overlaps"):
        add([floats[:7], floats[1:]], [floats[:7]])
    memory = np.zeros(3)
    with pytest.raises(ValueError, match="overlaps"):
        native.Reduction("avg", "int64", "float64", [1])([memory.view("int64")], [memory])
    for op, dtype, returned, weights in (
        ("mean", "float32", "float32", [1]),
        ("sum", "float32", "float64", [1]),
        ("max", "int8", "int64", [1]),
        ("sum", "object", "object", [1]),
        ("sum", ">f4", ">f4", [1]),
        ("sum", "float128", "float128", [1]),
        ("sum", "float32", "float32", []),
    ):
        with pytest.raises(TypeError, match="no reduction"):
            native.Reduction(op, dtype, returned, weights)
    with pytest.raises(TypeError):
        native.Reduction("avg", "float32", "float32", ["a"])
    with pytest.raises(TypeError, match="sequence of numbers"):
        native.normalized(3)
    with pytest.raises(TypeError, match="C-contiguous arrays"):
        native.add_to_sums(np.zeros(3, object), np.zeros(3, object), 1)
    with pytest.raises(ValueError, match="total"):
        native.mean_of_sums(np.zeros((3, 2), "int64"), 0, np.zeros(3))


def test_other_threads_run_while_large_arrays_are_reduced():
    array = np.zeros(10_000_000)
    add = native.Reduction("sum", "float64", "float64", [1] * 16)
    running, steps = threading.Event(), []

    def work():
        running.set()
        steps.append("begun")
        add([array] * 16, [array])
        steps.append("done")

    thread = threading.Thread(target=work)
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # threads switch only where one waits or releases the GIL
    try:
        thread.start()
        running.wait()
        seen = list(steps)
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert seen == ["begun"]


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "int8", "bool", "complex64"])
def test_a_weight_of_0_leaves_an_operand_out_of_any_reduction(op, dtype):
    values = [(np.random.RandomState(k).randn(70) * 3).astype(dtype) for k in range(4)]
    if op in ("max", "min") and dtype == "complex64":
        return
    wanted, out, all_of_them = (np.empty(70, dtype) for _ in range(3))
    native.Reduction(op, dtype, dtype, [1, 1])([values[0], values[2]], [wanted])
    if dtype.startswith(("float", "complex")):
        values[1][:] = np.nan
    native.Reduction(op, dtype, dtype, [2, 0, 5, 0])(values, [out])
    np.testing.assert_array_equal(out, wanted)
    native.Reduction(op, dtype, dtype, [0, 0])([values[0], values[2]], [all_of_them])  # treated as equal weights
    np.testing.assert_array_equal(all_of_them, wanted)
    native.Reduction(op, dtype, dtype, [0, 1, 0, 0])(values, [out])
    np.testing.assert_array_equal(out, values[1])
