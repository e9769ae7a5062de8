"""Vector code for convolution and pooling, and a fix for pooling in Python.

Convolution (forward, and the gradients with respect to weights and images): Theano copies the windows of each image
into a matrix (im2col), element by element, and multiplies this matrix by the weights. On one core this takes two to
four times as long as the arithmetic. With the patch, the Ops sum products in registers, directly from the image.
Grouped and unshared convolutions, and those with several OpenMP threads, use Theano's code.
``THEANO_FLAGS=synkhronos.vector_convolution=False`` turns the patch off. Sums are computed in another order, so results
differ by rounding.

Pooling in Python is used by Theano without a compiler, and in FAST_COMPILE. It indexes with a list, which NumPy 1.23
does not treat as a tuple any more; `patch_pooling` fixes this.

Pooling over windows that do not overlap (forward, gradient, and gradient of the gradient): Theano's C code computes the
address of each element separately, which takes longer than all convolutions of a small network. With the patch, the Ops
have their own code for adjacent windows without padding, if the window sizes are constants of the graph. Otherwise they
use Theano's code. ``THEANO_FLAGS=synkhronos.vector_pooling=False`` turns the patch off. Results are bitwise the same.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from typing import Any, Callable

from .flags import is_on, read_support_code, with_version, wrap_methods

# -- convolution

_CONVOLUTION_SUPPORT, _CONVOLUTION_VERSION = read_support_code("convolution.h")

_THEANOS = "PyArrayObject* corrMM("
_CONVOLUTION_CODE = """
static PyArrayObject *corrMM(PyArrayObject *bottom, PyArrayObject *weights, PyArrayObject *top, int direction, int dH,
                             int dW, int dilH, int dilW, int padH_l, int padH_r, int padW_l, int padW_r, int numgroups,
                             int unshared) {{
    int done = 0;
    if (numgroups == 1 && !unshared && dH > 0 && dW > 0 && dilH > 0 && dilW > 0) {{
        synkhronos::Axis y = {{0, padH_l, padH_r, 0, 0, dH, dilH}}, x = {{0, padW_l, padW_r, 0, 0, dW, dilW}};
        done = synkhronos::correlate_arrays<npy_{type}>(bottom, weights, top, NPY_{TYPE}, direction, y, x);
    }}
    if (done < 0) return NULL;
    if (done) return direction == 0 ? top : direction == 1 ? weights : bottom;
    return theanos_corrMM(bottom, weights, top, direction, dH, dW, dilH, dilW, padH_l, padH_r, padW_l, padW_r,
                          numgroups, unshared);
}}
"""


def vectorize_convolution(module: Any) -> None:
    """Replace the C code of the Ops. Calling this again does nothing.

    Parameters
    ----------
    module : module
        ``theano.tensor.nnet.corr``, executed.
    """
    wrap_methods(
        module.BaseCorrMM,
        c_support_code_apply=_convolution_code,
        c_headers=lambda theanos, op: ["<algorithm>", "<cstdlib>", "<cstring>", *theanos(op)],
        c_code_cache_version=with_version(_CONVOLUTION_VERSION, _replaces_convolution),
    )


def _replaces_convolution(op: Any) -> bool:
    # the rest is checked at run time, because several Ops may share a compiled module
    return is_on("vector_convolution") and not op.openmp


def _convolution_code(theanos: Callable[..., str], op: Any, node: Any, name: str) -> str:
    """Return Theano's routine under another name, and a routine of the old name that calls it if necessary."""
    code = theanos(op, node, name)
    if not _replaces_convolution(op) or code.count(_THEANOS) != 1:
        return code
    renamed = code.replace(_THEANOS, "static PyArrayObject* theanos_corrMM(")
    kind = {"float32": "float", "float64": "double"}[node.inputs[0].dtype]
    return renamed + _CONVOLUTION_SUPPORT + _CONVOLUTION_CODE.format(type=kind, TYPE=kind.upper())


# -- pooling in Python

_CLASSES = ("Pool", "AveragePoolGrad", "MaxPoolRop")
_AS_TUPLES = {
    "k[[region_slices[i][r[i]] for i in xrange(nd)]]": "k[tuple([region_slices[i][r[i]] for i in xrange(nd)])]",
    "gxk[region_slice]": "gxk[tuple(region_slice)]",
}


def patch_pooling(module: Any) -> None:
    """Patch ``perform`` of the Ops so that it indexes with tuples instead of lists of slices.

    Parameters
    ----------
    module : module
        ``theano.tensor.signal.pool``, executed.
    """
    for name in _CLASSES:
        op = getattr(module, name)
        lines, first = inspect.getsourcelines(op.perform)
        source = textwrap.dedent("".join(lines))
        for old, new in _AS_TUPLES.items():
            source = source.replace(old, new)
        made: dict[str, Any] = {}
        # add empty lines in front, so that tracebacks show the line numbers of the file
        exec(compile("\n" * (first - 1) + source, module.__file__, "exec"), vars(module), made)
        op.perform = made["perform"]


# -- pooling as vector code

_POOLING_SUPPORT, _POOLING_VERSION = read_support_code("pooling.h")

_AVERAGES = ("average_inc_pad", "average_exc_pad")  # the same without padding

