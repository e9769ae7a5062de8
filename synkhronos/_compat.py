"""The Theano stack (Theano 1.0.5, Lasagne 0.1) on today's Python and NumPy.

`install` puts a finder on ``sys.meta_path`` that mends Theano and Lasagne at the moment they are
first imported, and costs nothing before; `MENDS` lists which module is mended by what.

Invariants: this module imports only the standard library and nothing of this package, because
``_synkhronos_start`` loads it from its file while ``theano`` is being imported; a choice that the
user made in ``THEANO_FLAGS``, ``.theanorc`` or ``theano.config`` is never overruled; nothing is
written to disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
import types
import warnings
from typing import Any, Callable, Iterator, Optional

logger = logging.getLogger("synkhronos")

# Routines of levels 1 to 3 that the C code written by Theano calls by these names.
BLAS_SYMBOLS = ("sdot_", "ddot_", "sgemv_", "dgemv_", "sger_", "dger_", "sgemm_", "dgemm_")


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
        offer_blas(importlib.import_module("theano.configdefaults"))
    return mender


class Mender:
    """A ``sys.meta_path`` finder that wraps the import of the modules that need mending."""

    synkhronos_role = "mend"  # how a second copy of this module knows that the work is done

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Return the spec of a module to be mended; None leaves the others to other finders."""
        if name == DOWNSAMPLE:
            found = self._others_spec(name, path, target)
            return found or importlib.machinery.ModuleSpec(name, DownsampleLoader())
        mend = MENDS.get(name)
        if mend is None:
            return None
        spec = self._others_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                with mend(module):
                    execute(module)

            # On the instance, so that the loader keeps all its other abilities.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _others_spec(
        self, name: str, path: Any, target: Any
    ) -> Optional[importlib.machinery.ModuleSpec]:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


@contextlib.contextmanager
def mend_theano(module: types.ModuleType) -> Iterator[None]:
    """Around the execution of ``theano``."""
    prepare_theano()
    yield


@contextlib.contextmanager
def mend_configdefaults(module: types.ModuleType) -> Iterator[None]:
    """Around the execution of ``theano.configdefaults``."""
    yield
    offer_blas(module)


@contextlib.contextmanager
def mend_lasagne(module: types.ModuleType) -> Iterator[None]:
    """Around the execution of ``lasagne``, which asks pkg_resources for its own version.

    Newer setuptools, and an environment without setuptools, have no such module.
    """
    quieten("lasagne")
    if importlib.util.find_spec("pkg_resources") is not None:
        yield
        return
    from importlib.metadata import distribution

    stand_in: Any = types.ModuleType("pkg_resources")
    stand_in.get_distribution = distribution
    sys.modules["pkg_resources"] = stand_in
    try:
        yield
    finally:
        # Others must go on finding out that it is not there.
        del sys.modules["pkg_resources"]


def prepare_theano() -> None:
    """Do what has to be done before Theano's own code runs."""
    quieten("theano")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        config: Any = importlib.import_module("numpy.distutils.__config__")
    # Theano reads this when it looks for a BLAS, and NumPy >= 1.22 no longer writes it. Empty means
    # "none known"; `find_blas` is asked before it comes to that.
    if not hasattr(config, "blas_opt_info"):
        config.blas_opt_info = {}
    # Scan's C extension reads structures of the interpreter that are private since Python 3.11.
    # None makes its import an ImportError, upon which Theano runs Scan's loop in Python.
    if sys.version_info >= (3, 11):
        modules: dict[str, Any] = sys.modules
        modules.setdefault("theano.scan_module.scan_perform_ext", None)


def quieten(package: str) -> None:
    """Ignore the deprecation warnings and those of the byte-compiler that blame `package`.

    There are dozens, on names that Theano and Lasagne will use for ever (``imp``, ``distutils``,
    ``numpy.bool``, ``image_shape``). Warnings that blame the user's code stay.
    """
    module = rf"(.*[/\\])?{package}([./\\]|$)"
    for category in (DeprecationWarning, ResourceWarning, SyntaxWarning):
        warnings.filterwarnings("ignore", category=category, module=module)
    for message in ("pkg_resources is deprecated", "The `image_shape` keyword argument"):
        warnings.filterwarnings("ignore", message=message, module=module)


def offer_blas(configdefaults: Any) -> None:
    """Make `find_blas` the default of ``theano.config.blas.ldflags``, Theano's own its fallback.

    Being the default, it yields to whatever the user chose in any of Theano's ways.

    Parameters
    ----------
    configdefaults : module
        ``theano.configdefaults``, executed.
    """
    config = configdefaults.config
    parameter = type(config.blas).__dict__["ldflags"]
    theanos_own = parameter.default
    parameter.default = lambda: find_blas(config.cxx) or theanos_own()
    if parameter.is_default and getattr(parameter, "val", None) == "":
        # Theano has looked already, and found none.
        config.blas.ldflags = find_blas(config.cxx)


