"""The report of `info` on the compiler and the BLAS: states, notes and remedies."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from scripts import ROOT, launch

from synkhronos import _backends
from synkhronos._cli import devices as blas
from synkhronos._cli import report as remedies
from synkhronos._cli.devices import ENGINES
from synkhronos._cli.launcher import chosen_in
from synkhronos._cli.probes import Answer, ask, python
from synkhronos._theano_compat.blas import candidates

BACKEND = ENGINES["theano"]  # the tables below are for Theano
HERE = ENGINES[_backends.engine]
FLAGS, FILES = f"{_backends.engine.upper()}_FLAGS", f"{_backends.engine.upper()}RC"
#: The exit code of `info`, and the compiler's state, without a compiler. PyTensor can use numba instead.
WITHOUT_COMPILER = (1, "unusable") if _backends.engine == "theano" else (0, "optional")
LDFLAGS = HERE.flag("blas.ldflags")

WHEEL = "python -m pip install scipy-openblas32"


@pytest.fixture
def ldflags(tmp_path, monkeypatch):
    """Return a function that starts the backend with given flags and returns the report on its BLAS."""
    monkeypatch.setattr(blas, "peak_of_core", lambda *_: 0.0)

    def look(flags, installed=True, **variables):
        (tmp_path / "rc").write_text(f"[blas]\nldflags = {flags}\n")
        environment = {**os.environ, FILES: str(tmp_path / "rc"), "PYTHONPATH": str(ROOT), **variables}
        answer = ask({0: python(HERE.inquiry)}, environment, 110.0)[0]
        part, of_numpy = blas.blas_parts(answer, "g++", environment, installed, HERE)
        assert (part.name, of_numpy.name) == ("BLAS", "NumPy's BLAS")
        assert not os.path.exists(answer.record["folder"])
        return part

    return look


@pytest.fixture
def library():
    """Return the path of a BLAS with the standard names, that of SciPy's wheel."""
    found = [Path(one.library) for one in candidates("g++", "scipy")]
    return found[0] if found else pytest.skip("this scipy bundles no BLAS")


class TestOneModule:
    """`info` links one module by the flags, and calls its products."""

    def test_a_file_by_its_name(self, ldflags, library, tmp_path):
        flags = f"-L{library.parent} -l:{library.name}"
        part = ldflags(flags)
        assert part.path == str(library)
        assert part.note.endswith(f"linked by {flags}, as {tmp_path}/rc says")
        assert "GFLOP/s on one core" in part.note

    def test_quotes(self, ldflags, library):
        assert ldflags(f'"-L{library.parent}" "-l:{library.name}"').path == str(library)
        part = ldflags(f'"-L{library.parent} -l:{library.name}"')
        assert part.state == "unusable"
        reason = f'{HERE.title} takes no flag "-L{library.parent}: it splits them at white space, within'
        assert part.note.startswith(reason)

    def test_what_cannot_be_linked(self, ldflags, tmp_path):
        part = ldflags("-lnothing")
        assert part.state == "unusable"
        assert part.note.startswith("cannot find -lnothing")
        assert part.note.endswith(f"\n{LDFLAGS} is -lnothing, as {tmp_path}/rc says")
        assert part.remedy == f"remove {LDFLAGS} from {tmp_path}/rc"

    def test_long_integers(self, ldflags, tmp_path):
        source = "".join(f"double {name}_(void) {{ return 0; }}\n" for name in ("sdot", "ddot", "dgemm", "sgemm"))
        source += "".join(f"void {name}_(void) {{}}\n" for name in ("sgemv", "dgemv", "sger", "dger"))
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libmine.so")]
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        part = ldflags(f"-L{tmp_path} -lmine")
        assert "its integers have 64 bits, and those that are passed have 32" in part.note
        if _backends.engine == "theano":  # Synkhronos links Theano to another BLAS
            assert part.state == "optional" and part.path.endswith("libscipy_openblas.so")
            assert f"{LDFLAGS}=-L{tmp_path} -lmine: its integers" in part.note
        else:
            assert part.state == "unusable" and part.path == str(tmp_path / "libmine.so")
        assert part.remedy == f"remove {LDFLAGS} from {tmp_path}/rc"


