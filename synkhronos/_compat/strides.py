"""Matrix products without elements: an operand, or the product, has an axis of length 0.

Arrays without elements have strides of 0 since NumPy 1.23. Theano's C code around BLAS takes the strides as they are:
it finds that "some matrix has no unit stride", or hands BLAS a leading dimension of 0, which BLAS refuses. Here such
arrays get the strides of contiguous ones, which nothing is ever read by.
"""

from __future__ import annotations

from typing import Any

from .marks import is_mend, mend

_VERSION = "synkhronos 1"  # in the keys of the cache: other code than Theano's own

_CONTIGUOUS = """
        npy_intp empty_{0}[{ndim}];
        if (PyArray_SIZE({array}) == 0) {{
            empty_{0}[{ndim} - 1] = type_size;
            empty_{0}[{ndim} - 2] = (N{0}[{ndim} - 1] ? N{0}[{ndim} - 1] : 1) * (npy_intp) type_size;
            if ({ndim} > 2) empty_{0}[0] = 0;
            S{0} = empty_{0};
        }}
"""


def mend_strides() -> None:
    """Make products of empty matrices work. Theano must have been imported; calling it again does nothing."""
    from theano.tensor.blas import BatchedDot, GemmRelated

    if is_mend(GemmRelated.build_gemm_version):
        return
    gemm_version, batched_code = GemmRelated.build_gemm_version, BatchedDot.c_support_code
    batched_version = BatchedDot.c_code_cache_version

    @mend
    def build_gemm_version(self: Any) -> tuple[Any, ...]:
        """Give the version of the code that all products of two matrices share."""
        return (_VERSION, *gemm_version(self))

    def c_support_code(self: Any) -> str:
        """Give the C++ code of the product of two batches."""
        head = "npy_intp *Nz = PyArray_DIMS(zs), *Sz = PyArray_STRIDES(zs);\n"
        strides = "".join(_CONTIGUOUS.format(name, ndim=3, array=f"{name}s") for name in "xyz")
        return batched_code(self).replace(head, head + strides)

    def c_code_cache_version(self: Any) -> tuple[Any, ...]:
        """Give the version of the code of the product of two batches."""
        return (_VERSION, *batched_version(self))

    arrays = {"x": "%(_x)s", "y": "%(_y)s", "z": "%(_zout)s"}
    strides = "".join(_CONTIGUOUS.format(name, ndim=2, array=array) for name, array in arrays.items())
    GemmRelated.check_strides = strides + GemmRelated.check_strides
    GemmRelated.build_gemm_version = build_gemm_version
    BatchedDot.c_support_code = c_support_code
    BatchedDot.c_code_cache_version = c_code_cache_version
