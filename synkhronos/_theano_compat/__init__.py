"""The Theano stack (Theano 1.0.5, Lasagne 0.1) on today's Python and NumPy.

`install` puts a finder on ``sys.meta_path`` that mends Theano and Lasagne at the moment they are first imported, and
costs nothing before.

Invariants: this package imports only the standard library and nothing of synkhronos, because ``_synkhronos_start``
loads it by itself while ``theano`` is being imported; a choice that the user made in ``THEANO_FLAGS``, ``.theanorc`` or
``theano.config`` is never overruled, but for a BLAS that gives wrong results; nothing is written to disk but to
Theano's own cache.
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
from .compile_cache import mend_cache_keys, precompile_headers
from .elementwise import vectorize_elementwise, vectorize_tanh
from .flags import offer_switches
from .fusion import fuse_sums
from .log_filter import explain_missing_headers, shorten_complaints
from .numpy_fixes import mend_strides, mend_topk
from .scan import loop_in_c
from .summation import vectorize_sums
from .windows import mend_pooling, vectorize_convolution, vectorize_pooling

__all__ = ["find_blas", "prepare"]

SCAN_LOOP = "theano.scan_module.scan_perform_ext"
COMPILING = "theano.gof.cmodule"
MPI_OPS = "theano.tensor.io"
OPS = {  # modules of ops, and what is done to them
    "theano.scalar.basic": (vectorize_tanh,),
    "theano.tensor.elemwise": (vectorize_elementwise, vectorize_sums),
    "theano.tensor.nnet.corr": (vectorize_convolution,),
    "theano.tensor.signal.pool": (mend_pooling, vectorize_pooling),
}
MENDED = ("theano", "theano.configdefaults", COMPILING, "theano.gpuarray.linalg", SCAN_LOOP, MPI_OPS, *OPS, "lasagne")
DOWNSAMPLE = "theano.tensor.signal.downsample"


def install() -> Mender:
    """Mend Theano and Lasagne: now, if they are imported already, else when they are.

    Calling it again does nothing. It takes microseconds unless Theano is imported already.

    Returns
    -------
    Mender
        The finder on ``sys.meta_path`` that does it.
    """
    for finder in list(sys.meta_path):
        role = getattr(finder, "synkhronos_role", None)
        if role == "mend":
            return finder  # type: ignore[return-value]
        if role == "watch":
            sys.meta_path.remove(finder)
    mender = Mender()
    sys.meta_path.insert(0, mender)
    if "theano" in sys.modules:
        prepare_theano()
        offer_switches()
        offer_blas(importlib.import_module("theano.configdefaults"))
        mend_ops()
        explain_missing_headers(importlib.import_module(COMPILING))
        for name, mends in OPS.items():
            if name in sys.modules:
                for mend in mends:
                    mend(sys.modules[name])
    return mender


def prepare() -> Mender | None:
    """`install`, unless this process can have no use for it: PyTensor is asked for, or there is no Theano."""
    if os.environ.get("SYNKHRONOS_ENGINE") == "pytensor":
        return None
    finders = [one for one in sys.meta_path if hasattr(one, "find_spec") and not hasattr(one, "synkhronos_role")]
    found = [one.find_spec("theano", None) for one in finders]
    if "theano" in sys.modules or any(spec and spec.origin for spec in found):  # a folder of that name has none
        return install()
    return None


class Mender:
    """A ``sys.meta_path`` finder that wraps the import of the modules that need mending."""

    synkhronos_role = "mend"  # how a second copy of this module knows that the work is done

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module to be mended; None leaves the others to other finders."""
        if name == DOWNSAMPLE:
            found = self._others_spec(name, path, target)
            return found or ModuleSpec(name, DownsampleLoader())
        if name not in MENDED:
            return None
        spec = self._others_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                with mended(module):
                    execute(module)

            # On the instance, so that the loader keeps all its other abilities.
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
def mended(module: types.ModuleType) -> Iterator[None]:
    """Mend what a module of `MENDED` needs, around its execution."""
    if module.__name__ == "theano":
        prepare_theano()
        yield
        mend_ops()
    elif module.__name__ == "theano.configdefaults":
        offer_switches()
        yield
        offer_blas(module)
    elif module.__name__ == SCAN_LOOP:
        with loop_in_c():
            yield
    elif module.__name__ in OPS:
        yield
        for mend in OPS[module.__name__]:
            mend(module)
    elif module.__name__ == MPI_OPS:
        with mpi_withheld():
            yield
    elif module.__name__ == COMPILING:
        yield
        explain_missing_headers(module)
    else:
        quieten(module.__name__)
        with pkg_resources_lent():
            yield


