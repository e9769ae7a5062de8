"""Structural faults that imports do not show; each test prevents one from recurring."""

import ast
import inspect
import typing
from pathlib import Path

import pytest

import synkhronos as synk
from synkhronos import _collectives
from synkhronos._collectives.hierarchical import HierarchicalTransport
from synkhronos._rank import commands

PACKAGE = Path(synk.__file__).parent
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def named(node):
    """Return the names and attribute names in an expression."""
    return {getattr(one, "id", getattr(one, "attr", None)) for one in ast.walk(node)} - {None}


def calls(tree, function):
    """Return the calls of functions and methods with a given name."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in found if getattr(node.func, "id", getattr(node.func, "attr", None)) == function]


def within(*folders):
    """Return the syntax trees of modules whose paths begin with one of ``folders``, by path."""
    return {path: tree for path, tree in TREES.items() if path.startswith(folders)}


def annotated(tree):
    """Yield the line, name and annotation of each argument and field."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            yield node.lineno, getattr(node, "arg", None) or getattr(node.target, "id", None), node.annotation


def test_only_multinode_asks_which_class_a_group_of_ranks_has():
    for path, tree in TREES.items() - within("_multinode").items():
        for call in calls(tree, "isinstance"):
            assert "MultiNodeGroup" not in named(call.args[1]), f"{path}:{call.lineno}"


def imports(tree):
    """Return the names that a module imports from others."""
    return [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]


def is_message(node):
    """Return whether an expression is text with spaces, possibly concatenated."""
    texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    is_text = isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp))
    return is_text and any(" " in text.strip() for text in texts)


def messages_of(tree):
    """Return the names of a module's constants that hold messages."""
    found = [node for node in tree.body if isinstance(node, ast.Assign) and is_message(node.value)]
    return {name for node in found for name in named(node.targets[0])}


def messages_in(tree):
    """Return the names of the messages that a module defines or imports."""
    everywhere = set().union(*map(messages_of, TREES.values()))
    return messages_of(tree) | {alias.name for alias in imports(tree)} & everywhere


def test_no_message_is_compared_or_searched_for_to_find_out_what_happened():
    assert {"BROKEN", "LOST", "BUSY", "CLOSED_WITHIN"} <= messages_in(TREES["_session/dispatch.py"])
    for path, tree in TREES.items() - within("_theano_compat").items():
        messages = messages_in(tree)
        compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
        searched = ("startswith", "endswith", "replace", "removeprefix", "removesuffix", "partition", "split")
        for node in [*compared, *(call for method in searched for call in calls(tree, method))]:
            operands = node.args if isinstance(node, ast.Call) else [node.left, *node.comparators]
            names = {one.id for operand in operands for one in ast.walk(operand) if isinstance(one, ast.Name)}
            assert not messages & names, f"{path}:{node.lineno}"


def test_no_module_reads_the_variables_of_a_calling_frame():
    for path, tree in TREES.items():
        assert "f_locals" not in named(tree), path


def test_a_connection_between_node_leaders_is_described_where_lower_folders_use_it():
    for path, tree in within("_processes/", "_collectives/").items():
        for line, name, annotation in annotated(tree):
            if name == "comm" and path != "_collectives/nccl.py":  # pygpu's comm
                assert annotation is not None and "LeaderTransport" in named(annotation), f"{path}:{line}"


TRANSPORTS = [
    (_collectives.NcclTransport, _collectives.Transport),
    (_collectives.SharedMemoryTransport, _collectives.HostTransport),
    (HierarchicalTransport, _collectives.HostTransport),
]


@pytest.mark.parametrize(("transport", "interface"), TRANSPORTS)
def test_a_transport_has_all_methods_of_its_interface(transport, interface):
    methods = {name: method for name, method in inspect.getmembers(interface, inspect.isfunction) if name[0] != "_"}
    assert methods.keys() >= {"restart", "all_reduce"}
    for name, method in methods.items():
        if name != "restart":  # a method of the compiled core for host memory
            expected, found = (list(inspect.signature(one).parameters) for one in (method, getattr(transport, name)))
            assert found[: len(expected)] == expected, name


def test_code_above_the_transports_depends_on_their_interface():
    for path, tree in within("_graph/", "_rank/").items():
        assert not named(tree) & {"SharedMemoryTransport", "HierarchicalTransport"}, path


def test_the_fields_of_what_collectives_move_have_types():
    for path, tree in within("_collectives/", "_graph/ops/rank_context").items():
        for line, name, annotation in annotated(tree):
            if annotation is not None and name in ("parts", "how", "now", "out", "word"):
                assert "Any" not in named(annotation), f"{path}:{line}"


def test_a_public_name_is_listed_once():
    """The only list of public names is the stub, which type checkers read."""
    strings = [node.value for node in ast.walk(TREES["__init__.py"]) if isinstance(node, ast.Constant)]
    imported = [alias.name for alias in imports(TREES["__init__.py"])]
    assert set(synk.__all__) & {*strings, *imported} <= {"close"}  # a no-op while Python shuts down
    listed = imports(ast.parse((PACKAGE / "__init__.pyi").read_text()))
    assert sorted(alias.name for alias in listed) == synk.__all__
    assert all(alias.name == alias.asname for alias in listed), "type checkers take it for private"


def test_a_command_states_its_properties_where_it_is_defined():
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and path != "_rank/commands.py":
                kinds = named(node.value) & {"AllReduce", "Digest", "Get", "Reduce", "Shapes"}
                assert len(kinds) < 2, f"{path}:{node.lineno}: a list of commands"
    kinds = set(typing.get_args(commands.Command))
    assert kinds >= commands.KEEPS_SHAPES | commands.SYNCHRONIZES
