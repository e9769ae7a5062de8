"""`python -m synkhronos plan`: the command measures steps of scripts, and the links between nodes."""

import csv
import json
import os
import re
import subprocess
import sys

import pytest
from mpi_jobs import HELPERS, needs_mpi, output_of
from namespace_hosts import MPIEXEC
from scripts import ROOT

SCRIPT = """
import sys
import numpy as np
import synkhronos as synk
from synkhronos.extensions import train
if synk.engine == "theano":
    import theano, theano.tensor as T
else:
    import pytensor as theano, pytensor.tensor as T

w, x, t = theano.shared(np.ones(3), "w"), T.dmatrix("x"), T.dvector("t")
loss = T.sqr(x.dot(w) - t).mean()
with synk.session(RANKS, use_gpu=False):
    options = {OPTIONS}
    step = train.make_train_function(loss, [w], x, t, "sgd", learning_rate=0.1, **options)
    rows = np.ones((40, 3))
    print(sys.argv[1:], __name__)
    for turn in range(TURNS):
        step(rows, rows[:, 0], batch=slice(0, 24)) if "rule" not in options else None
    if "rule" in options:
        step.loop(rows, rows[:, 0], batch_size=12, epochs=1)
    print("the end")
"""


START = f"""
{SCRIPT.partition("with synk.session")[0]}
synk.fork(2, use_gpu=False)
rows = np.ones((40, 3))
"""


def run_plan(tmp_path, *words, options="", turns=1000, ranks=2, launcher=(), script=SCRIPT, modules=()):
    """Run the command on a script; return the exit code, and the output. ``modules`` are folders of other modules."""
    path = tmp_path / "script.py"
    path.write_text(
        script.replace("{OPTIONS}", f"dict({options})").replace("TURNS", str(turns)).replace("RANKS", str(ranks))
    )
    command = [*launcher, sys.executable, "-m", "synkhronos", "plan", path, *words]
    folders = os.pathsep.join(map(str, (ROOT, *modules)))
    environment = {**os.environ, "PYTHONPATH": folders, "SYNKHRONOS_COSTS": str(tmp_path / "costs.json")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path)
    return done.returncode, done.stdout, done.stderr


