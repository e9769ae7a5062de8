"""Structure of the package: layers, public names, size and documentation of modules."""

import ast
import graphlib
import inspect
import re
import sys
from pathlib import Path

import pytest
from backend import on_theano
from scripts import ROOT, python

import synkhronos as synk
from synkhronos import _backends

PACKAGE = Path(synk.__file__).parent

PUBLIC = {
    # the life cycle, functions and data
    "fork", "close", "session", "function", "parallelize", "distribute", "get_n_gpu", "Function", "data", "Data",
    "sequence", "Future",
    # collectives
    "broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce",
    "set_value", "get_value", "get_lengths", "get_shapes", "check_replicas",
    # training loops
    "loop", "Run",
    # collectives in a graph
    "averaged", "summed", "reduced", "gathered",
    # sharding rules
    "register_sharding", "Replicate", "Shard", "Partial",
    # instruments
    "profile", "trace", "Profile", "memory",
    # predictions
    "plan", "Plan",
    # the name of the backend
    "engine",
    # errors
    "SynkhronosError", "SessionError", "DeviceError", "WorkerError", "WorkerDied", "WorkerRestarted", "WorkerTimeout",
    "NodeLost",
}  # fmt: skip

#: The folder of the backend that is not installed.
OTHER_BACKEND = "pytensor" if on_theano else "theano"

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [*MODULES, *PACKAGE.rglob("*.[ch]"), *PACKAGE.rglob("*.pyi")]


def name_of(path):
    """Return the dotted name of a module within the package; for an ``__init__``, that of its folder."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


PATHS = {name_of(path): path for path in MODULES}


def home_of(path):
    """Return the dotted name of a module's folder; for a module at the top level, its own name."""
    return name_of(path) if path.parent == PACKAGE else ".".join(path.parent.relative_to(PACKAGE).parts)


def imported_modules(path):
    """Return the modules of this package that a module imports, except for type checkers only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = [ast.Pass()]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:  # in files that the start-up hook loads without the package
                assert node.level == 1 and home_of(path) == "_theano_compat", f"{path}: a relative import"
                module = f"synkhronos._theano_compat.{module}".rstrip(".")
            full = {alias.name: f"{module}.{alias.name}" for alias in node.names}
            names |= {one if one.partition(".")[2] in PATHS else module for one in full.values()}
    found = {name.partition(".")[2] or "__init__" for name in names if name.partition(".")[0] == "synkhronos"}
    return found & set(PATHS)


def packages_of(nodes):
    """Return the packages that import statements among ``nodes`` import."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in names}


def backend_imports_of(path):
    return packages_of([*ast.walk(ast.parse(path.read_text()))]) & {"theano", "lasagne", "pytensor"}


def test_folders_form_few_layers_without_cycles():
    needs = {home_of(path): set() for path in MODULES}
    for path in MODULES:
        needs[home_of(path)] |= {home_of(PATHS[name]) for name in imported_modules(path)} - {home_of(path)}
    assert sum(map(len, needs.values())) <= 100
    layers = {}
    for folder in graphlib.TopologicalSorter(needs).static_order():  # raises CycleError
        layers[folder] = 1 + max((layers[one] for one in needs[folder]), default=0)
    assert max(layers.values()) <= 12


