"""Theano and Lasagne work on current Python, in any import order; each case runs in its own process."""

import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
from backend import theano_only
from backend_flags import FOLDER
from scripts import ROOT, python

from synkhronos._theano_compat import compile_cache as complaints

pytestmark = theano_only("Theano patched for current Python")


def write_compiler(path, first=""):
    """Write a compiler script that executes some commands before it compiles, and return its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\n{first}\nexec {shutil.which("g++")} "$@"\n')
    path.chmod(0o755)
    return path


ORDERS = [
    "theano, lasagne, synkhronos",
    "lasagne, theano, synkhronos",
    "synkhronos, theano, lasagne",
    "scipy.linalg, theano.tensor.signal.downsample, lasagne.layers, synkhronos",
]


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_imports_works_without_messages(order, tmp_path):
    out, err = python(
        f"""
        import {order}
        import sys, theano, lasagne
        from theano.tensor.signal.downsample import max_pool_2d
        import synkhronos._theano_compat
        roles = [finder.synkhronos_role for finder in sys.meta_path if hasattr(finder, "synkhronos_role")]
        assert roles == ["patch"], roles
        first = synkhronos._theano_compat.install()
        assert synkhronos._theano_compat.install() is first
        print(theano.config.blas.ldflags)
        """,
        *("-W", "default::DeprecationWarning"),
        directory=tmp_path,
        THEANO_FLAGS=FOLDER,
        THEANORC="/dev/null",
    )
    assert "-l" in out
    assert err == ""


def test_the_hook_imports_nothing_and_leaves_other_programs_alone():
    out, _ = python(
        """
        import sys
        before = set(sys.modules)
        sys.modules.pop("_synkhronos_start")
        import _synkhronos_start
        assert set(sys.modules) == before
        import json, concurrent.futures
        print([name for name in sys.modules if "theano" in name or "synkhronos" in name or "numpy" in name])
        """,
        "-S",
    )
    assert out == "['_synkhronos_start']"


def test_warnings_that_blame_the_user_stay():
    _, err = python("import theano, warnings; warnings.warn('of my own', DeprecationWarning)", "-W", "default")
    assert "DeprecationWarning: of my own" in err
    assert err.count("Warning") == 1, err


def test_theano_imported_without_the_hook_is_patched_afterwards():
    out, _ = python(
        """
        import sys
        sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "synkhronos_role")]
        import numpy.distutils.__config__ as config
        if not hasattr(config, "blas_opt_info"):
            config.blas_opt_info = {"libraries": ["none-of-this-name"]}
        import theano
        import synkhronos
        import lasagne
        print(theano.config.blas.ldflags)
        from theano.scan_module import scan_perform_ext
        print(scan_perform_ext.perform)
        """,
        THEANO_FLAGS=FOLDER,
        THEANORC="/dev/null",
    )
    assert out.startswith(("-l", "-L"))
    assert out.endswith("<built-in function perform>")


@pytest.mark.parametrize("module", ["lasagne", "theano.gpuarray.linalg"])  # Scan imports the second module
def test_no_module_needs_pkg_resources(module):
    out, _ = python(
        f"""
        import sys
        sys.modules["pkg_resources"] = None
        import {module}
        print("pkg_resources" in sys.modules)
        """
    )
    assert out == "False"


@pytest.mark.timeout(300)  # with an empty compile cache
class TestScan:
    """Scan's loop is C code on every Python; where it cannot be compiled, Theano runs it in Python."""

    POWERS = """
        import logging, sys
        logging.basicConfig(level=logging.WARNING)
        import numpy as np, theano, theano.tensor as T
        x, n = T.dvector("x"), T.iscalar("n")
        powers, updates = theano.scan(lambda p, x: p * x, outputs_info=T.ones_like(x), non_sequences=x, n_steps=n)
        power = theano.function([x, n], powers[-1], updates=updates)
        assert (power([1.0, 2.0, 3.0], 3) == [1.0, 8.0, 27.0]).all()
        slope = theano.function([x, n], theano.grad(powers[-1].sum(), x))
        assert (slope([1.0, 2.0, 3.0], 3) == [3.0, 12.0, 27.0]).all()
    """
    ON_RANKS = """
        import synkhronos as synk, psutil
        synk.fork(3)
        f = synk.function([x], theano.scan(lambda x: x * x, sequences=x)[0].sum())
        assert f(np.arange(6.0)) == 55 / 3
        programs = [psutil.Process(), *psutil.Process().children()]
        print(sum("/scan_perform.so" in open(f"/proc/{one.pid}/maps").read() for one in programs))
        synk.close()
    """

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        """Return a folder with a compiler that refuses the loop while a file ``refuse`` exists, and a filled cache."""
        folder = tmp_path_factory.mktemp("scan")
        refuse = f"test -e {folder}/refuse && echo tried >> {folder}/log && exit 1"
        write_compiler(folder / "bin" / "g++", f'case "$*" in *scan_perform*) {refuse};; esac')
        assert self.run(self.POWERS, folder) == ("", "")
        return folder

    @staticmethod
    def run(program, folder):
        quiet = "ignore:synkhronos.fork:RuntimeWarning"  # about more ranks than cores
        path = f"{folder}/bin:{os.environ['PATH']}"
        return python(program, PATH=path, THEANO_FLAGS=f"base_compiledir={folder}/cache", PYTHONWARNINGS=quiet)

    def test_the_loop_is_compiled_once_for_all_processes(self, folder):
        (library,) = folder.glob("cache/*/scan_perform/scan_perform.so")
        made = library.stat().st_mtime_ns
        assert self.run(self.POWERS + self.ON_RANKS, folder) == ("3", "")
        assert library.stat().st_mtime_ns == made

    def test_an_error_in_a_step_is_reported_with_its_step_and_leaves_the_loop_usable(self):
        python(
            """
            import numpy as np, theano, theano.tensor as T, traceback
            x, y = T.dmatrix("x"), T.dvector("y")
            rows, _ = theano.scan(lambda row, y: T.dot(row, y), sequences=x, non_sequences=y)
            products = theano.function([x, y], rows)
            for _ in range(3):
                try:
                    products(np.ones((2, 3)), np.ones(4))
                except ValueError:
                    trace = traceback.format_exc()
                else:
                    raise AssertionError("no error")
                assert "Shape mismatch" in trace and "scan_perform.pyx" in trace, trace
                assert (products(np.ones((2, 3)), np.ones(3)) == 3).all()
            """
        )

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="Theano compiles the loop by itself")
    def test_without_it_theano_runs_the_loop_in_python(self, folder):
        (loop,) = folder.glob("cache/*/scan_perform")
        loop.rename(folder / "loop")
        (folder / "refuse").touch()
        try:
            out, err = self.run(self.POWERS, folder)
        finally:
            (folder / "refuse").unlink()
            shutil.rmtree(loop, ignore_errors=True)
            (folder / "loop").rename(loop)
        assert out == ""
        assert len(err.splitlines()) == 1 and "Scan runs its loop in Python" in err
        assert (folder / "log").read_text() == "tried\n"

    def test_without_a_compiler(self):
        python(self.POWERS, THEANO_FLAGS="cxx=")


