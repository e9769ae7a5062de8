"""Reductions of arrays on a GPU, by element-wise kernels of pygpu.

They support the ops and dtypes for which the result is the same as that of `reductions`. All other values are copied to
the host and reduced there.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from synkhronos._collectives.reductions import OPS, check_equal_shapes, result_dtype


def accumulates(dtype: np.dtype, op: str, wanted: np.dtype | None) -> bool:
    """Return whether slices' results can be reduced on the device.

    Averages of integers, sums that NumPy widens, half precision and booleans are reduced on the host.

    Parameters
    ----------
    dtype : dtype
        Dtype of the values.
    op : str
        Key of `OPS`, or ``"gather"``.
    wanted : dtype or None
        Dtype of the result; ``None``: that of `result_dtype`.
    """
    if op == "gather":
        return True
    if dtype.kind == "f":
        return dtype.itemsize >= 4 and wanted in (None, dtype)
    return (
        dtype.kind in "iu" and not OPS[op].weighted and (result_dtype(dtype, op) if wanted is None else wanted) == dtype
    )


@functools.cache
def _kernel(context: Any, expression: str, dtype: str) -> Any:
    """Return the (cached) kernel for a C expression in the elements ``a`` and ``b`` and the scalar ``s``."""
    from pygpu.elemwise import GpuElemwise, arg

    arguments = [arg("a", dtype, read=True, write=True)]
    if "b" in expression:
        arguments.append(arg("b", dtype, read=True))
    if "s" in expression:
        arguments.append(arg("s", "float64" if dtype == "float64" else "float32", scalar=True))
    return GpuElemwise(context, expression, arguments, convert_f16=True)


def _apply(expression: str, array: Any, *operands: Any) -> None:
    """Run a kernel on ``array``, in place; pygpu's kernels do not take 0-d arrays, so these are reshaped."""
    if array.size:
        flat = [x.reshape((1,)) if getattr(x, "shape", None) == () and not np.isscalar(x) else x for x in operands]
        target = array.reshape((1,)) if array.shape == () else array
        _kernel(array.context, expression, str(array.dtype))(target, *flat)


def scale(array: Any, factor: float) -> None:
    """Multiply a floating-point device array by a number, in place; a factor of 0 also sets NaNs to 0."""
    if factor == 0:
        _apply("a = 0", array)
    elif factor != 1:
        _apply("a = a * s", array, factor)


class DeviceAccumulator:
    """Reduce the results of a rank's slices on the device, one slice at a time.

    The parameters are those of `Accumulator`, its counterpart on the host.
    """

    def __init__(self, op: str, total: int, what: str) -> None:
        self._op = op
        self._total = total
        self._what = what
        self._parts: list[Any] = []

    def add(self, value: Any, count: int) -> None:
        """Add the result of one slice of ``count`` data points."""
        share = count / self._total if self._total else 1.0
        if self._op == "gather":
            self._parts.append(value.reshape((1,)) if value.shape == () else value)
        elif not self._parts:
            self._parts.append(value.copy())
            if OPS[self._op].weighted:
                scale(self._parts[0], share)
        else:
            check_equal_shapes([self._parts[0].shape, value.shape], self._op, self._what)
            operands = (value, share) if OPS[self._op].weighted else (value,)
            _apply(OPS[self._op].on_device, self._parts[0], *operands)

    def result(self) -> Any:
        """Return the reduction, as a device array."""
        if self._op == "gather":
            import pygpu

            return pygpu.concatenate(self._parts, 0, context=self._parts[0].context)
        return self._parts[0]
