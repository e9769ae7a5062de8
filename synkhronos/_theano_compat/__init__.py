"""Patches that make Theano 1.0.5 and Lasagne 0.1 work, and compute faster, on current Python and NumPy.

`install` adds a finder to ``sys.meta_path``. It patches Theano and Lasagne when they are first imported; until then it
costs nothing.

Invariants
----------
* This package imports only the standard library and nothing else of synkhronos, because ``_synkhronos_start`` loads it
  alone while ``theano`` is being imported.
* A user's setting in ``THEANO_FLAGS``, ``.theanorc`` or ``theano.config`` is never overridden, except for a BLAS that
  gives wrong results.
* Nothing is written to disk except to Theano's own cache.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import Any

from .blas import find_blas, offer_blas, refuse_unfit_blas
from .compile_cache import (
    explain_missing_headers,
    patch_cache_keys,
    precompile_headers,
    release_lock_of_interrupted,
    shorten_complaints,
)
from .current_versions import loop_in_c, patch_strides, patch_topk
from .elementwise import vectorize_elementwise, vectorize_sums, vectorize_tanh
from .flags import offer_switches
from .windows import patch_pooling, vectorize_convolution, vectorize_pooling

__all__ = ["find_blas", "prepare"]

SCAN_LOOP = "theano.scan_module.scan_perform_ext"
MPI_OPS = "theano.tensor.io"
OPS = {  # modules of Theano, and the functions that patch them
    "theano.gof.cmodule": (explain_missing_headers,),
    "theano.scalar.basic": (vectorize_tanh,),
    "theano.tensor.elemwise": (vectorize_elementwise, vectorize_sums),
    "theano.tensor.nnet.corr": (vectorize_convolution,),
    "theano.tensor.signal.pool": (patch_pooling, vectorize_pooling),
}
PATCHED = ("theano", "theano.configdefaults", "theano.gpuarray.linalg", SCAN_LOOP, MPI_OPS, *OPS, "lasagne")
DOWNSAMPLE = "theano.tensor.signal.downsample"


def install() -> PatchFinder:
    """Patch Theano and Lasagne: at once if they are imported already, otherwise when they are imported.

    Calling this again does nothing. It takes microseconds unless Theano is imported already.

    Returns
    -------
    PatchFinder
        The finder on ``sys.meta_path`` that applies the patches.
    """
    for finder in list(sys.meta_path):
        role = getattr(finder, "synkhronos_role", None)
        if role == "patch":
            return finder  # type: ignore[return-value]
        if role == "watch":
            sys.meta_path.remove(finder)
    finder = PatchFinder()
    sys.meta_path.insert(0, finder)
    if "theano" in sys.modules:
        prepare_theano()
        for name in ("theano.configdefaults", "theano", *OPS):
            if name in sys.modules:
                with patched(sys.modules[name]):
                    pass
    return finder


def prepare() -> PatchFinder | None:
    """Call `install`, unless PyTensor is requested or Theano is not installed; return its result or ``None``."""
    if os.environ.get("SYNKHRONOS_ENGINE") == "pytensor":
        return None
    finders = [one for one in sys.meta_path if hasattr(one, "find_spec") and not hasattr(one, "synkhronos_role")]
    found = [one.find_spec("theano", None) for one in finders]
    if "theano" in sys.modules or any(spec and spec.origin for spec in found):  # a namespace package has no origin
        return install()
    return None


class PatchFinder:
    """Finder for ``sys.meta_path`` that wraps the import of the modules to be patched."""

    synkhronos_role = "patch"  # lets a second copy of this module detect that the patches are installed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module to be patched; return ``None`` for others, so that other finders handle them."""
        if name == DOWNSAMPLE:
            found = self._others_spec(name, path, target)
            return found or ModuleSpec(name, DownsampleLoader())
        if name not in PATCHED:
            return None
        spec = self._others_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                with patched(module):
                    execute(module)

            # replace the method of this loader only, which keeps its other methods
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _others_spec(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


@contextlib.contextmanager
def patched(module: types.ModuleType) -> Iterator[None]:
    """Apply the patches of a module of `PATCHED` before and after the module is executed in a ``with`` block."""
    if module.__name__ == "theano":
        prepare_theano()
        yield
        patch_ops()
    elif module.__name__ == "theano.configdefaults":
        offer_switches()
        yield
        offer_blas(module)
    elif module.__name__ in (SCAN_LOOP, MPI_OPS):
        with loop_in_c() if module.__name__ == SCAN_LOOP else mpi_withheld():
            yield
    elif module.__name__ in OPS:
        yield
        for patch in OPS[module.__name__]:
            patch(module)
    else:
        ignore_warnings(module.__name__)
        with pkg_resources_lent():
            yield


@contextlib.contextmanager
def module_replaced(name: str, stand_in: types.ModuleType | None) -> Iterator[None]:
    """Provide another module under a name, or none, within a ``with`` block."""
    modules: dict[str, Any] = sys.modules
    before = modules.get(name)
    modules[name] = stand_in
    try:
        yield
    finally:
        del modules[name]
        if before is not None:
            modules[name] = before


def mpi_withheld() -> contextlib.AbstractContextManager[None]:
    """Hide mpi4py from Theano's MPI Ops, unless the program has imported it, because importing it initializes MPI."""
    return contextlib.nullcontext() if "mpi4py.MPI" in sys.modules else module_replaced("mpi4py", None)


def pkg_resources_lent() -> contextlib.AbstractContextManager[None]:
    """Provide a temporary stand-in for pkg_resources if it is not installed.

    Lasagne gets its version from this module, and Theano an exception class. Newer setuptools does not include it, and
    setuptools itself may be missing. The stand-in is removed afterwards, so that other code still finds the module
    missing.
    """
    if importlib.util.find_spec("pkg_resources") is not None:
        return contextlib.nullcontext()
    from importlib.metadata import PackageNotFoundError, distribution

    stand_in: Any = types.ModuleType("pkg_resources")
    stand_in.get_distribution, stand_in.DistributionNotFound = distribution, PackageNotFoundError
    return module_replaced("pkg_resources", stand_in)


def prepare_theano() -> None:
    """Apply the patches that are needed before Theano's own code runs."""
    ignore_warnings("theano")
    shorten_complaints()
    importlib.import_module("numpy")  # not within catch_warnings, which would undo the filters that NumPy sets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        config: Any = importlib.import_module("numpy.distutils.__config__")
    # Theano reads this to find a BLAS; NumPy >= 1.22 does not have it. Empty means "unknown", which matters only if
    # `find_blas` finds no BLAS either.
    if not hasattr(config, "blas_opt_info"):
        config.blas_opt_info = {}


def patch_ops() -> None:
    """Patch the compilation and the Ops of Theano, which must have been imported."""
    patch_cache_keys()
    patch_strides()
    patch_topk()
    from theano.gof import cmodule

    from . import fused_sum, one_pass  # they import Theano

    fused_sum.register()
    one_pass.register()
    precompile_headers(cmodule)
    release_lock_of_interrupted()
    refuse_unfit_blas()


def ignore_warnings(package: str) -> None:
    """Ignore deprecation, resource and syntax warnings that are attributed to ``package``.

    There are dozens of them, about names that Theano and Lasagne will always use (``imp``, ``distutils``,
    ``numpy.bool``, ``image_shape``). Warnings that are attributed to the user's code are not affected.
    """
    module = rf"(.*[/\\])?{package}([./\\]|$)"
    for category in (DeprecationWarning, ResourceWarning, SyntaxWarning):
        warnings.filterwarnings("ignore", category=category, module=module)
    for message in ("pkg_resources is deprecated", "The `image_shape` keyword argument"):
        warnings.filterwarnings("ignore", message=message, module=module)


class DownsampleLoader(Loader):
    """Loader that creates ``theano.tensor.signal.downsample``, which Lasagne 0.1 uses and Theano 1.0 does not have."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Define ``max_pool_2d`` in the empty module."""
        from theano.tensor.signal.pool import pool_2d

        def max_pool_2d(input, ds, ignore_border=False, st=None, padding=(0, 0), mode="max"):  # type: ignore[no-untyped-def]
            """Call ``theano.tensor.signal.pool.pool_2d``, whose parameters had these names in Theano 0.8."""
            return pool_2d(input, ws=ds, ignore_border=ignore_border, stride=st, pad=padding, mode=mode)

        vars(module)["max_pool_2d"] = max_pool_2d
