"""Faults of structure that imports do not show: each test names one and keeps it from coming back."""

import ast
from pathlib import Path

import synkhronos as synk

PACKAGE = Path(synk.__file__).parent
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def named(node):
    """The names in an expression, and those of its attributes."""
    return {getattr(one, "id", getattr(one, "attr", None)) for one in ast.walk(node)}


def calls(tree, function):
    """The calls of a function or method of that name."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in found if getattr(node.func, "id", getattr(node.func, "attr", None)) == function]


def test_only_multinode_asks_which_class_a_group_of_ranks_has():
    for path, tree in TREES.items():
        if not path.startswith("_multinode"):
            for call in calls(tree, "isinstance"):
                assert "MultiNodeGroup" not in named(call.args[1]), f"{path}:{call.lineno}"
