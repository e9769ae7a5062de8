"""State that the program's own functions and classes read: globals, class attributes, defaults, closures.

A pickle that names a function or a class does not contain this state. The state is divided into *slots*. A slot is a
name in a module, a class or a function. Its value can be compared by a digest, sent to another process, and set there.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import importlib
import os
import pickle
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, Callable, NamedTuple

import numpy as np

from synkhronos._backends import FromFunctionOp
from synkhronos._native import native
from synkhronos._utils.interrupts import let_interrupts_pass

MAIN = "__main__"

#: Packages that do not belong to the program, even if they are installed from a working tree.
_LIBRARIES = frozenset(["cloudpickle", "pygpu", "pymc", "pytensor", "synkhronos", "theano"])
_LIBRARY_FOLDERS = frozenset(["dist-packages", "site-packages"])  # names of folders in every Python installation
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # flags of classes (CPython's object.h); 3.9 lacks the second

_BLOCK = 4096
_key = os.urandom(_BLOCK + 16)

#: Decorated functions, which are pickled by name as functions are: those of `as_op` and of `functools.lru_cache`.
WRAPPERS = (FromFunctionOp, functools._lru_cache_wrapper)

_Definition = (type, types.FunctionType)
_Wrapper = (staticmethod, classmethod, property)


_SCALARS = (bool, int, float, complex, str, bytes)


class Slot(NamedTuple):
    """A name whose value functions and classes of the program read.

    Attributes
    ----------
    module : str
        The owner's module.
    owner : str
        The qualified name of a class or a function; empty for the module itself.
    name : str
        The name of an attribute or global; or a number, for a cell of a closure; or "#" and a number, for a class that
        is sent by value.
    """

    module: str
    owner: str
    name: str

    @classmethod
    def of_class(cls, definition: type, number: int) -> Slot:
        """Return the slot of a class that is sent by value. cloudpickle updates a class that was received before."""
        return cls(definition.__module__, definition.__qualname__, f"#{number}")

    def __str__(self) -> str:
        """Return the name as it would appear in the program."""
        return ".".join(part for part in (self.module.replace(MAIN, ""), self.owner, self.name) if part)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {*map(sysconfig.get_path, kinds), *site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.join(os.path.realpath(path), "") for path in found if path)


@functools.cache
def _is_of_library(file: str) -> bool:
    path = os.path.realpath(file)
    return path.startswith(_library_folders()) or not _LIBRARY_FOLDERS.isdisjoint(path.split(os.sep))


def is_of_program(module: str | None) -> bool:
    """Return whether a module is the program's own: the main one, or one whose file is not in a library folder."""
    if module == MAIN:
        return True
    if module is None or module.partition(".")[0] in _LIBRARIES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and not _is_of_library(file)


def is_opaque(value: Any) -> bool:
    """Return whether a value is compared by identity: a module, built-in function, memory map or library object."""
    of_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    return of_library or isinstance(value, (types.ModuleType, types.BuiltinFunctionType, np.memmap))


def module_of(obj: Any) -> str | None:
    """Return the ``__module__`` of a class or a function; ``None`` if it has none."""
    module = getattr(obj, "__module__", None)
    return module if isinstance(module, str) else None


def function_of(wrapper: Any) -> Any:
    """Return the function that one of `WRAPPERS` decorates."""
    return wrapper._FromFunctionOp__fn if isinstance(wrapper, FromFunctionOp) else wrapper.__wrapped__


def find(module: str | None, qualname: str) -> Any:
    """Return the object with a qualified name in a module of this process; ``None`` if there is none."""
    outermost, *inner = qualname.split(".")
    found = vars(sys.modules[module]).get(outermost) if module in sys.modules else None
    return reduce(lambda obj, name: getattr(obj, name, None), inner, found)


def assign(slot: Slot, value: Any) -> None:
    """Set a slot in this process; import the module if necessary."""
    if slot.name.startswith("#"):
        return
    owner = importlib.import_module(slot.module)
    for name in filter(None, slot.owner.split(".")):
        owner = getattr(owner, name)
    _set(owner, slot.name, value)


