"""Whoever searches docs/troubleshooting.md for an error finds it: each class, and each message that is raised."""

import ast
import re

import pytest
from support import ROOT

import synkhronos as synk

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = sorted(synk.errors.__all__)


def pieces(node, constants):
    """The literal pieces of a message, its module's constants among them."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in constants:
            yield constants[part.id]


def messages():
    """The longest literal piece of each message of our own errors, by where it is raised."""
    found = {}
    for path in sorted((ROOT / "synkhronos").rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
                piece = max(pieces(node.args[0], constants), key=len, default="")
                if len(piece) > 12:
                    found[f"{path.relative_to(ROOT)}:{node.lineno}"] = piece
    return found


MESSAGES = messages()


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_a_chapter(name):
    assert f"\n## {name}\n" in PAGE


@pytest.mark.parametrize("place", sorted(MESSAGES))
def test_each_message_is_found_by_words_of_it(place):
    words = " ".join(re.sub('[`"]', "", MESSAGES[place]).strip(" :;,(").split()[:6])
    assert words.rstrip(":;,") in re.sub('[`"]', "", PAGE), f"{place}: {words}"


def test_messages_are_looked_for():
    assert len(MESSAGES) > 15
