"""Prepare Theano in one process for all: compiler checks, the module cache, and labels of printed lines."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from typing import Any

import theano
from theano.gof import compilelock

__all__ = ["find_compiled", "label_prints", "limit_threads", "precompile", "prepare_fork", "print_profiles"]


def prepare_fork() -> None:
    """Have Theano perform now the checks that every process would otherwise perform on its first compilation.

    These are the compiler's flags for this processor and a quirk of the BLAS (both run the compiler), and the contents
    of the cache of compiled modules. Forked workers inherit the answers. In addition, ranks try to take Theano's
    compile lock every few milliseconds, because several may want it at once, each for a moment; Theano itself sleeps
    for five to ten seconds.
    """
    if not isinstance(compilelock.lock, functools.partial):
        compilelock.lock = functools.partial(compilelock.lock, min_wait=0.01, max_wait=0.05)
    if theano.config.cxx:
        theano.gof.cmodule.GCC_compiler.compile_args()
        theano.tensor.blas_c.check_force_gemv_init()
        theano.gof.cc.get_module_cache()


def precompile(function: Any) -> None:
    """Do nothing: Theano compiles functions when they are made."""


def find_compiled() -> None:
    """Have Theano load the index of modules that the controller has compiled since the last call.

    Theano would find them one by one, each under the compile lock.
    """
    if theano.config.cxx:
        theano.gof.cc.get_module_cache().refresh(cleanup=False)


def print_profiles() -> None:
    """Print the profiles of all functions of this process."""
    theano.compile.profiling._atexit_print_fn()


def limit_threads(most: int) -> None:
    """Do nothing: all of Theano's threads are those of BLAS and OpenMP."""


def label_prints(rank: int) -> None:
    """Have the operation ``Print`` begin each line with the rank of this process, and write all its lines at once."""
    plain: Any = theano.printing._print_fn

    def print_labelled(op: Any, value: Any) -> None:
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            plain(op, value)
        lines = written.getvalue().splitlines()
        sys.stdout.write("".join([f"rank {rank}: {line}\n" for line in lines]))
        sys.stdout.flush()

    theano.printing._print_fn = print_labelled  # unpickled functions refer to it by this name