@contextlib.contextmanager
def mpi_withheld() -> Iterator[None]:
    """Let Theano's operations on MPI find no mpi4py, whose import starts MPI, unless the program has imported it."""
    if "mpi4py.MPI" in sys.modules:
        yield
        return
    before = sys.modules.get("mpi4py")
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mpi4py"]
        if before is not None:
            sys.modules["mpi4py"] = before


@contextlib.contextmanager
def pkg_resources_lent() -> Iterator[None]:
    """Stand in for pkg_resources where there is none: Lasagne asks it for a version, Theano for an exception's class.

    Newer setuptools dropped it, and an environment may be without setuptools. Afterwards it is gone again: others must
    go on finding out that it is not there.
    """
    if importlib.util.find_spec("pkg_resources") is not None:
        yield
        return
    from importlib.metadata import PackageNotFoundError, distribution

    stand_in: Any = types.ModuleType("pkg_resources")
    stand_in.get_distribution, stand_in.DistributionNotFound = distribution, PackageNotFoundError
    sys.modules["pkg_resources"] = stand_in
    try:
        yield
    finally:
        del sys.modules["pkg_resources"]


def prepare_theano() -> None:
    """Do what has to be done before Theano's own code runs."""
    quieten("theano")
    shorten_complaints()
    importlib.import_module("numpy")  # outside of catch_warnings, which would undo the filters that it sets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        config: Any = importlib.import_module("numpy.distutils.__config__")
    # Theano reads this when it looks for a BLAS, and NumPy >= 1.22 no longer has it. Empty means "none known";
    # `find_blas` is asked before it comes to that.
    if not hasattr(config, "blas_opt_info"):
        config.blas_opt_info = {}


def mend_ops() -> None:
    """Mend what Theano, which has been imported, compiles and computes."""
    mend_cache_keys()
    mend_strides()
    mend_topk()
    fuse_sums()
    precompile_headers()
    refuse_unfit_blas()


def quieten(package: str) -> None:
    """Ignore the deprecation warnings and those of the byte-compiler that blame `package`.

    There are dozens, on names that Theano and Lasagne will use for ever (``imp``, ``distutils``, ``numpy.bool``,
    ``image_shape``). Warnings that blame the user's code stay.
    """
    module = rf"(.*[/\\])?{package}([./\\]|$)"
    for category in (DeprecationWarning, ResourceWarning, SyntaxWarning):
        warnings.filterwarnings("ignore", category=category, module=module)
    for message in ("pkg_resources is deprecated", "The `image_shape` keyword argument"):
        warnings.filterwarnings("ignore", message=message, module=module)


class DownsampleLoader(Loader):
    """Makes ``theano.tensor.signal.downsample``, gone from Theano 1.0 and used by Lasagne 0.1."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Define ``max_pool_2d`` in the empty module."""
        from theano.tensor.signal.pool import pool_2d

        def max_pool_2d(input, ds, ignore_border=False, st=None, padding=(0, 0), mode="max"):  # type: ignore[no-untyped-def]
            """Call ``theano.tensor.signal.pool.pool_2d``, whose parameters had these names in Theano 0.8."""
            return pool_2d(input, ws=ds, ignore_border=ignore_border, stride=st, pad=padding, mode=mode)

        namespace: Any = module
        namespace.max_pool_2d = max_pool_2d