def report(cache, **variables):
    """Return the exit code of `info`, and its parts by name."""
    done = launch("info", "--json", cache=cache, timeout=170, **variables)
    assert not done.stderr
    return done.returncode, {part["name"]: part for part in json.loads(done.stdout)["parts"]}


def test_a_compiler_that_is_turned_off_is_not_named(tmp_path):
    code, parts = report(tmp_path, **{FLAGS: "cxx="})
    assert (code, parts["C++ compiler"]["state"]) == WITHOUT_COMPILER
    compiler = parts["C++ compiler"]
    assert compiler["path"] == ""
    assert compiler["note"] == f"turned off by cxx in {FLAGS}: {HERE.title} compiles no C++"
    assert compiler["remedy"] == f"remove cxx from {FLAGS}"
    note = "nothing is linked without a compiler that works" if _backends.engine == "theano" else "not linked: "
    assert parts["BLAS"]["note"].startswith(note)
    assert parts["BLAS"]["remedy"] == ""


def test_flags_that_the_compiler_does_not_know(tmp_path):
    name = HERE.flag("gcc.cxxflags")
    code, parts = report(tmp_path, **{FLAGS: f"{name}=-no-such-flag"})
    assert (code, parts["C++ compiler"]["state"]) == WITHOUT_COMPILER
    assert "-no-such-flag" in parts["C++ compiler"]["note"]
    assert parts["C++ compiler"]["remedy"] == f"remove {name} from {FLAGS}"


FAILS = {"ldflags": "-la", "trouble": "it fails"}
WIDE = "SYNKHRONOS_BLAS=mkl: /a/libmkl_rt.so.2: its integers have 64 bits, and those that are passed have 32"
ILP64 = {"SYNKHRONOS_BLAS": "mkl", "MKL_INTERFACE_LAYER": "ILP64"}
GIVEN, REMOVE = {"THEANO_FLAGS": "floatX=float32,blas.ldflags=-la"}, "remove blas.ldflags from THEANO_FLAGS"


@pytest.mark.parametrize(
    ("found", "installed", "variables", "state", "note", "remedy"),
    [
        ({}, False, {}, "optional", "none is linked: NumPy's is called, which is slower", WHEEL),
        # an installed package is not proposed
        ({"said": [[False, "passed over"]]}, True, {}, "optional", "none is linked.*\npassed over", "apt-get install"),
        (
            {},
            True,
            {"THEANO_FLAGS": "blas.ldflags="},
            "optional",
            "blas.ldflags is empty in THEANO_FLAGS",
            "remove blas",
        ),
        (FAILS, True, {}, "unusable", "it fails\nblas.ldflags is -la$", "apt-get"),
        (FAILS, False, GIVEN, "unusable", "it fails\nblas.ldflags is -la, as THEANO_FLAGS says", f"{REMOVE}; {WHEEL}"),
        (FAILS, True, {"SYNKHRONOS_BLAS": "/a/liba.so"}, "unusable", "it fails", "unset SYNKHRONOS_BLAS"),
        ({"said": [[True, WIDE]]}, True, ILP64, "optional", f"none is linked.*\n{WIDE}", "unset MKL_INTERFACE_LAYER"),
    ],
)
def test_the_remedy_that_fits(found, installed, variables, state, note, remedy):
    environment = {"THEANORC": "/dev/null", **variables}
    part = blas._engines({"ldflags": "", **found}, True, environment, installed, 0.0, BACKEND)
    assert part.state == state
    assert re.search(note, part.note)
    assert part.remedy.removeprefix("sudo ").startswith(remedy)


@pytest.mark.parametrize("linker", ["auto", "numba"])
def test_numba_calls_the_blas_of_scipy(linker):
    part = blas._engines({"linker": linker, "ldflags": ""}, False, {}, False, 0.0, ENGINES["pytensor"])
    assert (part.state, part.note) == ("ok", "not linked: functions are compiled by numba, and call SciPy's")


def test_a_blas_that_dies_under_larger_products(monkeypatch):
    monkeypatch.setattr(blas, "ask", lambda *_: {"product": Answer("", "ended by signal 11 (Segmentation fault)")})
    found = {"ldflags": "-la", "trouble": "", "objection": "", "file": "/a/liba.so", "module": "/a/module.so"}
    part = blas._engines(found, True, {"THEANORC": "/dev/null"}, True, 0.0, BACKEND)
    assert (part.state, part.path) == ("unusable", "/a/liba.so")
    assert part.note == "ended by signal 11 (Segmentation fault)\nblas.ldflags is -la"


