"""Examples in docstrings run on both backends and print the output that they show; each public object has one.

They share this process, because starting a process for each would take longer than all of them together.
"""

import ast
import doctest
import importlib
import inspect

import numpy as np
import pytest
from backend import T, theano
from scripts import ROOT

import synkhronos as synk
from synkhronos.extensions import checkpoint, schedules, train, updates

pytestmark = pytest.mark.usefixtures("no_session")

#: Modules that examples need not import, as docs/reference.md states.
EXTENSIONS = {"checkpoint": checkpoint, "schedules": schedules, "train": train, "updates": updates}
NAMES = {"np": np, "theano": theano, "T": T, "synk": synk, **EXTENSIONS}


def examples():
    """Return each docstring with examples, as ``(module, text)`` by file and name."""
    found = {}
    for path in sorted((ROOT / "synkhronos").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node)
                if text and ">>>" in text:
                    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).replace(".__init__", "")
                    found[f"{path.relative_to(ROOT)}:{getattr(node, 'name', '')}"] = (module, text)
    return found


EXAMPLES = examples()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
@pytest.mark.filterwarnings("ignore:synkhronos.fork")  # about ranks that share a core
def test_examples_print_what_they_show(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, text = EXAMPLES[name]
    names = {**vars(importlib.import_module(module)), **NAMES}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    printed = []
    assert not doctest.DocTestRunner(verbose=False).run(test, out=printed.append).failed, "".join(printed)


def public():
    """Return public functions and classes by name, without `Function`, which other examples show."""
    found = {name: getattr(synk, name) for name in synk.__all__ if name not in ("Function", "engine")}
    for module in (synk.rules, *EXTENSIONS.values()):
        found.update({f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__})
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


@pytest.mark.parametrize("name", sorted(public()))
def test_each_public_object_has_an_example(name):
    assert ">>>" in inspect.getdoc(public()[name])
