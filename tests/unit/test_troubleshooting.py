"""docs/troubleshooting.md lists each error class, message and warning.

In a message, `…` stands for the parts that vary. An entry of the page, in backticks, explains a message if both begin
with the same words, and the entry covers the message to its end, or as far as a user would type.
"""

import ast
import re

import pytest
from scripts import ROOT

import synkhronos as synk

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "synkhronos"
CLASSES = sorted(synk.errors.__all__)
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

#: Messages that the page need not repeat, because they state what is expected and what was given.
EXPLAINS_ITSELF = re.compile(
    r".*\b(is|has|got)\b.*; expected |.*\b(must|cannot|expected)\b.*[;,] got "
    r"|.* must be a list of …, one for each variable$"
)
#: Messages that users do not see, because the library catches them or reports them in other words.
FOR_THE_LIBRARY = {
    "_theano_compat/blas_probe.py": "`python -m synkhronos info` shows it as the cause of an unusable BLAS",
    "_session/dispatch.py:… (the cause": "it follows one of two messages that the page has",
    "_theano_compat/current_versions.py": "messages of Theano; its own loop in Python runs instead",
    "_memory/segments.py:the memory": "no rank asks for memory that was freed",
    "_multinode/launch.py:a container": "it is caught: the files stay, without a message",
    "_processes/process_group.py:node 0": "raised on another node when the controller has ordered it to stop",
    "_rank/steps.py:the new values of some elements": "the end of a message in the log that the page has",
    "_sharding/propagate.py:… of …, which has": "the end of the message about what a sharding rule returned",
    "_sharding/propagate.py:… placements of": "likewise",
    "_sharding/propagate.py:… is not a placement": "likewise",
    "_utils/rows.py:got iteration": "only a mistake in the library's own code raises it",
    "_backends/pytensor/process.py:PyTensor computes": "raised by functions that are called only where there are GPUs",
    "_session/lifecycle.py:synkhronos.…: …": "one of two messages that the page has follows",
}


def constants(trees):
    """Return the texts assigned to names at the top level of modules, by name."""
    found = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                text = ast.unparse(node.value)
                if isinstance(node.value, (ast.Constant, ast.BinOp, ast.JoinedStr)) and "{" not in text:
                    found[node.targets[0].id] = words_of(node.value, {})
    return found


def words_of(node, names):
    """Return the text of the expression of a message, with `…` for parts that vary."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return words_of(node.value, names) if isinstance(node.value, ast.Name) else "…"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words_of(node.left, names) + words_of(node.right, names)
    if isinstance(node, ast.IfExp):
        return words_of(node.body, names)
    return names.get(node.id, "…") if isinstance(node, ast.Name) else "…"


def plain(text):
    """Return a text without quotes and line breaks, with successive `…` merged."""
    return re.sub(r"…[…\s]*…", "…", re.sub("[`\"']", "", " ".join(text.split())))


def is_error_or_warning(node):
    """Return whether a call creates an error or a warning."""
    name = ast.unparse(node.func).split(".")[-1]
    return name == "warn" or re.fullmatch(r"\w+(Error|Died|Lost|Restarted|Timeout|Aborted)", name)


def messages():
    """Return the messages of the library, by path and text."""
    everywhere, found = constants(TREES.values()), {}
    for path, tree in TREES.items():
        names = {**everywhere, **constants([tree])}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and is_error_or_warning(node):
                message = plain(words_of(node.args[0], names))
                if re.search("[a-z]{3}", message):
                    found[f"{path}:{message}"] = message
    return found


def letters(text):
    return len(re.sub(r"\W", "", text))


def explains(entry, message):
    """Return whether an entry of the page explains a message."""
    pattern = ".*?".join(map(re.escape, entry.rstrip("…").split("…")))
    found = re.match(pattern, message)
    if not found:
        return False
    end = found.end()
    return end >= min(50, len(message.rstrip("….)"))) and letters(entry) >= 0.8 * letters(message[:end])


MESSAGES = {place: text for place, text in messages().items() if not place.startswith((*FOR_THE_LIBRARY,))}
ENTRIES = [plain(entry) for entry in re.findall("`([^`]+)`", PAGE)]


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_a_chapter(name):
    assert f"\n## {name}\n" in PAGE


def test_each_message_is_found_by_its_words():
    found = {place for place, message in MESSAGES.items() if any(explains(entry, message) for entry in ENTRIES)}
    missing = [place for place in MESSAGES.keys() - found if not EXPLAINS_ITSELF.match(MESSAGES[place])]
    assert not missing, "\n".join(["docs/troubleshooting.md does not have:", *sorted(missing)])
    assert len(found) > 200


def test_modules_whose_messages_are_left_out_have_such_messages():
    assert [begin for begin in FOR_THE_LIBRARY if not any(place.startswith(begin) for place in messages())] == []


def test_other_messages_are_not_found():
    message = "…: … is out of range for … data points"
    assert explains("…: … is out of range for … data points", message)
    for other in ("…: …", "… is out of range", "…: … is out of range for … rows", "is out of range for … data points"):
        assert not explains(other, message), other