def test_the_remedy_names_a_package_for_this_processor(monkeypatch):
    assert remedies.blas("blas.ldflags", "", "", installed=False) == WHEEL
    monkeypatch.setattr(remedies.platform, "machine", lambda: "ppc64le")
    assert remedies.blas("blas.ldflags", "", "", installed=False).endswith("apt-get install libopenblas-dev")


class TestWhereTheUserChose:
    """Flags and files are searched as Theano reads them."""

    @pytest.mark.parametrize(
        ("flags", "chosen"),
        [
            ("blas.ldflags=-la", True),
            ("floatX=float32, blas.ldflags=", True),
            ("'blas.ldflags=-la,-lb'", True),
            ("base_compiledir='a,blas.ldflags=b'", False),
            ("blas.ldflags", False),
            ("blas.ldflags='-la", False),  # an unclosed quote
            ("", False),
        ],
    )
    def test_flags(self, flags, chosen):
        found = chosen_in("blas.ldflags", {"THEANO_FLAGS": flags, "THEANORC": "/dev/null"})
        assert found == ("THEANO_FLAGS" if chosen else "")

    def test_files(self, tmp_path):
        (tmp_path / ".theanorc").write_text("[global]\ncxx =\n[blas]\nldflags = -la\n")
        (tmp_path / "second").write_text("[blas]\nldflags = -lb\n")
        (tmp_path / "broken").write_text("nonsense")
        home = {"HOME": str(tmp_path)}
        assert chosen_in("cxx", home) == chosen_in("blas.ldflags", home) == str(tmp_path / ".theanorc")
        files = {**home, "THEANORC": f"~/.theanorc:{tmp_path}/second:{tmp_path}/broken:/nonexistent"}
        assert chosen_in("blas.ldflags", files) == str(tmp_path / "second")
        assert chosen_in("cxx", files) == str(tmp_path / ".theanorc")
        assert chosen_in("gcc.cxxflags", files) == ""


def test_kernels_that_fall_short_of_the_processor(tmp_path, monkeypatch):
    """OpenBLAS chooses kernels with narrower vectors on a processor that it does not know."""
    avx2, avx512 = "fpu sse2 avx2 fma", "avx512f avx512cd avx512bw avx512dq avx512vl"
    widths = {"flags\t: fpu sse2\n": 128, f"flags : {avx2}\n": 256, "Features: asimd\n": 0}
    widths[f"flags : {avx2} {avx512}\n"] = 512
    for text, width in widths.items():
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{text}\nprocessor : 1\n{text}")
        assert blas.width_of_processor(str(tmp_path / "cpuinfo")) == width
    assert blas.width_of_processor(str(tmp_path / "missing")) == 0
    monkeypatch.setattr(blas, "width_of_processor", lambda: 512)
    found = {"gflops": 40.0, "right": True, "file": "/a/libopenblas.so", "kind": "openblas", "version": "0.3.18"}
    own = {"file": "/a/libscipy_openblas.so"}
    cases = [
        ({"kernels": "SkylakeX"}, {}, "another", ""),
        ({"kernels": "Prescott"}, {}, "another", "another"),
        ({"kernels": "Haswell"}, {}, "", "export OPENBLAS_CORETYPE=SKYLAKEX"),
        ({"kernels": "Haswell", **own}, {}, "another", "export OPENBLAS_CORETYPE=SKYLAKEX"),
        ({"kernels": "Prescott", **own}, {"OPENBLAS_CORETYPE": "Prescott"}, "another", "unset OPENBLAS_CORETYPE"),
    ]
    for facts, environment, another, remedy in cases:
        part = blas._part("BLAS", {**found, **facts}, 200.0, ["linked by -l"], environment, another)
        assert part.remedy == remedy
        assert part.state == ("optional" if remedy else "ok")
        assert "40 GFLOP/s on one core, 20% of what its vector units can do (200)\nlinked by -l" in part.note
        assert ("vectors of 512" in part.note) == bool(remedy)
    assert blas._part("BLAS", {**found, "right": False}, 0.0, [], {}, "").state == "unusable"
