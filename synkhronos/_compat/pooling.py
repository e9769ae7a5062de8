"""Pooling in Python, which Theano uses without a compiler and in FAST_COMPILE: since NumPy 1.23 a list is no index."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

_CLASSES = ("Pool", "AveragePoolGrad", "MaxPoolRop")
_AS_TUPLES = {
    "k[[region_slices[i][r[i]] for i in xrange(nd)]]": "k[tuple([region_slices[i][r[i]] for i in xrange(nd)])]",
    "gxk[region_slice]": "gxk[tuple(region_slice)]",
}


def mend_pooling(module: Any) -> None:
    """Make tuples of the lists of slices in the ops' `perform`. Calling it again does nothing.

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
        # the empty lines give tracebacks the numbers that the lines have in the file
        exec(compile("\n" * (first - 1) + source, module.__file__, "exec"), vars(module), made)
        op.perform = made["perform"]
