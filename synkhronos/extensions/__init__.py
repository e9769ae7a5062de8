"""Extensions for training and for PyMC, which use only the public interface, as user code does.

``updates``     update rules of gradient descent, each split into a gradient part and a parameter part
``train``       training steps on all ranks, which combine the two parts
``schedules``   linear scaling and warm-up of learning rates
``checkpoint``  save and load every rank's values of shared variables, and training loops
``pymc``        PyMC models, sharded by the rows of their data
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["checkpoint", "pymc", "schedules", "train", "updates"]

if not TYPE_CHECKING:  # type checkers know the modules that a program imports

    def __getattr__(name: str) -> Any:
        """Import an extension when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return list(__all__)