#: By Op: its array inputs, the axes of its result ("in" as its input, "out" as its output), and the routine by mode.
_OPS: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "Pool": (("x",), "out", {"max": "max", "sum": "sum", **dict.fromkeys(_AVERAGES, "average")}),
    "MaxPoolGrad": (("x", "z", "gz"), "in", {"max": "max_grad"}),
    "AveragePoolGrad": (("x", "gz"), "in", {"sum": "sum_grad", **dict.fromkeys(_AVERAGES, "average_grad")}),
    "DownsampleFactorMaxGradGrad": (("x", "z", "ggx"), "out", {"max": "max_grad_grad"}),
}
_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
_MOST = 256  # largest window, in elements, for which code is generated

_POOLING_CODE = """
int synkhronos_done = 0;
if ({side_by_side}) {{
    const int window[3] = {{{d}, {h}, {w}}};
    synkhronos::Images images;
    PyArrayObject *given[] = {{{arrays}}};
    if (synkhronos::measure({x}, {nd}, window, {ignore_border}, images){pooled}) {{
        synkhronos::Operands<{n}> operands(given);
        synkhronos_done = operands.good && synkhronos::make(&{out}, {x}, {nd}, images.{axes}) ? 1 : -1;
        if (synkhronos_done > 0) {{
            {clear}
            synkhronos::Pooling<{type}, {d}, {h}, {w}>::{routine}(images{operands}, ({type} *)PyArray_DATA({out}));
        }}
    }}
}}
if (synkhronos_done < 0) {{
    {fail}
}}
if (!synkhronos_done) {{
    {theanos_own}
}}
"""


def vectorize_pooling(module: Any) -> None:
    """Replace the C code of the Ops. Calling this again does nothing.

    Parameters
    ----------
    module : module
        ``theano.tensor.signal.pool``, executed.
    """
    for name, routines in _OPS.items():
        wrap_methods(
            getattr(module, name),
            c_code=functools.partial(_pooling_code, routines),
            c_support_code=lambda theanos, op: _POOLING_SUPPORT if is_on("vector_pooling") else "",
            c_headers=lambda theanos, op: ["<algorithm>", *theanos(op)],
            c_code_cache_version=with_version(_POOLING_VERSION, lambda op: is_on("vector_pooling")),
        )


def _pooling_code(
    routines_of_op: tuple[tuple[str, ...], str, dict[str, str]],
    theanos: Callable[..., str],
    op: Any,
    node: Any,
    name: str,
    inputs: Any,
    outputs: Any,
    sub: Any,
) -> str:
    """Return the code for adjacent windows, with Theano's code as fallback."""
    arrays, axes, routines = routines_of_op
    n, x = len(arrays), inputs[0]
    fallback = theanos(op, node, name, inputs, outputs, sub)
    window = _window(op, node, n)
    if not is_on("vector_pooling") or window is None or op.mode not in routines:
        return fallback
    tested = zip(inputs[n:], (window, window, [0] * len(window)))  # window sizes, strides, padding
    conditions = [
        f"PyArray_DIM({one}, 0) == {op.ndim} && "
        + " && ".join(f"*(dtype_{one} *)PyArray_GETPTR1({one}, {i}) == {size}" for i, size in enumerate(sizes))
        for one, sizes in tested
    ]
    used = [one for one, array in zip(inputs, arrays) if array != "x" or routines[op.mode] not in _WITHOUT_X]
    d, h, w = [1] * (3 - op.ndim) + window
    checks = ""
    for one, array in zip(inputs, arrays):
        if array in ("z", "gz"):
            checks += f" && synkhronos::is_pooled({one}, {x}, {op.ndim}, images)"
        elif array == "ggx":
            checks += f" && PyArray_TYPE({one}) == PyArray_TYPE({x}) && PyArray_SAMESHAPE({one}, {x})"
    return _POOLING_CODE.format(
        side_by_side=" && ".join([f"PyArray_NDIM({x}) == {node.inputs[0].ndim}", *conditions]),
        d=d,
        h=h,
        w=w,
        arrays=", ".join(used),
        x=x,
        nd=op.ndim,
        ignore_border=str(bool(op.ignore_border)).lower(),
        pooled=checks,
        n=len(used),
        out=outputs[0],
        axes=axes,
        clear=f"synkhronos::clear_border(images, window, {outputs[0]});" if axes == "in" else "",
        type=f"dtype_{x}",
        routine=routines[op.mode],
        operands="".join(f", operands.data<dtype_{x}>({i})" for i in range(len(used))),
        fail=sub["fail"],
        theanos_own=fallback,
    )


_WITHOUT_X = ("sum_grad", "average_grad")


def _window(op: Any, node: Any, n: int) -> list[int] | None:
    """Return the window size of an Apply node if windows are adjacent and known from the graph; otherwise ``None``."""
    x, (sizes, strides, padding) = node.inputs[0], node.inputs[n : n + 3]
    known = [getattr(one, "data", None) for one in (sizes, strides, padding)]
    if any(one is None for one in known) or op.openmp or op.ndim > 3 or x.dtype not in _DTYPES:
        return None
    if any(one.dtype != x.dtype for one in (*node.inputs[:n], *node.outputs)):
        return None
    window, steps, pad = (one.tolist() for one in known if one is not None)
    is_adjacent = len(window) == op.ndim and window == steps and not any(pad)
    return window if is_adjacent and min(window) > 0 and math.prod(window) <= _MOST else None