@pytest.mark.timeout(300)  # with an empty compile cache
def test_lasagne_trains_a_convolutional_network():
    _, err = python(
        """
        import lasagne, numpy as np, theano, theano.tensor as T
        from lasagne.layers import Conv2DLayer, DenseLayer, DropoutLayer, InputLayer, MaxPool2DLayer
        lasagne.random.set_rng(np.random.RandomState(1))
        x, y = T.ftensor4("x"), T.ivector("y")
        net = MaxPool2DLayer(Conv2DLayer(InputLayer((None, 1, 12, 12), x), 4, 3), 2)
        net = DenseLayer(DropoutLayer(net), 3, nonlinearity=lasagne.nonlinearities.softmax)
        loss = lasagne.objectives.categorical_crossentropy(lasagne.layers.get_output(net), y).mean()
        parameters = lasagne.layers.get_all_params(net)
        step = theano.function([x, y], loss, updates=lasagne.updates.nesterov_momentum(loss, parameters, 0.1))
        rng = np.random.RandomState(0)
        labels = rng.randint(0, 3, 60).astype("int32")
        images = rng.rand(60, 1, 12, 12).astype("float32")
        images[np.arange(60), 0, 4 * labels] += 2
        losses = [float(step(images, labels)) for _ in range(30)]
        assert losses[-1] < 0.5 * losses[0], losses
        """,
        timeout=290,
        THEANO_FLAGS=",".join(filter(None, [os.environ.get("THEANO_FLAGS"), "floatX=float32"])),
    )
    assert err == ""


MISSING = "`python -m synkhronos info` says what is missing"


def test_no_compiler_is_reported_in_one_line(tmp_path):
    (tmp_path / "bin").mkdir()
    program = """
        import numpy as np, theano, theano.tensor as T
        x = T.dvector("x")
        print(theano.function([x], x.sum())(np.ones(3)))
    """
    out, err = python(program, PATH=str(tmp_path / "bin"), THEANO_FLAGS=f"base_compiledir={tmp_path}")
    assert out == "3.0"
    assert err == (
        "WARNING (theano.configdefaults): there is no C++ compiler: Theano computes in Python, which takes many times "
        f"longer; {MISSING}"
    )


