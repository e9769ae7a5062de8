"""Theano and Lasagne work on this Python, whatever is imported first; each case is a process of its own."""

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from synkhronos._compat import blas, complaints

ROOT = Path(__file__).resolve().parents[2]


def python(source, *options, timeout=110, directory=None, **environment):
    """Run a program that begins as every program does where synkhronos is installed; returns both outputs."""
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    program = "import _synkhronos_start\n" + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={name: value for name, value in surroundings.items() if value is not None},
        cwd=directory,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip(), done.stderr.strip()


ORDERS = [
    "theano, lasagne, synkhronos",
    "lasagne, theano, synkhronos",
    "synkhronos, theano, lasagne",
    "scipy.linalg, theano.tensor.signal.downsample, lasagne.layers, synkhronos",
]


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_imports_works_in_silence(order, tmp_path):
    out, err = python(
        f"""
        import {order}
        import sys, theano, lasagne
        from theano.tensor.signal.downsample import max_pool_2d
        import synkhronos._compat
        roles = [finder.synkhronos_role for finder in sys.meta_path if hasattr(finder, "synkhronos_role")]
        assert roles == ["mend"], roles
        first = synkhronos._compat.install()
        assert synkhronos._compat.install() is first
        print(theano.config.blas.ldflags)
        """,
        "-W",
        "default::DeprecationWarning",
        directory=tmp_path,
        THEANO_FLAGS=None,
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


@pytest.mark.parametrize("flags", ["-lm", ""])
def test_a_blas_chosen_in_theano_flags_wins(flags):
    out, _ = python("import theano; print([theano.config.blas.ldflags])", THEANO_FLAGS=f"blas.ldflags={flags}")
    assert out == str([flags])


def test_a_blas_chosen_in_theanorc_wins(tmp_path):
    (tmp_path / "rc").write_text("[blas]\nldflags = -lm -lc\n")
    out, _ = python(
        "import theano; print(theano.config.blas.ldflags)", THEANORC=str(tmp_path / "rc"), THEANO_FLAGS=None
    )
    assert out == "-lm -lc"


def test_theano_imported_without_the_hook_is_mended_afterwards():
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
        THEANO_FLAGS=None,
        THEANORC="/dev/null",
    )
    assert out.startswith(("-l", "-L"))
    assert out.endswith("<built-in function perform>")


@pytest.mark.parametrize("module", ["lasagne", "theano.gpuarray.linalg"])  # Scan imports the second one
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


LINKED = """
    import numpy as np, theano, theano.tensor as T, threadpoolctl
    before = {library["filepath"] for library in threadpoolctl.threadpool_info()}
    x = T.fmatrix("x")
    product = theano.function([x], T.dot(x, x))
    value = np.arange(9, dtype="float32").reshape(3, 3)
    assert (product(value) == value.dot(value)).all()
    (node,) = product.maker.fgraph.toposort()
    name = (node.op.c_libraries() or ["none"])[0]
    after = {library["filepath"] for library in threadpoolctl.threadpool_info()}
    assert after == before, (before, after)  # so that limits set before the first call hold
    assert any("blas" in path for path in after)
    modules = {line.split()[-1] for line in open("/proc/self/maps") if theano.config.compiledir in line}
    linked = [path for path in modules if f"lib{name}".encode() in open(path, "rb").read()]
    print(type(node.op).__name__, name, len(linked))
"""


def test_compiled_code_is_linked_and_finds_its_blas_in_the_next_process():
    for _ in range(2):
        out, _ = python(LINKED, THEANO_FLAGS=os.environ.get("THEANO_FLAGS"))
        op, _, linked = out.split()
        assert (op, linked) == ("Dot22", "1")


@pytest.mark.timeout(300)  # with nothing compiled yet
class TestScan:
    """Scan's loop is C code on every Python; where that cannot be compiled, Theano runs it in Python."""

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
        """Of a compiler that refuses the loop while there is a file ``refuse``, and a cache that it has filled."""
        folder = tmp_path_factory.mktemp("scan")
        compiler = folder / "bin" / "g++"
        compiler.parent.mkdir()
        compiler.write_text(
            f'#!/bin/sh\ncase "$*" in *scan_perform*) test -e {folder}/refuse && echo tried >> {folder}/log && exit 1;;'
            f'esac\nexec {shutil.which("g++")} "$@"\n'
        )
        compiler.chmod(0o755)
        assert self.run(self.POWERS, folder) == ("", "")
        return folder

    @staticmethod
    def run(program, folder):
        quiet = "ignore:synkhronos.fork:RuntimeWarning"  # more ranks than cores
        path = f"{folder}/bin:{os.environ['PATH']}"
        return python(program, PATH=path, THEANO_FLAGS=f"base_compiledir={folder}/cache", PYTHONWARNINGS=quiet)

    def test_the_loop_is_compiled_once_for_all_processes(self, folder):
        (library,) = folder.glob("cache/*/scan_perform/scan_perform.so")
        made = library.stat().st_mtime_ns
        assert self.run(self.POWERS + self.ON_RANKS, folder) == ("3", "")
        assert library.stat().st_mtime_ns == made

    def test_an_error_in_a_step_is_told_with_its_step_and_leaves_the_loop_usable(self):
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