def slots_of(definition: Any) -> Iterator[tuple[Slot, Any]]:
    """Yield the slots that a function or a class reads itself, with their values.

    Its own attributes, defaults and closure are included only if it is found under its name; otherwise it is pickled by
    value, with its state. `walk` also yields slots that are read indirectly, through other functions and classes.
    """
    module, qualname = module_of(definition), definition.__qualname__
    assert module is not None
    if find(module, qualname) is definition:
        for name, value in state_of(definition).items():
            yield Slot(module, qualname, name), value
    if isinstance(definition, types.FunctionType):
        names = _names(definition.__code__)
        home = sys.modules.get(definition.__globals__.get("__name__", ""))
        if home is not None and vars(home) is definition.__globals__:
            yield from _read(home, names, set())


def _read(module: types.ModuleType, names: set[str], seen: set[str]) -> Iterator[tuple[Slot, Any]]:
    """Yield the slots that code with these names may read: in a module, and in modules of the program that it names."""
    seen.add(module.__name__)
    for name in sorted(names & vars(module).keys()):
        value = vars(module)[name]
        yield Slot(module.__name__, "", name), value
        if isinstance(value, types.ModuleType) and value.__name__ not in seen and is_of_program(value.__name__):
            yield from _read(value, names, seen)


def _names(code: types.CodeType) -> set[str]:
    """Return the names of all globals and attributes to which code refers, inner functions included."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)


def state_of(definition: Any) -> dict[str, Any]:
    """Return the state of a class or a function that a program can change: attributes, defaults and closure."""
    if isinstance(definition, type):
        if not definition.__flags__ & _HEAP_TYPE or definition.__flags__ & _IMMUTABLE_TYPE:  # a class in C or Cython
            return {}
        return {name: value for name, value in list(vars(definition).items()) if not _is_made_by_python(name, value)}
    state = {"__defaults__": definition.__defaults__, "__kwdefaults__": definition.__kwdefaults__}
    for i, cell in enumerate(definition.__closure__ or ()):
        try:
            state[str(i)] = cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    return {name: value for name, value in {**state, **vars(definition)}.items() if value is not None}


def _is_made_by_python(name: str, value: Any) -> bool:
    if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)) or name == "_abc_impl":
        return True
    return name.startswith("__") and name.endswith("__") and not isinstance(value, types.FunctionType)


def reduced_function(function: Any) -> Any:
    """Return the reduction that pickles a function by value; ``NotImplemented`` if its globals are not a module's.

    The unpickled function uses the globals of the same module in the receiving process. Their values are sent as slots.
    cloudpickle would instead give each separately pickled function its own copy of the globals that it reads.
    """
    module = function.__globals__.get("__name__", "")
    if module not in sys.modules or vars(sys.modules[module]) is not function.__globals__:
        return NotImplemented
    state = {name: getattr(function, name) for name in ("__qualname__", "__module__", "__doc__")}
    new = module, function.__code__, function.__name__, len(function.__closure__ or ())
    return _new_function, new, {**state, **state_of(function)}, None, None, _set_state


def _new_function(module: str, code: types.CodeType, name: str, n_cells: int) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in range(n_cells))
    return types.FunctionType(code, vars(importlib.import_module(module)), name, None, cells)


def _set_state(function: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        _set(function, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    if name.isdigit():
        owner.__closure__[int(name)].cell_contents = value
    elif isinstance(owner, types.ModuleType):
        vars(owner)[name] = value
    elif isinstance(owner, type):
        try:
            type.__setattr__(owner, name, value)  # the metaclass's own method may refuse, as that of enums does
        except TypeError:  # a metaclass in C, such as that of ctypes.Structure
            with contextlib.suppress(AttributeError, TypeError):  # the program cannot have changed such an attribute
                setattr(owner, name, value)
    else:
        setattr(owner, name, value)


class Digester:
    """Compute digests of values: equal digests mean an unchanged value.

    A value that cannot be pickled is identified by the object instead of its contents.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[Any, int]] = {}
        self._last = 0

    def number(self, obj: Any) -> int:
        """Return a number that identifies an object among all objects that are alive at the same time."""
        known, number = self._numbers.get(id(obj), (None, 0))
        if not number or (known is not None and known() is not obj):
            self._last = number = self._last + 1
            reference: Any = None
            if isinstance(obj, _SCALARS):
                reference = functools.partial(_itself, obj)  # keeps it alive, so that no other object gets its address
            else:
                with contextlib.suppress(TypeError):
                    reference = weakref.ref(obj)
            self._numbers[id(obj)] = reference, number
        return number

    def digest(self, value: Any, is_known: Callable[[Any], bool]) -> tuple[bytes, list[Any]]:
        """Return the digest of a value, and the program's functions and classes in it.

        Parameters
        ----------
        value : Any
        is_known : callable
            Returns whether other processes find a function or a class under its name. If so, only its identity enters
            the digest, otherwise also its state.
        """
        pickler = _DigestPickler(self.number, is_known)
        try:
            pickler.dump(value)
        except Exception as error:  # objects of the program may raise anything while they are pickled
            let_interrupts_pass(error)
            return str(self.number(value)).encode(), pickler.found
        return pickler.hash.digest(), pickler.found


