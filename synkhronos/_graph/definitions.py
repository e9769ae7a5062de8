"""Track which of the program's own functions and classes, and their state, must be sent to other processes.

Workers inherit functions, classes and state when they are forked. Leaders of other nodes have run the program up to
their first `fork`, so in all sessions they have what the controller had at that time. Digests detect later changes of
state, which are sent with the next functions.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import types
import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any, Callable, NamedTuple

import cloudpickle

from synkhronos._backends import FromFunctionOp, PureOp, PureType
from synkhronos._graph import namespaces

_FIXED = (type, types.FunctionType, *namespaces.WRAPPERS, int, float, complex, str, bytes, type(None))


class Change(NamedTuple):
    """A slot whose value in other processes is different or unknown, so that it must be sent.

    Attributes
    ----------
    slot : Slot
    value : Any
    digest : bytes
    reader : str
        A function or a class that reads the slot.
    is_same : bool
        Whether the object is the one that other processes inherited, or the slot was not recorded when they were
        forked.
    """

    slot: namespaces.Slot
    value: Any
    digest: bytes
    reader: str
    is_same: bool


class Definitions:
    """Record of the functions and classes that processes forked now inherit, and of the state that these read.

    Other processes cannot find functions and classes by name that the main program (for example a notebook) defines or
    redefines later. These are sent by value. An Op of a reloaded module cannot be sent, because other parts of the
    module may have changed, too. A module that is imported later is imported by each process itself.

    Parameters
    ----------
    lasting : bool
        Whether the other processes are the same in all sessions, as leaders of other nodes are.
    """

    def __init__(self, lasting: bool = False) -> None:
        self._advice = "start the program again" if lasting else "close the session, and fork again"
        self._modules = set(sys.modules)
        ops = [PureOp, PureType, *_subclasses(PureOp), *_subclasses(PureType)]
        self._digester = namespaces.Digester()
        self._inherited: dict[namespaces.Slot, int] = {}
        inherited, roots = list(ops), [op for op in ops if namespaces.is_of_program(namespaces.module_of(op))]
        for module in filter(namespaces.is_of_program, self._modules):
            for name, value in list(vars(sys.modules[module]).items()):
                self._inherited[namespaces.Slot(module, "", name)] = self._digester.number(value)
                if isinstance(value, (type, types.FunctionType, PureOp, *namespaces.WRAPPERS)):
                    inherited.append(value)
                if isinstance(value, PureOp):
                    roots.append(namespaces.function_of(value) if isinstance(value, FromFunctionOp) else type(value))
        self._known = {id(obj): weakref.ref(obj) for obj in inherited}
        self._used: weakref.WeakSet[Any] = weakref.WeakSet()  # functions and classes that the ranks' functions use
        self._pickled: list[Any] = []  # functions and classes pickled since `begin`
        self._held: dict[namespaces.Slot, bytes] = {}
        for slot, value, digest, _ in namespaces.walk(roots, self._digest):
            self._held[slot], self._inherited[slot] = digest, self._digester.number(value)

    def begin(self, all_in_use: bool) -> None:
        """Start collecting the functions and classes whose state `changes` checks: those pickled from now on.

        Parameters
        ----------
        all_in_use : bool
            Include the functions and classes that the ranks' compiled functions already use.
        """
        self._pickled = list(self._used) if all_in_use else []

    def reach(self, obj: Any) -> bool:
        """Return false if an object must be pickled by value, because other processes cannot find it by its name.

        Parameters
        ----------
        obj : Any
            An object to be pickled. If it is a function or a class of the program, it is also recorded, so that
            `changes` checks the state that it reads.

        Raises
        ------
        pickle.PicklingError
            For an Op of a module that was reloaded.
        """
        if isinstance(obj, namespaces.WRAPPERS):  # these are pickled by the names of the functions that they decorate
            named = namespaces.function_of(obj)
        elif isinstance(obj, (type, types.FunctionType)):
            named = obj
        else:
            return True
        module = namespaces.module_of(named)
        if isinstance(named, (type, types.FunctionType)) and namespaces.is_of_program(module):
            self._pickled.append(named)
        is_op = isinstance(obj, type) and issubclass(obj, (PureOp, PureType))
        if is_op and module != namespaces.MAIN and module in self._modules and not self._is_inherited(obj):
            raise pickle.PicklingError(
                f"{module}.{named.__qualname__} was defined after synkhronos.fork(), so that the workers have none, or "
                f"an older one: {self._advice}"
            )
        return self._is_found(obj, named)

    def _is_found(self, obj: Any, named: Any) -> bool:
        """Return whether other processes find ``obj`` under the name of ``named``, a function or a class."""
        module = namespaces.module_of(named)
        if namespaces.find(module, named.__qualname__) is not obj:
            return False
        is_old = module == namespaces.MAIN or (module in self._modules and namespaces.is_of_program(module))
        return not is_old or self._is_inherited(namespaces.find(module, named.__qualname__.partition(".")[0]))

    def _is_inherited(self, obj: Any) -> bool:
        known = self._known.get(id(obj))
        return known is not None and known() is obj

    def _digest(self, value: Any) -> tuple[bytes, list[Any]]:
        return self._digester.digest(value, lambda named: self._is_found(named, named))

    def changes(self, already: Container[namespaces.Slot] = ()) -> Iterator[Change]:
        """Yield the slots to be sent: those that functions and classes pickled since `begin` read, if they changed.

        Parameters
        ----------
        already : container of Slot
            Slots to leave out.

        Yields
        ------
        Change
        """
        used = list(self._pickled)
        self._used.update(used)
        for cls in used:
            if isinstance(cls, type) and not self._is_found(cls, cls):
                slot, digest = namespaces.Slot.of_class(cls, self._digester.number(cls)), self._digest(cls)[0]
                if slot not in already and self._held.get(slot) != digest:
                    yield Change(slot, cls, digest, cls.__qualname__, False)
        for slot, value, digest, reader in namespaces.walk(used, self._digest):
            if slot in already or self._held.get(slot) == digest:
                continue
            if slot.owner and not self._is_found(*[namespaces.find(slot.module, slot.owner)] * 2):
                continue  # the slot is sent with its owner, which is pickled by value
            inherited = self._inherited.get(slot)
            is_same = inherited is None or inherited == self._digester.number(value)
            if slot not in self._held and self._is_fixed(slot, value, inherited):
                continue
            yield Change(slot, value, digest, f"{reader.__qualname__}", is_same)

    def _is_fixed(self, slot: namespaces.Slot, value: Any, inherited: int | None) -> bool:
        """Return whether other processes are known to have a slot's value although no digest is recorded for it.

        This is so for the definition of the slot's name, and for inherited objects whose state cannot have changed.
        """
        is_definition = isinstance(value, (type, types.FunctionType)) and self._is_found(value, value)
        if is_definition and (value.__module__, value.__qualname__) == (slot.module, slot.name):
            return True
        is_same = inherited is not None and inherited == self._digester.number(value)
        return is_same and (isinstance(value, _FIXED) or namespaces.is_opaque(value))

    def assume_missing(self, slots: Iterable[namespaces.Slot]) -> None:
        """Forget the digests of slots that are about to be set in other processes, because setting them may fail."""
        for slot in slots:
            self._held.pop(slot, None)

    def note(self, digests: dict[namespaces.Slot, bytes]) -> None:
        """Record the digests of slots that other processes have set."""
        self._held.update(digests)


def pickled_by_value(definition: Any, pickle_it: Callable[[], Any]) -> Any:
    """Return the reduction that pickles a function, a decorated function or a class by value.

    Parameters
    ----------
    definition : function, decorated function, or class
    pickle_it : callable
        Returns cloudpickle's reduction of it.
    """
    if isinstance(definition, FromFunctionOp):
        shapes = definition._FromFunctionOp__infer_shape
        return FromFunctionOp, (namespaces.function_of(definition), definition.itypes, definition.otypes, shapes)
    if isinstance(definition, namespaces.WRAPPERS):
        return _cached, (namespaces.function_of(definition), definition.cache_parameters())
    how = namespaces.reduced_function(definition) if isinstance(definition, types.FunctionType) else NotImplemented
    if how is not NotImplemented:
        return how
    with _by_value(namespaces.module_of(definition)):
        return pickle_it()


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


@contextlib.contextmanager
def _by_value(module: str | None) -> Iterator[None]:
    """Make cloudpickle pickle functions and classes of a module by value, within a block."""
    if (
        module in (None, namespaces.MAIN)
        or module not in sys.modules
        or module in cloudpickle.list_registry_pickle_by_value()
    ):
        yield
        return
    cloudpickle.register_pickle_by_value(sys.modules[module])
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[module])


def _subclasses(cls: Any) -> Iterator[Any]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)
