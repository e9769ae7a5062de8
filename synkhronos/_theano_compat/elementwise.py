"""Vector code for Theano's elementwise operations and sums: loops over contiguous runs, and a hyperbolic tangent.

Theano's loop over contiguous arrays is guarded by a condition of many parts. Gcc assumes that each part is true half of
the time. With five arrays, as in Adam's update, it considers the loop too rare for vector code: 2.9 ms for 1.28 million
float32 numbers instead of 0.36 ms. A compiler flag turns off these guesses.

If arrays are broadcast along some axes, as in batch normalization, Theano computes strides at run time, for which gcc
generates no vector code. Here the inner loop is over contiguous *runs* instead. A run covers the last axes, as far as
the types show that each array has either all its elements or a single number along them. Results differ only by
rounding, because gcc fuses multiplications and additions in other places.
``THEANO_FLAGS=synkhronos.vector_elementwise=False`` turns this off.

The hyperbolic tangent has no branches. It replaces the C library's function, which takes a third of an LSTM's step. Its
error is at most 0.51 units in the last place for float32, and less than 3 for float64 (C library: about 2).
``THEANO_FLAGS=synkhronos.vector_tanh=False`` turns this off.

Sums of floating-point numbers over the first axes of an array, its last axes, or both, have vector code, too. Theano's
C code sums the columns of a matrix one after the other, and each addition waits for the one before. The gradient of
every bias is such a sum. Here sums over rows are bitwise the same, because each column is summed in the same order.
Other sums add several interleaved partial sums, in an accumulator of the same dtype.
``THEANO_FLAGS=synkhronos.vector_sum=False`` turns this off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from .flags import is_on, read_support_code, with_version, wrap_methods

# -- loops over runs


class Operand(NamedTuple):
    """An array in C++ code.

    Parameters
    ----------
    name : str
        Prefix of the names of the pointer to its run, ``NAME_run``, and of the current element, ``NAME_i``.
    array : str
        Expression of the array.
    type : str
        C++ type of its elements.
    broadcastable : tuple of bool
    """

    name: str
    array: str
    type: str
    broadcastable: tuple[bool, ...]


def first_axis(patterns: Sequence[tuple[bool, ...]]) -> int:
    """Return the axis at which runs begin.

    Parameters
    ----------
    patterns : list of tuple of bool
        ``broadcastable`` of each array that is read.
    """
    run, first = None, 0
    for axis, pattern in reversed(list(enumerate(zip(*patterns)))):
        if all(pattern):  # the axis has length 1 in all arrays
            continue
        if run not in (None, pattern):
            return first
        run, first = pattern, axis
    return 0


def loops(operands: Sequence[Operand], first: int, sizes: str, body: str) -> str:
    """Return C++ code that loops over the axes before ``first`` and executes ``body`` for each run.

    ``sizes`` is the name of the C++ array that holds the lengths of all axes.
    """
    heads = [f"for (npy_intp at_{axis} = 0; at_{axis} < {sizes}[{axis}]; at_{axis}++)\n" for axis in range(first)]
    pointers = ""
    for one in operands:
        steps = [f" + at_{i} * PyArray_STRIDE({one.array}, {i})" for i in range(first) if not one.broadcastable[i]]
        pointers += f"{one.type} *{one.name}_run = ({one.type} *)(PyArray_BYTES({one.array}){''.join(steps)});\n"
    return f"{''.join(heads)}{{\n{pointers}{body}\n}}\n"


def length(sizes: str, axes: range) -> str:
    """Return a C++ expression for the length of a run over some axes."""
    return "".join(f"{sizes}[{axis}] * " for axis in axes) + "1"


def elements(operands: Sequence[Operand], first: int, n: str, task: str) -> str:
    """Return C++ code that executes ``task`` for the first ``n`` elements of a run."""
    numbers = places = ""
    for one in operands:
        if all(one.broadcastable[first:]):
            numbers += f"{one.type} {one.name}_i = *{one.name}_run;\n"
        else:
            places += f"{one.type} &{one.name}_i = {one.name}_run[i];\n"
    return f"{numbers}for (npy_intp i = 0; i < {n}; i++) {{\n{places}{task}\n}}\n"


def given(code: Callable[..., str], *arguments: Any) -> str:
    """Call a method of an Op that returns code; return an empty string if the Op does not define the method."""
    from theano.gof.utils import MethodNotDefined

    try:
        return code(*arguments)
    except MethodNotDefined:
        return ""


_WHOLE = """
synkhronos::SideBySide {array}_whole({array}, {first});
if (!{array}_whole.array) {{
    {fail}
}}
"""


def read_inputs(arrays: dict[str, Any], first: int, sub: dict[str, str]) -> tuple[list[Operand], str, str]:
    """Prepare the inputs of an Op for loops over runs.

    Parameters
    ----------
    arrays : dict
        The Theano variable of each array, by its name in C++.
    first : int
        The axis at which runs begin.
    sub : dict
        The argument of ``c_code``.

    Returns
    -------
    operands : list of Operand
    checks : str
        C++ code that declares the lengths (``NAME_nAXIS``), and checks them as Theano does.
    whole : str
        C++ code that copies the arrays whose runs are not contiguous.
    """
    from theano.tensor import elemwise_cgen

    types = [one.type.dtype_specs()[1] for one in arrays.values()]
    orders = [["x" if fixed else axis for axis, fixed in enumerate(one.broadcastable)] for one in arrays.values()]
    names = {**sub, **{f"lv{i}": array for i, array in enumerate(arrays)}}
    operands = [
        Operand(array, f"{array}_whole.array", type_, one.broadcastable)
        for (array, one), type_ in zip(arrays.items(), types)
    ]
    checks = (make(orders, types, names) for make in (elemwise_cgen.make_declare, elemwise_cgen.make_checks))
    whole = (_WHOLE.format(array=array, first=first, fail=sub["fail"]) for array in arrays)
    return operands, "\n".join(checks), "\n".join(whole)


# -- hyperbolic tangent

_TANH_SUPPORT, _TANH_VERSION = read_support_code("tanh.h")
_REORDERING = {"-fassociative-math", "-funsafe-math-optimizations"}  # tanh.h detects -ffast-math by its macro


def vectorize_tanh(module: Any) -> None:
    """Replace the C code of the Op. Calling this again does nothing.

    Parameters
    ----------
    module : module
        ``theano.scalar.basic``, executed.
    """
    wrap_methods(
        module.Tanh,
        c_code=_tanh_code,
        c_support_code=_tanh_support,
        c_code_cache_version=with_version(_TANH_VERSION, lambda op: is_on("vector_tanh")),
    )


def _tanh_code(theanos: Callable[..., str], op: Any, node: Any, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
    """Return code that calls the routine if the result is floating-point; otherwise return Theano's code."""
    dtype = node.outputs[0].type.dtype
    is_complex = node.inputs[0].type.dtype.startswith("complex")
    if not is_on("vector_tanh") or dtype not in ("float32", "float64") or is_complex:
        return theanos(op, node, name, inputs, outputs, sub)
    return f"{outputs[0]} = synkhronos_tanh((npy_{dtype}){inputs[0]});"


