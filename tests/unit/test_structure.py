"""The floors of the architecture, the public names, and the size and documentation of the modules."""

import ast
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from backend import on_theano
from scripts import ROOT

import synkhronos as synk

PACKAGE = Path(synk.__file__).parent

#: A folder, or a module beside them, imports from floors below its own; the listing of a floor is in no order.
FLOORS = (
    {"_core"},
    {
        "errors",
        "typing",
        "_compat",
        "_endings",
        "_interrupts",
        "_keywords",
        "_limits",
        "_partition",
        "_showing",
    },
    {"_rendezvous"},
    {"_background", "_machine", "_memory"},
    {"_engine", "_progress"},
    {"_graphs", "_team"},
    {"_collectives"},
    {"_inside"},
    {"_exact"},
    {"_rank"},
    {"_nodes"},
    {"_session"},
    {"_data"},
    {"_calls", "_variables"},
    {"__init__"},
    {"_top", "extensions"},
    {"__main__"},
)
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}

PUBLIC = {
    # the life cycle, functions and data
    "fork", "close", "session", "function", "parallelize", "distribute", "get_n_gpu", "Function", "data", "Data",
    "sequence", "Future",
    # collectives
    "broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce",
    "set_value", "get_value", "get_lengths", "get_shapes", "check_replicas",
    # collectives in a graph
    "averaged", "summed", "reduced", "gathered",
    # instruments
    "profile", "trace", "Profile", "memory",
    # the engine, a str
    "engine",
    # errors
    "SynkhronosError", "SessionError", "DeviceError", "WorkerError", "WorkerDied", "WorkerRestarted", "WorkerTimeout",
    "NodeLost",
}  # fmt: skip

