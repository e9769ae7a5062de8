"""The BLAS that PyTensor's C code is linked to: the one that is found for Theano, where the user names none.

PyTensor knows the libraries of conda, and warns where there are none; installed by pip it would multiply by NumPy.
"""

from __future__ import annotations

from pytensor import config

from synkhronos._theano_compat import find_blas

__all__ = ["offer_blas"]


def offer_blas() -> None:
    """Make `find_blas` the default of ``pytensor.config.blas__ldflags``, PyTensor's own its fallback."""
    parameter = config._config_var_dict["blas__ldflags"]
    pytensors_own = parameter.default
    parameter._default = lambda: find_blas(config.cxx) or pytensors_own()
    if parameter.is_default and getattr(parameter, "val", None) == "":  # PyTensor has looked already, and found none
        config.blas__ldflags = find_blas(config.cxx)