def test_modules_import_each_other_without_cycles():
    faces = {name for name, path in PATHS.items() if path.name == "__init__.py"}
    needs = {name: imported_modules(path) - faces - {name} for name, path in PATHS.items() if name not in faces}
    list(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError


#: Folders whose modules are imported one by one, because they have only their layer in common.
WITHOUT_FACE = {"_utils", "_theano_compat", "extensions", "extensions.pymc", "extensions.updates"}


def face_of(name):
    """Return the folder whose ``__init__`` exports a module's names to other folders, or ``None``."""
    folder = home_of(PATHS[name])
    return None if folder in WITHOUT_FACE or PATHS[name].parent == PACKAGE else folder


def test_folders_are_imported_by_their_faces():
    for path in MODULES:
        for name in imported_modules(path):
            face = face_of(name)
            if face and not f"{home_of(path)}.".startswith(f"{face}.") and path.parent != PACKAGE:
                assert name == face, f"{path} imports {name} past the face of {face}"


def exports_of(face):
    """Return the exports of a folder: the names that its ``__init__`` imports from its modules."""
    imports = [node for node in ast.parse(PATHS[face].read_text()).body if isinstance(node, ast.ImportFrom)]
    others = ("__future__", f"synkhronos.{face}")
    return {alias.asname or alias.name for node in imports if node.module not in others for alias in node.names}


FACES = sorted({face_of(name) for name in PATHS} - {None, "_backends", "_backends.theano", "_backends.pytensor"})


@pytest.mark.parametrize("folder", [face for face in FACES if face[0] == "_"])
def test_faces_export_what_other_folders_use_and_nothing_else(folder):
    exports = exports_of(folder)
    assert ast.get_docstring(ast.parse(PATHS[folder].read_text())).split("\n")[0].endswith(".")
    used, leaf = exports & set(synk.__all__), folder.rpartition(".")[2]
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py")]:
        if path not in MODULES or home_of(path) != folder:
            text = path.read_text()
            aliases = "|".join({leaf, *re.findall(rf"import {leaf} as (\w+)", text)})
            used |= set(re.findall(rf"\b(?:{aliases})\.(\w+)", text))
            imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
            used |= {alias.name for node in imports if node.module == f"synkhronos.{folder}" for alias in node.names}
    modules = {name.rpartition(".")[2] for name in PATHS if home_of(PATHS[name]) == folder}
    assert not modules & exports, "an import from the face could mean either"
    assert exports <= used, f"nobody uses {exports - used}"


def test_only_the_backends_import_theano_and_pytensor():
    users = {home_of(path) for path in MODULES if backend_imports_of(path)}
    assert users <= {"_backends.theano", "_backends.pytensor", "_theano_compat"}
    for backend in ("theano", "pytensor"):
        for path in (PACKAGE / "_backends" / backend).rglob("*.py"):
            assert backend_imports_of(path) <= {backend}, path


def bound_names(path):
    """Return the names that a module binds at its top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return names


@pytest.mark.parametrize("module", _backends.INTERFACE)
@pytest.mark.parametrize("backend", _backends.ENGINES)
def test_each_backend_defines_all_names_of_the_interface(backend, module):
    missing = set(_backends.INTERFACE[module]) - bound_names(PACKAGE / "_backends" / backend / f"{module}.py")
    assert not missing, "write Absent for an operation that the backend does not have"


def test_the_interface_of_the_backends_has_the_names_that_are_used_and_no_others():
    used, used_ops = set(), set()
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "synkhronos._backends":
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used |= {node.attr} if node.value.id == "_backends" else set()
                used_ops |= {node.attr} if node.value.id == "ops" else set()
    listed = {name for module, names in _backends.INTERFACE.items() if module != "ops" for name in names}
    assert listed <= used, "nobody uses these"
    own = {"ENGINES", "INTERFACE", "TITLE", "choose", "common", "engine", "generic", "ops"}
    assert used <= listed | own | set(_backends.generic.__all__)
    listed_ops = set(_backends.INTERFACE["ops"])
    assert listed_ops <= used_ops, "nobody uses these"
    assert {name for name in used_ops if name[0].isupper()} <= listed_ops


def test_the_extensions_use_the_public_interface_alone():
    for path in (PACKAGE / "extensions").rglob("*.py"):
        private = {name for name in imported_modules(path) if name.startswith("_")}
        assert private <= {"__init__", "_backends", "_utils.interrupts", "_utils.rendezvous"}, path  # for any program


def test_the_extensions_are_listed_and_imported_when_they_are_used():
    program = """
        import sys, synkhronos as synk
        names = dir(synk.extensions)
        assert not [one for one in sys.modules if one.startswith("synkhronos.extensions.")]
        print(*names, synk.extensions.train.__name__, synk.extensions.updates.adam.__name__)
    """
    out, _ = python(program)
    modules = sorted(path.stem for path in (PACKAGE / "extensions").glob("*") if path.stem[0].islower())
    assert out.split() == [*(one for one in modules if one != "steps"), "synkhronos.extensions.train", "adam"]
    with pytest.raises(AttributeError, match="has no attribute 'nets'; it has checkpoint, pymc, "):
        synk.extensions.nets  # noqa: B018


def test_heavy_and_optional_packages_are_imported_where_they_are_needed():
    heavy = {"lasagne", "pygpu", "mpi4py", "matplotlib", "rich", "tqdm", "sklearn"}
    for path in MODULES:
        assert not packages_of(ast.parse(path.read_text()).body) & heavy, path


def test_sources_are_neither_many_nor_long():
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert max(lines.values()) <= 600, max(lines, key=lines.get)
    assert len(lines) <= 200
    short = [path for path, n in lines.items() if n < 60 and path.name != "__init__.py"]
    assert len(short) <= 12, short


def test_files_of_tests_are_not_long():
    lines = {path: len(path.read_text().splitlines()) for path in (PACKAGE.parent / "tests").rglob("*.py")}
    assert max(lines.values()) <= 600, max(lines, key=lines.get)


def test_public_names():
    assert list(synk.__all__) == sorted(synk.__all__)
    assert set(synk.__all__) - {"errors", "extensions", "rules", "__version__"} == PUBLIC
    for name in synk.__all__:
        assert hasattr(synk, name)
    others = ("Data", "Function", "Future", "Plan", "Profile", "Run", "Replicate", "Shard", "Partial")
    errors = {name for name in PUBLIC if inspect.isclass(getattr(synk, name)) and name not in others}
    for name in errors:
        assert issubclass(getattr(synk, name), synk.SynkhronosError)
        assert getattr(synk, name).__module__ == "synkhronos.errors"


def test_the_package_does_nothing_but_re_export():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            assert node.name in ("__dir__", "__getattr__")
            continue
        assert isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)), ast.dump(node)
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            assert isinstance(node.value, ast.Call)
            assert node.value.func.id in ("_install", "_warn_of_unusable_pymc")  # the patches of Theano


FORK = "n_parallel=None, use_gpu=None, master_rank=0, profile_workers=False, max_n_var=1000, max_dim=16"
DATA = (
    "value=None, var=None, dtype=None, ndim=None, shape=None, minibatch=False, force_cast=False, oversize=1, name=None"
)
FUNCTION = "inputs, outputs=None, bcast_inputs=None, updates=None, givens=None, sliceable_shareds=None, **kwargs"

#: The positional parameters of public functions, with their defaults.
SIGNATURES = {
    "fork": FORK,
    "close": "",
    "session": FORK,
    "function": FUNCTION,
    "distribute": "",
    "get_n_gpu": "",
    "data": DATA,
    "broadcast": "shared_vars, values=None, nccl=True",
    "scatter": "shared_vars, values, batch=None",
    "gather": "shared_vars, nd_up=1, nccl=True",
    "all_gather": "shared_vars, nccl=True",
    "reduce": "shared_vars, op='avg', in_place=True, nccl=True",
    "all_reduce": "shared_vars, op='avg', nccl=True, weights=None",
    "set_value": "rank, shared_vars, values, batch=None",
    "get_value": "rank, shared_vars",
    "get_lengths": "shared_vars",
    "get_shapes": "shared_vars",
    "check_replicas": "shared_vars=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(synk, name)).parameters.values()
    positional = [str(one.replace(annotation=one.empty)) for one in parameters if one.kind != one.KEYWORD_ONLY]
    assert ", ".join(positional) == SIGNATURES[name]


def public_objects():
    for path in MODULES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        others = {"__main__", OTHER_BACKEND, *["_theano_compat"] * (not on_theano)}
        if others & {*parts}:
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
    """Public objects of public modules have docstrings; private modules may omit them."""
    named = {name: one for name, one in public_objects() if callable(one) and "._" not in name}
    documented = {name for name, one in named.items() if (inspect.getdoc(one) or "").strip()}
    assert {name for name in named.keys() - documented if getattr(named[name], "__name__", "") != "<lambda>"} == set()


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
    assert python(script, timeout=60, directory=ROOT) == ("", "")


def test_the_library_never_prints():
    for path in {*MODULES} - {PACKAGE / "extensions" / "pymc" / "__init__.py"}:  # its `report` prints
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and name_of(path) != "__main__":
                assert node.func.id != "print", path
