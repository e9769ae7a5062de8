"""The BLAS that Theano is linked to: which is chosen, which are refused, and the messages.

The C compiler builds test libraries with integers of 32 or 64 bits, and with faults.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from backend import theano_only
from backend_flags import FOLDER
from interrupts import Interrupt, handled_by, interrupt
from scripts import python

from synkhronos._theano_compat import blas, blas_probe

import theano  # isort: skip

pytestmark = theano_only("the BLAS that Theano is linked to")

SCIPY_OPENBLAS = r"-L\S+/scipy_openblas32/lib -lscipy_openblas -include\S+/_theano_compat/scipy_openblas32.h"
WIDE = "its integers have 64 bits, and those that are passed have 32"

SOURCE = r"""
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#define AT(m, ld, t, i, j) (*(t) == 'N' ? (m)[(i) + (j) * *(ld)] : (m)[(j) + (i) * *(ld)])
#define ROUTINES(T, dot, gemv, ger, gemm)                                                                             \
    T dot(INT *n, T *x, INT *incx, T *y, INT *incy) {                                                                 \
        T sum = 0;                                                                                                    \
        FAULT;                                                                                                        \
        for (INT i = 0; i < *n; i++) sum += x[i * *incx] * y[i * *incy];                                              \
        return DOT;                                                                                                   \
    }                                                                                                                 \
    void ger(void) {}                                                                                                 \
    void gemm(char *ta, char *tb, INT *m, INT *n, INT *k, T *alpha, T *a, INT *lda, T *b, INT *ldb, T *beta, T *c,    \
              INT *ldc) {                                                                                             \
        for (INT j = 0; j < *n; j++) {                                                                                \
            for (INT i = 0; i < *m; i++) c[i + j * *ldc] = *beta == 0 ? 0 : *beta * c[i + j * *ldc];                  \
            for (INT l = 0; l < *k; l++)                                                                              \
                for (INT i = 0; i < *m; i++) c[i + j * *ldc] += *alpha * AT(a, lda, ta, i, l) * AT(b, ldb, tb, l, j); \
        }                                                                                                             \
    }                                                                                                                 \
    void gemv(char *t, INT *m, INT *n, T *alpha, T *a, INT *lda, T *x, INT *incx, T *beta, T *y, INT *incy) {         \
        INT rows = *t == 'N' ? *m : *n, columns = *t == 'N' ? *n : *m;                                                \
        for (INT i = 0; i < rows; i++) {                                                                              \
            T sum = 0;                                                                                                \
            for (INT j = 0; j < columns; j++) sum += *alpha * AT(a, lda, t, i, j) * x[j];                             \
            y[i] = GEMV;                                                                                              \
        }                                                                                                             \
    }