@pytest.mark.timeout(300)  # with nothing compiled yet
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


def flags_with(choice, **variables):
    source = "import theano; print(theano.config.blas.ldflags)"
    return python(source, THEANO_FLAGS=None, THEANORC="/dev/null", SYNKHRONOS_BLAS=choice, **variables)


def test_the_current_openblas_comes_first():
    out, err = flags_with(None)
    assert re.fullmatch(r"-L\S+/scipy_openblas32/lib -lscipy_openblas -include\S+/_compat/scipy_openblas.h", out)
    assert err == ""
    assert flags_with("scipy-openblas32")[0] == out


def test_every_standard_name_is_one_of_its_routines():
    """A prototype of each, in C++ that is linked to it, so that none is left undefined."""
    [[flags, library, prefix]] = [one for one in blas.candidates("g++") if one.prefix]
    header = flags.split("-include")[1]
    names = re.findall(r"^#define (\w+) (\w+)$", Path(header).read_text(), re.MULTILINE)
    loaded = ctypes.CDLL(library)
    for name, own in names:
        assert own == prefix + name
        assert hasattr(loaded, own), own
    assert {name for name, _ in names} > {*blas.SYMBOLS, "openblas_set_num_threads", "ztrsm_"}


@pytest.mark.parametrize("choice", ["scipy", "path", "numbered path"])
def test_another_blas_can_be_chosen(choice, tmp_path):
    bundled = [library for flags, library, _ in blas.candidates("g++", "scipy")]
    if not bundled:
        pytest.skip("this scipy bundles no BLAS")
    numbered = tmp_path / "libmine.so.3"
    numbered.symlink_to(bundled[0])
    chosen = {"scipy": "scipy", "path": bundled[0], "numbered path": str(numbered)}[choice]
    out, err = python(LINKED, THEANO_FLAGS=None, SYNKHRONOS_BLAS=chosen, directory=tmp_path)
    assert (out.split()[0], err) == ("Dot22", "")
    assert blas.linked_library(flags_with(chosen)[0])[1] == ""


def test_a_choice_that_is_not_there_is_told():
    out, err = flags_with("/nonexistent/libblas.so")
    assert "scipy_openblas" in out
    assert "SYNKHRONOS_BLAS=/nonexistent/libblas.so: there is no such BLAS" in err


def test_a_blas_of_the_system_comes_before_the_one_of_scipy(tmp_path):
    bundled = [library for flags, library, _ in blas.candidates("/nonexistent") if "scipy.libs" in library]
    if not bundled:
        pytest.skip("this scipy bundles no BLAS")
    (tmp_path / "libopenblas.so").symlink_to(bundled[0])
    paths = {"LIBRARY_PATH": str(tmp_path), "LD_LIBRARY_PATH": f"{tmp_path}:{Path(bundled[0]).parent}"}
    assert flags_with("system", **paths)[0] == "-lopenblas"
    # What only the linker finds would not load later.
    assert flags_with("system", LIBRARY_PATH=paths["LIBRARY_PATH"])[0] != "-lopenblas" or system_has_openblas()


def system_has_openblas():
    return any(flags == "-lopenblas" for flags, *_ in blas.candidates("g++"))


def test_no_compiler_means_no_blas():
    assert blas.find_blas("") == ""
    assert not [flags for flags, *_ in blas.candidates("/nonexistent/g++") if flags == "-lopenblas"]


MISSING = "`python -m synkhronos info` says what is missing"