def _tanh_support(theanos: Callable[..., str], op: Any) -> str:
    """Return the routine, even if the flag is off, because a composite Op keeps the code from its creation."""
    from theano.configparser import config

    flags = config.gcc.cxxflags.split()
    return "#define SYNKHRONOS_REORDERS\n" + _TANH_SUPPORT if _REORDERING.intersection(flags) else _TANH_SUPPORT


# -- elementwise operations

_FLAG = "-fno-guess-branch-probability"
_SUPPORT, _ = read_support_code("loops.h")
_, _VERSION = read_support_code("loops.h", "elementwise.py")
_LEAST = 4  # shortest run, in elements, that gets a loop of its own

_CODE = """
{{
    const npy_intp *sizes = PyArray_DIMS({out});
    const npy_intp run = {run};
    if (run >= {least} && {side_by_side}) {{
        {loops}
    }} else {{
        {theanos_own}
    }}
}}
"""


def vectorize_elementwise(module: Any) -> None:
    """Add the loops and the compiler flag to the Op; both are part of the keys of Theano's cache.

    Calling this again does nothing.

    Parameters
    ----------
    module : module
        ``theano.tensor.elemwise``, executed.
    """
    wrap_methods(
        module.Elemwise,
        c_compile_args=lambda theanos, op: [*theanos(op), *([_FLAG] if is_on("vector_elementwise") else [])],
        _c_all=_all_code,
        c_support_code_apply=_support_code,
        c_code_cache_version_apply=with_version(_VERSION, _has_runs),
    )


def _has_runs(op: Any, node: Any) -> bool:
    """Return whether an axis is broadcast in some of the arrays only; otherwise Theano's loop is as fast."""
    patterns = [one.broadcastable for one in node.inputs]
    return is_on("vector_elementwise") and not op.openmp and bool(patterns) and first_axis(patterns) > 0


def _all_code(
    theanos: Callable[..., Any], op: Any, node: Any, name: str, inputs: Any, outputs: Any, sub: Any
) -> tuple[str, ...]:
    """Return Theano's code, with a loop over runs in place of Theano's loop if the arrays allow it."""
    *before, loop = theanos(op, node, name, inputs, outputs, sub)
    return (*before, _code(op, node, name, inputs, outputs, sub, loop) if _has_runs(op, node) else loop)