#: The folder of the engine that is not installed.
OTHER_ENGINE = "on_pytensor" if on_theano else "on_theano"

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported_names(path):
    """What a module imports of this package, as "folder.module.name"; what is for type checkers alone is left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # what the start-up hook loads by itself
                assert node.level == 1 and home_of(path) == "_compat", f"{path}: a relative import"
                continue
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.partition(".")[2] for name in found if name.startswith("synkhronos.")}


def home_of(path):
    """The folder of a module, or its own name where it is in none."""
    return name_of(path).split(".")[0]


def imports_of(path):
    """The folders, and modules beside them, that a module imports from."""
    return {name.split(".")[0] for name in imported_names(path)} & set(FLOOR_OF)


def engine_imports_of(path):
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found & {"theano", "lasagne", "pytensor"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_floors(path):
    own = home_of(path)
    for imported in imports_of(path) - {own}:
        assert FLOOR_OF[imported] < FLOOR_OF[own], f"{own} imports {imported}, which is not on a floor below"


def test_every_folder_has_a_floor():
    assert {home_of(path) for path in MODULES} == set(FLOOR_OF)


def test_folders_are_imported_by_their_faces():
    for path in MODULES:
        for name in imported_names(path):
            folder, *inside = name.split(".")
            if folder != home_of(path) and (PACKAGE / folder).is_dir() and folder.startswith("_"):
                assert len(inside) < 2, f"{path} imports {name} past the face of {folder}"


@pytest.mark.parametrize("folder", sorted(name for name in FLOOR_OF if (PACKAGE / name).is_dir() and name[0] == "_"))
def test_faces_export_what_other_folders_use_and_nothing_else(folder):
    face = importlib.import_module(f"synkhronos.{folder}")
    assert ast.get_docstring(ast.parse(Path(face.__file__).read_text())).split("\n")[0].endswith(".")
    used = set(face.__all__) & set(synk.__all__)
    for path in MODULES:
        if home_of(path) != folder:
            aliases = "|".join({folder, *re.findall(rf"import {folder} as (\w+)", path.read_text())})
            used |= set(re.findall(rf"\b(?:{aliases})\.(\w+)", path.read_text()))
            tree = ast.parse(path.read_text())
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            used |= {alias.name for node in imports if node.module == f"synkhronos.{folder}" for alias in node.names}
    assert set(face.__all__) <= used, f"nobody uses {set(face.__all__) - used}"


def test_no_circles_among_modules():
    needs = {}
    for path in MODULES:
        if path.name == "__init__.py":
            continue
        names = {name for name in imported_names(path) if name.split(".")[0] == home_of(path)}
        parts = {".".join(name.split(".")[:2]) for name in names}
        needs[name_of(path)] = {part for part in parts if (PACKAGE / f"{part.replace('.', '/')}.py").exists()}
    list(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError


def test_only_the_seam_knows_the_engines():
    users = {home_of(path) for path in MODULES if engine_imports_of(path)}
    assert users <= {"_engine", "_compat"}
    for path in MODULES:
        if home_of(path) == "_engine" and path.parent.name.startswith("on_"):
            assert engine_imports_of(path) <= {path.parent.name.removeprefix("on_")}, path


def test_the_extensions_use_the_public_interface_alone():
    for path in (PACKAGE / "extensions").rglob("*.py"):
        private = {
            name for name in imports_of(path) - {"_engine", "_interrupts"} if name.startswith("_")
        }  # as any program might
        assert not private, f"{path.name} imports {private}"


def test_heavy_and_optional_packages_are_imported_where_they_are_needed():
    for path in MODULES:
        tree = ast.parse(path.read_text())
        for node in tree.body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module.split(".")[0]]
            assert not set(names) & {"lasagne", "pygpu", "mpi4py", "matplotlib", "rich", "tqdm", "sklearn"}, path


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_short(path):
    assert len(path.read_text().splitlines()) <= 600


def test_public_names():
    assert list(synk.__all__) == sorted(synk.__all__)
    assert set(synk.__all__) - {"errors", "extensions", "__version__"} == PUBLIC
    for name in synk.__all__:
        assert hasattr(synk, name)
    others = ("Data", "Function", "Future", "Profile")
    errors = {name for name in PUBLIC if inspect.isclass(getattr(synk, name)) and name not in others}
    for name in errors:
        assert issubclass(getattr(synk, name), synk.SynkhronosError)
        assert getattr(synk, name).__module__ == "synkhronos.errors"


def test_the_package_does_nothing_but_re_export():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.If):
            if ast.unparse(node.test) != "TYPE_CHECKING":
                assert ast.unparse(node.test) == "not TYPE_CHECKING"
                assert [one.name for one in node.body] == ["__getattr__"]
            continue
        if isinstance(node, ast.FunctionDef):
            assert node.name == "__dir__"
            continue
        assert isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)), ast.dump(node)
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            assert isinstance(node.value, ast.Call)  # the mending of Theano, and what `help` lists
            assert node.value.func.id in ("_install", "_list_public_modules")


SIGNATURES = {
    "fork": ["n_parallel", "use_gpu", "master_rank", "profile_workers", "max_n_var", "max_dim"],
    "close": [],
    "session": ["n_parallel", "use_gpu", "master_rank", "profile_workers", "max_n_var", "max_dim"],
    "function": ["inputs", "outputs", "bcast_inputs", "updates", "givens", "sliceable_shareds", "kwargs"],
    "distribute": [],
    "get_n_gpu": [],
    "data": ["value", "var", "dtype", "ndim", "shape", "minibatch", "force_cast", "oversize", "name"],
    "broadcast": ["shared_vars", "values", "nccl"],
    "scatter": ["shared_vars", "values", "batch"],
    "gather": ["shared_vars", "nd_up", "nccl"],
    "all_gather": ["shared_vars", "nccl"],
    "reduce": ["shared_vars", "op", "in_place", "nccl"],
    "all_reduce": ["shared_vars", "op", "nccl", "weights"],
    "set_value": ["rank", "shared_vars", "values", "batch"],
    "get_value": ["rank", "shared_vars"],
    "get_lengths": ["shared_vars"],
    "get_shapes": ["shared_vars"],
    "check_replicas": ["shared_vars"],
}
DEFAULTS = {
    "fork": [None, None, 0, False, 1000, 16],
    "session": [None, None, 0, False, 1000, 16],
    "data": [None, None, None, None, None, False, False, 1, None],
    "broadcast": [None, True],
    "gather": [1, True],
    "all_gather": [True],
    "reduce": ["avg", True, True],
    "all_reduce": ["avg", True, None],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(synk, name))
    positional = [p for p in signature.parameters.values() if p.kind != p.KEYWORD_ONLY]
    assert [p.name for p in positional] == SIGNATURES[name]
    if name in DEFAULTS:
        assert [p.default for p in positional if p.default is not p.empty] == DEFAULTS[name]


def public_objects():
    for path in MODULES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if "__main__" in parts or OTHER_ENGINE in parts or ("_compat" in parts and not on_theano):
            continue
        __import__(module)
        for name, obj in vars(sys.modules[module]).items():
            if not name.startswith("_") and getattr(obj, "__module__", None) == module:
                yield f"{module}.{name}", obj
                if inspect.isclass(obj):
                    for inner, member in vars(obj).items():
                        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                        if not inner.startswith("_") and inspect.isfunction(function):
                            yield f"{module}.{name}.{inner}", function


def test_public_functions_and_classes_are_documented():
    undocumented = [
        name
        for name, obj in public_objects()
        if callable(obj) and not (inspect.getdoc(obj) or "").strip() and getattr(obj, "__name__", "") != "<lambda>"
    ]
    allowed = [name for name in undocumented if not _needs_docstring(name)]
    assert sorted(set(undocumented) - set(allowed)) == []


def _needs_docstring(name):
    """Members of private classes with a telling name may go without; everything that users can reach may not."""
    return "._" not in name


@pytest.mark.parametrize("name", sorted(PUBLIC - {"engine"}))
def test_docstrings_of_the_public_names_tell_their_parameters(name):
    obj = getattr(synk, name)
    doc = inspect.getdoc(obj)
    assert doc.splitlines()[0].endswith((".", ":", ";"))
    if inspect.isfunction(obj):
        for parameter in inspect.signature(obj).parameters:
            told = parameter in doc or obj is synk.session  # which says "those of `fork`"
            assert told, f"{name}: {parameter} is not in the docstring"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_constructors_take_few_arguments_by_position(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            assert len(node.args.args) - 1 <= 5, f"{path}:{node.lineno}: pass them by name, or as one thing"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_its_purpose(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_importing_has_no_side_effects():
    script = """
import os, sys, threading
limit, before = sys.getrecursionlimit(), set(os.listdir("/dev/shm"))
import synkhronos
assert sys.getrecursionlimit() == limit
assert threading.active_count() == 1, threading.enumerate()
assert not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children") or not open(
    f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().strip()
mine = f"-{os.getpid()}-"
assert not [name for name in os.listdir("/dev/shm") if mine in name and "synkhronos" in name]
assert not {"theano", "pytensor", "numpy", "lasagne", "pygpu", "matplotlib"} & set(sys.modules)
assert {*synkhronos.__all__, "__version__"} == set(dir(synkhronos))
from synkhronos import *
assert fork is synkhronos.fork and len({"theano", "pytensor"} & set(sys.modules)) == 1
try:
    synkhronos.no_such_name
except AttributeError as error:
    assert str(error) == "module 'synkhronos' has no attribute 'no_such_name'"
import logging
assert not logging.getLogger("synkhronos").handlers
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_library_never_prints():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and name_of(path) != "__main__":
                assert node.func.id != "print", path
