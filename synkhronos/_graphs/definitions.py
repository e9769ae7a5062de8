"""What forked processes find under a name: pickles name classes and functions, and must mean the same everywhere."""

from __future__ import annotations

import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from synkhronos._engine import FromFunctionOp, PureOp, PureType

__all__ = ["Definitions"]

_MAIN = "__main__"


class Definitions:
    """The classes and functions that exist now, and that processes forked now inherit.

    What the main program (a notebook, say) defines later, or defines anew, does not reach them: under its name they
    have nothing, or what was there before. The same goes for ops of a module that is reloaded. A module that is
    imported later is no trouble, since each process imports it for itself.
    """

    def __init__(self) -> None:
        main = vars(sys.modules[_MAIN]).values()
        inherited = [obj for obj in list(main) if isinstance(obj, (type, types.FunctionType, PureOp))]
        inherited += [*_subclasses(PureOp), *_subclasses(PureType)]
        self._known = {id(obj): weakref.ref(obj) for obj in inherited}
        self._modules = set(sys.modules)

    def check(self, obj: Any) -> None:
        """Raise `pickle.PicklingError` for a class, function or op that other processes know otherwise, or not at all.

        Parameters
        ----------
        obj : Any
            Something to be pickled.
        """
        if isinstance(obj, FromFunctionOp):  # of the decorator as_op; pickled by the name of its function
            function = obj._FromFunctionOp__fn
            module, name = function.__module__, function.__qualname__
        elif isinstance(obj, (type, types.FunctionType)):
            module, name = obj.__module__, obj.__qualname__
        else:
            return
        is_named_by_us = module == _MAIN or (isinstance(obj, type) and issubclass(obj, (PureOp, PureType)))
        if not is_named_by_us or module not in self._modules or self._inherited(obj):
            return
        if module == _MAIN and self._inherited(vars(sys.modules[_MAIN]).get(name.split(".")[0])):
            return  # inside something that is as it was
        raise pickle.PicklingError(
            f"{module}.{name} was defined after synkhronos.fork(), so that the workers have none, or an older one"
        )

    def _inherited(self, obj: Any) -> bool:
        known = self._known.get(id(obj))
        return known is not None and known() is obj


def _subclasses(cls: Any) -> Iterator[Any]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)