@pytest.mark.parametrize("flags", ["device=cuda", "device=cpu,init_gpu_device=cuda0"])
def test_a_missing_gpu_is_reported_in_one_line(flags, tmp_path):
    (tmp_path / "pygpu").mkdir()
    (tmp_path / "pygpu" / "__init__.py").write_text("raise ImportError")  # hides an installed pygpu
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    _, err = python("import theano", THEANO_FLAGS=flags, PYTHONPATH=path)
    named = flags.split(",")[-1]
    assert err == (
        f"ERROR (theano.gpuarray): Theano's flags ask for a GPU ({named}), but pygpu cannot be imported; it computes "
        f"on the CPU. {MISSING}"
    )


def test_a_gpu_that_fails_is_reported_by_the_first_line_of_its_error():
    words = "Could not initialize pygpu, support disabled"
    record = logging.LogRecord("theano.gpuarray", logging.ERROR, "", 0, words, (), None)
    try:
        raise RuntimeError((b"Could not load libcuda.so\nand more", 3))
    except RuntimeError:
        record.exc_info = sys.exc_info()
    assert complaints._shortened(record)
    words = "Theano's flags ask for a GPU (), but Could not load libcuda.so; it computes on the CPU. " + MISSING
    assert logging.Formatter().format(record) == words


@pytest.mark.parametrize("warm", [False, True])
def test_missing_headers_are_reported_in_one_line(warm, tmp_path):
    """Python.h is missing, with Theano's own extension in its cache or not."""
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    fail = "{ echo 'mod.cpp:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1; }"
    compiler = write_compiler(tmp_path / "g++", f'case "$*" in *-shared*) [ -e no_headers ] && {fail};; esac')
    flags = f"base_compiledir={tmp_path}/cache,cxx={compiler}"
    if warm:
        python("import theano", THEANO_FLAGS=flags, directory=tmp_path)
    (tmp_path / "no_headers").touch()
    program = f"""
        try:
            import theano, theano.tensor as T
            assert {warm}
            theano.function([], T.constant(1.0) * theano.shared(2.0) + {os.getpid()})
        except RuntimeError as error:
            assert error.__suppress_context__
            print(error)
    """
    out, _ = python(program, THEANO_FLAGS=flags, directory=tmp_path)
    assert f"Theano cannot compile, because Python.h is missing; {MISSING}" in out


class TestHeaders:
    """Theano's headers are precompiled once; a module that cannot use them is compiled as usual."""

    PROGRAM = """
        import theano, theano.tensor as T, numpy as np
        x = T.dvector("x")
        assert theano.function([x], T.exp(x) + x * {number})(np.ones(2)).tolist() == [np.e + {number}] * 2
        print(theano.config.compiledir)
    """

    def compile(self, folder, number, **environment):
        """Compile a function; return the precompiled headers in the cache, and the times of their compilation."""
        flags = f"base_compiledir={folder},synkhronos.vector_elementwise=False"  # all modules have the same flags
        out, _ = python(self.PROGRAM.format(number=number), THEANO_FLAGS=flags, **environment)
        made = Path(out.strip()).glob("synkhronos_headers/*/*.gch")
        return {path.parent.name: path.stat().st_mtime_ns for path in made}

    def test_they_are_compiled_once(self, tmp_path):
        first = self.compile(tmp_path, 2)
        assert len(first) == 1
        assert self.compile(tmp_path, 3) == first

    def test_another_compiler_compiles_them_again(self, tmp_path):
        first = self.compile(tmp_path, 2)
        other = write_compiler(tmp_path / "bin" / "g++")
        both = self.compile(tmp_path, 3, PATH=f"{other.parent}:{os.environ['PATH']}")
        assert len(both) == 2 and first.items() <= both.items()

    @pytest.mark.parametrize("fault", ["no room", "a damaged file", "no compilation"])
    def test_modules_are_compiled_without_them(self, tmp_path, fault):
        (name,) = self.compile(tmp_path, 2)
        (folder,) = tmp_path.glob("*/synkhronos_headers")
        if fault == "a damaged file":
            (folder / name / "theano.h.gch").write_bytes(b"gpch")
        else:
            shutil.rmtree(folder)
        if fault == "no room":
            folder.write_text("a file where the folder should be")
        compiler = write_compiler(tmp_path / "bin" / "g++", 'case "$*" in *c++-header*) exit 1;; esac')
        path = f"{compiler.parent}:{os.environ['PATH']}" if fault == "no compilation" else os.environ["PATH"]
        found = self.compile(tmp_path, 4, PATH=path)
        assert set(found) == ({name} if fault == "a damaged file" else set())
