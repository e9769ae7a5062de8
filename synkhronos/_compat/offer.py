"""The BLAS in ``theano.config.blas.ldflags``: where the user names none, one that is found; and none that is unfit."""

from __future__ import annotations

import logging
import sys
from typing import Any

from .blas import find_blas, found
from .marks import is_mend, mend
from .trial import try_blas

__all__ = ["offer_blas", "refuse_unfit_blas"]

logger = logging.getLogger("synkhronos")


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


def refuse_unfit_blas() -> None:
    """Have ``theano.config.blas.ldflags`` take no flags of a BLAS that Theano would compute wrongly with.

    Its values are tried when they are set, by whatever way; the first one, which the user may have given, now. In the
    place of what is refused comes what `find_blas` finds. What cannot be linked stays, and is told of. Theano must have
    been imported; calling this again does nothing.
    """
    from theano import config

    parameter = type(config.blas).__dict__["ldflags"]
    theanos_own = parameter.filter
    if is_mend(theanos_own):
        return
    answers: dict[str, str] = {}

    @mend
    def filter(value: Any) -> str:
        """Convert a value as Theano does, and refuse it if need be."""
        flags = str(theanos_own(value))
        if not flags.strip() or flags in found or not config.cxx or not sys.platform.startswith("linux"):
            return flags
        if flags not in answers:
            answers[flags] = _fit(flags, config.cxx)
        return answers[flags]

    parameter.filter = filter
    config.blas.ldflags = config.blas.ldflags


def _fit(flags: str, cxx: str) -> str:
    """Return these flags, or others in their place."""
    linked = try_blas(flags)
    if not linked.objection:
        if linked.trouble:
            logger.warning("blas.ldflags=%s: %s", flags, linked.trouble)
        return flags
    others = find_blas(cxx)
    instead = "another is taken" if others else "NumPy's is called instead, which is slower"
    logger.warning("blas.ldflags=%s: %s; %s", flags, linked.objection, instead)
    return others
