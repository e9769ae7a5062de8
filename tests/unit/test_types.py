"""mypy on programs that use the library: no errors in correct programs, and an error for every mistake."""

import re
import subprocess
import sys
import textwrap
from typing import get_args

import pytest
from backend import on_theano
from scripts import ROOT

from synkhronos._backends import KEYWORDS
from synkhronos._collectives import OPS
from synkhronos.typing import Keywords, Reduction

pytest.importorskip("mypy")

OPTIONS = ("--strict", "--ignore-missing-imports", "--allow-untyped-calls", "--follow-imports=silent")

if on_theano:
    IMPORTS = """
        import theano.tensor as T
        from theano import In, shared
        from theano.tensor import grad
        """
else:
    IMPORTS = """
        import pytensor.tensor as T
        from pytensor.compile.io import In
        from pytensor.compile.sharedvalue import shared
        from pytensor.gradient import grad
        """

BEGINNING = """
    from typing import Any

    import numpy as np
    import synkhronos as synk
    from synkhronos.extensions import checkpoint, train, updates
    from synkhronos.typing import Output

    x, y = T.matrix("x"), T.vector("y")
    w = shared(np.zeros(3), "w")
    loss = ((x * w).sum(axis=1) - y).mean()
    slope: Any = grad(loss, w)
    """

GOOD = """
    def main() -> None:
        with synk.session(2, use_gpu=False, timeout=60.0) as n_ranks:
            print(n_ranks + 1)
            one = synk.function([x, y], loss, updates=[(w, w - 0.1 * slope)], name="one")
            synk.function([x], (x.sum(), "sum"))
            synk.function((In(x), y), [(x.sum(), "c_sum"), loss, (x, "gather"), (loss, None)])
            synk.function([x], updates={w: w * 0.5}, givens={}, on_unused_input="ignore", bcast_inputs=[y])
            synk.function([x], updates=[(w, w * 0.5, "sum"), (w, w + 1)], givens=[(y, x[0])], mode="FAST_RUN")
            synk.function([x, y], loss, exact=True, shard={y: 0}, random="own")
            outputs: list[Output] = [(x.sum(), "sum"), loss]
            several = synk.function([x, y], outputs, sliceable_shareds=[w])
            synk.distribute()
            rows: synk.Data = synk.data(np.zeros((4, 3)), var=x, minibatch=True)
            print(one(rows, np.zeros(4), batch=slice(2)), several.output_modes, rows.shape[0], rows.alloc_size)
            synk.all_reduce([w], op="sum")
            synk.all_reduce(w, weights=one.counts)
            synk.broadcast(w, np.ones(3))
            print(synk.reduce(w, "max", in_place=False), synk.get_value(1, w), synk.engine.upper())
            with synk.profile() as profile, synk.sequence():
                one(rows, np.zeros(4))
            print(profile.total["function"], synk.memory().in_use)
            step = train.make_train_function(loss, [w], x, y, updates.adam, learning_rate=0.1)
            print(step(rows, np.zeros(4)), checkpoint.__name__)
            synk.averaged(synk.reduced(x, "max"))
            with synk.parallelize(bcast_inputs=["y", x], random="own"):
                pass
        try:
            synk.fork(2)
        except synk.WorkerDied as error:
            print(error.rank)

    @synk.session(2)
    def decorated() -> int:
        return synk.get_n_gpu()

    main()
    print(decorated() + 1)
    """

BAD = (
    "from synkhronos import no_such_name",
    "synk.forkk()",
    "synk.errors.WorkerDead",
    "synk.extensions.traine",
    'synk.function([x], (x.sum(), "summ"))',
    'synk.function([x], [x.sum(), (x.sum(), "summ")])',
    "synk.function([x], x, update_s=[])",
    'synk.function([x], x, exact=True, random="ownn")',
    'synk.function([x], x, on_unused_input="ignored")',
    'synk.function([x], "x")',
    'synk.function(["x"], x)',
    'synk.function([x], updates=[(w, w + 1, "mean")])',
    "synk.function([x], x).output_mode",
    'synk.function([x], x)(x, num_slices="2")',
    "synk.function([x], x).as_thaeno(x)",
    'synk.all_reduce(w, op="mean")',
    'synk.reduce(w, "average")',
    'synk.broadcast("w")',
    "synk.get_value(w, 1)",
    'synk.reduced(x, "summ")',
    "synk.session(2, timeouts=3)",
    'synk.fork("2")',
    "synk.parallelize(shards=[x])",
    "synk.data(x, var=x, ndims=3)",
    "synk.data(var=x).set_values(3)",
    "synk.data(var=x).shapes",
    "synk.memory().used",
    "synk.profile().__enter__().totals",
    "updates.adamm(loss, [w])",
    "train.make_train_funtion(loss, [w], x, y, updates.sgd)",
)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """Return a function that checks a script with mypy and returns its errors by line number."""
    folder = tmp_path_factory.mktemp("types")

    def check(name, script):
        path = folder / f"{name}.py"
        path.write_text(script)
        command = [sys.executable, "-m", "mypy", *OPTIONS, "--cache-dir", folder / "cache", path.name]
        environment = {"MYPYPATH": str(ROOT), "PATH": ""}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
        assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
        found = re.findall(r"^(\S+):(\d+): error: (.*)", done.stdout, re.MULTILINE)
        assert {file for file, _, _ in found} <= {path.name}, done.stdout
        return {int(line): text for _, line, text in found}

    return check


def test_mypy_finds_no_errors_in_good_programs(complaints):
    script = textwrap.dedent(IMPORTS) + textwrap.dedent(BEGINNING) + textwrap.dedent(GOOD)
    assert complaints("good", script) == {}


def test_mypy_finds_typos_and_wrong_ops(complaints):
    script = textwrap.dedent(IMPORTS) + textwrap.dedent(BEGINNING)
    first = len(script.splitlines()) + 1
    found = complaints("bad", script + "\n".join(BAD) + "\n")
    assert min(found) >= first, found
    assert [line for number, line in enumerate(BAD, first) if number not in found] == []


def test_types_name_the_ops_and_keywords_that_there_are():
    assert set(get_args(Reduction)) == {f"{prefix}{op}" for op in OPS for prefix in ("", "c_")}
    own = {"inputs", "outputs", "updates", "givens"}
    assert set(KEYWORDS) - own <= set(Keywords.__annotations__)