def _support_code(theanos: Callable[..., str], op: Any, node: Any, name: str) -> str:
    """Return Theano's support code, and the support code of the loops."""
    return _SUPPORT + given(theanos, op, node, name) if _has_runs(op, node) else theanos(op, node, name)


def _code(op: Any, node: Any, name: str, inputs: Any, outputs: Any, sub: Any, theanos_own: str) -> str:
    arrays = dict(zip([*inputs, *outputs], [*node.inputs, *node.outputs]))
    overwritten = {outputs[place]: inputs[of] for place, of in op.inplace_pattern.items()}
    operands = [
        Operand(array, array, variable.type.dtype_specs()[1], variable.broadcastable)
        for array, variable in arrays.items()
        if array not in overwritten
    ]
    first = first_axis([one.broadcastable for one in operands])
    results = [f"{overwritten.get(output, output)}_i" for output in outputs]
    task = op.scalar_op.c_code(node.tag.fake_node, f"{name}_scalar_", [f"{one}_i" for one in inputs], results, sub)
    return _CODE.format(
        out=outputs[0],
        run=length("sizes", range(first, node.outputs[0].ndim)),
        least=_LEAST,
        side_by_side=" && ".join(f"synkhronos::side_by_side({one.array}, {first})" for one in operands),
        loops=loops(operands, first, "sizes", elements(operands, first, "run", f"{{{task}}}")),
        theanos_own=theanos_own,
    )


# -- sums

_SUM_SUPPORT, _SUM_VERSION = read_support_code("loops.h")
_SUM_DTYPES = ("float32", "float64")

_SUM_CODE = """
if (PyArray_NDIM({x}) == {ndim} && PyArray_TYPE({x}) == NPY_{TYPE} && PyArray_ISCARRAY_RO({x}) &&
    PyArray_SIZE({x}) > 0) {{
    synkhronos::Sums<{type}, {sum}> synkhronos_sums(PyArray_DIMS({x}), {ndim}, {first}, {n_kept});
    if (!synkhronos_sums.make(&{out}, NPY_{OUT_TYPE})) {{
        {fail}
    }}
    synkhronos_sums.add(({type} *)PyArray_DATA({x}), PyArray_SIZE({x}));
    synkhronos_sums.put(({out_type} *)PyArray_DATA({out}));
}} else {{
    {theanos_own}
}}
"""


def vectorize_sums(module: Any) -> None:
    """Replace the C code of the Op. Calling this again does nothing.

    Parameters
    ----------
    module : module
        ``theano.tensor.elemwise``, executed.
    """
    wrap_methods(
        module.Sum,
        c_code=_sum_code,
        c_support_code=lambda theanos, op: _SUM_SUPPORT if is_on("vector_sum") else "",
        c_headers=lambda theanos, op: ["<cstdlib>", *theanos(op)],
        c_code_cache_version_apply=with_version(_SUM_VERSION, lambda op, node: is_on("vector_sum")),
    )


def _sum_code(theanos: Callable[..., str], op: Any, node: Any, name: str, inputs: Any, outputs: Any, sub: Any) -> str:
    """Return vector code, with Theano's code as fallback."""
    fallback = theanos(op, node, name, inputs, outputs, sub)
    kept = kept_axes(op, node) if is_on("vector_sum") else None
    if kept is None:
        return fallback
    dtype, out_dtype = node.inputs[0].dtype, node.outputs[0].dtype
    return _SUM_CODE.format(
        x=inputs[0],
        out=outputs[0],
        ndim=node.inputs[0].ndim,
        type=f"npy_{dtype}",
        TYPE=dtype.upper(),
        sum=f"npy_{op.acc_dtype}",
        out_type=f"npy_{out_dtype}",
        OUT_TYPE=out_dtype.upper(),
        first=kept.start,
        n_kept=len(kept),
        fail=sub["fail"],
        theanos_own=fallback,
    )


def kept_axes(op: Any, node: Any) -> range | None:
    """Return the axes that are not summed, if they are adjacent and there is vector code for the dtypes.

    Otherwise return ``None``.
    """
    x, out = node.inputs[0], node.outputs[0]
    summed = set(range(x.ndim) if op.axis is None else op.axis)
    kept = [axis for axis in range(x.ndim) if axis not in summed]
    neighbours = range(kept[0], kept[-1] + 1) if kept else range(0)
    suits = x.dtype in _SUM_DTYPES and out.dtype in _SUM_DTYPES and op.acc_dtype in _SUM_DTYPES
    return neighbours if suits and summed and list(neighbours) == kept else None
