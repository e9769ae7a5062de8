"""Run Theano's own tests, which are in its wheel, on current Python: ``run.py [--quick] [pytest's arguments]``.

The tests were written for nose; this module replaces the parts of nose that they use. The file ``expected.txt`` lists
tests that fail, and the reasons. The run fails if another test fails, or if a listed test passes or does not exist.
"""

import fnmatch
import functools
import inspect
import pathlib
import sys
import types
import unittest

import pytest

import synkhronos  # noqa: F401  (patches Theano, so it comes before Theano)

import theano  # isort: skip

HERE = pathlib.Path(__file__).resolve().parent
THEANO = pathlib.Path(theano.__file__).parent

QUICK = (
    "compile.tests.test_function",
    "compile.tests.test_function_module",
    "compile.tests.test_shared",
    "scan_module.tests.test_scan_utils",
    "tensor.tests.test_blas",
    "tensor.tests.test_sort",
    "tests.test_2nd_order_grads",
    "tests.test_gradient",
)
LONG = (
    "compile.tests.test_pfunc",
    "scan_module.tests.test_scan",
    "scan_module.tests.test_scan_checkpoints",
    "scan_module.tests.test_scan_opt",
    "tensor.nnet.tests.test_abstract_conv",
    "tensor.nnet.tests.test_corr",
    "tensor.nnet.tests.test_nnet",
    "tensor.signal.tests.test_pool",
    "tensor.tests.test_basic",
    "tensor.tests.test_blas_c",
    "tensor.tests.test_blas_scipy",
    "tensor.tests.test_elemwise",
    "tensor.tests.test_inc_subtensor",
    "tensor.tests.test_sharedvar",
    "tensor.tests.test_subtensor",
    "tests.test_rop",
)


def nose():
    """Return replacements for the parts of nose that Theano's tests use, by module name."""
    case = unittest.TestCase()

    def raises(*exceptions):
        """Decorate a test that must raise."""

        def decorate(test):
            @functools.wraps(test)
            def must_raise(*args):
                with pytest.raises(exceptions):
                    test(*args)

            return must_raise

        return decorate

    tools = {
        "assert_equal": case.assertEqual,
        "assert_equals": case.assertEqual,
        "assert_raises": case.assertRaises,
        "assert_true": case.assertTrue,
        "make_decorator": functools.wraps,
        "raises": raises,
    }
    contents = {
        "nose": {"SkipTest": unittest.SkipTest},
        "nose.plugins": {},
        "nose.plugins.attrib": {"attr": lambda name: getattr(pytest.mark, name)},  # only attr("slow") is used
        "nose.plugins.skip": {"SkipTest": unittest.SkipTest},
        "nose.tools": tools,
        "nose.util": {"isgenerator": inspect.isgeneratorfunction},  # used by NumPy's decorators
    }
    modules = {}
    for name, namespace in contents.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(namespace)
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    return modules


def expected():
    """Return the reasons of tests that are expected to fail on this Python, by name or pattern of names."""
    reasons, reason = {}, None
    for line in (HERE / "expected.txt").read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line:
            name, *versions = line.split()
            if not versions or "{}.{}".format(*sys.version_info) in versions:
                reasons[name] = reason
    return reasons


def name_of(item):
    """Return a test's name, such as ``tests/test_rop.py::test_RopLop::test_max``."""
    return "::".join([item.path.relative_to(THEANO).as_posix(), *item.nodeid.split("::")[1:]])


class Plugin:
    """Pytest plugin that runs nose's test generators, and marks tests that are expected to fail."""

    def __init__(self):
        self.reasons = expected()
        self.missing = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector, name, obj):
        """Collect a test generator as one test, and set up classes as nose does."""
        if inspect.isclass(obj) and not issubclass(obj, unittest.TestCase):
            names = {"setup": "setup_method", "setUp": "setup_method", "tearDown": "teardown_method"}
            for of_nose, own in names.items():
                if hasattr(obj, of_nose) and not hasattr(obj, own):
                    setattr(obj, own, lambda self, method, name=of_nose: getattr(self, name)())
        if name.startswith("test") and inspect.isgeneratorfunction(obj):

            @functools.wraps(obj)
            def all_of_them(*args):
                for test, *arguments in obj(*args):
                    test(*arguments)

            return list(collector._genfunctions(name, all_of_them))
        return None

    def pytest_collection_modifyitems(self, session, items):
        """Mark tests that are expected to fail, and record listed tests that the collected modules do not have."""
        unseen = set(self.reasons)
        for item in items:
            for pattern, reason in self.reasons.items():
                if fnmatch.fnmatchcase(name_of(item), pattern):
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                    unseen.discard(pattern)
        if not any("::" in one for one in session.config.args):
            modules = {name_of(item).split("::")[0] for item in items}
            self.missing = sorted(pattern for pattern in unseen if pattern.split("::")[0] in modules)

    def pytest_terminal_summary(self, terminalreporter):
        """Print the names of listed tests that do not exist."""
        for name in self.missing:
            terminalreporter.line(f"ERROR {name} is expected to fail, and there is no such test")

    def pytest_sessionfinish(self, session):
        """Fail if a listed test does not exist."""
        if self.missing and session.exitstatus == 0:
            session.exitstatus = 1


def main(arguments):
    """Run the quick modules, all modules or the named ones, and return pytest's exit status."""
    sys.modules.update(nose())
    options = ["-c", str(HERE / "pytest.ini"), f"--rootdir={THEANO}", "--pyargs"]
    quick = "--quick" in arguments
    if quick:
        arguments.remove("--quick")
        options += ["-m", "not slow"]
    if not any(one.startswith("theano.") for one in arguments):
        options += [f"theano.{module}" for module in (QUICK if quick else QUICK + LONG)]
    return pytest.main([*options, *arguments], plugins=[Plugin()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