def test_no_compiler_is_told_in_one_line(tmp_path):
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
def test_a_gpu_that_is_not_there_is_told_in_one_line(flags, tmp_path):
    (tmp_path / "pygpu").mkdir()
    (tmp_path / "pygpu" / "__init__.py").write_text("raise ImportError")  # whatever this machine has
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    _, err = python("import theano", THEANO_FLAGS=flags, PYTHONPATH=path)
    named = flags.split(",")[-1]
    assert err == (
        f"ERROR (theano.gpuarray): Theano's flags ask for a GPU ({named}), but pygpu cannot be imported; it computes "
        f"on the CPU. {MISSING}"
    )


def test_a_gpu_that_fails_is_told_by_the_first_line_of_its_error():
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
def test_missing_headers_are_told_in_one_line(warm, tmp_path):
    """Without Python.h; Theano's own extension lies in its cache, or does not."""
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-shared*) [ -e no_headers ] && '
        "{ echo 'mod.cpp:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1; };; esac\n"
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
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


def test_white_space_in_a_path_cannot_be_passed_to_theano():
    assert blas.link_flags("/a/b/libc.so") == "-L/a/b -lc"
    assert blas.link_flags("/a b/libc.so") == ""
    assert blas.link_flags("/a/b/libc.so.6") == "-Wl,--no-as-needed,/a/b/libc.so.6,-rpath,/a/b"
    assert blas.link_flags("/a b/libc.so.6") == ""


def library_of(directory, gemv):
    """Compile a "BLAS" whose dgemv runs the given statement for each element of y; the other routines are empty."""
    others = "".join(f"void {name}(void) {{}}\n" for name in blas.SYMBOLS if name != "dgemv_")
    (directory / "blas.c").write_text(
        others + "void dgemv_(char *t, int *m, int *n, double *alpha, double *a, int *lda, double *x, int *incx,\n"
        "            double *beta, double *y, int *incy) {\n"
        "    for (int i = 0; i < *m; i++) {\n"
        "        double sum = 0;\n"
        "        for (int j = 0; j < *n; j++) sum += *alpha * a[i + j * *lda] * x[j];\n"
        f"        {gemv};\n"
        "    }\n}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "blas.c", "-o", "blas.so"], check=True, cwd=directory, timeout=60)
    return str(directory / "blas.so")


@pytest.mark.parametrize(
    ("gemv", "usable"),
    [
        ("y[i] = sum + (*beta == 0 ? 0 : *beta * y[i])", True),
        ("y[i] = sum + *beta * y[i]", False),  # keeps the NaN of memory that was never written
        ("y[i] = 0", False),
    ],
)
def test_a_blas_is_tried_before_it_is_used(gemv, usable, tmp_path):
    assert blas.is_usable(library_of(tmp_path, gemv)) is usable


def test_a_library_that_is_no_blas_is_not_used(tmp_path):
    assert not blas.is_usable("libc.so.6")
    assert not blas.is_usable(str(tmp_path / "missing.so"))


class TestHeaders:
    """Theano's headers are compiled once, and a module that cannot use them is compiled as ever."""

    PROGRAM = """
        import theano, theano.tensor as T, numpy as np
        x = T.dvector("x")
        assert theano.function([x], T.exp(x) + x * {number})(np.ones(2)).tolist() == [np.e + {number}] * 2
        print(theano.config.compiledir)
    """

    def compile(self, folder, number, **environment):
        """Compile something into a cache; returns the headers that are in it then, and when they were made."""
        flags = f"base_compiledir={folder}"
        out, _ = python(self.PROGRAM.format(number=number), THEANO_FLAGS=flags, **environment)
        made = Path(out.strip()).glob("synkhronos_headers/*/*.gch")
        return {path.parent.name: path.stat().st_mtime_ns for path in made}

    def test_they_are_compiled_once(self, tmp_path):
        first = self.compile(tmp_path, 2)
        assert len(first) == 1
        assert self.compile(tmp_path, 3) == first

    def test_another_compiler_compiles_them_again(self, tmp_path):
        first = self.compile(tmp_path, 2)
        other = tmp_path / "bin" / "g++"
        other.parent.mkdir()
        other.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@"\n')
        other.chmod(0o755)
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
        compiler = tmp_path / "bin" / "g++"
        compiler.parent.mkdir()
        compiler.write_text(f'#!/bin/sh\ncase "$*" in *c++-header*) exit 1;; esac\nexec {shutil.which("g++")} "$@"\n')
        compiler.chmod(0o755)
        path = f"{compiler.parent}:{os.environ['PATH']}" if fault == "no compilation" else os.environ["PATH"]
        found = self.compile(tmp_path, 4, PATH=path)
        assert set(found) == ({name} if fault == "a damaged file" else set())
