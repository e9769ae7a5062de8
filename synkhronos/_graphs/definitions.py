"""What forked processes find under a name: pickles name classes and functions, and must mean the same everywhere."""

from __future__ import annotations

import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from functools import reduce
from typing import Any

from synkhronos._engine import FromFunctionOp, PureOp, PureType

__all__ = ["Definitions", "function_of"]

_MAIN = "__main__"


class Definitions:
    """The classes and functions that exist now, and that processes forked now inherit.

    What the main program (a notebook, say) defines later, or defines anew, does not reach them under its name: it
    travels whole. An op of a module that was reloaded cannot, for it belongs with the rest of that module. A module
    that is imported later is no trouble, since each process imports it for itself.
    """

    def __init__(self) -> None:
        main = vars(sys.modules[_MAIN]).values()
        inherited = [obj for obj in list(main) if isinstance(obj, (type, types.FunctionType, PureOp))]
        inherited += [PureOp, PureType, *_subclasses(PureOp), *_subclasses(PureType)]
        self._known = {id(obj): weakref.ref(obj) for obj in inherited}
        self._modules = set(sys.modules)

    def reach(self, obj: Any) -> bool:
        """Whether other processes find this object under its name; true, too, for one that is not pickled by name.

        Parameters
        ----------
        obj : Any
            Something to be pickled.

        Raises
        ------
        pickle.PicklingError
            For an op of a module that was reloaded.
        """
        if isinstance(obj, FromFunctionOp):  # of the decorator as_op; pickled by the name of its function
            named = function_of(obj)
        elif isinstance(obj, (type, types.FunctionType)):
            named = obj
        else:
            return True
        module, (outermost, *inner) = named.__module__, named.__qualname__.split(".")
        found = vars(sys.modules[module]).get(outermost) if module in sys.modules else None
        is_found = reduce(_attribute, inner, found) is obj
        if module == _MAIN:
            return is_found and self._inherited(found)
        is_op = isinstance(obj, type) and issubclass(obj, (PureOp, PureType))
        if is_op and module in self._modules and not self._inherited(obj):
            raise pickle.PicklingError(
                f"{module}.{named.__qualname__} was defined after synkhronos.fork(), so that the workers have none, or "
                "an older one: close the session, and fork again"
            )
        return is_found

    def _inherited(self, obj: Any) -> bool:
        known = self._known.get(id(obj))
        return known is not None and known() is obj


def function_of(op: FromFunctionOp) -> Any:
    """The function that `as_op` decorates."""
    return op._FromFunctionOp__fn


def _attribute(obj: Any, name: str) -> Any:
    return getattr(obj, name, None)


def _subclasses(cls: Any) -> Iterator[Any]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)