def find_blas(cxx: str) -> str:
    """Find a BLAS that the compiler can link, the loader finds again, and that computes rightly.

    Parameters
    ----------
    cxx : str
        The C++ compiler; empty if Theano has none, and then nothing can be linked.

    Returns
    -------
    str
        Flags for ``theano.config.blas.ldflags``; empty if none was found.
    """
    if not cxx or not sys.platform.startswith("linux"):
        return ""
    for flags, library in blas_candidates(cxx):
        if flags and is_usable(library):
            logger.debug("Theano is linked to the BLAS %s (%s)", library, flags)
            return flags
    logger.info("no BLAS to link Theano to; `apt-get install libopenblas-dev` provides one")
    return ""


def blas_candidates(cxx: str) -> Iterator[tuple[str, str]]:
    """Yield flags for the linker with the library to load: this environment's own one first.

    Theano adds the run path for ``-L`` by itself. Neither is used for the system's directories:
    they would come before this Python's, and some hold another libpython.
    """
    own = os.path.join(sys.prefix, "lib", "libopenblas.so")
    if os.path.exists(own):
        yield link_flags(own), own
    # Where the linker would take -lopenblas from; the bare name is echoed if it would not. The
    # loader is asked for the bare name too, so that it will find the library by itself later.
    name = "libopenblas.so"
    try:
        command = [cxx, "-print-file-name=" + name]
        if os.path.isabs(subprocess.check_output(command, text=True).strip()):
            yield "-lopenblas", name
    except (OSError, subprocess.SubprocessError):
        pass
    # Wheels of scipy < 1.11 bundle an OpenBLAS under the plain names that Theano's C code uses.
    scipy = importlib.util.find_spec("scipy")
    if scipy is not None and scipy.origin:
        site_packages = os.path.dirname(os.path.dirname(scipy.origin))
        pattern = os.path.join(glob.escape(site_packages), "scipy.libs", "libopenblas*.so")
        for bundled in glob.glob(pattern):
            yield link_flags(bundled), bundled


def link_flags(library: str) -> str:
    """Return the flags that link one library file, ``/a/b/libc.so`` as ``-L/a/b -lc``.

    Empty if the path holds white space, at which Theano would split the flags.
    """
    directory, name = os.path.split(library)
    flags = f"-L{directory} -l{name[len('lib') : -len('.so')]}"
    return flags if len(flags.split()) == 2 else ""


def is_usable(library: str) -> bool:
    """Load a BLAS and try it.

    Loading it also lets threadpoolctl see it before Theano's first compiled module needs it.

    Parameters
    ----------
    library : str
        A path, or a bare file name that the loader looks for.

    Returns
    -------
    bool
        Whether it loads, has the routines of `BLAS_SYMBOLS`, and ``y = 0 * y + A x`` forgets a NaN
        in ``y``: Theano passes memory that was never written there. (It has a check of its own for
        that, whose C code lacks a parenthesis.)
    """
    try:
        blas = ctypes.CDLL(library)
    except OSError:
        return False
    if not all(hasattr(blas, symbol) for symbol in BLAS_SYMBOLS):
        return False
    n = 8
    size, step = ctypes.c_int64(n), ctypes.c_int64(1)  # right for 32-bit arguments as well
    zero, one = ctypes.c_double(0.0), ctypes.c_double(1.0)
    matrix, x = (ctypes.c_double * (n * n))(*[1.0] * (n * n)), (ctypes.c_double * n)(*[1.0] * n)
    for transpose in (b"N", b"T"):
        y = (ctypes.c_double * n)(*[float("nan")] * n)
        pointers = [ctypes.byref(c) for c in (size, size, one, matrix, size, x, step, zero, y, step)]
        blas.dgemv_(transpose, *pointers)
        if list(y) != [float(n)] * n:
            return False
    return True


DOWNSAMPLE = "theano.tensor.signal.downsample"

MENDS: dict[str, Callable[[types.ModuleType], contextlib.AbstractContextManager[None]]] = {
    "theano": mend_theano,
    "theano.configdefaults": mend_configdefaults,
    "lasagne": mend_lasagne,
}


class DownsampleLoader(importlib.abc.Loader):
    """Makes ``theano.tensor.signal.downsample``, gone from Theano 1.0 and used by Lasagne 0.1."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Define ``max_pool_2d`` in the empty module."""
        from theano.tensor.signal.pool import pool_2d

        def max_pool_2d(
            input: Any,
            ds: Any,
            ignore_border: Optional[bool] = False,
            st: Any = None,
            padding: Any = (0, 0),
            mode: str = "max",
        ) -> Any:
            """Call ``theano.tensor.signal.pool.pool_2d`` by the names it had in Theano 0.8."""
            return pool_2d(input, ws=ds, ignore_border=ignore_border, stride=st, pad=padding, mode=mode)

        namespace: Any = module
        namespace.max_pool_2d = max_pool_2d