def _itself(obj: Any) -> Any:
    return obj


class _Hash:
    """A file object that hashes the bytes written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.digest = self._hash.digest

    def write(self, content: Any) -> None:
        array = np.frombuffer(content, np.uint8)
        if len(array) > _BLOCK:  # hashing blocks in the compiled core is faster
            numbers = np.arange(-(-len(array) // _BLOCK))
            digests = np.empty((len(numbers), 4), np.uint64)
            native.hash_blocks(array, numbers, _key, digests)
            content = digests
        self._hash.update(str(len(array)).encode())
        self._hash.update(content)


class _DigestPickler(pickle.Pickler):
    def __init__(self, number: Callable[[Any], int], is_known: Callable[[Any], bool]) -> None:
        self.hash = _Hash()
        self.found: list[Any] = []
        self._number, self._is_known = number, is_known
        super().__init__(self.hash, 5, buffer_callback=lambda buffer: self.hash.write(buffer.raw()))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, WRAPPERS):
            self.found.append(function_of(obj))
            return self._by_identity(obj)
        if isinstance(obj, _Wrapper):
            parts = [getattr(obj, name, None) for name in ("__func__", "fget", "fset", "fdel")]
            return _Named, (type(obj).__name__,), parts
        if isinstance(obj, _Definition):
            if not is_of_program(module_of(obj)):
                return self._by_identity(obj) if isinstance(obj, types.FunctionType) else NotImplemented
            self.found.append(obj)
            bases = [base for base in getattr(obj, "__bases__", ()) if is_of_program(module_of(base))]
            state = bases if self._is_known(obj) else [bases, state_of(obj)]
            return _Named, (self._number(obj),), state
        if is_opaque(obj):
            return self._by_identity(obj)
        how = copyreg.dispatch_table.get(type(obj))
        try:
            reduced = obj.__reduce_ex__(5) if how is None else how(obj)
        except Exception as error:  # cannot be pickled
            let_interrupts_pass(error)
            return self._by_identity(obj)
        # a string is a global name, which may refer to another object now
        return self._by_identity(obj) if isinstance(reduced, str) else reduced

    def _by_identity(self, obj: Any) -> Any:
        return _Named, (self._number(obj),)


class _Named:
    """Placeholder of an object in pickles that are only digested, never unpickled."""


def walk(
    roots: Iterable[Any], digest: Callable[[Any], tuple[bytes, list[Any]]]
) -> Iterator[tuple[Slot, Any, bytes, Any]]:
    """Yield all slots that functions and classes read, directly or through functions and classes in other slots.

    Parameters
    ----------
    roots : iterable of functions and classes
    digest : callable
        Returns the digest of a value, and the functions and classes in it; see `Digester.digest`.

    Yields
    ------
    slot : Slot
    value : Any
    digest : bytes
    reader : function or class
    """
    queue, seen, done = list(roots), set(), set()
    while queue:
        reader = queue.pop()
        if id(reader) in seen or not is_of_program(module_of(reader)):
            continue
        seen.add(id(reader))
        for slot, value in slots_of(reader):
            if slot not in done:
                done.add(slot)
                digested, found = digest(value)
                queue += found
                yield slot, value, digested, reader
        if isinstance(reader, type):
            queue += reader.__bases__
