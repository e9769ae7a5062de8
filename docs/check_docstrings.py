"""Validate the docstrings of all public names with numpydoc; ``make lint`` runs this script."""

import importlib
import inspect
import sys

from numpydoc.validate import validate

import synkhronos

EXTENSIONS = ("checkpoint", "schedules", "train", "updates")
#: Parameters match the signature and have types, results are documented, and sentences end with periods.
CHECKS = {"GL08", "PR01", "PR02", "PR03", "PR04", "PR07", "RT01", "RT03", "SS01", "SS03", "SS06", "YD01"}
#: The parameters of `session` are documented at `fork`, which has the same ones.
UNCHECKED = {"synkhronos.session": {"PR01", "PR02"}}
#: Parameters and results of methods of training rules are documented at the class that first defines the method.
UNCHECKED_OVERRIDES = {"PR01", "RT01"}


def members(name, obj):
    """Yield the names of an object, and of the public methods that its class or a private base of it defines."""
    yield name
    if inspect.isclass(obj) and not issubclass(obj, BaseException):
        for member, value in inspect.getmembers(obj):
            own = (getattr(value, "__module__", "") or "").startswith("synkhronos")
            if own and inspect.isroutine(value) and not member.startswith("_"):
                yield f"{name}.{member}"


def public_names():
    """Yield the full name of each public function, class and method."""
    extensions = [importlib.import_module(f"synkhronos.extensions.{name}") for name in EXTENSIONS]
    for module in (synkhronos, synkhronos.rules, *extensions):
        for name in module.__all__:
            obj = getattr(module, name)
            if callable(obj):
                yield from members(f"{module.__name__}.{name}", obj)


def overrides(name):
    """Return whether a name is that of a method of a training rule that a base class defines, too."""
    parts = name.split(".")
    if parts[:2] != ["synkhronos", "rules"] or len(parts) != 4:
        return False
    return sum(parts[3] in vars(one) for one in getattr(synkhronos.rules, parts[2]).__mro__) > 1


def faults(name):
    """Yield the faults of a docstring; classes need no section of parameters, because users do not construct them."""
    found = validate(name)
    checks = CHECKS - {"PR01"} if found["type"] == "type" else CHECKS
    checks = checks - UNCHECKED.get(name, set()) - (UNCHECKED_OVERRIDES if overrides(name) else set())
    yield from (f"{name}: {code} {text}" for code, text in found["errors"] if code in checks)


if __name__ == "__main__":
    sys.exit("\n".join(fault for name in public_names() for fault in faults(name)) or None)