#: Other ways to make steps of 24 rows.
WAYS = {
    "parallelize": """
with synk.parallelize():
    f = theano.function([x, t], loss, updates=[(w, w - 0.1 * T.grad(loss, w))])
for turn in range(9):
    f(rows[:24], rows[:24, 0])
""",
    "loop": """
f = synk.function([x, t], loss, updates=[(w, w - 0.1 * T.grad(loss, w))])
synk.loop(f, [rows, rows[:, 0]], params=[w], batch_size=12, epochs=1, rule=synk.rules.LocalSGD(every=2))
""",
    "loop of a step": """
step = train.make_train_function(loss, [w], x, t, "sgd", learning_rate=0.1)
step.loop(x_data=rows, y_data=rows[:, 0], batch_size=12, epochs=1)
""",
    "loop of a function with an all-reduce": """
f = synk.function([x, t], loss, updates=[(w, w - 0.1 * synk.averaged(T.grad(loss, w)))])
synk.loop(f, [rows, rows[:, 0]], params=[w], batch_size=12, epochs=1)
""",
    "loop of calls": """
f = synk.function([x, t], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], exact=True)
synk.loop(f, list(map(synk.data, (rows, rows[:, 0]))), params=[w], batch_size=12, epochs=1)
""",
    "sequence": """
f = synk.function([x, t], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], exact=True)
for turn in range(9):
    with synk.sequence():
        f(rows[:24], rows[:24, 0])
f(*map(synk.data, (rows, rows[:, 0])), batch=list(range(24)))
""",
    "rows of named inputs, along another axis": """
f = synk.function([x, t], T.sqr(x.T.dot(w) - t).sum(), shard={x: 1, t: 0}, exact=True)
for turn in range(9):
    f(x=np.ones((3, 40)), t=rows[:, 0], batch=slice(0, 24))
""",
    "a loop of a callable": """
f = synk.function([x, t], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], exact=True)
step = lambda *data, batch: f(*data, batch=24, output_subset=[0])
synk.loop(f=step, inputs=[rows, rows[:, 0]], batch_size=20, epochs=9)
""",
    "functions without rows, and an exit": """
synk.close()
with synk.session(2, use_gpu=False) as s:
    f = synk.function([x, t], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], exact=True)
    others = [synk.function([], updates=[(w, rate * w)]) for rate in (0.5, 2)]
    for turn in range(1000):
        for other in others:
            other()
    f(rows[:24], rows[:24, 0])
    sys.exit()
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_the_command_measures_other_ways_to_make_steps(tmp_path, way):
    code, text, errors = run_plan(tmp_path, script=START + WAYS[way] + 'print("the end")')
    assert code == 0, errors
    assert "\n    1      2     24 " in text
    assert "the end" not in text
    assert ("rows by index" in text) == (way.startswith("loop") or way == "sequence")
    assert ("Measured without output_subset, which" in text) == (way == "a loop of a callable")


def test_an_error_of_the_script_keeps_its_traceback(tmp_path):
    code, _, errors = run_plan(tmp_path, script="import no_such_module")
    assert code == 1
    assert "Traceback" in errors and "script.py" in errors and "no_such_module" in errors


def test_the_command_measures_a_script(tmp_path):
    """It ends when the table is complete. Unknown options are the script's own."""
    words = ["--nodes", "1-4", "--line", "1Gbit", "--rule", "bsp,local:8", "--own", "3", f"--csv={tmp_path / 'a.csv'}"]
    code, text, errors = run_plan(tmp_path, *words, options="exact=True")
    assert code == 0, errors
    assert text.startswith("['--own', '3'] __main__\nnodes ")
    assert "the end" not in text
    with open(tmp_path / "a.csv") as file:
        lines = [(one["rule"], *map(int, [one["nodes"], one["ranks"], one["batch"]])) for one in csv.DictReader(file)]
    assert lines == [(rule, n, r, 24) for rule in ("bsp", "local every=8") for n in (1, 2, 4) for r in (1, 2)]


def test_the_command_writes_this_machine_and_takes_another(tmp_path):
    path = tmp_path / "here.json"
    code, _, errors = run_plan(tmp_path, "--machine-out", str(path))
    assert code == 0, errors
    assert set(json.loads(path.read_text())) == {"products", "memory", "memory_of_all", "cores", "command", "meeting"}
    code, text, errors = run_plan(tmp_path, "--machine", str(path), "--machine-out", str(tmp_path))
    assert (code, text) == (2, "")
    assert re.search(r"plan: --machine-out is .*; expected a file in a folder that exists\n$", errors)
    code, text, errors = run_plan(tmp_path, "--machine", str(path))
    assert code == 0, errors
    assert "Assumed, not measured: a machine with 2 cores" in text


@pytest.mark.parametrize("options", ["", "rule=synk.rules.LocalSGD(every=5)", 'rule="local"'])
def test_the_command_measures_a_step_with_few_calls_and_a_loop(tmp_path, options):
    code, text, errors = run_plan(tmp_path, options=options, turns=2)
    assert code == 0, errors
    assert "\n    1      2     24 " in text
    assert ("the end" in text) == (not options)


@needs_mpi
@pytest.mark.parametrize("options", ["exact=True", 'exact=True, rule="local"'])
def test_the_command_measures_the_link_between_nodes(tmp_path, options):
    launcher = [MPIEXEC, "-n", "2"]
    code, text, errors = run_plan(tmp_path, options=options, ranks=1, launcher=launcher)
    assert code == 0, errors
    assert "\n    2      1     24 " in text
    assert re.search(r"Measured: a link of .* µs for a message; messages of 8 bytes to 8 MiB differ from this", text)


LEADERS = f"""
    import os, sys
    sys.path.insert(0, {str(HELPERS)!r})
    from backend import T, theano
    import numpy as np
    import synkhronos as synk
    from synkhronos._api import step_measurements
    from synkhronos._collectives.pipeline import Pieces
    from synkhronos._session import current

    synk.fork(int(os.environ["RANKS"]), use_gpu=False, timeout=60)
    w = theano.shared(np.arange(3.0), "w")
    f = synk.function([], updates=[(w, w + 1)])
    f()
    measure = lambda: step_measurements.measure_link(current("the test"))
"""


@needs_mpi
@pytest.mark.parametrize(("n", "ranks"), [(2, 2), (3, 1)])
def test_messages_between_leaders(n, ranks):
    """Also after an interrupt of one of them, and of a message that is on its way."""
    program = """
        link = measure()
        assert 0 < link.latency < 1 and link.bandwidth > 1e6
        finish, n_left = Pieces.finish, [3]

        def interrupted(pieces, n):
            n_left[0] -= 1
            if not n_left[0]:
                raise KeyboardInterrupt
            finish(pieces, n)

        Pieces.finish = interrupted
        try:
            measure()
        except KeyboardInterrupt:
            print("interrupted")
        Pieces.finish = finish
        f()
        print(measure().bandwidth > 1e6, synk.check_replicas(), w.get_value())
    """
    assert output_of(LEADERS, program, n=n, RANKS=str(ranks)).splitlines() == ["interrupted", "True {} [2. 3. 4.]"]


def test_the_command_says_if_there_is_nothing_to_measure(tmp_path):
    code, text, _ = run_plan(tmp_path, turns=0)
    assert code == 1
    assert "calls no function of Synkhronos of which the number of rows can be changed" in text


#: Options with wrong values, and what begins the message. ``None``: the option and its value.
OPTIONS = {
    **dict.fromkeys(["nodes=many", "nodes=64-1", "nodes=1-4", "ranks=0", "batch=1.5", "slow=often", "slow=1x0"]),
    **dict.fromkeys(["machine-out=/none/a", "csv=/none/a", "csv=", "plot=/none/a.png", "plot=/tmp/a.b"]),
    "line=fast": "line is 'fast'",
    "rule=bsp,often": "rule is 'often'",
    "rule=delayed:1": "rule is 'delayed every=1'",
    "machine=none.json": "machine is 'none.json', which cannot be read",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_wrong_values_are_refused_before_the_script_runs(tmp_path, option):
    code, text, errors = run_plan(tmp_path, f"--{option}", script="print('it ran')")
    assert (code, text) == (2, "")
    name, _, value = option.partition("=")
    begin = re.escape(OPTIONS[option] or f"--{name} is '{value}'")
    assert re.fullmatch(rf"python -m synkhronos plan: {begin}.*; expected .*\n", errors)


def test_a_plot_without_matplotlib_is_refused_before_the_script_runs(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    code, text, errors = run_plan(tmp_path, "--plot=a.svg", script="print('it ran')", modules=[tmp_path])
    assert (code, text) == (1, "")
    expected = "--plot is 'a.svg'; expected also Matplotlib (pip install matplotlib), which is not usable: not here"
    assert errors == f"python -m synkhronos plan: {expected}\n"


def test_files_are_written_where_the_command_was_called_also_if_the_script_changes_the_directory(tmp_path):
    (tmp_path / "other").mkdir()
    code, _, errors = run_plan(tmp_path, "--csv=a.csv", script=f"import os; os.chdir('other')\n{SCRIPT}")
    assert code == 0, errors
    assert (tmp_path / "a.csv").read_text().startswith("rule,nodes,ranks,batch,")


def test_a_missing_script_is_refused(tmp_path):
    command = [sys.executable, "-m", "synkhronos", "plan", "none.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    text = "SCRIPT is 'none.py'; expected a file that can be read: No such file or directory"
    assert (done.returncode, done.stderr) == (2, f"python -m synkhronos plan: {text}\n")


def test_the_script_can_set_flags_and_choose_the_backend_first(tmp_path):
    """As with `python`: neither NumPy nor a backend is imported before the script begins."""
    flags = """
import os, sys
assert not {"numpy", "theano", "pytensor"} & {*sys.modules}
os.environ.update(THEANO_FLAGS="floatX=float32", PYTENSOR_FLAGS="floatX=float32")
from synkhronos.extensions import train
"""
    check = 'assert theano.config.floatX == "float32"\nw, x, t'
    code, _, errors = run_plan(tmp_path, script=flags + SCRIPT.replace("w, x, t", check, 1))
    assert code == 0, errors


PYMC = """
import numpy as np
import pymc as pm
import synkhronos as synk

rows = np.random.default_rng(0).normal(size=(400, 3))
with pm.Model() as model:
    w = pm.Normal("w", 0, 1, shape=3)
    pm.Normal("t", pm.math.dot(pm.Data("rows", rows), w), 1, observed=rows.sum(axis=1))
with synk.session(2, use_gpu=False), synk.extensions.pymc.parallel(model), model:
    pm.sample(draws=20, tune=20, chains=1, cores=1, progressbar=False)
print("the end")
"""


def test_the_command_measures_the_sampling_of_a_pymc_model(tmp_path):
    pytest.importorskip("pymc")
    code, text, errors = run_plan(tmp_path, script=PYMC)
    assert code == 0, errors
    assert "\n    1      2    400 " in text
    assert "the end" not in text
