"""Convolutions as vector code: forward, and the gradients with respect to weights and images.

Theano writes the windows of each image side by side, element by element, and multiplies the small matrix that this
gives by the weights; on a core that takes two to four times as long as the arithmetic. Here its ops sum up products
where the image lies, in registers. Grouped and unshared convolutions and those of several OpenMP threads take Theano's
way, as does all of it with ``THEANO_FLAGS=synkhronos.vector_convolution=False``. Sums are formed in another order, so
that results differ by rounding.
"""

from __future__ import annotations

from typing import Any

from .marks import is_mend, mend
from .switches import read_support_code, switch

__all__ = ["vectorize_convolution"]

_SUPPORT, _VERSION = read_support_code("sums.h", "convolution.h")

_THEANOS = "PyArrayObject* corrMM("
_CODE = """
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
    """Give the ops their code. Calling it again does nothing.

    Parameters
    ----------
    module : module
        ``theano.tensor.nnet.corr``, executed.
    """
    op_class, is_on = module.BaseCorrMM, switch("vector_convolution")
    if is_mend(op_class.c_headers):
        return
    support, version = op_class.c_support_code_apply, op_class.c_code_cache_version
    headers = op_class.c_headers

    def replaces(op: Any) -> bool:
        return is_on() and not op.openmp  # the others are told apart at run time: a module may have several

    def c_support_code_apply(self: Any, node: Any, name: str) -> str:
        """Give Theano's routine another name, and the routines beside it."""
        theanos_own: str = support(self, node, name)
        if not replaces(self) or theanos_own.count(_THEANOS) != 1:
            return theanos_own
        renamed = theanos_own.replace(_THEANOS, "static PyArrayObject* theanos_corrMM(")
        kind = {"float32": "float", "float64": "double"}[node.inputs[0].dtype]
        return renamed + _SUPPORT + _CODE.format(type=kind, TYPE=kind.upper())

    @mend
    def c_headers(self: Any) -> list[str]:
        """Name what Theano's code and the routines include."""
        return ["<algorithm>", "<cstdlib>", "<cstring>", *headers(self)]

    def c_code_cache_version(self: Any) -> tuple[Any, ...]:
        """Give the version of the code."""
        return (_VERSION, *version(self)) if replaces(self) else version(self)

    op_class.c_support_code_apply, op_class.c_headers = c_support_code_apply, c_headers
    op_class.c_code_cache_version = c_code_cache_version