ROUTINES(float, sdot_, sgemv_, sger_, sgemm_)
ROUTINES(double, ddot_, dgemv_, dger_, dgemm_)
"""

needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("g++") is None, reason="the libraries are built by a C compiler"
)


def build(path, *options, kind="-shared", **macros):
    """Compile a BLAS to a path, and return the path. ``INT=long`` gives it integers of 64 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    right = {"INT": "int", "FAULT": "(void)0", "DOT": "sum", "GEMV": "sum + (*beta == 0 ? 0 : *beta * y[i])"}
    macros = [f"-D{name}={value}" for name, value in {**right, **macros}.items()]
    command = ["gcc", kind, "-fPIC", "-O3", *macros, "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=SOURCE, text=True, check=True, timeout=60)
    return path


def make_foreign(file):
    """Mark a library as built for another processor."""
    head = bytearray(file.read_bytes())
    head[18] ^= 1
    file.write_bytes(head)


def chosen(program="", **variables):
    """Import Theano and execute a program; return the BLAS flags, and the messages."""
    source = "import theano\n" + program + "\nprint(theano.config.blas.ldflags)"
    surroundings = {"THEANO_FLAGS": None, "THEANORC": "/dev/null", "SYNKHRONOS_BLAS": None, **variables}
    return python(source, **surroundings)


#: Multiplies matrices by Theano's C code, which is recompiled when flags change.
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
    assert after == before, (before, after)  # thread limits set before the first call still apply
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


class TestRoutines:
    """Routines are tried before Theano is linked to a BLAS."""

    @needs_compiler
    @pytest.mark.parametrize(
        ("macros", "objection"),
        [
            ({}, ""),
            ({"INT": "long"}, WIDE),
            ({"DOT": "sum + 1"}, "its dot products are wrong"),
            ({"GEMV": "sum + *beta * y[i]"}, "its products are wrong, or keep what was in the memory"),
            ({"GEMV": "0"}, "its products are wrong, or keep what was in the memory"),
        ],
    )
    def test_faults(self, macros, objection, tmp_path):
        found = blas_probe.objection(blas_probe.load(str(build(tmp_path / "blas.so", **macros))))
        assert found.startswith(objection) and bool(found) == bool(objection)

    @needs_compiler
    def test_the_cause_of_long_integers_in_mkl(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MKL_INTERFACE_LAYER", "GNU,ILP64")
        loaded = blas_probe.load(str(build(tmp_path / "blas.so", INT="long")))
        assert blas_probe.objection(loaded) == f"{WIDE} (MKL_INTERFACE_LAYER is GNU,ILP64)"

    @needs_compiler
    @pytest.mark.parametrize(
        ("read", "little", "seen"),
        [
            ("*(int *)n", True, 8),
            ("*(long *)n", True, 0),
            ("((int *)n)[1]", False, 0),  # 32 bits at that address in big-endian order
            ("*(long *)n", False, 8),
        ],
    )
    def test_the_length_that_32_and_64_bits_give_in_both_byte_orders(self, read, little, seen, tmp_path):
        """No length exceeds the vectors, so that no other memory is read."""
        source = f"double ddot_(void *n, double *x, void *incx) {{ long size = {read}; return size < 0 ? 0 : size; }}"
        file = str(tmp_path / "dot.so")
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", file]
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        address = ctypes.cast(ctypes.CDLL(file).ddot_, ctypes.c_void_p).value
        assert blas_probe._elements_seen(address, little) == seen

    def test_a_library_that_is_no_blas(self, tmp_path):
        with pytest.raises(OSError, match="it has no routine sdot_"):
            blas_probe.load("libc.so.6")
        with pytest.raises(OSError, match="cannot open shared object file"):
            blas_probe.load(str(tmp_path / "missing.so"))


class TestFork:
    """A BLAS is tried in a forked process, which leaves nothing behind."""

    def test_a_blas_that_ends_the_process(self):
        words = b"INTEL MKL FATAL ERROR: Cannot load libmkl_core.so.\n"
        faults = {
            "it ends the process": lambda: os._exit(3),
            "it ends the process by signal 6": os.abort,
            words.decode().strip(): lambda: (os.write(2, words), os._exit(2)),
        }
        for trouble, load in faults.items():
            assert blas_probe.try_routines(load) == blas_probe.Linked(trouble)

    @needs_compiler
    def test_messages_of_a_working_blas_are_ignored(self, tmp_path):
        file = str(build(tmp_path / "blas.so"))
        tried = blas_probe.try_routines(lambda: (os.write(2, b"OpenBLAS WARNING\n"), blas_probe.load(file))[1])
        assert tried == blas_probe.Linked(file=file)

    def test_the_registration_file_of_intels_openmp_is_removed(self):
        """Intel's OpenMP creates the file when it is loaded, and removes it only at a regular exit."""

        def load():
            with open(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}", "w") as file:
                os.write(2, file.name.encode())
            os._exit(0)

        registered = blas_probe.try_routines(load).trouble
        assert "__KMP_REGISTERED_LIB_" in registered
        assert not os.path.exists(registered)

    def test_a_blas_that_never_answers(self, monkeypatch):
        monkeypatch.setattr(blas_probe, "_PROBE_SECONDS", 1)
        before = set(psutil.Process().children())
        assert blas_probe.try_routines(lambda: time.sleep(100)).trouble == "it gave no answer within 1 seconds"
        assert set(psutil.Process().children()) == before

    def test_an_interrupt_while_it_is_awaited(self):
        before, mask = set(psutil.Process().children()), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with handled_by(interrupt), pytest.raises(Interrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            blas_probe.try_routines(lambda: time.sleep(100))
        assert set(psutil.Process().children()) == before
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask

    def test_a_program_that_reaps_its_children_itself(self):
        with handled_by(signal.SIG_IGN, signal.SIGCHLD):
            assert blas_probe.try_routines(lambda: os._exit(0)).trouble == "it ends the process"


class TestChoice:
    """The choice of a BLAS where the user sets no flags."""

    def test_the_current_openblas_comes_first(self):
        out, err = chosen()
        assert re.fullmatch(SCIPY_OPENBLAS, out)
        assert err == ""
        assert chosen(SYNKHRONOS_BLAS="scipy-openblas32")[0] == out

    def test_every_standard_name_is_one_of_its_routines(self):
        """Each name that the header redefines is exported by the library."""
        [[flags, library, prefix]] = [one for one in blas.candidates("g++") if one.prefix]
        header = flags.split("-include")[1]
        renamed = subprocess.run(["g++", "-E", "-x", "c++", header], capture_output=True, text=True, check=True).stdout
        names = re.findall(r"^#pragma redefine_extname (\w+) (\w+)$", renamed, re.MULTILINE)
        loaded = ctypes.CDLL(library)
        for name, own in names:
            assert own == prefix + name
            assert hasattr(loaded, own), own
        assert {name for name, _ in names} > {*blas_probe.SYMBOLS, "openblas_set_num_threads", "ztrsm_"}

    @pytest.mark.parametrize("choice", ["scipy", "path", "numbered path"])
    def test_another_blas_can_be_chosen(self, choice, tmp_path):
        bundled = [library for flags, library, _ in blas.candidates("g++", "scipy")]
        if not bundled:
            pytest.skip("this scipy bundles no BLAS")
        numbered = tmp_path / "libmine.so.3"
        numbered.symlink_to(bundled[0])
        named = {"scipy": "scipy", "path": bundled[0], "numbered path": str(numbered)}[choice]
        out, err = python(LINKED, THEANO_FLAGS=FOLDER, SYNKHRONOS_BLAS=named, directory=tmp_path)
        assert (out.split()[0], err) == ("Dot22", "")

    @pytest.mark.parametrize(
        ("choice", "reason"),
        [
            ("/nonexistent/libblas.so", "cannot open shared object file: No such file or directory"),
            ("openblas", "there is no such BLAS: it is no path, nor scipy-openblas32, system, mkl, scipy"),
            ("mkl", "there is no such BLAS: `python -m pip install mkl` brings it"),
        ],
    )
    def test_a_missing_choice_is_reported(self, choice, reason):
        if choice == "mkl" and list(blas.candidates("g++", "mkl")):
            pytest.skip("MKL is here")
        out, err = chosen(SYNKHRONOS_BLAS=choice)
        assert re.fullmatch(SCIPY_OPENBLAS, out)
        assert err == f"SYNKHRONOS_BLAS={choice}: {reason}; trying others"

    @needs_compiler
    @pytest.mark.parametrize(
        ("macros", "reason"),
        [({"INT": "long"}, WIDE), ({"FAULT": 'puts("no parts"), exit(2)'}, "no parts")],
    )
    def test_a_choice_that_is_unfit_is_reported(self, macros, reason, tmp_path):
        file = build(tmp_path / "libmine.so", **macros)
        out, err = chosen(SYNKHRONOS_BLAS=str(file))
        assert re.fullmatch(SCIPY_OPENBLAS, out)
        assert err == f"SYNKHRONOS_BLAS={file}: {reason}; trying others"

    @needs_compiler
    def test_a_library_for_another_processor(self, tmp_path):
        file = build(tmp_path / "libmine.so")
        make_foreign(file)
        _, err = chosen(SYNKHRONOS_BLAS=str(file))
        assert f"{file}: it is made for another kind of processor; " in err

    def test_a_blas_of_the_system_comes_before_the_one_of_scipy(self, tmp_path):
        bundled = [library for flags, library, _ in blas.candidates("/nonexistent") if "scipy.libs" in library]
        if not bundled:
            pytest.skip("this scipy bundles no BLAS")
        (tmp_path / "libopenblas.so").symlink_to(bundled[0])
        paths = {"LIBRARY_PATH": str(tmp_path), "LD_LIBRARY_PATH": f"{tmp_path}:{Path(bundled[0]).parent}"}
        assert chosen(SYNKHRONOS_BLAS="system", **paths)[0] == "-lopenblas"
        # A library that only the linker finds could not be loaded later.
        only_linked = chosen(SYNKHRONOS_BLAS="system", LIBRARY_PATH=paths["LIBRARY_PATH"])[0]
        assert only_linked != "-lopenblas" or any(flags == "-lopenblas" for flags, *_ in blas.candidates("g++"))

    @needs_compiler
    def test_a_blas_of_the_system_with_long_integers_is_skipped(self, tmp_path):
        build(tmp_path / "libopenblas.so", INT="long")
        paths = {"LIBRARY_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
        program = """
            import sys, logging
            logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
            sys.modules["scipy_openblas32"] = None  # as if it were not installed
            import theano
            print(theano.config.blas.ldflags)
        """
        hidden = {"THEANO_FLAGS": None, "THEANORC": "/dev/null", **paths}
        out, _ = python(program, **hidden)
        assert f"not used as a BLAS for Theano: libopenblas.so: {WIDE}" in out.splitlines()
        assert out.splitlines()[-1] != "-lopenblas"

    def test_no_compiler_means_no_blas(self):
        assert blas.find_blas("") == ""
        assert not [flags for flags, *_ in blas.candidates("/nonexistent/g++") if flags == "-lopenblas"]

    def test_white_space_in_a_path_cannot_be_passed_to_theano(self):
        assert blas.link_flags("/a/b/libc.so") == "-L/a/b -lc"
        assert blas.link_flags("/a b/libc.so") == ""
        assert blas.link_flags("/a/b/libc.so.6") == "-Wl,--no-as-needed,/a/b/libc.so.6,-rpath,/a/b"
        assert blas.link_flags("/a b/libc.so.6") == ""
        _, err = chosen(SYNKHRONOS_BLAS="/a b/libc.so")
        assert "/a b/libc.so: its path holds white space or a comma, at which Theano and the compiler split" in err


def in_one_way(way, flags, folder):
    """Return the start of a program that sets flags in one of three ways, and its environment variables."""
    (folder / "rc").write_text(f"[blas]\nldflags = {flags}\n")
    if way == "assigned":
        return f"theano.config.blas.ldflags = '{flags}'\n", {}
    return "", {"THEANORC": str(folder / "rc")} if way == "theanorc" else {"THEANO_FLAGS": f"blas.ldflags={flags}"}


class TestFlags:
    """Flags that the user sets, in any of Theano's ways."""

    def test_empty_flags_win(self):
        assert chosen(THEANO_FLAGS="blas.ldflags=") == ("", "WARNING (theano.tensor.blas): " + NUMPYS)

    def test_flags_without_a_blas_are_kept_and_reported(self, tmp_path):
        (tmp_path / "rc").write_text("[blas]\nldflags = -lm -lc\n")
        out, err = chosen(THEANORC=str(tmp_path / "rc"))
        assert (out, err) == ("-lm -lc", "blas.ldflags=-lm -lc: none of the libraries has the routine sdot_")

    @needs_compiler
    @pytest.mark.parametrize("way", ["THEANO_FLAGS", "theanorc", "assigned"])
    def test_flags_that_work_are_kept_without_a_message(self, way, tmp_path):
        build(tmp_path / "libmine.so.3")
        flags = f"-L{tmp_path} -l:libmine.so.3"
        program, variables = in_one_way(way, flags, tmp_path)
        program += "import numpy as np, theano.tensor as T\nx = T.dmatrix()\n"
        program += "product = theano.function([x], T.dot(x, x))\nassert (product(np.ones((3, 3))) == 3).all()\n"
        program += "assert 'libmine.so.3' in open('/proc/self/maps').read()"
        # its own cache, because Theano prints a message while it waits for another process to compile
        assert chosen(program, HOME=str(tmp_path), **variables) == (flags, "")

    @needs_compiler
    @pytest.mark.parametrize("way", ["THEANO_FLAGS", "theanorc", "assigned", "renamed"])
    def test_a_blas_with_long_integers_is_refused(self, way, tmp_path):
        options = []
        if way == "renamed":  # with the names in NumPy's own BLAS
            options = [f"-D{name}={name}64_" for name in blas_probe.SYMBOLS]
        build(tmp_path / "libmine.so", *options, INT="long")
        flags = " ".join([*options, f"-L{tmp_path}", "-lmine"])
        program, variables = in_one_way(way, flags, tmp_path)
        out, err = chosen(program, **variables)
        assert re.fullmatch(SCIPY_OPENBLAS, out)
        assert err == f"blas.ldflags={flags}: {WIDE}; another is taken"

    @needs_compiler
    def test_a_refused_blas_without_another(self, tmp_path):
        build(tmp_path / "libmine.so", INT="long")
        program = f"""
            import synkhronos._theano_compat.blas as offer
            offer.find_blas = lambda cxx: ""
            import theano
            theano.config.blas.ldflags = "-L{tmp_path} -lmine"
            print([theano.config.blas.ldflags])
        """
        out, err = python(program, THEANO_FLAGS="blas.ldflags=", THEANORC="/dev/null")
        assert out == "['']"
        assert f"blas.ldflags=-L{tmp_path} -lmine: {WIDE}; NumPy's is called instead, which is slower" in err

    @needs_compiler
    @pytest.mark.parametrize(
        ("fault", "trouble"),
        [("__builtin_trap()", "it ends the process by signal 4"), ('puts("no parts"), exit(2)', "no parts")],
    )
    def test_a_blas_that_would_end_the_program_does_not_end_its_imports(self, fault, trouble, tmp_path):
        build(tmp_path / "libmine.so", FAULT=fault)  # as MKL does where a part is missing
        flags = f"-L{tmp_path} -lmine"
        assert chosen(THEANO_FLAGS=f"blas.ldflags={flags}") == (flags, f"blas.ldflags={flags}: {trouble}")


NUMPYS = "Using NumPy C-API based implementation for BLAS functions."


@needs_compiler
class TestLinking:
    """Reports on flags that cannot be linked, and flags that can."""

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ("-lnothing", "cannot find -lnothing"),
            ("-L{0} -lmine", "cannot find -lmine.*; {0}/libmine.so.3 would be -l:libmine.so.3"),
            ("-L{0}/nothing -lm", "the folder {0}/nothing of -L: No such file or directory"),
            ("-L{0}/other -lblas", "skipping incompatible {0}/other/libblas.so when searching for -lblas; cannot find"),
            ('-L"{0}" -lother', "cannot find -lother.*; Theano passes quotes within a flag unchanged"),
            ('"-L{0} -lm"', 'Theano takes no flag "-L{0}: it splits them at white space, within quotes too'),
            ("-L {0}", "Theano takes no flag -L: it splits them at white space"),
            (
                "{0}/libmine.so.3",
                "Theano takes no path {0}/libmine.so.3 as a flag: -L gives the folder, -l:NAME the file",
            ),
            ("-I{0} -lm", "Theano takes no flag -I{0}: no folder of headers is used for a BLAS"),
            ("-fno-such-thing", "unrecognized command"),
        ],
    )
    def test_words(self, flags, words, tmp_path):
        build(tmp_path / "libmine.so.3")
        make_foreign(build(tmp_path / "other" / "libblas.so"))
        with pytest.raises(OSError, match=words.format(re.escape(str(tmp_path)))):
            blas_probe.link(flags.format(tmp_path), str(tmp_path))

    @pytest.mark.parametrize(
        "flags",
        [
            "-L{0} -lmine",
            "-L{0} -l:libmine.so.3",
            "-L{0}/empty -L{0} -L{0} -lmine",
            '"-L{0}" "-lmine"',
            "-Wl,--no-as-needed,{0}/libmine.so.3,-rpath,{0}",
            "-L{0} -lmine -L{0}/static -lstatic",
            "-L{0}/static -lstatic",
        ],
    )
    def test_what_works(self, flags, tmp_path):
        (tmp_path / "empty").mkdir()
        build(tmp_path / "libmine.so")
        (tmp_path / "libmine.so.3").symlink_to("libmine.so")
        build(tmp_path / "static" / "blas.o", kind="-c")
        archive = tmp_path / "static" / "libstatic.a"
        subprocess.run(["ar", "rc", archive, archive.parent / "blas.o"], check=True, timeout=60)
        linked = blas_probe.try_blas(flags.format(tmp_path))
        assert linked[:2] == ("", "")
        module = str(Path(theano.config.base_compiledir) / "synkhronos_")
        assert linked.file.startswith(str(tmp_path) if "mine" in flags else module)
        assert os.path.exists(linked.file) == ("mine" in flags)

    def test_a_library_that_may_not_be_read(self, tmp_path, monkeypatch):
        """A broken link stands for an unreadable file, because root can read all files."""
        (tmp_path / "libmine.so").symlink_to("nothing")
        with pytest.raises(OSError, match=f"cannot find -lmine.*; {tmp_path}/libmine.so is a broken link"):
            blas_probe.link(f"-L{tmp_path} -lmine", str(tmp_path))
        monkeypatch.setattr(os.path, "exists", lambda path: True)
        assert blas_probe._hints("mine", f"-lmine -L{tmp_path}") == [f"{tmp_path}/libmine.so may not be read"]

    def test_a_library_that_only_the_linker_finds(self, tmp_path, monkeypatch):
        build(tmp_path / "libmine.so", "-Wl,-soname,libmine.so")
        monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
        trouble = "libmine.so: cannot open shared object file: No such file or directory"
        assert blas_probe.try_blas("-lmine").trouble == trouble
        linked = blas_probe.try_blas(f"-lmine -Wl,-rpath,{tmp_path}")
        assert linked == blas_probe.Linked(file=str(tmp_path / "libmine.so"))
